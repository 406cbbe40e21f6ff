"""The engine's signatures in front of the kernels, one adapter a hook of `releases`.

Each counts its calls: a kernel whose counter stays at zero is not the one that runs.
"""

from __future__ import annotations

import collections
import importlib
from collections.abc import Callable
from typing import Any

import torch

from . import indexer, mhc, sparse_mla

CALLS: collections.Counter[str] = collections.Counter()
# Kernels that do not compute what they should on this card (`selfcheck`): the engine's own code runs instead.
BROKEN: set[str] = set()

# The engine's top-k is 512 or 1024 wide and answers rows up to its width without reading a score.
IDENTITY_BELOW = 512
# Longer inputs are prefill, where the product is large enough for the release's own path.
HC_PRE_MOST_ROWS = 512


def _int32(values: torch.Tensor | None) -> torch.Tensor | None:
    return values if values is None or values.dtype == torch.int32 else values.to(torch.int32)


def _sparse_mla(kwargs: dict[str, Any], head_range: tuple[int, int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS["sparse_mla"] += 1
    indices = _int32(kwargs["indices"])
    assert indices is not None
    return sparse_mla.sparse_mla_decode(
        kwargs["q"],
        kwargs["k_cache"],
        indices,
        _int32(kwargs.get("topk_length")),
        kwargs.get("attn_sink"),
        kwargs.get("softmax_scale"),
        kwargs.get("extra_k_cache"),
        _int32(kwargs.get("extra_indices_in_kvcache")),
        _int32(kwargs.get("extra_topk_length")),
        head_range=head_range,
    )


def sparse_mla_0_5_13(original: Callable[..., Any], **kwargs: Any) -> Any:
    """``flash_mla_with_kvcache_sm120``; of the padded query only this rank's own heads are computed.

    The release allocates the query with all heads of the model and fills this rank's share; of the output it reads
    the same share (``MQALayer.forward``: ``q_padded``, ``tp_slice``).
    """
    if "sparse_mla" in BROKEN:
        return original(**kwargs)
    ranks = importlib.import_module("sglang.srt.layers.dp_attention")
    context = importlib.import_module("sglang.srt.layers.attention.dsa.utils")
    size = 1 if context.is_dsa_enable_prefill_cp() else ranks.get_attention_tp_size()
    if size == 1:
        return _sparse_mla(kwargs, None)
    share = kwargs["q"].shape[2] // size
    first = ranks.get_attention_tp_rank() * share
    return _sparse_mla(kwargs, (first, first + share))


def sparse_mla_0_5_23(original: Callable[..., Any], **kwargs: Any) -> Any:
    """``flash_mla_with_kvcache_sm120``; the release fills padded heads with zeros, which are computed along."""
    if "sparse_mla" in BROKEN:
        return original(**kwargs)
    return _sparse_mla(kwargs, None)


def _indexer(
    original: Callable[..., torch.Tensor], identity_below: int, args: tuple[Any, ...], clean_logits: bool
) -> torch.Tensor:
    if "indexer" in BROKEN:
        return original(*args, clean_logits)
    CALLS["indexer"] += 1
    q, cache, weight, lengths, pages, _, width = args
    if clean_logits:
        raise RuntimeError("pdstack-kernels leaves logits behind a row's length unwritten; the engine asked for more")
    return indexer.paged_mqa_logits(
        q.contiguous(),
        cache,
        weight.float(),
        lengths.to(torch.int32),
        pages.to(torch.int32),
        width,
        identity_below=identity_below,
    )


def indexer_0_5_13(
    original: Callable[..., Any],
    q_fp8: torch.Tensor,
    kvcache_fp8: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    deep_gemm_metadata: Any,
    max_seq_len: int,
    clean_logits: bool = True,
) -> torch.Tensor:
    """``fp8_paged_mqa_logits_torch_sm120``."""
    args = (q_fp8, kvcache_fp8, weight, seq_lens, page_table, deep_gemm_metadata, max_seq_len)
    return _indexer(original, IDENTITY_BELOW, args, clean_logits)


def indexer_0_5_23(
    original: Callable[..., Any],
    q_fp8: torch.Tensor,
    kvcache_fp8: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    deep_gemm_metadata: Any,
    max_seq_len: int,
    clean_logits: bool = True,
) -> torch.Tensor:
    """``tilelang_fp8_paged_mqa_logits``; other models' top-k calls it too, so every row is scored."""
    args = (q_fp8, kvcache_fp8, weight, seq_lens, page_table, deep_gemm_metadata, max_seq_len)
    return _indexer(original, 0, args, clean_logits)


def hc_pre_0_5_13(
    original: Callable[..., Any],
    layer: Any,
    x: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    norm: Any = None,
) -> Any:
    """``DeepseekV4DecoderLayer.hc_pre`` for decode-sized inputs; the norm stays the caller's, as in the original."""
    fits = 0 < x.shape[0] <= HC_PRE_MOST_ROWS and x.shape[1] == mhc.STREAMS and x.dtype == torch.bfloat16
    if "hc_pre" in BROKEN or not (fits and x.is_contiguous() and hc_fn.is_contiguous()):
        return original(layer, x, hc_fn, hc_scale, hc_base, norm)
    CALLS["hc_pre"] += 1
    y, post, comb = mhc.hc_pre(
        x,
        hc_fn,
        hc_scale,
        hc_base,
        rms_eps=layer.rms_norm_eps,
        hc_eps=layer.hc_eps,
        iterations=layer.hc_sinkhorn_iters,
    )
    return y, post, comb, False


def _fp4_experts(original: Callable[..., Any], config: Any, layer: Any, prefix: str, module: str, name: str) -> Any:
    """The working method for FP4 experts on sm_120, where the release chose one that is not.

    ``Fp8MoEMethod`` reads packed FP4 as FP8 ("Hidden size mismatch"), the TRT-LLM class needs SM100.
    """
    method = original(config, layer, prefix)
    chosen = type(method).__name__
    if chosen not in ("Fp8MoEMethod", "Mxfp4FlashinferTrtllmMoEMethod") or not getattr(config, "is_fp4_experts", False):
        return method
    if getattr(config, "dequant_fp4_to_fp8", False):
        return method  # the weights become FP8 at load: the release's own option
    fp8 = method if chosen == "Fp8MoEMethod" else getattr(method, "_fp8", None)
    try:
        working = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"{prefix}: FP4 experts would run on {chosen}, which cannot read them on sm_120, and {module}.{name} is "
            f"not there ({error}). Set --speculative-moe-runner-backend to the target model's backend, or switch "
            "speculative decoding off."
        ) from error
    if fp8 is None:
        raise RuntimeError(f"{prefix}: {chosen} holds no FP8 method to build {name} from")
    CALLS["draft_moe"] += 1
    return working(fp8, prefix=prefix)


def fp4_experts_0_5_13(original: Callable[..., Any], config: Any, layer: Any, prefix: str) -> Any:
    """``Fp8Config.get_quant_method``: the Marlin class, whose sm_120 branch runs the release's Triton kernel."""
    module = "sglang.srt.layers.quantization.mxfp4_marlin_moe"
    return _fp4_experts(original, config, layer, prefix, module, "Mxfp4MarlinMoEMethod")


def fp4_experts_0_5_23(original: Callable[..., Any], config: Any, layer: Any, prefix: str) -> Any:
    """``Fp8Config.get_quant_method``: the CUTLASS class, which the release itself takes on sm_120."""
    module = "sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe"
    return _fp4_experts(original, config, layer, prefix, module, "Mxfp4FlashinferCutlassMoEMethod")
