"""Sparse MLA decode over the paged FP8 cache of DeepSeek-V4, on tensor cores.

One program takes a block of heads of one query row and a share of the row's tokens (both pools, in one loop), so the
KV is read once per head block instead of once per head. Heads are the M dimension of the MMA, the 512 values of a
token are eight 64-wide chunks: seven of e4m3 with one power-of-two scale each, which bf16 holds exactly, and the
rotary one, stored as bf16. Softmax is online and in base 2. Where one program per head block would leave
multiprocessors idle, a row's tokens are split and a second kernel merges the partial results.

Everything that depends on lengths is read on the device: a captured graph replays with new lengths and indices.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl

from . import layout, sparse_mla_jit

LOG2E = 1.4426950408889634
SM120_SHARED = 101376
MOST_SPLITS = 32


@dataclasses.dataclass(frozen=True)
class Config:
    """How one call is cut.

    Attributes:
        heads, tokens: of a tile; warps: of a program; splits: programs among which a row's tokens are split.
        stages: 1 reads a tile into registers when it is needed; n has n - 1 tiles on their way into shared memory.
        turned: tokens, not heads, are the M dimension of the products: 8 heads fill an instruction.
        held: of the query's eight chunks, if turned, those in registers; the others are in shared memory.
    """

    heads: int
    tokens: int
    warps: int
    splits: int
    stages: int = 1
    turned: bool = False
    held: int = 0


@functools.cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, shared memory of a block in bytes), asked once; for the interpreter's CPU, small ones."""
    if device.type != "cuda":
        return 8, SM120_SHARED
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return int(properties["multiprocessor_count"]), int(properties["max_shared_mem"])


@functools.lru_cache(maxsize=4096)
def choose(rows: int, heads: int, width0: int, width1: int, sms: int, shared: int) -> Config:
    """The cut for a call, from shapes alone: a graph may be captured with it and replayed with any lengths.

    Tuned on an H200 (docs/kernels.md); the shapes' limits hold for sm_120, whose blocks have 99 KB.

    Args:
        rows: query rows; heads: heads that are computed; width0, width1: index widths of the two pools.
        sms: multiprocessors; shared: bytes of shared memory that a block can have.
    """
    block = 32 if heads > 16 and rows * -(-heads // 32) >= sms // 5 else 16
    programs = max(1, rows * -(-heads // block))
    roomy = shared >= 2 * SM120_SHARED  # two programs with tiles on their way into shared memory

    def tiles(size: int) -> int:
        return max(1, -(-width0 // size) - (-width1 // size))

    if programs * tiles(32) <= sms:
        return Config(heads=block, tokens=32, warps=4, splits=min(MOST_SPLITS, tiles(32)))
    if heads <= 8 and programs * tiles(32) <= 2 * sms and roomy:
        return Config(heads=8, tokens=32, warps=4, splits=tiles(32))
    if block == 16 and programs * tiles(64) <= sms:
        return Config(heads=16, tokens=64, warps=8, splits=tiles(64))
    if block == 32 and programs * tiles(64) <= 2 * sms and roomy:
        return Config(heads=32, tokens=64, warps=8, splits=1)
    if block == 32 and sms < 2 * programs <= 2 * sms and tiles(64) <= 10 and roomy:
        # No merge, which at 64 rows of 64 heads takes 6 us; for longer rows it is the smaller part.
        return Config(heads=32, tokens=64, warps=8, splits=1, stages=3)
    stages = 3 if roomy else 1 if block == 16 else 2
    resident = sms if block == 32 and 2 * programs <= sms else 2 * sms
    share = max(3, -(-tiles(32) // max(1, min(MOST_SPLITS, resident // programs))))
    splits = -(-tiles(32) // share)
    if heads <= 8 and programs * splits > sms and roomy:
        # With two chunks of the query in registers a third program fits a multiprocessor: worth their reloading from
        # eight tiles a program on.
        third = max(1, min(MOST_SPLITS, 3 * sms // programs))
        if (third > splits or programs > 2 * sms) and -(-tiles(32) // third) >= 8:
            return Config(heads=8, tokens=32, warps=2, splits=third, stages=3, turned=True, held=2)
        return Config(heads=8, tokens=32, warps=2, splits=splits, stages=3, turned=True)
    return Config(heads=block, tokens=32, warps=4, splits=splits, stages=stages)


def merged_heads(rows: int, heads: int, splits: int, sms: int) -> int:
    """Heads that a program of the merge takes: four where they are many and the merge still fills the card."""
    return 4 if heads > 16 and splits <= 4 and rows * heads >= 4 * sms else 1


def sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    head_range: tuple[int, int] | None = None,
    config: Config | None = None,
    dot_dtype: tl.dtype = tl.float16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query row over its own list of cached tokens.

    Args:
        q: [B, 1, H, 512] bf16, any strides with contiguous rows of 512; H from 1 to 128.
        k_cache: [pages, P, 1, 584], one-byte elements, MODEL1 layout (`layout`), any P and page stride.
        indices: [B, W] or [B, 1, W] int32 token indices; -1 is no token.
        topk_length: [B] int32 or None; entries of a row at or behind its length are ignored.
        attn_sink: [H] fp32 or None, added to the softmax's denominator only.
        softmax_scale: default 512 ** -0.5.
        extra_k_cache, extra_indices, extra_topk_length: the second pool, or None.
        head_range: (first, end): compute only these heads; the others' output is left unwritten.
        config: the cut; None chooses it from the shapes.
        dot_dtype: operand type of the products; fp32 for the interpreter.
    Returns:
        out [B, 1, H, 512] in q's dtype, and lse [B, heads, 1] fp32 (natural logarithm, without the sink, -inf for a
        row without tokens, whose output is 0).
    Raises:
        ValueError: shapes or types that the kernel does not take.
    Source: FlashMLA's ``flash_mla_with_kvcache``, of which the engine calls this subset.
    """
    if q.dim() != 4 or q.shape[1] != 1 or q.shape[3] != layout.HEAD_DIM or q.stride(3) != 1:
        raise ValueError(f"q must be [B, 1, H, {layout.HEAD_DIM}] with contiguous rows, found {tuple(q.shape)}")
    rows, _, all_heads, _ = q.shape
    first, last = head_range or (0, all_heads)
    heads = last - first
    if not 0 <= first < last <= all_heads or heads > 128:
        raise ValueError(f"head range {(first, last)} does not fit {all_heads} heads (at most 128 at once)")
    index0, width0 = _rows_of(indices, rows)
    cache0 = layout.raw_bytes(k_cache)
    if extra_k_cache is not None and extra_indices is not None:
        index1, width1 = _rows_of(extra_indices, rows)
        cache1, page1, stride1 = layout.raw_bytes(extra_k_cache), extra_k_cache.shape[1], extra_k_cache.stride(0)
    else:
        index1, width1, cache1, page1, stride1, extra_topk_length = index0, 0, cache0, 0, 0, None
    scale = layout.HEAD_DIM**-0.5 if softmax_scale is None else softmax_scale

    out = torch.empty(rows, 1, all_heads, layout.HEAD_DIM, dtype=q.dtype, device=q.device)
    lse = torch.empty(rows, heads, 1, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    sms, shared = device_limits(q.device)
    cut = config or choose(rows, heads, width0, width1, sms, shared)
    blocks = triton.cdiv(heads, cut.heads)
    part, part_lse = out, lse
    if cut.splits > 1:
        shape = (rows, cut.splits, heads, layout.HEAD_DIM)
        part = torch.empty(shape, dtype=q.dtype, device=q.device)
        part_lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
    # Programmatic dependent launch: a kernel is set up while the one before still runs. With more programs than
    # multiprocessors that waits for the tiles: programs set up early go where there is room, not where there is time.
    overlap = q.is_cuda
    sink = lse if attn_sink is None else attn_sink
    sparse_mla_jit.decode_kernel[(blocks, cut.splits, rows)](
        q,
        cache0,
        index0,
        index0 if topk_length is None else topk_length,
        cache1,
        index1,
        index1 if extra_topk_length is None else extra_topk_length,
        sink,
        out,
        lse,
        part,
        part_lse,
        scale * LOG2E,
        width0,
        width1,
        k_cache.stride(0),
        stride1,
        q.stride(0),
        q.stride(2),
        index0.stride(0),
        index1.stride(0),
        out.stride(0),
        out.stride(2),
        first,
        heads,
        PAGE0=k_cache.shape[1],
        PAGE1=page1,
        HAS_LENGTHS0=topk_length is not None,
        HAS_LENGTHS1=extra_topk_length is not None,
        HAS_SINK=attn_sink is not None,
        SPLIT=cut.splits > 1,
        HB=cut.heads,
        T=cut.tokens,
        STAGES=cut.stages,
        TURNED=cut.turned,
        HELD=cut.held,
        DT=dot_dtype,
        PACKED=dot_dtype == tl.float16,
        OVERLAP=overlap,
        LATE=blocks * cut.splits * rows > sms,
        num_warps=cut.warps,
        launch_pdl=overlap,
    )
    if cut.splits > 1:
        merged = merged_heads(rows, heads, cut.splits, sms)
        sparse_mla_jit.merge_kernel[(triton.cdiv(heads, merged), rows)](
            part,
            part_lse,
            sink,
            out,
            lse,
            cut.splits,
            out.stride(0),
            out.stride(2),
            first,
            heads,
            HAS_SINK=attn_sink is not None,
            HB=merged,
            BS=triton.next_power_of_2(cut.splits),
            OVERLAP=overlap,
            num_warps=4,
            launch_pdl=overlap,
        )
    return out, lse


def _rows_of(indices: torch.Tensor, rows: int) -> tuple[torch.Tensor, int]:
    flat = indices.reshape(rows, -1) if rows else indices.reshape(0, indices.shape[-1])
    if flat.dtype != torch.int32:
        raise ValueError(f"indices must be int32, found {flat.dtype}")
    if flat.shape[1] > 1 and flat.stride(1) != 1:
        flat = flat.contiguous()
    return flat, flat.shape[1]
