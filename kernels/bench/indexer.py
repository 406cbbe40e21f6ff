"""Indexer logits: time against context and captured width, beside DeepGEMM and the release's torch code."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import cases
import timing
import torch
from pdstack_kernels import indexer

# (rows, keys of each row, captured width); keys = context / 4.
SHAPES = [
    (1, 2048, 2048),
    (64, 128, 2048),
    (64, 2048, 2048),
    (64, 2048, 262144),
    (16, 32768, 32768),
    (64, 32768, 32768),
    (64, 32768, 262144),
]
# The release's torch code works over the whole captured width: these are as far as it is worth waiting for.
TORCH_WIDTHS = [(64, 128, 2048), (16, 128, 16384), (16, 128, 65536)]


def deep_gemm_calls(sets: list[dict[str, Any]]) -> list[Callable[[], object]]:
    import deep_gemm

    def call(one: dict[str, Any], table: torch.Tensor, plan: torch.Tensor) -> Any:
        return deep_gemm.fp8_paged_mqa_logits(
            one["q_fp8"],
            one["kvcache_fp8"],
            one["weight"],
            one["seq_lens"],
            table,
            plan,
            one["max_seq_len"],
            False,
        )

    calls = []
    for one in sets:
        table = one["page_table"].masked_fill(one["page_table"] == 2**31 - 1, 0)
        plan = deep_gemm.get_paged_mqa_logits_metadata(one["seq_lens"], 64, 132)
        calls.append(lambda one=one, table=table, plan=plan: call(one, table, plan))
    return calls


def torch_calls(sets: list[dict[str, Any]], folder: pathlib.Path) -> list[Callable[[], object]]:
    """``fp8_paged_mqa_logits_torch_sm120`` of SGLang 0.5.13.post1, cut out of an unpacked wheel."""
    tree = ast.parse((folder / "indexer.py").read_text())
    name = "fp8_paged_mqa_logits_torch_sm120"
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "Any": Any, "FP8_DTYPE": torch.float8_e4m3fn}
    exec(compile(ast.Module([function], []), "indexer.py", "exec"), scope)
    calls = []
    for one in sets:
        table = one["page_table"].masked_fill(one["page_table"] == 2**31 - 1, 0)
        rest = (one["weight"], one["seq_lens"], table, None, one["max_seq_len"], False)
        calls.append(lambda one=one, rest=rest: scope[name](one["q_fp8"], one["kvcache_fp8"], *rest))
    return calls


def sets_of(rows: int, keys: int, width: int, copies: int) -> list[dict[str, Any]]:
    case = cases.Indexer("bench", rows, keys, width, ragged=False)
    return [cases.indexer_inputs(case, "cuda", seed) for seed in range(copies)]


def measure(bandwidth: float, wheel: pathlib.Path | None, deep_gemm: bool) -> Iterator[dict[str, Any]]:
    """One record a shape."""
    for rows, keys, width in SHAPES:
        sets = sets_of(rows, keys, width, 2 if rows * keys > 2**19 else 8)
        size = rows * keys * (132 + 4)
        record: dict[str, Any] = {
            "kernel": "indexer_logits",
            "shape": f"{keys} keys (context {4 * keys}), captured width {width}",
            "B": rows,
            "keys": keys,
            "width": width,
            "bytes": size,
            "ideal_us": size / bandwidth * 1e6,
            "us": timing.replay_time([lambda one=one: indexer.paged_mqa_logits(**one) for one in sets]),
        }
        if deep_gemm:
            record["deep_gemm_us"] = timing.replay_time(deep_gemm_calls(sets))
        if keys <= 512:
            calls = [lambda one=one: indexer.paged_mqa_logits(**one, identity_below=512) for one in sets]
            record["identity_us"] = timing.replay_time(calls)
        yield record
        torch.cuda.empty_cache()
    if wheel:
        for rows, keys, width in TORCH_WIDTHS:
            sets = sets_of(rows, keys, width, 2)
            yield {
                "kernel": "indexer_logits",
                "shape": f"{keys} keys (context {4 * keys}), captured width {width}",
                "B": rows,
                "keys": keys,
                "width": width,
                "us": timing.replay_time([lambda one=one: indexer.paged_mqa_logits(**one) for one in sets]),
                "torch_us": timing.replay_time(torch_calls(sets, wheel), repeats=5, rounds=1),
            }
            torch.cuda.empty_cache()
