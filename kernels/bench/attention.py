"""Sparse MLA decode: time, bytes, share of the roofline, and ratios to the baselines."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cases
import timing
import torch
from pdstack_kernels import layout, sparse_mla

COPIES = 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """A row of the table: a window of 128 and a second pool."""

    name: str
    rows: int
    heads: int
    extra: int
    page: int = 64

    @property
    def tokens(self) -> int:
        return 128 + self.extra

    @property
    def kv_bytes(self) -> int:
        return layout.TOKEN_BYTES * self.rows * self.tokens

    @property
    def bytes(self) -> int:
        """Every KV byte once, the query and the output once."""
        return self.kv_bytes + 2 * 2 * layout.HEAD_DIM * self.rows * self.heads


SHAPES = [
    Shape("window 128, H=64", 1, 64, 0),
    Shape("ratio 4, 640 tokens, H=64", 1, 64, 512),
    Shape("ratio 4, 640 tokens, H=16", 1, 16, 512),
    Shape("ratio 4, 640 tokens, H=64", 16, 64, 512),
    Shape("ratio 4, 640 tokens, H=16", 16, 16, 512),
    Shape("window 128, H=64", 64, 64, 0),
    Shape("window 128, H=16", 64, 16, 0),
    Shape("window 128, H=8", 64, 8, 0),
    Shape("ratio 4, 640 tokens, H=64", 64, 64, 512),
    Shape("ratio 4, 640 tokens, H=16", 64, 16, 512),
    Shape("ratio 4, 640 tokens, H=8", 64, 8, 512),
    Shape("ratio 128 at 8k, 192 tokens, H=8", 64, 8, 64, 2),
    Shape("ratio 128 at 128k, 1152 tokens, H=8", 64, 8, 1024, 2),
    Shape("1152 tokens, H=64", 64, 64, 1024, 2),
    Shape("three rows a request, 640 tokens, H=8", 192, 8, 512),
]


def inputs_of(shape: Shape) -> list[dict[str, Any]]:
    """Eight independent sets of inputs: their KV together is larger than the L2 for all but the smallest shapes."""
    case = cases.Attention(shape.name, shape.rows, shape.heads, width1=shape.extra, page1=shape.page)
    return [cases.attention_inputs(case, "cuda", seed) for seed in range(COPIES)]


def my_calls(sets: list[dict[str, Any]], cut: sparse_mla.Config | None = None) -> list[Callable[[], Any]]:
    return [lambda one=one: sparse_mla.sparse_mla_decode(**one, config=cut) for one in sets]


def flash_mla_calls(sets: list[dict[str, Any]]) -> list[Callable[[], Any]]:
    """FlashMLA 1.0.0 (H = 64 or 128 only); its scheduler's metadata is kept per set, as the engine keeps it a step."""
    from flash_mla import flash_mla_interface as flash_mla

    def call(one: dict[str, Any], meta: Any) -> Any:
        return flash_mla.flash_mla_with_kvcache(
            q=one["q"],
            k_cache=one["k_cache"],
            block_table=None,
            cache_seqlens=None,
            head_dim_v=layout.HEAD_DIM,
            tile_scheduler_metadata=meta,
            softmax_scale=layout.HEAD_DIM**-0.5,
            is_fp8_kvcache=True,
            indices=one["indices"],
            topk_length=one["topk_length"],
            attn_sink=one["attn_sink"],
            extra_k_cache=one.get("extra_k_cache"),
            extra_indices_in_kvcache=one.get("extra_indices"),
            extra_topk_length=one.get("extra_topk_length"),
            use_legacy=True,
        )

    metas = [flash_mla.get_mla_metadata()[0] for _ in sets]
    return [lambda one=one, meta=meta: call(one, meta) for one, meta in zip(sets, metas)]


def simt_calls(sets: list[dict[str, Any]], folder: pathlib.Path, pad_to: int = 64) -> list[Callable[[], Any]]:
    """The per-head kernel of SGLang 0.5.13.post1, from an unpacked wheel, with heads padded as the engine pads them."""
    sys.path.insert(0, str(folder))
    import flash_mla_sm120_triton as simt

    def call(one: dict[str, Any]) -> Any:
        return simt.flash_mla_sparse_decode_triton(
            one["q"],
            one["k_cache"],
            one["indices"],
            one["topk_length"],
            one["attn_sink"],
            layout.HEAD_DIM,
            layout.HEAD_DIM**-0.5,
            one.get("extra_k_cache"),
            one.get("extra_indices"),
            one.get("extra_topk_length"),
        )

    wide = []
    for one in sets:
        heads = one["q"].shape[2]
        q = torch.zeros(one["q"].shape[0], 1, max(pad_to, heads), layout.HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        q[:, :, :heads] = one["q"]
        sink = torch.zeros(q.shape[2], device="cuda")
        sink[:heads] = one["attn_sink"]
        wide.append(one | {"q": q, "attn_sink": sink})
    return [lambda one=one: call(one) for one in wide]


def measure(bandwidth: float, wheel: pathlib.Path | None, flash: bool) -> Iterator[dict[str, Any]]:
    """One record a shape."""
    for shape in SHAPES:
        sets = inputs_of(shape)
        record: dict[str, Any] = {
            "kernel": "sparse_mla_decode",
            "shape": shape.name,
            "B": shape.rows,
            "H": shape.heads,
            "tokens": shape.tokens,
            "bytes": shape.bytes,
            "ideal_us": shape.bytes / bandwidth * 1e6,
            "us": timing.replay_time(my_calls(sets)),
            "us_warm": timing.replay_time(my_calls(sets[:1]), rounds=16),
        }
        limits = sparse_mla.device_limits(torch.device("cuda", 0))
        cut = sparse_mla.choose(shape.rows, shape.heads, 128, shape.extra, *limits)
        record["cut"] = dataclasses.asdict(cut)
        if flash and shape.heads == 64:
            record["flash_mla_us"] = timing.replay_time(flash_mla_calls(sets))
        if wheel and shape.rows * shape.tokens <= 64 * 640:
            simt = simt_calls(sets[:4], wheel)
            record["simt_us"] = timing.replay_time(simt, repeats=3, rounds=1)
            mine, theirs = my_calls(sets[:1])[0]()[0], simt[0]()
            theirs = theirs[0] if isinstance(theirs, tuple) else theirs
            theirs = theirs.reshape(mine.shape[0], 1, -1, layout.HEAD_DIM)[:, :, : shape.heads]
            record["simt_largest_difference"] = float((mine.float() - theirs.float()).abs().max())
        yield record
        torch.cuda.empty_cache()
