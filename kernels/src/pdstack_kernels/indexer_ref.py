"""Indexer logits in plain PyTorch: what `indexer` must compute."""

from __future__ import annotations

import torch

from . import layout


def paged_mqa_logits(
    q_fp8: torch.Tensor,
    kvcache_fp8: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    max_seq_len: int,
) -> torch.Tensor:
    """[B, max_seq_len] fp32; -inf at and behind each row's length (the kernel leaves those unwritten)."""
    split = layout.INDEX_PAGE * layout.INDEX_DIM
    pages = layout.raw_bytes(kvcache_fp8).view(-1, layout.INDEX_PAGE * layout.INDEX_TOKEN_BYTES)
    logits = torch.full((q_fp8.shape[0], max_seq_len), float("-inf"), device=q_fp8.device)
    for row, length in enumerate(seq_lens.flatten().tolist()):
        used = pages[page_table[row, : -(-length // layout.INDEX_PAGE)].long()]
        keys = used[:, :split].contiguous().view(torch.float8_e4m3fn).float().view(-1, layout.INDEX_DIM)
        scales = used[:, split:].contiguous().view(torch.float32).flatten()
        scores = torch.relu(keys.double() @ q_fp8[row, 0].double().T) @ weight[row].double() * scales
        logits[row, :length] = scores[:length].float()
    return logits
