"""Device code of `mhc`."""

# mypy: ignore-errors
# ruff: noqa: N803
# Triton reads these bodies, not Python: types are Triton's.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def product_kernel(
    x_ptr,
    fn_ptr,
    part_ptr,
    rows,
    width,
    share,
    BM: tl.constexpr,
    BK: tl.constexpr,
    TERMS: tl.constexpr,
    STAGES: tl.constexpr,
    DT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (K splits, row blocks). part [splits, rows, 32] fp32: 24 products, then the sum of squares."""
    if OVERLAP:
        gdc_launch_dependents()
    split = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.arange(0, 32)
    k = tl.arange(0, BK)
    acc = tl.zeros([BM, 32], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    for start in tl.range(split * share, tl.minimum((split + 1) * share, width), BK, num_stages=STAGES):
        x = tl.load(x_ptr + m.to(tl.int64)[:, None] * width + start + k[None, :], mask=(m < rows)[:, None], other=0.0)
        w = tl.load(fn_ptr + n[:, None] * width + start + k[None, :], mask=(n < 24)[:, None], other=0.0)
        xf = x.to(tl.float32)
        squares += tl.sum(xf * xf, 1)
        # Added up in fp32 registers block by block: the tensor cores' own sums cut bits off over a long K.
        block = tl.zeros([BM, 32], tl.float32)
        for _ in tl.static_range(TERMS):
            term = w.to(DT)
            block = tl.dot(x.to(DT), tl.trans(term), block, input_precision="ieee")
            w = w - term.to(tl.float32)
        acc += block
    acc = tl.where((n == 24)[None, :], squares[:, None], acc)
    tl.store(part_ptr + (split * rows + m)[:, None] * 32 + n[None, :], acc, mask=(m < rows)[:, None])


@triton.jit
def finish_kernel(
    x_ptr,
    part_ptr,
    scale_ptr,
    base_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    rows,
    hidden,
    splits,
    rms_eps,
    hc_eps,
    ITERATIONS: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (hidden blocks + 1, rows): the last program of a row computes post and comb, the others a block of y."""
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, 4)
    s = tl.arange(0, BS)
    live = s < splits
    at = part_ptr + (s * rows + row) * 32
    squares = tl.sum(tl.load(at + 24, mask=live, other=0.0))
    rms = tl.rsqrt(squares / (4 * hidden) + rms_eps)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        pre = tl.sum(tl.load(at[:, None] + i[None, :], mask=live[:, None], other=0.0), 0) * rms
        pre = tl.sigmoid(pre * tl.load(scale_ptr) + tl.load(base_ptr + i)) + hc_eps
        b = tl.program_id(0) * BH + tl.arange(0, BH)
        x = tl.load(x_ptr + (row * 4 + i)[:, None] * hidden + b[None, :], mask=(b < hidden)[None, :], other=0.0)
        y = tl.sum(x.to(tl.float32) * pre[:, None], 0)
        tl.store(y_ptr + row * hidden + b, y.to(y_ptr.dtype.element_ty), mask=b < hidden)
    else:
        post = tl.sum(tl.load(at[:, None] + 4 + i[None, :], mask=live[:, None], other=0.0), 0) * rms
        post = 2 * tl.sigmoid(post * tl.load(scale_ptr + 1) + tl.load(base_ptr + 4 + i))
        tl.store(post_ptr + row * 4 + i, post)
        cell = i[:, None] * 4 + i[None, :]
        comb = tl.sum(tl.load(at[:, None, None] + 8 + cell[None, :, :], mask=live[:, None, None], other=0.0), 0) * rms
        comb = comb * tl.load(scale_ptr + 2) + tl.load(base_ptr + 8 + cell)
        comb = tl.exp(comb - tl.max(comb, 1)[:, None])
        comb = comb / tl.sum(comb, 1)[:, None] + hc_eps
        comb = comb / (tl.sum(comb, 0)[None, :] + hc_eps)
        for _ in range(ITERATIONS - 1):
            comb = comb / (tl.sum(comb, 1)[:, None] + hc_eps)
            comb = comb / (tl.sum(comb, 0)[None, :] + hc_eps)
        tl.store(comb_ptr + row * 16 + cell, comb)
