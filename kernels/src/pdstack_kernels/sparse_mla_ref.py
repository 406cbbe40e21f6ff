"""Sparse MLA decode in plain PyTorch: what `sparse_mla` must compute."""

from __future__ import annotations

import torch

from . import layout


def _pool(
    cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = indices.reshape(indices.shape[0], -1)
    valid = rows >= 0
    if lengths is not None:
        valid &= torch.arange(rows.shape[1], device=rows.device)[None] < lengths[:, None]
    keys = layout.gather_kv(cache, rows.clamp(min=0).masked_fill(~valid, 0))
    # A slot that no row refers to may hold NaN; index 0 stands in for "no token" above.
    return keys.masked_fill(~valid[..., None], 0.0), valid


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out [B, 1, H, 512] fp32, lse [B, H, 1] fp32, natural log, without the sink)."""
    keys, valid = _pool(k_cache, indices, topk_length)
    if extra_k_cache is not None and extra_indices is not None:
        more_keys, more_valid = _pool(extra_k_cache, extra_indices, extra_topk_length)
        keys, valid = torch.cat([keys, more_keys], 1), torch.cat([valid, more_valid], 1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bhd,btd->bht", q[:, 0].double(), keys.double()) * scale
    scores = scores.masked_fill(~valid[:, None], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    total = lse if attn_sink is None else torch.logaddexp(lse, attn_sink.double()[None])
    weights = torch.exp(scores - total.masked_fill(lse == float("-inf"), 0.0)[..., None])
    out = torch.einsum("bht,btd->bhd", weights, keys.double())
    return out.float()[:, None], lse.float()[..., None]
