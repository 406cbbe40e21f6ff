"""Analyse Torch profiler traces by hand: ``PYTHONPATH=module_utils python3 -m pdstack.trace_cli TRACE.json.gz ...``.

Several files are the ranks of one run. Prints the table by kernel family; --json and --svg keep it.
Needs Python 3.9 and nothing else.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from typing import Any, Dict, Optional, Sequence

from . import codec
from .bench import plots, trace


def read(path: str) -> Dict[str, Any]:
    """Return a trace, packed or not. Raises OSError and ValueError."""
    with open(path, "rb") as stream:
        data = stream.read()
    document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    if not isinstance(document, dict) or "traceEvents" not in document:
        raise ValueError(f"{path} is no Chrome trace: it has no traceEvents")
    return document


def link_of(path: str) -> Optional[float]:
    """Return the slowest measured link between two GPUs of a facts document, None where none was measured."""
    with open(path, encoding="utf-8") as stream:
        facts = json.load(stream)
    speeds = [speed for row in facts.get("p2p", {}).get("measured_gb_s") or () for speed in row if speed]
    return min(speeds) if speeds else None


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Analyse; returns 2 for what cannot be read."""
    parser = argparse.ArgumentParser(prog="python3 -m pdstack.trace_cli", description=__doc__)
    parser.add_argument("traces", nargs="+", help="*.trace.json.gz of the ranks")
    parser.add_argument("--steps", type=int, default=0, help="steps in the trace, where it does not mark them")
    parser.add_argument("--facts", help="facts of the host (probe.yml), for the measured link between GPUs")
    parser.add_argument("--memory-gb-s", type=float, help="memory bandwidth; by default the data sheet's by the name")
    parser.add_argument("--link-gb-s", type=float, help="GB/s one way between two GPUs, instead of --facts")
    parser.add_argument(
        "--bytes", action="append", default=[], metavar="FAMILY=BYTES", help="bytes that a step moves, such as MoE=7e9"
    )
    parser.add_argument("--title", default="Time by kernel family")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--svg", metavar="FILE")
    given = parser.parse_args(arguments)
    try:
        sizes = {name: float(value) for name, _, value in (item.partition("=") for item in given.bytes)}
        unknown = sorted(set(sizes) - set(trace.FAMILIES))
        if unknown:
            raise ValueError(f"--bytes names {unknown[0]!r}; known: {', '.join(trace.FAMILIES)}")
        link = given.link_gb_s or (link_of(given.facts) if given.facts else None)
        limits = trace.Limits(given.memory_gb_s, link, sizes)
        tables = [trace.analyse(read(path), os.path.basename(path), given.steps, limits) for path in given.traces]
        table = trace.combine(tables)
    except (OSError, ValueError, KeyError) as error:
        print(f"cannot be analysed: {error}", file=sys.stderr)
        return 2
    print(trace.text(table))
    if given.json:
        _write(given.json, json.dumps(codec.dump(table), indent=1) + "\n")
    if given.svg:
        _write(given.svg, plots.families(table, given.title))
    return 0


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)


if __name__ == "__main__":
    raise SystemExit(main())
