"""Indexer logits against their reference."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
import triton.language as tl
from pdstack_kernels import indexer, indexer_ref

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EXACT = {} if GPU else {"dot_dtype": tl.float32}


@pytest.mark.parametrize("case", cases.INDEXER_FULL if GPU else cases.INDEXER_SMALL, ids=lambda case: case.name)
def test_logits(case: cases.Indexer) -> None:
    inputs: dict[str, Any] = cases.indexer_inputs(case, DEVICE)
    out = indexer.paged_mqa_logits(**inputs, identity_below=case.identity_below, **EXACT)
    want = indexer_ref.paged_mqa_logits(**inputs)
    scored = torch.isfinite(want) & (inputs["seq_lens"] > case.identity_below)
    assert scored.any()
    error = (out - want)[scored].abs().max() / want[scored].abs().max()
    assert error < (2e-3 if GPU else 1e-6)
    if case.identity_below and DEVICE == "cpu":
        assert not scored.all(1).any()


def test_top_k_is_the_references() -> None:
    case = cases.Indexer("top-k", 8, 4096 if GPU else 256, 4096 if GPU else 256, ragged=False)
    k = case.keys // 4
    inputs: dict[str, Any] = cases.indexer_inputs(case, DEVICE)
    mine = indexer.paged_mqa_logits(**inputs, **EXACT).topk(k).indices
    want = indexer_ref.paged_mqa_logits(**inputs).topk(k).indices
    shared = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(mine, want))
    assert shared >= (0.995 if GPU else 1.0) * mine.numel()


def test_nothing_behind_the_length_is_written() -> None:
    """The grid must not follow the captured width: with a poisoned allocator every other element stays as it was."""
    inputs: dict[str, Any] = cases.indexer_inputs(cases.Indexer("tail", 3, 130, 512), DEVICE)
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs).fill_(12345.0)

    indexer.torch.empty = poisoned  # type: ignore[assignment]
    try:
        out = indexer.paged_mqa_logits(**inputs, **EXACT)
    finally:
        indexer.torch.empty = empty
    behind = torch.arange(512, device=DEVICE)[None] >= inputs["seq_lens"]
    assert (out[behind] == 12345.0).all()
    assert not (out[~behind] == 12345.0).any()


def test_wrong_inputs_are_refused() -> None:
    inputs: dict[str, Any] = cases.indexer_inputs(cases.Indexer("wrong", 2, 100, 128), DEVICE)
    with pytest.raises(ValueError, match=r"\[pages, 64, 1, 132\]"):
        indexer.paged_mqa_logits(**(inputs | {"kvcache_fp8": inputs["kvcache_fp8"][:, :32]}), **EXACT)
    with pytest.raises(ValueError, match="int32"):
        indexer.paged_mqa_logits(**(inputs | {"seq_lens": inputs["seq_lens"].long()}), **EXACT)


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU")
def test_a_captured_graph_replays_with_new_lengths() -> None:
    case = cases.Indexer("graph", 64, 2048, 8192)
    static: dict[str, Any] = cases.indexer_inputs(case, DEVICE)
    indexer.paged_mqa_logits(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = indexer.paged_mqa_logits(**static)
    fresh: dict[str, Any] = cases.indexer_inputs(case, DEVICE, seed=1)
    for name, value in fresh.items():
        if isinstance(value, torch.Tensor):
            static[name].copy_(value)
    graph.replay()
    eager = indexer.paged_mqa_logits(**fresh)
    inside = torch.arange(8192, device=DEVICE)[None] < fresh["seq_lens"]
    assert torch.equal(out[inside], eager[inside])
