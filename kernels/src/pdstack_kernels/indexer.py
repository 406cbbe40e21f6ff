"""Indexer logits over the paged FP8 key cache, bounded by each row's own length.

``logits[b, t] = s_t * sum_h w_bh * relu(q_bh . k_t)`` for t below the row's length. The grid depends on the batch
alone and every program walks its row's pages up to its row's length, so the time follows the context that is there
and not the width that a CUDA graph was captured with.

Positions at or behind the length stay unwritten. The engine's top-k reads only positions below the length
(``topk_transform_512`` of both pinned releases; its PyTorch twin masks by length first), and the release's own
TileLang and DeepGEMM kernels leave them unwritten too; filling them would bring the captured width back. Rows no
longer than ``identity_below`` stay unwritten whole: their top-k is every position, which the engine's top-k returns
without reading a score.
"""

from __future__ import annotations

import torch
import triton.language as tl

from . import indexer_jit, layout
from .sparse_mla import device_limits

# Shared memory of a program at the default stages: as many are launched as fit on the device at once.
PROGRAM_SHARED = 48 * 1024


def paged_mqa_logits(
    q_fp8: torch.Tensor,
    kvcache_fp8: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    max_seq_len: int,
    *,
    identity_below: int = 0,
    programs: int | None = None,
    stages: int = 5,
    warps: int = 4,
    dot_dtype: tl.dtype = tl.float8e4nv,
) -> torch.Tensor:
    """Scores of every cached key for every query row.

    Args:
        q_fp8: [B, 1, 64, 128] float8_e4m3fn, contiguous.
        kvcache_fp8: [pages, 64, 1, 132] one-byte elements, contiguous: 8192 e4m3 bytes, then 64 fp32 scales a page.
        weight: [B, 64] fp32 head weights (the query's scale is in them).
        seq_lens: [B] or [B, 1] int32 number of keys of each row.
        page_table: [B, pages] int32, any row stride.
        max_seq_len: width of the result.
        identity_below: rows with at most this many keys are not scored at all.
        programs, stages, warps: the cut; None takes as many programs a row as fill the device.
        dot_dtype: operand type of the product; fp32 for the interpreter.
    Returns:
        [B, max_seq_len] fp32; only positions below a scored row's length are written.
    Raises:
        ValueError: shapes or types that the kernel does not take.
    """
    rows, one, heads, dim = q_fp8.shape
    if one != 1 or dim != layout.INDEX_DIM or not q_fp8.is_contiguous():
        raise ValueError(f"q must be a contiguous [B, 1, H, 128], found {tuple(q_fp8.shape)}")
    if kvcache_fp8.shape[1:] != (layout.INDEX_PAGE, 1, layout.INDEX_TOKEN_BYTES) or not kvcache_fp8.is_contiguous():
        raise ValueError(f"the key cache must be a contiguous [pages, 64, 1, 132], found {tuple(kvcache_fp8.shape)}")
    if weight.dtype != torch.float32 or seq_lens.dtype != torch.int32 or page_table.dtype != torch.int32:
        raise ValueError(f"expected fp32, int32, int32, found {weight.dtype}, {seq_lens.dtype}, {page_table.dtype}")
    logits = torch.empty(rows, max_seq_len, dtype=torch.float32, device=q_fp8.device)
    if rows == 0 or max_seq_len == 0:
        return logits
    raw = layout.raw_bytes(kvcache_fp8)
    if programs is None:
        sms, shared = device_limits(q_fp8.device)
        programs = max(1, (shared // PROGRAM_SHARED) * sms // rows)
    indexer_jit.logits_kernel[(programs, rows)](
        q_fp8,
        raw.view(torch.float8_e4m3fn),
        raw.view(torch.float32),
        weight,
        seq_lens,
        page_table,
        logits,
        min(max_seq_len, page_table.shape[1] * layout.INDEX_PAGE),
        page_table.stride(0),
        logits.stride(0),
        weight.stride(0),
        identity_below,
        H=heads,
        STAGES=stages,
        DT=dot_dtype,
        CAST=dot_dtype != tl.float8e4nv,
        num_warps=warps,
    )
    return logits
