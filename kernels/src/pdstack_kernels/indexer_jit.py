"""Device code of `indexer`."""

# mypy: ignore-errors
# ruff: noqa: N803
# Triton reads these bodies, not Python: types are Triton's.

import triton
import triton.language as tl


@triton.jit
def logits_kernel(
    q_ptr,
    cache8,
    cache32,
    weight_ptr,
    lengths,
    page_table,
    out_ptr,
    width,
    page_stride_b,
    out_stride_b,
    weight_stride_b,
    identity_below,
    H: tl.constexpr,
    STAGES: tl.constexpr,
    DT: tl.constexpr,
    CAST: tl.constexpr,
):
    """Grid (programs a row, rows). One page of 64 keys an iteration, keys as the M dimension."""
    row = tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(lengths + row), width)
    if length > identity_below:
        h = tl.arange(0, H)
        t = tl.arange(0, 64)
        d = tl.arange(0, 128)
        q = tl.load(q_ptr + (row * H + h)[:, None] * 128 + d[None, :])
        if CAST:
            q = q.to(DT)
        weight = tl.load(weight_ptr + row * weight_stride_b + h)
        for page in tl.range(tl.program_id(0), tl.cdiv(length, 64), tl.num_programs(0), num_stages=STAGES):
            at = tl.load(page_table + row * page_stride_b + page).to(tl.int64)
            k = tl.load(cache8 + at * 8448 + t[:, None] * 128 + d[None, :])
            if CAST:
                k = k.to(DT)
            scale = tl.load(cache32 + at * 2112 + 2048 + t)
            s = tl.dot(k, tl.trans(q), input_precision="ieee")
            s = tl.sum(tl.maximum(s, 0.0) * weight[None, :], 1) * scale
            where = page * 64 + t
            tl.store(out_ptr + row * out_stride_b + where, s, mask=where < length)
