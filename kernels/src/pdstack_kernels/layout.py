"""The two paged caches of DeepSeek-V4 as SGLang lays them out, and how to pack and unpack them.

Source: ``sglang/srt/layers/attention/flash_mla_sm120.py`` and ``dsv4/indexer.py`` of the pinned wheels.

KV cache "MODEL1": 584 bytes a token. A page of P tokens holds P records of 576 bytes (448 e4m3 values, then 64 bf16
values of the rotary part) and behind them P records of 8 bytes (7 UE8M0 scales, one per 64 e4m3 values, and a pad
byte); the page is rounded up to a multiple of 576. Token index = page * P + slot; -1 means "no token".

Indexer keys: 132 bytes a token. A page of 64 tokens holds 64 * 128 e4m3 values and behind them 64 fp32 scales.
"""

from __future__ import annotations

import torch

NOPE = 448
ROPE = 64
HEAD_DIM = NOPE + ROPE
GROUP = 64
DATA_BYTES = NOPE + 2 * ROPE
SCALE_BYTES = NOPE // GROUP + 1
TOKEN_BYTES = DATA_BYTES + SCALE_BYTES

INDEX_DIM = 128
INDEX_PAGE = 64
INDEX_TOKEN_BYTES = INDEX_DIM + 4


def page_bytes(page_size: int) -> int:
    """Bytes of one KV page of ``page_size`` tokens, the round-up included."""
    return -(-page_size * TOKEN_BYTES // DATA_BYTES) * DATA_BYTES


def raw_bytes(cache: torch.Tensor) -> torch.Tensor:
    """The cache's memory as one flat uint8 view, padding between pages included.

    Args:
        cache: [pages, P, 1, bytes a token], one byte an element, any stride between pages.
    Raises:
        ValueError: an element is not one byte wide, or a page is not 16-byte aligned, which the kernels' loads need.
    """
    if cache.element_size() != 1:
        raise ValueError(f"the cache must hold one-byte elements, found {cache.dtype}")
    stride = cache.stride(0)
    if stride % 16 or cache.data_ptr() % 16:
        raise ValueError(
            f"pages must be 16-byte aligned, found a stride of {stride} bytes at address {cache.data_ptr():#x}"
        )
    size = (cache.shape[0] - 1) * stride + cache.shape[1] * cache.shape[3]
    return cache.as_strided((size,), (1,)).view(torch.uint8)


def pack_kv(values: torch.Tensor, page_size: int, *, page_stride: int | None = None) -> torch.Tensor:
    """Quantise [tokens, 512] to a MODEL1 cache [pages, P, 1, 584] of dtype float8_e4m3fn (tests and benchmarks).

    ``page_stride`` asks for a wider stride between pages, as a pool that pads its rows has it.
    """
    pages = values.shape[0] // page_size
    if pages * page_size != values.shape[0]:
        raise ValueError(f"{values.shape[0]} tokens do not fill pages of {page_size}")
    stride = page_stride or page_bytes(page_size)
    groups = values[:, :NOPE].float().reshape(-1, NOPE // GROUP, GROUP)
    exponent = torch.ceil(torch.log2(groups.abs().amax(-1).clamp(min=1e-10) / 448.0)).clamp(-126, 127)
    quantised = (groups * torch.exp2(-exponent)[..., None]).to(torch.float8_e4m3fn)

    pool = torch.zeros(pages, stride, dtype=torch.uint8, device=values.device)
    data = pool[:, : page_size * DATA_BYTES].view(pages, page_size, DATA_BYTES)
    data[..., :NOPE] = quantised.view(torch.uint8).view(pages, page_size, NOPE)
    rope = values[:, NOPE:].to(torch.bfloat16).contiguous().view(torch.uint8)
    data[..., NOPE:] = rope.view(pages, page_size, 2 * ROPE)
    scales = pool[:, page_size * DATA_BYTES : page_size * TOKEN_BYTES].view(pages, page_size, SCALE_BYTES)
    scales[..., : NOPE // GROUP] = (exponent + 127).to(torch.uint8).view(pages, page_size, -1)
    view = pool.as_strided((pages, page_size, 1, TOKEN_BYTES), (stride, TOKEN_BYTES, TOKEN_BYTES, 1))
    return view.view(torch.float8_e4m3fn)


def gather_kv(cache: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The tokens at ``indices`` (any shape, all >= 0) as fp32 [..., 512]: exact, since e4m3 * 2^k fits fp32."""
    page_size, stride = cache.shape[1], cache.stride(0)
    raw = raw_bytes(cache)
    flat = indices.reshape(-1).long()
    base = flat // page_size * stride
    slot = flat % page_size
    span = torch.arange(DATA_BYTES, device=cache.device)
    data = raw[(base + slot * DATA_BYTES)[:, None] + span]
    scale_at = base + page_size * DATA_BYTES + slot * SCALE_BYTES
    scales = raw[scale_at[:, None] + span[: NOPE // GROUP]].view(torch.float8_e8m0fnu).float()
    nope = data[:, :NOPE].contiguous().view(torch.float8_e4m3fn).float()
    nope = nope.view(-1, NOPE // GROUP, GROUP) * scales[..., None]
    rope = data[:, NOPE:].contiguous().view(torch.bfloat16).float()
    return torch.cat([nope.flatten(1), rope], dim=1).view(*indices.shape, HEAD_DIM)


def pack_index_keys(keys: torch.Tensor) -> torch.Tensor:
    """Quantise [tokens, 128] to an indexer cache [pages, 64, 1, 132] uint8 (tests and benchmarks)."""
    pages = keys.shape[0] // INDEX_PAGE
    if pages * INDEX_PAGE != keys.shape[0]:
        raise ValueError(f"{keys.shape[0]} tokens do not fill pages of {INDEX_PAGE}")
    scale = keys.float().abs().amax(-1).clamp(min=1e-10) / 448.0
    quantised = (keys.float() / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    pool = torch.empty(pages, INDEX_PAGE * INDEX_TOKEN_BYTES, dtype=torch.uint8, device=keys.device)
    pool[:, : INDEX_PAGE * INDEX_DIM] = quantised.view(pages, -1)
    pool[:, INDEX_PAGE * INDEX_DIM :] = scale.float().contiguous().view(torch.uint8).view(pages, -1)
    return pool.view(pages, INDEX_PAGE, 1, INDEX_TOKEN_BYTES)
