"""Which parts of which SGLang release the kernels replace.

A target was read in the release's own wheel and holds for that release alone: an unknown release gets no hook.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Hook:
    """One replaced function of the engine.

    Attributes:
        kernel: name in the log line, the report and the counters.
        target: dotted path of the function or method.
        adapter: name of the function in `adapters` that stands around it: it gets the original as its first argument.
        auto: whether ``PDSTACK_KERNELS=auto`` turns it on.
        why: the reason for ``auto``, for the operator.
        captured: the decode graphs of DeepSeek-V4 must have called it; otherwise only some configurations do.
    """

    kernel: str
    target: str
    adapter: str
    auto: bool
    why: str
    captured: bool


@dataclasses.dataclass(frozen=True)
class Release:
    """A release's hooks, and the method after which its decode graphs are captured."""

    hooks: tuple[Hook, ...]
    captured: str


RELEASES = {
    "0.5.13.post1": Release(
        hooks=(
            Hook(
                "sparse_mla",
                "sglang.srt.layers.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120",
                "sparse_mla_0_5_13",
                auto=True,
                why="the release reads each token's KV once a head, outside the tensor cores",
                captured=True,
            ),
            Hook(
                "indexer",
                "sglang.srt.layers.attention.dsv4.indexer.fp8_paged_mqa_logits_torch_sm120",
                "indexer_0_5_13",
                auto=True,
                why="the release scores the whole captured width, not the context that is there",
                captured=True,
            ),
            Hook(
                "hc_pre",
                "sglang.srt.models.deepseek_v4.DeepseekV4DecoderLayer.hc_pre",
                "hc_pre_0_5_13",
                auto=True,
                why="the release computes the mixing product in fp32, outside the tensor cores",
                captured=True,
            ),
            Hook(
                "draft_moe",
                "sglang.srt.layers.quantization.fp8.Fp8Config.get_quant_method",
                "fp4_experts_0_5_13",
                auto=True,
                why="FP4 experts fall to a method that cannot read them (sglang#30952)",
                captured=False,
            ),
        ),
        captured="sglang.srt.model_executor.model_runner.ModelRunner.init_device_graphs",
    ),
    "0.5.23": Release(
        hooks=(
            Hook(
                "sparse_mla",
                "sglang.kernels.ops.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120",
                "sparse_mla_0_5_23",
                auto=False,
                why="the release runs FlashInfer's kernel; which is faster on sm_120 has not been measured",
                captured=True,
            ),
            Hook(
                "indexer",
                "sglang.kernels.ops.attention.dsa.tilelang_kernel.tilelang_fp8_paged_mqa_logits",
                "indexer_0_5_23",
                auto=False,
                why="the release's TileLang kernel is bounded by the length too; not measured on sm_120",
                captured=True,
            ),
            Hook(
                "draft_moe",
                "sglang.srt.layers.quantization.fp8.Fp8Config.get_quant_method",
                "fp4_experts_0_5_23",
                auto=True,
                why="FP4 experts fall to a method that cannot read them when the draft's backend is set by hand",
                captured=False,
            ),
        ),
        captured="sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs",
    ),
}
