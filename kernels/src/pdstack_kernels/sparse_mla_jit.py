"""Device code of `sparse_mla`."""

# mypy: ignore-errors
# ruff: noqa: N803, N806, RET505, RUF005
# Triton reads these bodies, not Python: types are Triton's, and tuples grow only by addition.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _dequantise(raw, scale, DT: tl.constexpr, PACKED: tl.constexpr):
    """e4m3 bytes [T, 64] times 2^(scale - 127) [T].

    PACKED: fp16, four bytes with four instructions; exact for scales of 2^-15 to 2^7, to within 2^-25 down to 2^-24,
    and zero below, where no value reaches 1.4e-5. Marked impure only so that Triton converts once, before the tile goes
    to shared memory, and not again for each of the two products.
    """
    factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    if PACKED:
        half = factor.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        pair = (half | (half << 16))[:, None]
        raw4, pair4 = tl.broadcast(raw, pair)
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            mul.f16x2 $0, $0, $3;
            mul.f16x2 $1, $1, $3;
            }""",
            "=&r,=&r,r,r,r,r,r",
            [raw4, pair4],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    else:
        factor = tl.where(scale == 0, 2.0**-127, factor)
        return (raw.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor[:, None]).to(DT)


@triton.jit
def _once(values, PACKED: tl.constexpr):
    """The values, behind an opaque move: see `_dequantise` on why the compiler must not look through."""
    if PACKED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=tl.float16, is_pure=False, pack=2)
    else:
        return values


@triton.jit
def _indices(tile, tiles0, row0, width0, row1, width1, T: tl.constexpr, PAGE1: tl.constexpr):
    """The index entries of a tile, whatever the row's lengths; -1 behind the widths."""
    at = tile * T + tl.arange(0, T)
    if PAGE1 > 0:
        second = tile >= tiles0
        at -= tl.where(second, tiles0 * T, 0)
        return tl.load(tl.where(second, row1, row0) + at, mask=at < tl.where(second, width1, width0), other=-1)
    else:
        return tl.load(row0 + at, mask=at < width0, other=-1)


@triton.jit
def _live(index, tile, tiles0, count0, count1, T: tl.constexpr, PAGE1: tl.constexpr):
    """The index entries with -1 at and behind the row's lengths."""
    at = tile * T + tl.arange(0, T)
    if PAGE1 > 0:
        second = tile >= tiles0
        at -= tl.where(second, tiles0 * T, 0)
        return tl.where(at < tl.where(second, count1, count0), index, -1)
    else:
        return tl.where(at < count0, index, -1)


@triton.jit
def _nth(step, begin, live0, begin1):
    """The tile of a step: the live ones of the first pool, then those of the second."""
    return begin + step if step < live0 else begin1 + step - live0


@triton.jit
def _read(index, second, cache0, page_bytes0, cache1, page_bytes1, PAGE0: tl.constexpr, PAGE1: tl.constexpr):
    """A tile's bytes as they lie in the cache: scales [T], seven times e4m3 [T, 64], and bf16 [T, 64]."""
    d = tl.arange(0, 64)
    valid = index >= 0
    token, scale_at = _locate(index, second, cache0, page_bytes0, cache1, page_bytes1, PAGE0, PAGE1)
    scales = tl.load(scale_at.to(tl.pointer_type(tl.uint64), bitcast=True), mask=valid, other=0)
    raw = ()
    for c in tl.static_range(7):
        raw = raw + (tl.load(token[:, None] + c * 64 + d[None, :], mask=valid[:, None], other=0),)
    rope_at = (token + 448).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    rope = tl.load(rope_at[:, None] + d[None, :], mask=valid[:, None], other=0.0)
    return scales, raw, rope


@triton.jit
def _locate(index, second, cache0, page_bytes0, cache1, page_bytes1, PAGE0: tl.constexpr, PAGE1: tl.constexpr):
    """Addresses of the tokens' 576 data bytes and 8 scale bytes; those of token 0 where the index is -1."""
    index = tl.where(index >= 0, index, 0)
    if PAGE1 > 0:
        page = tl.where(second, index // PAGE1, index // PAGE0)
        slot = tl.where(second, index % PAGE1, index % PAGE0)
        base = page.to(tl.int64) * tl.where(second, page_bytes1, page_bytes0)
        scale_off = tl.where(second, PAGE1, PAGE0) * 576
        cache = tl.where(second, cache1, cache0)
    else:
        slot = index % PAGE0
        base = (index // PAGE0).to(tl.int64) * page_bytes0
        scale_off = PAGE0 * 576
        cache = cache0
    return cache + tl.multiple_of(base + slot * 576, 16), cache + tl.multiple_of(base + scale_off + slot * 8, 8)


@triton.jit
def _side_by_side(a, b, N: tl.constexpr):
    """[M, N] and [M, N] to [M, 2 N]; a renaming of registers."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * N))


@triton.jit
def _whole(chunks):
    """Eight [M, 64] chunks as one [M, 512] tile: one change of layout where eight would be."""
    a = _side_by_side(chunks[0], chunks[1], 64)
    b = _side_by_side(chunks[2], chunks[3], 64)
    c = _side_by_side(chunks[4], chunks[5], 64)
    d = _side_by_side(chunks[6], chunks[7], 64)
    return _side_by_side(_side_by_side(a, b, 128), _side_by_side(c, d, 128), 256)


@triton.jit
def decode_kernel(
    q_ptr,
    cache0,
    indices0,
    lengths0,
    cache1,
    indices1,
    lengths1,
    sink_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    scale_log2,
    width0,
    width1,
    page_bytes0,
    page_bytes1,
    q_stride_b,
    q_stride_h,
    index_stride0,
    index_stride1,
    out_stride_b,
    out_stride_h,
    first_head,
    heads,
    PAGE0: tl.constexpr,
    PAGE1: tl.constexpr,
    HAS_LENGTHS0: tl.constexpr,
    HAS_LENGTHS1: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SPLIT: tl.constexpr,
    HB: tl.constexpr,
    T: tl.constexpr,
    STAGES: tl.constexpr,
    TURNED: tl.constexpr,
    HELD: tl.constexpr,
    DT: tl.constexpr,
    PACKED: tl.constexpr,
    OVERLAP: tl.constexpr,
    LATE: tl.constexpr,
):
    """Grid (head blocks, splits, rows). PAGE1 = 0: no second pool. Not SPLIT: the one program finishes the row.

    STAGES: 1 reads a tile into registers when it is needed; n has n - 1 tiles on their way into shared memory.
    TURNED: tokens are the M dimension of the products and heads the N dimension, where 8 fill an instruction; otherwise
    heads are M, where 16 do.
    HELD: of the query's chunks, if TURNED, those that stay in registers; the others are read from shared memory for
    every tile.
    LATE: the next kernel is set up when the tiles are done, not at once.
    """
    AXIS: tl.constexpr = 0 if TURNED else 1  # of a tile of scores, along which tokens lie; heads lie along the other
    if OVERLAP:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) * HB + tl.arange(0, HB)
    real = head < heads

    # Which tiles are whose follows from the widths alone: the first indices are read beside the lengths, not after.
    tiles0 = tl.cdiv(width0, T)
    tiles = tiles0
    if PAGE1 > 0:
        tiles = tiles0 + tl.cdiv(width1, T)
    begin = split * tiles // splits
    end = (split + 1) * tiles // splits
    row0 = indices0 + row * index_stride0
    row1 = indices1 + row * index_stride1
    count0 = width0
    if HAS_LENGTHS0:
        count0 = tl.minimum(tl.load(lengths0 + row), width0)
    count1 = 0
    if PAGE1 > 0:
        count1 = width1
        if HAS_LENGTHS1:
            count1 = tl.minimum(tl.load(lengths1 + row), width1)
    index = _indices(begin, tiles0, row0, width0, row1, width1, T, PAGE1)

    q_at = q_ptr + row * q_stride_b + tl.expand_dims(first_head + head, AXIS) * q_stride_h
    q_at += tl.expand_dims(tl.arange(0, 64), 1 - AXIS)
    q = ()
    acc = ()
    for c in tl.static_range(8):
        q = q + (tl.load(q_at + c * 64, mask=tl.expand_dims(real, AXIS), other=0.0).to(DT),)
        acc = acc + (tl.zeros([64, HB] if TURNED else [HB, 64], tl.float32),)
    zero = tl.zeros([T, HB] if TURNED else [HB, T], tl.float32)
    if TURNED:
        for c in tl.static_range(HELD):
            # Zero, but Triton 3.6 brings an operand of a product before the loop into registers before the loop.
            zero = tl.dot(tl.zeros([T, 64], DT), q[c], zero, input_precision="ieee")
    top = tl.full([HB], -1e30, tl.float32)
    # Summed over a tile's tokens only at the end: one reduction across warps less a tile.
    totals = tl.zeros([T, HB] if TURNED else [HB, T], tl.float32)

    # Of each pool's tiles the first ones hold tokens: behind them the walk skips to the second pool.
    live0 = tl.maximum(tl.minimum(tl.cdiv(tl.maximum(count0, 0), T), tl.minimum(end, tiles0)) - begin, 0)
    begin1 = tl.maximum(begin, tiles0)
    live1 = 0
    if PAGE1 > 0:
        live1 = tl.maximum(tl.minimum(tiles0 + tl.cdiv(tl.maximum(count1, 0), T), end) - begin1, 0)
        if live0 == 0 and begin < tiles0:
            index = _indices(begin1, tiles0, row0, width0, row1, width1, T, PAGE1)
    index = _live(index, _nth(0, begin, live0, begin1), tiles0, count0, count1, T, PAGE1)
    # Indices two tiles ahead: the reads that are one tile ahead must not wait for them.
    later = _indices(_nth(1, begin, live0, begin1), tiles0, row0, width0, row1, width1, T, PAGE1)
    for step in tl.range(0, live0 + live1, num_stages=STAGES):
        valid = tl.expand_dims(index >= 0, 1 - AXIS)
        second = _nth(step, begin, live0, begin1) >= tiles0
        scales, raw, rope = _read(index, second, cache0, page_bytes0, cache1, page_bytes1, PAGE0, PAGE1)
        index = _live(later, _nth(step + 1, begin, live0, begin1), tiles0, count0, count1, T, PAGE1)
        later = _indices(_nth(step + 2, begin, live0, begin1), tiles0, row0, width0, row1, width1, T, PAGE1)
        k = ()
        for c in tl.static_range(7):
            k = k + (_dequantise(raw[c], (scales >> (8 * c)).to(tl.uint8), DT, PACKED),)
        k = k + (_once(rope.to(DT), PACKED),)
        # Four sums, not one: a chain of 32 dependent MMAs costs more time than everything else in a tile.
        parts = ()
        for c in tl.static_range(4):
            if TURNED:
                half = tl.dot(k[c], q[c], zero, input_precision="ieee")
                parts = parts + (tl.dot(k[c + 4], q[c + 4], half, input_precision="ieee"),)
            else:
                half = tl.dot(q[c], tl.trans(k[c]), zero, input_precision="ieee")
                parts = parts + (tl.dot(q[c + 4], tl.trans(k[c + 4]), half, input_precision="ieee"),)
        s = (parts[0] + parts[1]) + (parts[2] + parts[3])
        s = tl.where(valid, s * scale_log2, -1e30)
        new_top = tl.maximum(top, tl.max(s, AXIS))
        shrink = tl.expand_dims(tl.exp2(top - new_top), AXIS)
        p = tl.where(valid, tl.exp2(s - tl.expand_dims(new_top, AXIS)), 0.0)
        totals = totals * shrink + p
        top = new_top
        new_acc = ()
        for c in tl.static_range(8):
            if TURNED:
                new_acc = new_acc + (tl.dot(tl.trans(k[c]), p.to(DT), acc[c] * shrink, input_precision="ieee"),)
            else:
                new_acc = new_acc + (tl.dot(p.to(DT), k[c], acc[c] * shrink, input_precision="ieee"),)
        acc = new_acc

    if OVERLAP and LATE:
        gdc_launch_dependents()
    total = tl.sum(totals, AXIS)
    seen = total > 0
    lse2 = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    if TURNED:
        turned_back = ()
        for c in tl.static_range(8):
            turned_back = turned_back + (tl.trans(acc[c]),)
        acc = turned_back
    value = _whole(acc)
    wide = tl.arange(0, 512)
    out_at = out_ptr + row * out_stride_b + (first_head + head)[:, None] * out_stride_h + wide[None, :]
    if not SPLIT:
        if HAS_SINK:
            sink = tl.load(sink_ptr + first_head + head, mask=real, other=0.0) * 1.4426950408889634
            total += tl.exp2(tl.minimum(sink - top, 126.0))
        weight = tl.where(seen, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
        tl.store(out_at, (value * weight[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])
        tl.store(lse_ptr + row * heads + head, lse2 * 0.6931471805599453, mask=real)
    else:
        weight = 1.0 / tl.where(seen, total, 1.0)
        part = (row * splits + split) * heads + head
        part_at = part_ptr + part[:, None] * 512 + wide[None, :]
        tl.store(part_at, (value * weight[:, None]).to(part_ptr.dtype.element_ty), mask=real[:, None])
        tl.store(part_lse_ptr + part, lse2, mask=real)


@triton.jit
def _column(heads, HB: tl.constexpr):
    """A vector of HB heads as a column; a scalar, for HB = 1, as it is."""
    if HB == 1:
        return heads
    else:
        return heads[:, None]


@triton.jit
def merge_kernel(
    part_ptr,
    part_lse_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    splits,
    out_stride_b,
    out_stride_h,
    first_head,
    heads,
    HAS_SINK: tl.constexpr,
    HB: tl.constexpr,
    BS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (head blocks, rows): out = sum_s 2^(lse_s - m) O_s / (sum_s 2^(lse_s - m) + 2^(sink * log2(e) - m))."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    # One head is a scalar: a tensor of one would have two layouts, and every load of it would come twice.
    if HB == 1:
        head = tl.program_id(0)
        d = tl.arange(0, 512)
        total = 0.0
        acc = tl.zeros([512], tl.float32)
    else:
        head = tl.program_id(0) * HB + tl.arange(0, HB)
        d = tl.arange(0, 512)[None, :]
        total = tl.zeros([HB], tl.float32)
        acc = tl.zeros([HB, 512], tl.float32)
    real = head < heads
    row = tl.program_id(1).to(tl.int64)
    # Unrolled: every load is on its way before the first one is waited for.
    lses = ()
    values = ()
    top = total - float("inf")
    for i in tl.static_range(BS):
        part = (row * splits + i) * heads + head
        there = real & (i < splits)
        lse = tl.load(part_lse_ptr + part, mask=there, other=float("-inf"))
        lses = lses + (lse,)
        at = part_ptr + _column(part, HB) * 512 + d
        values = values + (tl.load(at, mask=_column(there, HB), other=0.0),)
        top = tl.maximum(top, lse)
    seen = top > float("-inf")
    top = tl.where(seen, top, 0.0)
    for i in tl.static_range(BS):
        weight = tl.exp2(lses[i] - top)
        total += weight
        acc += _column(weight, HB) * values[i].to(tl.float32)
    lse2 = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + row * heads + head, lse2 * 0.6931471805599453, mask=real)
    if HAS_SINK:
        sink = tl.load(sink_ptr + first_head + head, mask=real, other=0.0) * 1.4426950408889634
        total += tl.exp2(tl.minimum(sink - top, 126.0))
    acc = tl.where(_column(seen, HB), acc / _column(tl.where(total > 0, total, 1.0), HB), 0.0)
    out_at = out_ptr + row * out_stride_b + _column(first_head + head, HB) * out_stride_h + d
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=_column(real, HB))
