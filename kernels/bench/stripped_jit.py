"""Device code of `floor`."""

# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl
from pdstack_kernels.sparse_mla_jit import _indices, _live, _locate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def stripped_kernel(
    q_ptr,
    cache0,
    indices0,
    lengths0,
    cache1,
    indices1,
    lengths1,
    part_ptr,
    width0,
    width1,
    page_bytes0,
    page_bytes1,
    index_stride0,
    index_stride1,
    heads,
    PAGE0: tl.constexpr,
    PAGE1: tl.constexpr,
    LEVEL: tl.constexpr,
    T: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (1, tiles, rows). LEVEL 0: nothing. 1: lengths and indices. 2: every byte of a tile, of query and output.

    What is read ends in one number a program that is never stored, in a way that the compiler cannot know.
    """
    gdc_launch_dependents()
    gdc_wait()
    if LEVEL > 0:
        tile = tl.program_id(1)
        row = tl.program_id(2).to(tl.int64)
        tiles0 = tl.cdiv(width0, T)
        row1 = indices1 + row * index_stride1
        index = _indices(tile, tiles0, indices0 + row * index_stride0, width0, row1, width1, T, PAGE1)
        count0 = tl.minimum(tl.load(lengths0 + row), width0)
        count1 = 0
        if PAGE1 > 0:
            count1 = tl.minimum(tl.load(lengths1 + row), width1)
        index = _live(index, tile, tiles0, count0, count1, T, PAGE1)
        seen = tl.max(index, 0)
        if LEVEL > 1:
            valid = index >= 0
            token, scale_at = _locate(index, tile >= tiles0, cache0, page_bytes0, cache1, page_bytes1, PAGE0, PAGE1)
            words = token.to(tl.pointer_type(tl.int32), bitcast=True)
            many = tl.arange(0, 128)
            few = tl.arange(0, 16)
            a = tl.load(words[:, None] + many[None, :], mask=valid[:, None], other=0)
            b = tl.load((words + 128)[:, None] + few[None, :], mask=valid[:, None], other=0)
            c = tl.load(scale_at.to(tl.pointer_type(tl.int64), bitcast=True), mask=valid, other=0)
            seen ^= tl.xor_sum(tl.xor_sum(a, 1), 0) ^ tl.xor_sum(tl.xor_sum(b, 1), 0) ^ tl.xor_sum(c, 0).to(tl.int32)
            # Query and output, as often as there are partial results, eight heads at a time.
            groups = heads // 8
            d = tl.arange(0, 8 * 512)
            for group in range(tile, groups * SPLITS, tl.num_programs(1)):
                q = tl.load(q_ptr + (row * groups + group % groups) * 8 * 512 + d)
                tl.store(part_ptr + (row * groups * SPLITS + group) * 8 * 512 + d, q)
        tl.store(part_ptr + tl.arange(0, 1), tl.full([1], 0.0, tl.bfloat16), mask=seen == 0x7FFFFFF3)
