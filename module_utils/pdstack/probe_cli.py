"""Probe a host by hand, without Ansible: ``PYTHONPATH=module_utils python3 -m pdstack.probe_cli``.

Prints the picture; with --json and --svg writes the facts and the drawing. Needs Python 3.9 and nothing else.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone
from typing import Optional, Sequence

from . import codec, picture, probe, svg


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Probe this machine by hand, without Ansible; returns the process's exit status (1: the driver is not ok)."""
    parser = argparse.ArgumentParser(prog="python3 -m pdstack.probe_cli", description=__doc__)
    parser.add_argument("--root", default="/", help="filesystem root that holds sys/ and proc/")
    parser.add_argument("--library", help="folder of libcuda.so.1 and libnvidia-ml.so.1, instead of the system's")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each driver library")
    parser.add_argument("--measure", action="store_true", help="copy data between all GPUs, which must be idle")
    parser.add_argument("--force", action="store_true", help="measure in spite of IOMMU and ACS")
    parser.add_argument("--ctypes", action="store_true", help="do not use nvidia-ml-py, even if it is installed")
    parser.add_argument("--json", metavar="FILE", help="write the facts document")
    parser.add_argument("--svg", metavar="FILE", help="write the picture")
    given = parser.parse_args(arguments)
    request = probe.Request("", given.root, given.library, given.timeout, prefer_package=not given.ctypes)
    facts = probe.probe(request)
    if given.measure:
        when = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        facts = probe.with_measurement(facts, request, given.force, 120.0, when)
    print(picture.text(facts))
    if given.json:
        _write(given.json, json.dumps(codec.dump(facts), indent=1) + "\n")
    if given.svg:
        _write(given.svg, svg.svg(facts))
    return 0 if facts.driver.state == "ok" else 1


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)


if __name__ == "__main__":
    raise SystemExit(main())
