"""The hyper-connections' pre step against its reference."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
import triton.language as tl
from pdstack_kernels import mhc, mhc_ref

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EXACT = {} if GPU else {"dot_dtype": tl.float32}
EPS = {"rms_eps": 1e-6, "hc_eps": 1e-6}


@pytest.mark.parametrize("rows", [1, 7, 64, 300] if GPU else [1, 5, 33])
@pytest.mark.parametrize("hidden", [4096] if GPU else [128, 1024])
def test_all_outputs(rows: int, hidden: int) -> None:
    inputs: dict[str, Any] = cases.mhc_inputs(rows, hidden, DEVICE)
    y, post, comb = mhc.hc_pre(**inputs, **EPS, **EXACT)
    want_y, want_post, want_comb = mhc_ref.hc_pre(**inputs, **EPS)
    fp32 = mhc_ref.hc_pre(**inputs, **EPS, dtype=torch.float32)
    assert ((y.double() - want_y).abs() <= want_y.abs() * (2**-8 if GPU else 1e-5) + (1e-4 if GPU else 1e-5)).all()
    for mine, torchs, exact in ((post, fp32[1], want_post), (comb, fp32[2], want_comb)):
        assert (mine - exact).abs().max() < 4 * (torchs - exact).abs().max() + 2e-6, "less exact than fp32"
    assert (comb.sum(-2) - 1).abs().max() < 1e-3, "Sinkhorn's last step leaves columns that sum to one"


def test_no_rows() -> None:
    inputs: dict[str, Any] = cases.mhc_inputs(1, 128, DEVICE)
    y, post, comb = mhc.hc_pre(**(inputs | {"x": inputs["x"][:0]}), **EPS, **EXACT)
    assert y.shape == (0, 128)
    assert post.shape == (0, 4)
    assert comb.shape == (0, 4, 4)


def test_wrong_inputs_are_refused() -> None:
    inputs: dict[str, Any] = cases.mhc_inputs(2, 128, DEVICE)
    with pytest.raises(ValueError, match="do not fit together"):
        mhc.hc_pre(**(inputs | {"fn": inputs["fn"].to(torch.bfloat16)}), **EPS, **EXACT)


@pytest.mark.skipif(not GPU, reason="bf16 products need a GPU")
def test_three_terms_are_exact_and_one_is_not() -> None:
    inputs: dict[str, Any] = cases.mhc_inputs(64, 4096, DEVICE)
    want = mhc_ref.hc_pre(**inputs, **EPS)[2]
    error = [(mhc.hc_pre(**inputs, **EPS, terms=terms)[2] - want).abs().max().item() for terms in (1, 3)]
    assert error[1] < 3e-5 < error[0]
