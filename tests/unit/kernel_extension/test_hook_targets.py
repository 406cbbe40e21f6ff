"""The hooks against the engine's own code, out of the locked wheels of both releases: nothing of it runs on a GPU here.

Only sources are read, since the modules import beside torch and the engine's whole set alone. What chooses and builds
the method of the experts is taken out of them and run, the rest of the engine is stood in for.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
import types
from typing import Any

import pytest
from pdstack import flags
from unit.plan import wheels

PACKAGE = wheels.ROOT / "kernels/src/pdstack_kernels"
RELEASES = {"0.5.13.post1": "sglang-0.5.13.post1", "0.5.23": "sglang-0.5.23"}


def hooks(version: str) -> list[Any]:
    """The release's hooks; releases.py alone imports without torch."""
    spec = importlib.util.spec_from_file_location("kernel_releases", PACKAGE / "releases.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    release = module.RELEASES[version]
    captured = types.SimpleNamespace(kernel="capture", target=release.captured, adapter=None)
    return [*release.hooks, captured]


@functools.cache
def source(version: str, module: str) -> ast.Module | None:
    folder = wheels.unpacked(RELEASES[version], "engine", wheels.ENGINE)
    path = folder / (module.replace(".", "/") + ".py")
    return ast.parse(path.read_text()) if path.is_file() else None


def found(version: str, target: str) -> ast.FunctionDef:
    """The definition at a dotted path."""
    parts = target.split(".")
    depth = next(n for n in range(len(parts), 0, -1) if source(version, ".".join(parts[:n])))
    scope: Any = source(version, ".".join(parts[:depth]))
    for name in parts[depth:]:
        kinds = (ast.ClassDef, ast.FunctionDef)
        scope = next(node for node in scope.body if isinstance(node, kinds) and node.name == name)
    assert isinstance(scope, ast.FunctionDef)
    return scope


def compiled(node: ast.stmt, scope: dict[str, Any]) -> Any:
    """A function or class of the sources, run in a scope of stand-ins; its annotations are not needed."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef):
            part.returns = None
            for argument in part.args.args:
                argument.annotation = None
    exec(compile(ast.Module([node], []), "<wheel>", "exec"), scope)
    return scope[node.name]  # type: ignore[attr-defined]


def adapter(name: str) -> ast.FunctionDef:
    tree = ast.parse((PACKAGE / "adapters.py").read_text())
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


def test_every_gpu_release_has_hooks() -> None:
    versions = {release.engine.version for release in flags.RELEASES.values() if release.profile == "gpu"}
    assert versions == set(RELEASES)


@pytest.mark.parametrize("version", RELEASES)
def test_targets_and_adapters_take_the_same(version: str) -> None:
    assert hooks(version)
    for hook in hooks(version):
        theirs = [argument.arg for argument in found(version, hook.target).args.args]
        if hook.adapter is None:
            assert theirs[:1] == ["self"]  # the adapter hands on whatever else there is
            continue
        mine = [argument.arg for argument in adapter(hook.adapter).args.args][1:]  # behind the original
        method = theirs[:1] == ["self"]  # whose object has a name of our own
        assert mine[method:] == theirs[method:], hook.target


class Fp8MoEMethod:
    """Stands for the method that cannot read packed FP4."""

    def __init__(self, config: Any) -> None:
        self.quant_config = config


class Experts:
    """Stands for the layer that holds the experts."""

    use_triton_kernels = use_flashinfer_trtllm_moe = False


def engine(version: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The engine's method classes with their own constructors, on sm_120, and what its chooser finds around it."""
    card = types.SimpleNamespace(is_sm90=False, is_sm100=False, is_sm120=True)
    scope: dict[str, Any] = {
        "Fp8MoEMethod": Fp8MoEMethod,
        "is_layer_skipped": lambda *_, **__: False,
        "is_npu": lambda: False,
        "is_npu_arch35": lambda: False,
        "is_sm90_supported": lambda: False,
        "is_sm100_supported": lambda: False,
        "is_flashinfer_available": lambda: True,
        "get_platform": lambda: card,
        "get_global_server_args": Anything(),
        "get_exec": lambda: types.SimpleNamespace(moe=types.SimpleNamespace(flashinfer_mxfp4_moe_precision="default")),
        "get_moe_runner_backend": lambda: Backend(backend),
    }
    stood_in = {
        "sglang.srt.layers.linear": {"LinearBase": type("LinearBase", (), {})},
        "sglang.srt.layers.moe.fused_moe_triton": {"FusedMoE": Experts},
        "sglang.srt.layers.radix_attention": {"RadixAttention": type("RadixAttention", (), {})},
    }
    for name in ("marlin", "flashinfer_cutlass", "flashinfer_trtllm"):
        module = f"sglang.srt.layers.quantization.mxfp4_{name}_moe"
        tree = source(version, module)
        assert tree, f"{module} is not in sglang {version}"
        kind = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Mxfp4"))
        init = next(node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        assert [argument.arg for argument in init.args.args] == ["self", "fp8_method", "prefix"]
        own = {"__init__": compiled(init, {**scope, "super": Parent, "torch": Anything(), "envs": Anything()})}
        stood_in[module] = {kind.name: type(kind.name, (), own)}
    for name, values in stood_in.items():
        made = types.ModuleType(name)
        made.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, made)
    return scope


class Backend:
    """The engine's choice of a MoE backend: is_NAME() for each."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, asked: str) -> Any:
        return lambda: asked == f"is_{self.name}"


class Anything:
    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Anything()


class Parent:
    def __init__(self, *args: Any) -> None:
        pass


def choose(version: str, backend: str, config: Any, monkeypatch: pytest.MonkeyPatch, *, hooked: bool) -> Any:
    """What the release's own Fp8Config.get_quant_method gives the experts, with or without the hook around it."""
    scope = engine(version, backend, monkeypatch)
    own = compiled(found(version, "sglang.srt.layers.quantization.fp8.Fp8Config.get_quant_method"), scope)
    if not hooked:
        return own(config, Experts(), "model.decoder.mlp.experts")
    mine: dict[str, Any] = {"importlib": importlib, "CALLS": {"draft_moe": 0}}
    compiled(adapter("_fp4_experts"), mine)
    (hook,) = [hook for hook in hooks(version) if hook.kernel == "draft_moe"]
    around = compiled(adapter(hook.adapter), mine)
    return around(own, config, Experts(), "model.decoder.mlp.experts")


def config(*, fp4: bool) -> Any:
    return types.SimpleNamespace(
        is_fp4_experts=fp4, is_dsv4_fp4_experts=fp4, dequant_fp4_to_fp8=False, use_mxfp8=False, ignored_layers=[],
        packed_modules_mapping={},
    )  # fmt: skip


# (release, backend): what the release itself gives FP4 experts on sm_120, and what they get with the hook.
CHOICES = {
    ("0.5.13.post1", "auto"): ("Fp8MoEMethod", "Mxfp4MarlinMoEMethod"),
    ("0.5.13.post1", "triton"): ("Fp8MoEMethod", "Mxfp4MarlinMoEMethod"),
    ("0.5.13.post1", "flashinfer_mxfp4"): ("Mxfp4FlashinferTrtllmMoEMethod", "Mxfp4MarlinMoEMethod"),
    ("0.5.13.post1", "marlin"): ("Mxfp4MarlinMoEMethod", "Mxfp4MarlinMoEMethod"),
    ("0.5.23", "auto"): ("Fp8MoEMethod", "Mxfp4FlashinferCutlassMoEMethod"),
    ("0.5.23", "triton"): ("Fp8MoEMethod", "Mxfp4FlashinferCutlassMoEMethod"),
    ("0.5.23", "flashinfer_mxfp4"): ("Mxfp4FlashinferCutlassMoEMethod", "Mxfp4FlashinferCutlassMoEMethod"),
    ("0.5.23", "marlin"): ("Mxfp4MarlinMoEMethod", "Mxfp4MarlinMoEMethod"),
}


@pytest.mark.parametrize(("version", "backend"), CHOICES)
def test_fp4_experts_get_a_method_that_reads_them(version: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = choose(version, backend, config(fp4=True), monkeypatch, hooked=False)
    after = choose(version, backend, config(fp4=True), monkeypatch, hooked=True)
    assert (type(before).__name__, type(after).__name__) == CHOICES[version, backend]
    assert isinstance(after._fp8, Fp8MoEMethod)
    assert after.prefix == "model.decoder.mlp.experts"


@pytest.mark.parametrize("version", RELEASES)
def test_fp8_experts_keep_their_method(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(choose(version, "triton", config(fp4=False), monkeypatch, hooked=True)) is Fp8MoEMethod
