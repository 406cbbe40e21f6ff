"""The hyper-connections' pre step: time beside torch, and what each precision does to expert routing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cases
import timing
import torch
from pdstack_kernels import mhc, mhc_ref

HIDDEN, EXPERTS, TOP = 4096, 256, 6
EPS = {"rms_eps": 1e-6, "hc_eps": 1e-6}


def release_product(x: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """The product as SGLang 0.5.13.post1 computes it on sm_120; its Sinkhorn and weighted sum come on top."""
    wide = x.flatten(1).float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return torch.nn.functional.linear(wide, fn) * factor


def times(bandwidth: float) -> Iterator[dict[str, Any]]:
    """One record a batch size."""
    for rows in (1, 16, 64, 512):
        sets = [cases.mhc_inputs(rows, HIDDEN, "cuda", seed) for seed in range(8)]
        size = rows * 4 * HIDDEN * 2 * 2 + 24 * 4 * HIDDEN * 4 + rows * HIDDEN * 2
        record: dict[str, Any] = {
            "kernel": "hc_pre",
            "shape": f"{rows} rows, hidden {HIDDEN}",
            "B": rows,
            "bytes": size,
            "ideal_us": size / bandwidth * 1e6,
        }
        for terms, name in ((3, "us"), (1, "one_term_us")):
            calls = [lambda one=one, terms=terms: mhc.hc_pre(**one, **EPS, terms=terms) for one in sets]
            record[name] = timing.replay_time(calls)
        calls = [lambda one=one: release_product(one["x"], one["fn"]) for one in sets]
        record["torch_product_only_us"] = timing.replay_time(calls)
        yield record


def gate_times() -> Iterator[dict[str, Any]]:
    """The MoE gate as the release has it (bf16 operands, fp32 result) beside one forced to fp32."""
    weight = torch.randn(EXPERTS, HIDDEN, device="cuda").to(torch.bfloat16) * HIDDEN**-0.5
    wide = weight.float()
    for rows in (1, 64):
        xs = [torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16) for _ in range(8)]
        yield {
            "kernel": "moe_gate",
            "shape": f"{rows} rows, {EXPERTS} experts",
            "B": rows,
            "release_us": timing.replay_time(
                [lambda x=x: torch.mm(x, weight.t(), out_dtype=torch.float32) for x in xs]
            ),
            "forced_fp32_us": timing.replay_time([lambda x=x: torch.mm(x.float(), wide.t()) for x in xs]),
        }


def routing(rows: int = 4096) -> Iterator[dict[str, Any]]:
    """Top-6 agreement of the experts behind one pre step, against a pre step in fp64.

    The step's output goes through an RMS norm, a bf16 gate and the square root of softplus, as in the model. Rows
    whose sixth and seventh expert are closer than the difference are what moves.
    """
    inputs = cases.mhc_inputs(rows, HIDDEN, "cuda", 7)
    gate = torch.randn(EXPERTS, HIDDEN, device="cuda", generator=torch.Generator("cuda").manual_seed(3)) * HIDDEN**-0.5

    def experts(y: torch.Tensor) -> torch.Tensor:
        y = y.to(torch.bfloat16).double()
        y = (y * torch.rsqrt(y.square().mean(-1, True) + 1e-6)).to(torch.bfloat16)
        logits = y.double() @ gate.to(torch.bfloat16).double().T
        return torch.nn.functional.softplus(logits).sqrt().topk(TOP).indices.sort(-1).values

    exact = mhc_ref.hc_pre(**inputs, **EPS)
    want = experts(exact[0])
    variants = {
        "fp32 (release)": mhc_ref.hc_pre(**inputs, **EPS, dtype=torch.float32),
        "bf16 x 3 (this kernel)": mhc.hc_pre(**inputs, **EPS),
        "bf16 x 2": mhc.hc_pre(**inputs, **EPS, terms=2),
        "bf16 (plain)": mhc.hc_pre(**inputs, **EPS, terms=1),
    }
    for name, (y, post, comb) in variants.items():
        yield {
            "kernel": "hc_pre_routing",
            "variant": name,
            "rows": rows,
            "rows_with_the_same_experts": float((experts(y) == want).all(-1).double().mean()),
            "largest_error_comb": float((comb.double() - exact[2]).abs().max()),
            "largest_error_post": float((post.double() - exact[1]).abs().max()),
        }
