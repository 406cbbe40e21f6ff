"""Manifold-constrained hyper-connections, the part before a block ("hc_pre"), in two kernels.

The release computes ``F.linear(x.float(), fn)`` in fp32 outside the tensor cores, with x widened in memory. But x is
bf16: splitting the fp32 weight into three bf16 terms (hi + mid + lo, 24 bits) makes every product exact on bf16
tensor cores with fp32 sums, so nothing that routes downstream moves. The first kernel computes the split-K product
and the sum of squares in one pass over x, the second finishes: RMS factor, sigmoids, Sinkhorn, and the weighted sum
of the residual streams.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import mhc_jit
from .sparse_mla import device_limits

STREAMS = 4
MIXES = (2 + STREAMS) * STREAMS


def hc_pre(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    iterations: int = 20,
    terms: int = 3,
    dot_dtype: tl.dtype = tl.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mixing weights from the residual streams, and the streams' weighted sum.

    Args:
        x: [N, 4, hidden] bf16, contiguous: the residual streams.
        fn: [24, 4 * hidden] fp32; scale: [3] fp32; base: [24] fp32.
        rms_eps, hc_eps: epsilon of the RMS factor, and of the sigmoid and Sinkhorn steps.
        iterations: Sinkhorn iterations.
        terms: bf16 terms of the weight: 3 is exact to fp32, 1 is plain bf16.
        dot_dtype: operand type of the products; fp32 for the interpreter.
    Returns:
        y [N, hidden] in x's dtype, post [N, 4] fp32, comb [N, 4, 4] fp32.
    Raises:
        ValueError: shapes or types that the kernel does not take.
    Source: ``DeepseekV4DecoderLayer.hc_pre`` and ``hc_split_sinkhorn`` of the pinned wheels.
    """
    rows, streams, hidden = x.shape
    width = streams * hidden
    if streams != STREAMS or fn.shape != (MIXES, width) or fn.dtype != torch.float32 or width % 128:
        raise ValueError(f"x {tuple(x.shape)} and fn {tuple(fn.shape)} {fn.dtype} do not fit together")
    if not (x.is_contiguous() and fn.is_contiguous()):
        raise ValueError("x and fn must be contiguous")
    y = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    post = torch.empty(rows, STREAMS, dtype=torch.float32, device=x.device)
    comb = torch.empty(rows, STREAMS, STREAMS, dtype=torch.float32, device=x.device)
    if rows == 0:
        return y, post, comb
    # The wider block spills with a K block of 128.
    block_m, block_k, stages = (16, 128, 2) if rows <= 16 else (32, 64, 3)
    blocks = triton.cdiv(rows, block_m)
    steps = triton.cdiv(width, block_k)
    splits = max(1, min(steps, 64, device_limits(x.device)[0] // blocks))
    share = triton.cdiv(steps, splits) * block_k
    splits = triton.cdiv(width, share)
    part = torch.empty(splits, rows, 32, dtype=torch.float32, device=x.device)
    mhc_jit.product_kernel[(splits, blocks)](
        x,
        fn,
        part,
        rows,
        width,
        share,
        BM=block_m,
        BK=block_k,
        TERMS=terms,
        STAGES=stages,
        DT=dot_dtype,
        OVERLAP=x.is_cuda,
        num_warps=4,
    )
    block_h = 1024
    mhc_jit.finish_kernel[(triton.cdiv(hidden, block_h) + 1, rows)](
        x,
        part,
        scale,
        base,
        y,
        post,
        comb,
        rows,
        hidden,
        splits,
        rms_eps,
        hc_eps,
        ITERATIONS=iterations,
        BH=block_h,
        BS=triton.next_power_of_2(splits),
        OVERLAP=x.is_cuda,
        num_warps=4,
        launch_pdl=x.is_cuda,
    )
    return y, post, comb
