"""Each kernel against its reference on the card at hand, with inputs of a few hundred tokens.

The kernels are compiled for a card that their authors may not have had. So before the engine captures its graphs with
them, it is looked at whether they compute there what they should; it takes some seconds, most of it compilation that
the engine would wait for anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import indexer, indexer_ref, layout, mhc, mhc_ref, sparse_mla, sparse_mla_ref


def _attention(gen: torch.Generator, options: dict[str, Any]) -> str | None:
    device = gen.device
    pools = []
    for page, width in ((256, 100), (64, 150)):
        cache = layout.pack_kv(torch.randn(512, layout.HEAD_DIM, generator=gen, device=device) * 0.1, page)
        index = torch.randint(-64, 512, (3, width), generator=gen, device=device).clamp(min=-1).to(torch.int32)
        length = torch.tensor([width, width // 2, 0], dtype=torch.int32, device=device)
        pools.append((cache, index, length))
    q = torch.randn(3, 1, 16, layout.HEAD_DIM, generator=gen, device=device)
    q = q.to(torch.bfloat16) if device.type == "cuda" else q
    sink = torch.randn(16, generator=gen, device=device)
    want, want_lse = sparse_mla_ref.sparse_mla_decode(q, *pools[0], sink, None, *pools[1])
    for cut in _cuts(device):
        out, lse = sparse_mla.sparse_mla_decode(q, *pools[0], sink, None, *pools[1], config=cut, **options)
        far = (out.double() - want.double()).abs() > 1e-3 + 2.01 / 128 * want.double().abs()
        if far.any() or not out.isfinite().all():
            return f"{int(far.sum())} of {far.numel()} outputs are off, cut into {cut}"
        if not torch.allclose(lse, want_lse, atol=1e-3):
            return f"the log-sum-exp is off, cut into {cut}"
    return None


def _cuts(device: torch.device) -> list[sparse_mla.Config]:
    """The cuts that decode calls of 1 to 64 rows take on the device, in at most two splits."""
    limits = sparse_mla.device_limits(device)
    found = {
        dataclasses.replace(cut, splits=min(cut.splits, 2))
        for rows in (1, 16, 64)
        for extra in (0, 64, 512)
        for cut in [sparse_mla.choose(rows, 16, 128, extra, *limits)]
    }
    return sorted(found, key=dataclasses.astuple)


def _indexer(gen: torch.Generator, options: dict[str, Any]) -> str | None:
    device = gen.device
    cache = layout.pack_index_keys(torch.randn(640, layout.INDEX_DIM, generator=gen, device=device))
    q = torch.randn(3, 1, 64, layout.INDEX_DIM, generator=gen, device=device).to(torch.float8_e4m3fn)
    weight = torch.randn(3, 64, generator=gen, device=device)
    lengths = torch.tensor([320, 65, 1], dtype=torch.int32, device=device)
    pages = torch.randint(0, 10, (3, 5), generator=gen, device=device).to(torch.int32)
    out = indexer.paged_mqa_logits(q, cache, weight, lengths, pages, 320, **options)
    want = indexer_ref.paged_mqa_logits(q, cache, weight, lengths, pages, 320)
    inside = want.isfinite()
    error = float((out - want)[inside].abs().max() / want[inside].abs().max())
    return None if error < 2e-3 else f"scores are off by {error:.1e} of the largest"


def _hc_pre(gen: torch.Generator, options: dict[str, Any]) -> str | None:
    device = gen.device
    x = torch.randn(5, mhc.STREAMS, 1024, generator=gen, device=device).to(torch.bfloat16)
    x = x if device.type == "cuda" else x.float()
    fn = torch.randn(mhc.MIXES, 4096, generator=gen, device=device) / 64
    scale, base = torch.ones(3, device=device), torch.randn(mhc.MIXES, generator=gen, device=device)
    y, post, comb = mhc.hc_pre(x, fn, scale, base, rms_eps=1e-6, hc_eps=1e-6, **options)
    want = mhc_ref.hc_pre(x, fn, scale, base, rms_eps=1e-6, hc_eps=1e-6)
    for name, mine, exact, relative in (
        ("y", y, want[0], 2**-8),
        ("post", post, want[1], 0),
        ("comb", comb, want[2], 0),
    ):
        error = (mine.double() - exact).abs() - relative * exact.abs()
        if not bool((error < 1e-4).all()):
            return f"{name} is off by {float(error.max()):.1e}"
    return None


CHECKS: dict[str, Callable[[torch.Generator, dict[str, Any]], str | None]] = {
    "sparse_mla": _attention,
    "indexer": _indexer,
    "hc_pre": _hc_pre,
}


def failures(kernels: Iterable[str], device: torch.device, **options: Any) -> dict[str, str]:
    """What is wrong with which of the kernels on a device; empty when nothing is.

    ``options`` go to every kernel (``dot_dtype`` for the interpreter).
    """
    found = {}
    with torch.inference_mode():
        for kernel in kernels:
            if kernel not in CHECKS:
                continue
            try:
                wrong = CHECKS[kernel](torch.Generator(device).manual_seed(0), options)
            except Exception as error:  # a kernel that does not compile or launch is one that does not work
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                found[kernel] = wrong
    return found
