"""SGLang plugin for measurements: send the engine down its sm_120 code path on another card, with useful dummy weights.

SGLang 0.5.13.post1 asks for compute capability 12.x before it takes the code that the kernels replace. Here the answer
is yes for attention and indexer on any card: an H200 then runs the path of sm_120, with and without the hooks.
The rest of the route is environment variables that the release sets for itself on sm_120: see ROUTE.

The release's own dummy weights lie within 0.001: in FP8 they are zeros, and the model's output would not depend on its
attention. `fill` draws weights that keep activations near unit variance, the same in every process. The gate's bias is
a ladder, so that it alone chooses the experts: with random weights the sixth and the seventh of 256 lie so near each
other that the last bit of a bf16 sum chooses between them, and what was compared then was two different models (on an
H200 the release differed from itself by 0.3 in a log-probability, and so did the hooked engine from the release).

With PDSTACK_NUDGE=1 every weight of the norms is one bf16 step off, up or down: how far such a model's answers move
when nothing but last bits change is the measure for two engines that round differently. `spoil` makes the hooked
attention wrong inside captured graphs, where no check at start looks: a comparison must notice that.

Never installed with the kernels: `hooked_engine.py` puts it on the path of the engines that it compares.
"""

from __future__ import annotations

import multiprocessing
import os
import zlib
from typing import Any

# What server_args.py of the release sets where is_sm120_supported() is true, for DeepSeek-V4.
ROUTE = {
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
    "SGLANG_OPT_USE_TOPK_V2": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
}


def route() -> None:
    """Entry point: the sm_120 path and the dummy weights."""
    if multiprocessing.parent_process() is None:
        return  # the launcher runs no model
    import sglang.srt.layers.attention.deepseek_v4_backend as backend
    import sglang.srt.layers.attention.dsv4.indexer as indexer

    backend._is_sm120 = True
    indexer.is_sm120_supported = lambda: True
    weights()


def weights() -> None:
    """Entry point: the dummy weights alone, for the card's native path."""
    if multiprocessing.parent_process() is None:
        return
    import sglang.srt.model_loader.loader as loader

    loader.initialize_dummy_weights = fill


def spoil() -> None:
    """Entry point: the hooked attention forgets an eighth of its output where a decode step is captured."""
    if multiprocessing.parent_process() is None:
        return
    import torch
    from pdstack_kernels import sparse_mla

    right = sparse_mla.sparse_mla_decode

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out, lse = right(*args, **kwargs)
        if torch.cuda.is_current_stream_capturing():
            out[..., :64] = 0
        return out, lse

    sparse_mla.sparse_mla_decode = wrong


def fill(model: Any, *_: Any, **__: Any) -> None:
    """Fill a model's parameters by name, type and shape; runs after the engine has repacked its quantised weights."""
    import torch

    state = model.state_dict()
    for name, tensor in state.items():
        value = tensor.data
        draw = torch.Generator(value.device).manual_seed(zlib.crc32(name.encode()))
        scale = "_scale" in name
        small_integer = value.dtype in (torch.int8, torch.uint8, torch.int32)
        if value.dtype == torch.float8_e8m0fnu or (scale and small_integer):
            value.view(torch.uint8).fill_(127 - 8)  # of FP4 values, whose mean square is 8.6, over 4096 inputs
        elif small_integer:
            value.view(torch.uint8).random_(0, 256, generator=draw)  # packed FP4: every nibble is a number
        elif scale:
            value.fill_(_inputs(name, state) ** -0.5)
        elif not torch.is_floating_point(value):
            value.zero_()
        elif value.dim() >= 2:
            drawn = torch.randn(value.shape, generator=draw, device=value.device, dtype=torch.float32)
            quantised = value.dtype.itemsize == 1
            value.copy_(drawn if quantised or "embed" in name else drawn * value.shape[-1] ** -0.5)
        else:
            drawn = torch.randn(value.shape, generator=draw, device=value.device, dtype=torch.float32)
            if "correction_bias" in name:
                value.copy_(3 * drawn.argsort().argsort())  # ranks
            else:
                value.copy_(1 + 0.1 * drawn if "norm" in name or name.endswith("scale") else 0.1 * drawn)
                if "norm" in name and os.environ.get("PDSTACK_NUDGE") == "1":
                    _nudge(value, draw)


def _nudge(value: Any, draw: Any) -> None:
    """Move every element to the next bf16 number above or below, as a coin says."""
    import torch

    near = value.bfloat16()
    coins = torch.randint(0, 2, near.shape, generator=draw, device=near.device, dtype=torch.int16) * 2 - 1
    value.copy_((near.view(torch.int16) + coins).view(torch.bfloat16))


def _inputs(name: str, state: dict[str, Any]) -> int:
    """Inputs of the linear layer that a block scale belongs to."""
    weight = state.get(name.replace("_scale_inv", "").replace("_scale", ""))
    return 4096 if weight is None or weight.dim() < 2 else int(weight.shape[-1])
