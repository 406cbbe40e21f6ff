"""The part of the hyper-connections before a block in plain PyTorch: what `mhc` must compute."""

from __future__ import annotations

import torch


def hc_pre(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    iterations: int = 20,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (y [N, hidden], post [N, 4], comb [N, 4, 4]) in ``dtype``: no rounding of y to x's type."""
    n, streams, _ = x.shape
    wide = x.flatten(1).to(dtype)
    mixes = torch.nn.functional.linear(wide, fn.to(dtype)) * torch.rsqrt(wide.square().mean(-1, True) + rms_eps)
    scale, base = scale.to(dtype), base.to(dtype)
    pre = torch.sigmoid(mixes[:, :streams] * scale[0] + base[:streams]) + hc_eps
    post = 2 * torch.sigmoid(mixes[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
    comb = (mixes[:, 2 * streams :] * scale[2] + base[2 * streams :]).view(n, streams, streams)
    comb = torch.softmax(comb, -1) + hc_eps
    comb = comb / (comb.sum(1, True) + hc_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, True) + hc_eps)
        comb = comb / (comb.sum(1, True) + hc_eps)
    y = (pre[..., None] * x.to(dtype)).sum(1)
    return y, post, comb
