"""The adapters: the engine's calls as they come, and the choice of the method for FP4 experts."""

from __future__ import annotations

import sys
import types
from typing import Any

import cases
import pytest
import torch
import triton.language as tl
from pdstack_kernels import adapters, indexer, indexer_ref, mhc, mhc_ref, sparse_mla, sparse_mla_ref

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def NEVER(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the original must not run")


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the interpreter computes in fp32."""
    adapters.CALLS.clear()
    if not GPU:
        for module, name in ((sparse_mla, "sparse_mla_decode"), (indexer, "paged_mqa_logits"), (mhc, "hc_pre")):
            function = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, f=function, **k: f(*a, **k, dot_dtype=tl.float32))


def engine(monkeypatch: pytest.MonkeyPatch, *, size: int, rank: int, context_parallel: bool = False) -> None:
    ranks = types.ModuleType("sglang.srt.layers.dp_attention")
    ranks.get_attention_tp_size = lambda: size  # type: ignore[attr-defined]
    ranks.get_attention_tp_rank = lambda: rank  # type: ignore[attr-defined]
    context = types.ModuleType("sglang.srt.layers.attention.dsa.utils")
    context.is_dsa_enable_prefill_cp = lambda: context_parallel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, ranks.__name__, ranks)
    monkeypatch.setitem(sys.modules, context.__name__, context)


def attention_call() -> tuple[dict[str, Any], torch.Tensor]:
    inputs: dict[str, Any] = cases.attention_inputs(cases.Attention("call", 2, 16, width0=64, width1=64), DEVICE)
    call = dict(inputs, head_dim_v=512, softmax_scale=512**-0.5)
    call["extra_indices_in_kvcache"] = call.pop("extra_indices")
    return call, sparse_mla_ref.sparse_mla_decode(**inputs)[0]


def test_attention_computes_this_ranks_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    engine(monkeypatch, size=4, rank=2)
    call, want = attention_call()
    call["q"] = call["q"].clone()
    call["q"][:, :, :8] = float("nan")  # the release leaves the other ranks' heads unwritten
    call["q"][:, :, 12:] = float("nan")
    out = adapters.sparse_mla_0_5_13(NEVER, **call)[0]
    assert torch.allclose(out[:, :, 8:12].float(), want[:, :, 8:12], atol=2e-3, rtol=2e-2)
    assert adapters.CALLS["sparse_mla"] == 1


@pytest.mark.parametrize(("size", "context_parallel"), [(1, False), (4, True)])
def test_attention_computes_all_heads(monkeypatch: pytest.MonkeyPatch, size: int, context_parallel: bool) -> None:
    engine(monkeypatch, size=size, rank=0, context_parallel=context_parallel)
    call, want = attention_call()
    out = adapters.sparse_mla_0_5_13(NEVER, **call)[0]
    assert torch.allclose(out.float(), want, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("adapter", [adapters.sparse_mla_0_5_13, adapters.sparse_mla_0_5_23])
def test_a_broken_kernel_is_left_out(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "BROKEN", {"sparse_mla"})
    assert adapter(lambda **given: given, q=1) == {"q": 1}
    assert not adapters.CALLS


def test_attention_takes_wide_indices() -> None:
    call, want = attention_call()
    for name in ("indices", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"):
        call[name] = call[name].long()
    assert torch.allclose(adapters.sparse_mla_0_5_23(NEVER, **call)[0].float(), want, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("adapter", [adapters.indexer_0_5_13, adapters.indexer_0_5_23])
def test_indexer(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "IDENTITY_BELOW", 0)
    inputs: dict[str, Any] = cases.indexer_inputs(cases.Indexer("call", 2, 130, 256), DEVICE)
    want = indexer_ref.paged_mqa_logits(**inputs)
    positional = [inputs[name] for name in ("q_fp8", "kvcache_fp8", "weight", "seq_lens", "page_table")]
    out = adapter(NEVER, *positional, None, 256, False)
    inside = torch.isfinite(want)
    assert torch.allclose(out[inside], want[inside], rtol=1e-3, atol=0.1)
    with pytest.raises(RuntimeError, match="leaves logits behind a row's length unwritten"):
        adapter(NEVER, *positional, None, 256)


def test_hc_pre_hands_what_it_does_not_take_to_the_original() -> None:
    inputs = cases.mhc_inputs(3, 128, DEVICE)
    layer = types.SimpleNamespace(rms_norm_eps=1e-6, hc_eps=1e-6, hc_sinkhorn_iters=20)
    arguments = (layer, inputs["x"].float(), inputs["fn"], inputs["scale"], inputs["base"])
    assert adapters.hc_pre_0_5_13(lambda *given: given, *arguments)[1] is arguments[1]
    assert not adapters.CALLS


@pytest.mark.skipif(not GPU, reason="the interpreter cuts bf16 results off")
def test_hc_pre() -> None:
    inputs = cases.mhc_inputs(3, 4096, DEVICE)
    layer = types.SimpleNamespace(rms_norm_eps=1e-6, hc_eps=1e-6, hc_sinkhorn_iters=20)
    y, post, comb, normed = adapters.hc_pre_0_5_13(None, layer, *inputs.values())  # type: ignore[arg-type]
    want = mhc_ref.hc_pre(**inputs, rms_eps=1e-6, hc_eps=1e-6)
    assert torch.allclose(y.double(), want[0], rtol=2**-8, atol=1e-4)
    assert torch.allclose(post.double(), want[1], atol=1e-5)
    assert torch.allclose(comb.double(), want[2], atol=1e-5)
    assert normed is False


class Fp8MoEMethod:
    """Stands for the release's class of the same name."""


class Mxfp4FlashinferTrtllmMoEMethod:
    """Stands for the SM100-only class, which wraps an FP8 method."""

    def __init__(self) -> None:
        self._fp8 = Fp8MoEMethod()


class Working:
    """Stands for the class that reads packed FP4 on sm_120."""

    def __init__(self, fp8_method: Any, prefix: str) -> None:
        self.fp8_method, self.prefix = fp8_method, prefix


RELEASES = {
    adapters.fp4_experts_0_5_13: ("sglang.srt.layers.quantization.mxfp4_marlin_moe", "Mxfp4MarlinMoEMethod"),
    adapters.fp4_experts_0_5_23: (
        "sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe",
        "Mxfp4FlashinferCutlassMoEMethod",
    ),
}


@pytest.fixture(params=RELEASES, ids=lambda adapter: adapter.__name__)
def experts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType(RELEASES[request.param][0])
    setattr(module, RELEASES[request.param][1], Working)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return request.param


FP4 = types.SimpleNamespace(is_fp4_experts=True)


@pytest.mark.parametrize("chosen", [Fp8MoEMethod, Mxfp4FlashinferTrtllmMoEMethod])
def test_fp4_experts_never_fall_through(experts: Any, chosen: Any) -> None:
    method = experts(lambda *_: chosen(), FP4, object(), "model.decoder.mlp.experts")
    assert isinstance(method, Working)
    assert isinstance(method.fp8_method, Fp8MoEMethod)
    assert method.prefix == "model.decoder.mlp.experts"
    assert adapters.CALLS["draft_moe"] == 1


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        (types.SimpleNamespace(is_fp4_experts=False), Fp8MoEMethod),
        (types.SimpleNamespace(is_fp4_experts=True, dequant_fp4_to_fp8=True), Fp8MoEMethod),
        (FP4, Working.__class__),
        (FP4, type("Mxfp4MarlinMoEMethod", (), {})),
        (FP4, type("Fp8LinearMethod", (), {})),
    ],
)
def test_what_works_stays(experts: Any, config: Any, chosen: Any) -> None:
    method = chosen() if chosen is not type else object()
    assert experts(lambda *_: method, config, object(), "x") is method
    assert not adapters.CALLS


def test_nothing_to_fall_back_on_is_an_error(experts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, RELEASES[experts][0], types.ModuleType("empty"))
    with pytest.raises(RuntimeError, match=r"cannot read them on sm_120.*--speculative-moe-runner-backend"):
        experts(lambda *_: Fp8MoEMethod(), FP4, object(), "x")
