"""Every cut of the sparse MLA decode on the table's rows: times and errors, to choose `sparse_mla.choose` by.

    python3 bench/tune.py --out tune.json [--workers 14] [--rows NAME ...]

The workers compile beforehand, in parallel, into Triton's cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import pathlib
import sys
import time
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "tests")]

import cases  # noqa: E402
import timing  # noqa: E402
import torch  # noqa: E402
from pdstack_kernels import sparse_mla, sparse_mla_ref  # noqa: E402

# (heads, tokens, warps, stages): of a cut but for the splits.
SMALL = [(8, 32, 4, 1), (8, 64, 8, 1), (16, 64, 8, 1), (16, 64, 8, 2), (16, 32, 4, 1), (16, 32, 4, 3)]
LONG = [(16, 32, 4, 1), (16, 32, 4, 2), (16, 32, 4, 3), (16, 32, 4, 4), (16, 64, 4, 1)]
BROAD = [(32, 32, 4, 1), (32, 32, 4, 2), (32, 32, 4, 3), (32, 64, 4, 1), (32, 64, 8, 1), (32, 64, 8, 3)]


class Row(NamedTuple):
    """A row of the table: query rows, heads, tokens of the second pool and its page, and what to try."""

    rows: int
    heads: int
    extra: int
    page: int
    blocks: list[tuple[int, int, int, int]]
    splits: list[int]


ROWS = {
    "b64-h8-128": Row(64, 8, 0, 64, SMALL, [1, 2, 4]),
    "b64-h8-192": Row(64, 8, 64, 2, SMALL, [2, 3, 6]),
    "b64-h8-640": Row(64, 8, 512, 64, LONG, [3, 4, 5, 6]),
    "b64-h8-1152": Row(64, 8, 1024, 2, LONG, [4, 6]),
    "b64-h64-128": Row(64, 64, 0, 64, BROAD, [1, 2]),
    "b64-h64-640": Row(64, 64, 512, 64, BROAD, [1, 2, 3]),
    "b64-h64-1152": Row(64, 64, 1024, 2, BROAD[:4], [2]),
    "b16-h64-640": Row(16, 64, 512, 64, [*BROAD, *LONG[:3]], [4, 5, 7, 10]),
    "b16-h16-640": Row(16, 16, 512, 64, LONG, [7, 10, 20]),
    "b1-h64-640": Row(1, 64, 512, 64, LONG, [10, 20]),
}


def cuts(row: Row) -> list[sparse_mla.Config]:
    """What is tried for a row."""
    found = []
    for (heads, tokens, warps, stages), splits in itertools.product(row.blocks, row.splits):
        if splits <= -(-128 // tokens) - (-row.extra // tokens):
            found.append(sparse_mla.Config(heads, tokens, warps, splits, stages))
    return found


def inputs(name: str, seed: int) -> dict[str, Any]:
    row = ROWS[name]
    case = cases.Attention(name, row.rows, row.heads, width1=row.extra, page1=row.page)
    return cases.attention_inputs(case, "cuda", seed)


def build(jobs: list[tuple[str, sparse_mla.Config]]) -> None:
    """In a worker: run each job once, which compiles it."""
    sets: dict[str, dict[str, Any]] = {}
    for name, cut in jobs:
        if name not in sets:
            sets[name] = inputs(name, 0)
        try:
            sparse_mla.sparse_mla_decode(**sets[name], config=cut)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{name} {cut}: {type(error).__name__} {str(error)[:200]}", flush=True)


def main() -> None:
    """Compile, check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    options = parser.parse_args()
    begin = time.perf_counter()
    # One job a kernel: what is compiled depends on the number of splits only in whether there is more than one.
    unique = {}
    for name in options.rows:
        row = ROWS[name]
        for cut in cuts(row):
            unique[dataclasses.replace(cut, splits=min(cut.splits, 2)), row.page, row.extra > 0] = (name, cut)
    jobs = list(unique.values())
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=build, args=(jobs[i :: options.workers],)) for i in range(options.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{len(jobs)} kernels compiled after {time.perf_counter() - begin:.0f} s", flush=True)

    records = []
    for name in options.rows:
        sets = [inputs(name, seed) for seed in range(8)]
        want = sparse_mla_ref.sparse_mla_decode(**sets[0])[0].double()
        best = []
        for cut in cuts(ROWS[name]):
            try:
                out = sparse_mla.sparse_mla_decode(**sets[0], config=cut)[0].double()
                far = (out - want).abs() > 1e-3 + 2.01 / 128 * want.abs()
                wrong = int(far.sum()) + int((~out.isfinite()).sum())
                calls = [lambda one=one, cut=cut: sparse_mla.sparse_mla_decode(**one, config=cut) for one in sets]
                us = timing.replay_time(calls, repeats=7, rounds=3)
            except Exception as error:
                wrong, us = -1, float("inf")
                print(f"{name} {cut}: {type(error).__name__} {str(error)[:160]}", flush=True)
            best.append((us, wrong, dataclasses.astuple(cut)))
            records.append({"row": name, "cut": dataclasses.asdict(cut), "us": us, "wrong": wrong})
        for us, wrong, cut in sorted(best)[:6]:
            print(f"{name} {us:6.2f} us wrong {wrong} (heads, tokens, warps, splits, stages) {cut}", flush=True)
        bad = [cut for _, wrong, cut in best if wrong]
        print(f"{name}: {len(best)} cuts, wrong: {bad}; {time.perf_counter() - begin:.0f} s", flush=True)
        options.out.write_text(json.dumps(records, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
