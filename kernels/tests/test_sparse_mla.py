"""Sparse MLA decode against its reference, at FlashMLA's tolerances on a GPU and at fp32's in the interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import pytest
import torch
import triton.language as tl
from pdstack_kernels import sparse_mla, sparse_mla_ref

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EXACT = {} if GPU else {"dot_dtype": tl.float32}


def assert_close(out: torch.Tensor, want: torch.Tensor) -> None:
    out, want = out.double(), want.double()
    assert torch.isfinite(out).all(), "not every element was written, or a NaN leaked"
    error = (out - want).abs()
    absolute, relative, cosine = (1e-3, 2.01 / 128, 5e-6) if GPU else (1e-5, 1e-5, 1e-9)
    wrong = (error > absolute) & (error > relative * want.abs())
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} elements off, at most by {error[wrong].max()}"
    norm = (out.square() + want.square()).sum()
    if norm > 0:
        assert 1 - 2 * (out * want).sum() / norm < cosine


def run(case: cases.Attention, **more: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    inputs: dict[str, Any] = cases.attention_inputs(case, DEVICE)
    if case.splits:
        cut = sparse_mla.choose(case.rows, case.heads, case.width0, case.width1, 8, sparse_mla.SM120_SHARED)
        more["config"] = dataclasses.replace(cut, splits=case.splits)
    out, lse = sparse_mla.sparse_mla_decode(**inputs, **EXACT, **more)
    return out, lse, inputs


@pytest.mark.parametrize("case", cases.FULL if GPU else cases.SMALL, ids=lambda case: case.name)
def test_output_and_lse(case: cases.Attention) -> None:
    out, lse, inputs = run(case)
    want, want_lse = sparse_mla_ref.sparse_mla_decode(**inputs)
    assert out.shape == want.shape
    assert lse.shape == want_lse.shape
    assert_close(out, want)
    empty = want_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty)
    assert (lse - want_lse)[~empty].abs().max().item() < 1e-3 if (~empty).any() else True


def test_empty_rows_are_zero() -> None:
    out, lse, _ = run(cases.Attention("empty", 2, 8, width0=64, width1=64, holes=1.0))
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_the_sink_lowers_the_output() -> None:
    inputs: dict[str, Any] = cases.attention_inputs(cases.Attention("sink", 2, 8, width0=64), DEVICE)
    free = sparse_mla.sparse_mla_decode(**(inputs | {"attn_sink": None}), **EXACT)[0].float()
    for sink, factor in ((-1e30, 1.0), (float("inf"), 0.0)):
        held = torch.full((8,), sink, device=DEVICE)
        out = sparse_mla.sparse_mla_decode(**(inputs | {"attn_sink": held}), **EXACT)[0].float()
        assert torch.allclose(out, free * factor, atol=1e-6)


def test_only_the_asked_heads_are_computed() -> None:
    case = cases.Attention("range", 2, 16, width0=64, width1=32)
    inputs: dict[str, Any] = cases.attention_inputs(case, DEVICE)
    want, want_lse = sparse_mla_ref.sparse_mla_decode(**inputs)
    inputs["q"] = inputs["q"].clone()
    inputs["q"][:, :, :4] = float("nan")
    inputs["q"][:, :, 12:] = float("nan")
    for splits in (1, 2):
        cut = sparse_mla.Config(16, 32, 4, splits)
        out, lse = sparse_mla.sparse_mla_decode(**inputs, head_range=(4, 12), config=cut, **EXACT)
        assert_close(out[:, :, 4:12], want[:, :, 4:12])
        assert torch.allclose(lse, want_lse[:, 4:12], atol=1e-3)


CUTS = [
    sparse_mla.Config(8, 32, 4, 2, 1),
    sparse_mla.Config(8, 32, 2, 3, 3, turned=True),
    sparse_mla.Config(8, 32, 2, 5, 3, turned=True, held=2),
    sparse_mla.Config(16, 64, 8, 3, 2),
    sparse_mla.Config(32, 32, 4, 1, 1),
    sparse_mla.Config(32, 64, 8, 1, 3),
]


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: str(dataclasses.astuple(cut)))
def test_every_cut_gives_the_same(cut: sparse_mla.Config) -> None:
    case = cases.Attention("cut", 3, 40, width0=100, width1=130, short=True)
    out, _, inputs = run(case, config=cut)
    assert_close(out, sparse_mla_ref.sparse_mla_decode(**inputs)[0])


@pytest.mark.parametrize("scale", [0, 1, 100, 112, 120, 127, 134])
def test_every_byte_dequantises(scale: int) -> None:
    """One token a row whose weight is 1 returns the token itself: all 256 bytes, exactly where fp16 holds them."""
    inputs: dict[str, Any] = cases.attention_inputs(cases.Attention("bytes", 1, 1, width0=1, sink=False), DEVICE)
    cache = inputs["k_cache"]
    memory = cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1)).view(torch.uint8)
    values = torch.arange(256, device=DEVICE).to(torch.uint8)
    values = torch.where((values & 0x7F) == 0x7F, 0, values)
    memory[0, :448] = values.repeat(2)[:448]
    memory[0, 448:576] = 0
    memory[0, 256 * 576 : 256 * 576 + 7] = scale
    inputs["q"].zero_()
    inputs["indices"].zero_()
    out = sparse_mla.sparse_mla_decode(**inputs, **EXACT)[0].flatten()[:448].double()
    want = values.repeat(2)[:448].view(torch.float8_e4m3fn).double() * 2.0 ** (scale - 127)
    # Scales below 2^-24 are zero in fp16; those here leave nothing above 4e-6.
    most = torch.zeros_like(want) if scale >= 112 or not GPU else want.abs()
    assert scale >= 112 or want.abs().max() < 4e-6
    assert ((out - want).abs() <= most).all()


def test_wrong_inputs_are_refused() -> None:
    inputs: dict[str, Any] = cases.attention_inputs(cases.Attention("wrong", 1, 8, width0=32), DEVICE)
    with pytest.raises(ValueError, match="must be int32"):
        sparse_mla.sparse_mla_decode(**(inputs | {"indices": inputs["indices"].long()}), **EXACT)
    with pytest.raises(ValueError, match="does not fit 8 heads"):
        sparse_mla.sparse_mla_decode(**inputs, head_range=(4, 9), **EXACT)
    with pytest.raises(ValueError, match=r"\[B, 1, H, 512\]"):
        sparse_mla.sparse_mla_decode(**(inputs | {"q": inputs["q"][..., :256]}), **EXACT)
    cache = torch.zeros(4, 18697, dtype=torch.uint8, device=DEVICE)[:, : 32 * 584].view(4, 32, 1, 584)
    with pytest.raises(ValueError, match="16-byte aligned"):
        sparse_mla.sparse_mla_decode(**(inputs | {"k_cache": cache}), **EXACT)


def test_no_rows() -> None:
    inputs: dict[str, Any] = cases.attention_inputs(cases.Attention("none", 1, 8, width0=32), DEVICE)
    inputs |= {name: inputs[name][:0] for name in ("q", "indices", "topk_length")}
    assert sparse_mla.sparse_mla_decode(**inputs, **EXACT)[0].shape == (0, 1, 8, 512)


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("rows", [1, 64])
def test_a_captured_graph_replays_with_new_lengths_and_indices(rows: int) -> None:
    case = cases.Attention("graph", rows, 16, width1=512, short=True, holes=0.1)
    static: dict[str, Any] = cases.attention_inputs(case, DEVICE)
    fresh: dict[str, Any] = cases.attention_inputs(case, DEVICE, seed=1)
    sparse_mla.sparse_mla_decode(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = sparse_mla.sparse_mla_decode(**static)
    for name, value in fresh.items():
        if name.endswith("k_cache"):
            pages, stride = value.shape[0], value.stride(0)
            whole = (pages, stride), (stride, 1)
            static[name].view(torch.uint8).as_strided(*whole).copy_(value.view(torch.uint8).as_strided(*whole))
        else:
            static[name].copy_(value)
    out.fill_(float("nan"))
    graph.replay()
    eager, eager_lse = sparse_mla.sparse_mla_decode(**fresh)
    assert torch.equal(out, eager)
    assert torch.equal(lse, eager_lse)
    assert_close(out, sparse_mla_ref.sparse_mla_decode(**fresh)[0])
