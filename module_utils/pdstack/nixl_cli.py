"""Prove NIXL's transport by hand, without Ansible: ``PYTHONPATH=module_utils python3 -m pdstack.nixl_cli --device``.

Moves memory between two processes in both directions, compares every byte, and prints bandwidths and UCX's data lane.
Run it on a host that has a release, or anywhere with ``--python`` of an environment that holds nixl.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from typing import Optional, Sequence

from . import codec, communication, nixl, runner

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "roles/nixl_ucx/files/nixl_transfer.py"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Transfer between two processes of this machine; returns the exit status (1: refused)."""
    parser = argparse.ArgumentParser(prog="python3 -m pdstack.nixl_cli", description=__doc__)
    parser.add_argument("--python", default="/opt/pdstack/current/venv/bin/python", help="interpreter with nixl")
    parser.add_argument("--device", action="store_true", help="between the memories of two GPUs; else host memory")
    parser.add_argument("--gpus", default="0,1", help="the two GPUs, in PCI order (may be the same one)")
    parser.add_argument(
        "--isolate", action="store_true", help="each side sees its own GPU alone, as the engines of a pair do"
    )
    parser.add_argument("--bytes", type=int, default=1 << 26, help="size of the buffer; GPUs move it 16 times at once")
    parser.add_argument("--repetitions", type=int, default=5, help="transfers per direction")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="more environment, repeatable")
    parser.add_argument("--baseline", type=float, metavar="GB/S", help="P2P bandwidth that the probe measured")
    parser.add_argument("--script", type=pathlib.Path, default=SCRIPT, help="the transfer script")
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    given = parser.parse_args(arguments)
    pair = _pair(given)
    problems = [problem for side in pair.sides for problem in nixl.check_environment(side.environment)]
    run = functools.partial(runner.run, timeout_s=600.0)
    try:
        if problems:
            raise nixl.TransportRefused(problems)
        result = nixl.measure(given.script.read_text(), given.python, pair, given.bytes, given.repetitions, run)
    except nixl.TransportRefused as error:
        print(error)
        return 1
    if given.json:
        print(json.dumps(codec.dump(result), indent=1))
    else:
        for direction, speed in result.directions.items():
            lane = result.lane if direction.startswith(result.sides[0] + " ") else result.lane_back
            print(f"{direction}: {speed['best'] / 1e9:.2f} GB/s best, {speed['median'] / 1e9:.2f} median, over {lane}")
    copied = given.baseline * 1e9 if given.baseline else None
    for words in nixl.warnings(result, copied):
        print(f"warning: {words}")
    problems = nixl.check_result(result, copied, ["tcp"] if given.device else [])
    if problems:
        print(nixl.TransportRefused(problems))
    return 1 if problems else 0


def _pair(given: argparse.Namespace) -> nixl.Pair:
    """Return the pair that the arguments ask for, with the plan's own transports."""
    common = {"UCX_TLS": communication.LANES, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if given.device else {}
    common.update(item.partition("=")[::2] for item in given.env)
    gpus = [int(word) for word in given.gpus.split(",")]
    sides = []
    for role, gpu in zip(("prefill", "decode"), gpus):
        own = {"CUDA_VISIBLE_DEVICES": str(gpu)} if given.device and given.isolate else {}
        sides.append(nixl.Side(f"{role}.gpu{gpu}", {**common, **own}, 0 if own else gpu))
    return nixl.Pair("VRAM" if given.device else "DRAM", sides)


if __name__ == "__main__":
    raise SystemExit(main())
