"""Shape tables and random inputs, shared by the CPU tests, the GPU tests and the benchmark."""

from __future__ import annotations

import dataclasses

import torch
from pdstack_kernels import layout


@dataclasses.dataclass(frozen=True)
class Attention:
    """One call of the sparse MLA decode. ``width1 = 0``: no second pool. ``short``: lengths drawn below the widths."""

    name: str
    rows: int
    heads: int
    width0: int = 128
    page0: int = 256
    width1: int = 0
    page1: int = 64
    short: bool = False
    holes: float = 0.0
    lengths: bool = True
    sink: bool = True
    page_pad: int = 0
    splits: int | None = None
    q_pad: int = 0


SMALL = [
    Attention("window", 2, 8),
    Attention("window-split", 2, 8, splits=3),
    Attention("two-pools", 3, 16, width0=64, width1=96, splits=2),
    Attention("ratio-128-pages-of-2", 2, 16, width0=64, width1=70, page1=2, short=True),
    Attention("one-head", 2, 1, width0=40),
    Attention("odd-heads", 2, 19, width0=64, width1=32),
    Attention("heads-128", 1, 128, width0=32),
    Attention("odd-top-k", 2, 4, width0=37, width1=65),
    Attention("holes", 3, 8, width0=64, width1=64, holes=0.5, short=True, splits=2),
    Attention("all-minus-one", 2, 8, width0=64, width1=64, holes=1.0),
    Attention("no-lengths-no-sink", 2, 8, width0=64, width1=64, lengths=False, sink=False),
    Attention("padded-strides", 2, 8, width0=64, width1=64, page_pad=1152, q_pad=3),
    Attention("more-than-64-rows", 66, 1, width0=8),
]

FULL = [
    Attention("window-b1-h64", 1, 64),
    Attention("window-b64-h8", 64, 8),
    Attention("ratio-4-b1-h16", 1, 16, width1=512),
    Attention("ratio-4-b64-h16", 64, 16, width1=512, short=True),
    Attention("ratio-4-b64-h64", 64, 64, width1=512),
    Attention("ratio-4-b3-h1", 3, 1, width1=512, holes=0.3),
    Attention("ratio-4-b5-h33", 5, 33, width1=512, short=True),
    Attention("ratio-4-b2-h128", 2, 128, width1=512),
    Attention("ratio-128-b64-h8-8k", 64, 8, width1=64, page1=2),
    Attention("ratio-128-b64-h16-128k", 64, 16, width1=1024, page1=2, short=True),
    Attention("pages-of-128", 7, 16, page0=128, width0=100, width1=77, page1=128),
    Attention("draft-rows-b192-h16", 192, 16, width1=512, short=True),
    Attention("draft-rows-b192-h8", 192, 8, width1=512, short=True),
    Attention("ratio-4-b64-h8", 64, 8, width1=512, short=True),
    Attention("ratio-4-b64-h5-split", 64, 5, width1=512, splits=6, holes=0.2),
    Attention("ratio-128-b64-h8-128k", 64, 8, width1=1024, page1=2, short=True),
    Attention("ratio-4-b16-h64", 16, 64, width1=512, short=True),
    Attention("ratio-128-b64-h64-128k", 64, 64, width1=1024, page1=2, short=True),
    Attention("ratio-4-b16-h57", 16, 57, width1=512, short=True),
    Attention("prefill-b2048-h16", 2048, 16, width1=512, short=True),
    Attention("all-minus-one", 4, 16, width1=512, holes=1.0),
    Attention("no-lengths-no-sink", 4, 16, width1=512, lengths=False, sink=False),
    Attention("padded-strides", 4, 16, width1=512, page_pad=1152, q_pad=5, holes=0.2),
    Attention("few-splits", 2, 16, width1=512, splits=2),
    Attention("more-splits-than-tiles", 2, 16, width0=64, splits=24),
]


def attention_inputs(case: Attention, device: str, seed: int = 0) -> dict[str, torch.Tensor | None]:
    """Keyword arguments of ``sparse_mla_decode``; every slot that no row refers to holds NaN.

    Magnitudes as FlashMLA's own tests have them (standard deviation 0.1), with a few large keys to move the maximum.
    """
    gen = torch.Generator(device=device).manual_seed(seed)

    def pool(width: int, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        # A token of its own for every entry, as requests without a shared prefix have it, up to a bound on memory.
        own = case.rows * width <= 2**18
        tokens = -(-(case.rows * width if own else 2**17) // page) * page
        values = torch.randn(tokens, layout.HEAD_DIM, generator=gen, device=device) * 0.1
        values[::17] *= 8
        cache = layout.pack_kv(values, page, page_stride=layout.page_bytes(page) + case.page_pad)
        if own:
            index = torch.randperm(tokens, generator=gen, device=device)[: case.rows * width].to(torch.int32)
            index = index.view(case.rows, width)
        else:
            index = torch.randint(0, tokens, (case.rows, width), generator=gen, device=device, dtype=torch.int32)
        hole = torch.rand(case.rows, width, generator=gen, device=device) < case.holes
        index = index.masked_fill(hole, -1)
        length = None
        if case.lengths:
            low = 0 if case.short else width
            length = torch.randint(low, width + 1, (case.rows,), generator=gen, device=device, dtype=torch.int32)
        poison(cache, index, length)
        return cache, index[:, None], length

    heads_in_memory = case.heads + case.q_pad
    q = torch.randn(case.rows, 1, heads_in_memory, layout.HEAD_DIM, generator=gen, device=device)
    cache0, index0, length0 = pool(case.width0, case.page0)
    inputs: dict[str, torch.Tensor | None] = {
        "q": work_type(q.to(torch.bfloat16))[:, :, : case.heads],
        "k_cache": cache0,
        "indices": index0,
        "topk_length": length0,
        "attn_sink": torch.randn(case.heads, generator=gen, device=device) if case.sink else None,
    }
    if case.width1:
        cache1, index1, length1 = pool(case.width1, case.page1)
        inputs |= {"extra_k_cache": cache1, "extra_indices": index1, "extra_topk_length": length1}
    return inputs


def work_type(values: torch.Tensor) -> torch.Tensor:
    """bf16 values, held as fp32 on the CPU: the interpreter cuts bf16 results off instead of rounding them."""
    return values if values.is_cuda else values.float()


def poison(cache: torch.Tensor, index: torch.Tensor, length: torch.Tensor | None) -> None:
    """Overwrite every token that no row refers to: 0xFF is NaN as e4m3, as bf16 pair and as scale."""
    used = index >= 0
    if length is not None:
        used &= torch.arange(index.shape[1], device=index.device)[None] < length[:, None]
    pages, page, _, _ = cache.shape
    free = torch.ones(pages * page, dtype=torch.bool, device=index.device)
    free[index[used].long()] = False
    free = free.view(pages, page)
    stride = cache.stride(0)
    memory = cache.as_strided((pages, stride), (stride, 1)).view(torch.uint8)
    data = memory[:, : page * layout.DATA_BYTES].view(pages, page, layout.DATA_BYTES)
    data[free] = 0xFF
    scales = memory[:, page * layout.DATA_BYTES : page * layout.TOKEN_BYTES].view(pages, page, layout.SCALE_BYTES)
    scales[free] = 0xFF


@dataclasses.dataclass(frozen=True)
class Indexer:
    """One call of the indexer logits."""

    name: str
    rows: int
    keys: int
    width: int
    ragged: bool = True
    identity_below: int = 0


INDEXER_SMALL = [
    Indexer("ragged", 3, 300, 512),
    Indexer("one-page", 2, 5, 64),
    Indexer("identity-skipped", 4, 200, 256, identity_below=100),
    Indexer("width-below-pages", 2, 190, 190),
]

INDEXER_FULL = [
    Indexer("b1-8k", 1, 2048, 2048),
    Indexer("b64-8k", 64, 2048, 2048),
    Indexer("b64-8k-wide", 64, 2048, 262144),
    Indexer("b16-128k", 16, 32768, 32768),
    Indexer("b64-128k", 64, 32768, 32768),
    Indexer("b5-odd", 5, 777, 832),
    Indexer("b64-identity", 64, 1024, 2048, identity_below=512),
    Indexer("b1024-prefill", 1024, 1024, 1024),
]


def indexer_inputs(case: Indexer, device: str, seed: int = 0) -> dict[str, torch.Tensor | int]:
    """Keyword arguments of ``paged_mqa_logits``; the page table's unused entries point far outside the pool."""
    gen = torch.Generator(device=device).manual_seed(seed)
    pages = -(-case.keys // 64)
    own = case.rows * pages <= 2**15
    pool = case.rows * pages if own else 2**13
    keys = torch.randn(pool * 64, layout.INDEX_DIM, generator=gen, device=device)
    q = torch.randn(case.rows, 1, 64, layout.INDEX_DIM, generator=gen, device=device).to(torch.float8_e4m3fn)
    low = 1 if case.ragged else case.keys
    lengths = torch.randint(low, case.keys + 1, (case.rows, 1), generator=gen, device=device, dtype=torch.int32)
    table = torch.full((case.rows, -(-case.width // 64) + 3), 2**31 - 1, dtype=torch.int32, device=device)
    if own:
        table[:, :pages] = torch.randperm(pool, generator=gen, device=device).to(torch.int32).view(case.rows, pages)
    else:
        table[:, :pages] = torch.randint(0, pool, (case.rows, pages), generator=gen, device=device, dtype=torch.int32)
    return {
        "q_fp8": q,
        "kvcache_fp8": layout.pack_index_keys(keys),
        "weight": torch.randn(case.rows, 64, generator=gen, device=device),
        "seq_lens": lengths,
        "page_table": table,
        "max_seq_len": case.width,
    }


def mhc_inputs(rows: int, hidden: int, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of ``hc_pre`` at the scale of a trained layer: streams that differ in size, mixes of O(1)."""
    gen = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(rows, 4, hidden, generator=gen, device=device)
    x *= torch.tensor([1.0, 3.0, 0.3, 10.0], device=device)[:, None]
    fn = torch.randn(24, 4 * hidden, generator=gen, device=device) * (4 * hidden) ** -0.5
    return {
        "x": work_type(x.to(torch.bfloat16)),
        "fn": fn,
        "scale": torch.rand(3, generator=gen, device=device) + 0.5,
        "base": torch.randn(24, generator=gen, device=device),
    }
