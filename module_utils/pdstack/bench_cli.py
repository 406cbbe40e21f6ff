"""Measure a server by hand, without Ansible: ``PYTHONPATH=module_utils python3 -m pdstack.bench_cli --url URL``.

Streams completions and prints tok/s, TTFT, TPOT and ITL for each concurrency; --json and --html keep them.
Needs Python 3.9 and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import List, Optional, Sequence, Tuple

from . import codec
from .bench import archive, ceiling, page, session, stream, workload
from .http import Access


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Measure; returns 1 when a request failed, 2 when nothing could be measured."""
    given = _parser().parse_args(arguments)
    if given.ceiling:
        found = ceiling.measure(given.concurrency, given.output_len, given.requests, given.token_s)
        if given.json:
            _write(given.json, json.dumps(codec.dump(found), indent=1) + "\n")
        return 0
    if not given.url:
        print("--url is missing; needed: the router's address, such as http://127.0.0.1:8000", file=sys.stderr)
        return 2
    try:
        wanted, lines = _request(given)
        server = stream.server(given.url, Access(given.key_file, given.ca_file))
        result = session.measure(wanted, server, lines, lambda words: print(words, file=sys.stderr, flush=True))
    except (workload.WorkloadError, OSError, ValueError) as error:
        print(f"nothing was measured: {error}", file=sys.stderr)
        return 2
    print(f"{result.label}: {workload.describe(result.workload, (given.rate or [None])[0])}")
    for run in result.runs:
        print(session.words(run))
    if given.json:
        _write(given.json, json.dumps(codec.dump(result), indent=1) + "\n")
    if given.html:
        try:
            _write(given.html, page.page([result, *map(archive.read, given.beside)]))
        except (OSError, codec.CodecError) as error:
            print(f"measured, and no page written: {error}", file=sys.stderr)
            return 2
    return 1 if any(run.failed for run in result.runs) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m pdstack.bench_cli", description=__doc__)
    parser.add_argument("--url", help="base address of the router or engine, such as http://127.0.0.1:8000")
    parser.add_argument("--model", default="", help="the served name; by default the first that the server lists")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument("--concurrency", type=_ints, default=[1, 8, 16, 64], help="closed loop, such as 1,16,64")
    parser.add_argument("--rate", type=_floats, default=[], help="open loop instead: requests a second, such as 2,4,8")
    parser.add_argument("--dataset", default=workload.FIXED, help="fixed, sharegpt-like, or a JSONL file")
    parser.add_argument("--input-len", type=int, default=256, help="tokens of a prompt (fixed)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer (fixed, or a line without)")
    parser.add_argument("--requests", type=int, default=96, help="requests of each measurement")
    parser.add_argument("--shared-prefix", type=float, default=0.0, help="share of the prompt that all have; 0 is cold")
    parser.add_argument("--stop-at-eos", action="store_true", help="let answers end by themselves")
    parser.add_argument("--repeat", type=int, default=1, help="each measurement so often: its noise")
    parser.add_argument("--warmup", type=int, help="requests before each measurement; by default 4 to 32")
    parser.add_argument("--seed", type=int, default=1, help="of lengths, words and arrival times")
    parser.add_argument("--salt", default="", help="repeat the very prompts of a run; by default they are new")
    parser.add_argument("--max-seconds", type=float, default=600.0, help="no request leaves later in a measurement")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one request")
    parser.add_argument("--key-file", default="", help="file with the API key")
    parser.add_argument("--ca-file", default="", help="certificates to trust, instead of the system's")
    parser.add_argument("--label", default="", help="what the report calls this run")
    parser.add_argument("--ceiling", action="store_true", help="measure this client against a stub on this machine")
    parser.add_argument("--token-s", type=float, default=0.0, help="--ceiling: the stub's pause between tokens")
    parser.add_argument("--json", metavar="FILE", help="write the result document")
    parser.add_argument("--html", metavar="FILE", help="write the report page")
    parser.add_argument("--beside", action="append", default=[], metavar="JSON", help="a result to stand next to it")
    return parser


def _request(given: argparse.Namespace) -> Tuple[session.Request, Optional[List[str]]]:
    lines = None
    if given.dataset not in (workload.FIXED, workload.SHAREGPT_LIKE):
        with open(given.dataset, encoding="utf-8") as stream_of_lines:
            lines = stream_of_lines.readlines()
    load = workload.Workload(
        dataset=given.dataset if lines is None else os.path.basename(given.dataset),
        input_len=given.input_len,
        output_len=given.output_len,
        requests=given.requests,
        shared_prefix=given.shared_prefix,
        seed=given.seed,
        salt=given.salt or os.urandom(4).hex(),
        ignore_eos=not given.stop_at_eos,
    )
    workload.check(load)
    return (
        session.Request(
            given.url,
            given.concurrency,
            given.rate,
            given.model,
            given.endpoint == "chat",
            load,
            given.repeat,
            given.warmup,
            given.max_seconds,
            given.timeout,
            given.label,
        ),
        lines,
    )


def _ints(text: str) -> List[int]:
    found = [int(part) for part in text.split(",")]
    if any(value < 1 for value in found):
        raise ValueError(text)
    return found


def _floats(text: str) -> List[float]:
    found = [float(part) for part in text.split(",")]
    if any(value <= 0 for value in found):
        raise ValueError(text)
    return found


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as stream_of_text:
        stream_of_text.write(text)


if __name__ == "__main__":
    raise SystemExit(main())
