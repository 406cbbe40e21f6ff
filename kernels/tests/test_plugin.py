"""The plugin against a stand-in of the engine's modules, and against the originals where unpacked wheels are named.

PDSTACK_SGLANG=<folder>[:<folder>] names folders with an unpacked sglang wheel each (python -m zipfile -e).
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import logging
import os
import pathlib
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pdstack_kernels import adapters, plugin, releases

WHEELS = [pathlib.Path(folder) for folder in os.environ.get("PDSTACK_SGLANG", "").split(":") if folder]
REGISTRIES = [pathlib.Path(__file__).with_name("hook_registry_stub.py")]
REGISTRIES += [wheel / "sglang/srt/plugins/hook_registry.py" for wheel in WHEELS]

Engine = Callable[..., dict[str, Any]]


def fresh() -> Callable[..., str]:
    """A function of its own a target: the engine's registry patches every module that holds the same object."""

    def original(*args: Any, **kwargs: Any) -> str:
        return "original"

    return original


def place(target: str, value: Any) -> None:
    """Put a value at a dotted path, making modules (lower case) and classes (upper case) on the way."""
    parts = target.split(".")
    owner: Any = None
    for depth, part in enumerate(parts[:-1], 1):
        name = ".".join(parts[:depth])
        if part[0].isupper():
            child = getattr(owner, part, None) or type(part, (), {})
        else:
            child = sys.modules.setdefault(name, types.ModuleType(name))
            child.__path__ = []
        if owner is not None:
            setattr(owner, part, child)
        owner = child
    setattr(owner, parts[-1], value)


@pytest.fixture(params=REGISTRIES, ids=lambda path: path.parts[-5] if "sglang" in path.parts else "stub")
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Starts the plugin in a scheduler process of a release, with a mode and a GPU.

    Returns which kernels are hooked, and the method that captures graphs.
    """
    saved = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "sglang"}
    for name in saved:
        del sys.modules[name]
    adapters.CALLS.clear()
    adapters.BROKEN.clear()
    plugin._SELFCHECKED.clear()
    plugin._CAPTURED.clear()

    def start(
        version: str,
        mode: str | None,
        capability: tuple[int, int] = (12, 0),
        *,
        without: str = "",
        child: bool = True,
        broken: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        release = releases.RELEASES.get(version, releases.RELEASES["0.5.23"])
        originals = {hook.kernel: fresh() for hook in release.hooks if hook.kernel != without}
        for hook in release.hooks:
            if hook.kernel != without:
                place(hook.target, originals[hook.kernel])
        place(release.captured, fresh())
        place("sglang.srt.plugins.hook_registry.X", None)
        spec = importlib.util.spec_from_file_location("sglang.srt.plugins.hook_registry", request.param)
        assert spec
        assert spec.loader
        registry = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = registry
        spec.loader.exec_module(registry)
        registry.HookRegistry.reset()
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
        monkeypatch.setattr(plugin, "_capability", lambda: capability)
        monkeypatch.setattr(plugin, "_failures", lambda kernels: broken or {})
        monkeypatch.setattr(plugin.multiprocessing, "parent_process", lambda: object() if child else None)
        if mode is None:
            monkeypatch.delenv("PDSTACK_KERNELS", raising=False)
        else:
            monkeypatch.setenv("PDSTACK_KERNELS", mode)
        plugin.register()
        registry.HookRegistry.apply_hooks()  # the engine does it again after all plugins
        found: dict[str, Any] = {}
        for kernel, original in originals.items():
            target = next(hook.target for hook in release.hooks if hook.kernel == kernel)
            found[kernel] = pkgutil.resolve_name(target) is not original
        return found | {"captured": pkgutil.resolve_name(release.captured)}

    yield start
    adapters.BROKEN.clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]
    sys.modules.update(saved)


def hooked(found: dict[str, Any]) -> set[str]:
    return {kernel for kernel, is_hooked in found.items() if is_hooked is True}


def test_auto_hooks_what_the_release_needs(engine: Engine) -> None:
    found = engine("0.5.13.post1", None)
    assert hooked(found) == {"sparse_mla", "indexer", "hc_pre", "draft_moe"}


def test_auto_on_the_newer_release_leaves_its_attention_alone(engine: Engine) -> None:
    assert hooked(engine("0.5.23", "auto")) == {"draft_moe"}


def test_on_hooks_everything_of_the_newer_release(engine: Engine) -> None:
    assert hooked(engine("0.5.23", "on")) == {"sparse_mla", "indexer", "draft_moe"}


@pytest.mark.parametrize(("mode", "capability"), [("off", (12, 0)), ("auto", (9, 0)), ("auto", (0, 0))])
def test_nothing_is_hooked(engine: Engine, mode: str, capability: tuple[int, int]) -> None:
    assert not hooked(engine("0.5.13.post1", mode, capability))


def test_the_launcher_imports_no_target(engine: Engine) -> None:
    assert not hooked(engine("0.5.13.post1", "on", child=False))


def test_an_unknown_switch_ends_the_process(engine: Engine) -> None:
    with pytest.raises(SystemExit, match="PDSTACK_KERNELS is 'yes', needed one of auto, on, off"):
        engine("0.5.13.post1", "yes")


def test_an_unknown_release_is_refused(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit, match=r"sglang 0\.5\.99 is not a release it was read for"):
        engine("0.5.99", "on")
    assert not hooked(engine("0.5.99", "auto"))
    assert "is not a release it was read for" in caplog.text


def test_a_missing_target_ends_the_process_when_on(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit, match=r"indexer: .*fp8_paged_mqa_logits_torch_sm120 .*is not there"):
        engine("0.5.13.post1", "on", without="indexer")
    assert hooked(engine("0.5.13.post1", "auto", without="indexer")) == {"sparse_mla", "hc_pre", "draft_moe"}
    assert "the engine's own code runs instead" in caplog.text


@pytest.mark.parametrize("engine", REGISTRIES[:1], indirect=True, ids=["stub"])
def test_a_hook_that_the_engine_drops_ends_the_process(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    start = plugin._apply

    def deaf(*args: Any) -> None:
        registry = sys.modules["sglang.srt.plugins.hook_registry"]
        monkeypatch.setattr(registry.HookRegistry, "apply_hooks", classmethod(lambda cls: None))
        start(*args)

    monkeypatch.setattr(plugin, "_apply", deaf)
    with pytest.raises(SystemExit, match="sparse_mla: the engine did not apply the hook"):
        engine("0.5.13.post1", "on")


def runner(**fields: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**({"graph_runner": object(), "is_draft_worker": False} | fields))


def test_graphs_without_a_kernel_end_the_process(engine: Engine) -> None:
    captured = engine("0.5.13.post1", "on")["captured"]
    adapters.CALLS.update({"sparse_mla": 43, "hc_pre": 86})
    with pytest.raises(SystemExit, match="the decode graphs were captured without indexer"):
        captured(runner())
    adapters.CALLS["indexer"] = 21
    assert captured(runner()) == "original"


def test_prefill_without_graphs_proves_nothing_yet(engine: Engine) -> None:
    captured = engine("0.5.13.post1", "on")["captured"]
    assert captured(runner(graph_runner=None)) == "original"
    assert captured(runner(is_draft_worker=True)) == "original"


def test_a_kernel_that_is_off_is_left_to_the_engine(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    captured = engine("0.5.13.post1", "auto", broken={"indexer": "scores are off"})["captured"]
    adapters.CALLS.update({"sparse_mla": 43, "hc_pre": 86})
    assert captured(runner()) == "original"
    assert "indexer does not compute what it should on this GPU (scores are off); the engine's own" in caplog.text
    assert "hooked sparse_mla, hc_pre, draft_moe; those with a reference agree" in caplog.text
    assert {"indexer"} == adapters.BROKEN
    assert adapters.indexer_0_5_13(lambda *given: given[6:], *range(7), False) == (6, False)


def test_a_kernel_that_is_off_ends_the_process_when_on(engine: Engine) -> None:
    captured = engine("0.5.13.post1", "on", broken={"sparse_mla": "outputs are off"})["captured"]
    with pytest.raises(SystemExit, match="sparse_mla does not compute what it should"):
        captured(runner())


def test_the_outcome_is_logged_and_reported(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("PDSTACK_KERNELS_REPORT", str(tmp_path / "kernels.json"))
    captured = engine("0.5.13.post1", "auto")["captured"]
    adapters.CALLS.update({"sparse_mla": 43, "hc_pre": 86, "indexer": 21})
    captured(runner())
    assert "live on sglang 0.5.13.post1, calls so far: sparse_mla=43, indexer=21, hc_pre=86, draft_moe=0" in caplog.text
    report = json.loads((tmp_path / "kernels.json").read_text())
    assert report["calls"]["indexer"] == 21
    assert report["silent"] == []
    monkeypatch.setenv("PDSTACK_KERNELS_REPORT", str(tmp_path / "missing" / "kernels.json"))
    captured(runner())
    assert "no report in" in caplog.text


def test_each_rank_reports_in_a_file_of_its_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("PDSTACK_KERNELS_REPORT", str(tmp_path / "kernels-{pid}.json"))
    captured = engine("0.5.13.post1", "auto")["captured"]
    captured(runner(graph_runner=None))
    (file,) = tmp_path.iterdir()
    assert file.name == f"kernels-{os.getpid()}.json"
    assert json.loads(file.read_text())["captured"] is False
    captured(runner())
    captured(runner(is_draft_worker=True))  # a draft model after it takes nothing back
    report = json.loads(file.read_text())
    assert report["captured"] is True
    assert report["silent"] == ["sparse_mla", "indexer", "hc_pre"]


def test_the_engines_metrics_say_which_kernels_are_in_place(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """prometheus_client itself, in the mode in which the engine serves what its processes wrote."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(plugin, "_GAUGES", [])
    for name in [name for name in sys.modules if name.split(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)  # it chooses the mode when it is imported
    captured = engine("0.5.13.post1", "auto", broken={"indexer": "scores are off"})["captured"]
    adapters.CALLS.update({"sparse_mla": 43})
    captured(runner())
    captured(runner())  # twice, as with a draft model: the gauge is made once

    import prometheus_client.multiprocess

    registry = prometheus_client.CollectorRegistry()
    prometheus_client.multiprocess.MultiProcessCollector(registry)
    samples = {s.labels["kernel"]: s.value for metric in registry.collect() for s in metric.samples}
    assert samples == {"sparse_mla": 1.0, "indexer": 0.0, "hc_pre": 0.0}


def test_an_engine_without_metrics_gets_none(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(plugin, "_GAUGES", [])
    engine("0.5.13.post1", "auto")["captured"](runner())
    assert plugin._GAUGES == []


def test_every_hook_names_an_adapter() -> None:
    for release in releases.RELEASES.values():
        for hook in release.hooks:
            assert callable(getattr(adapters, hook.adapter))


@pytest.mark.skipif(not WHEELS, reason="PDSTACK_SGLANG names no unpacked wheel")
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: wheel.name)
def test_the_targets_are_in_the_wheel(wheel: pathlib.Path) -> None:
    """Read as text: the modules import only beside the engine's whole set."""
    version = next(version for version in releases.RELEASES if list(wheel.glob(f"sglang-{version}.dist-info")))
    release = releases.RELEASES[version]
    for target in [hook.target for hook in release.hooks] + [release.captured]:
        parts = target.split(".")
        depth = next(n for n in range(len(parts), 0, -1) if (wheel / ("/".join(parts[:n]) + ".py")).is_file())
        scope: Any = ast.parse((wheel / ("/".join(parts[:depth]) + ".py")).read_text())
        for name in parts[depth:]:
            kinds = (ast.ClassDef, ast.FunctionDef)
            scope = next(node for node in scope.body if isinstance(node, kinds) and node.name == name)
        hook = next((hook for hook in release.hooks if hook.target == target), None)
        if hook:
            mine = getattr(adapters, hook.adapter).__code__
            names = list(mine.co_varnames[1 : mine.co_argcount])
            theirs = [argument.arg for argument in scope.args.args]
            # The object of a method has a name of our own.
            skip = 1 if theirs[:1] == ["self"] else 0
            assert names[skip:] == theirs[skip:], f"{target} takes {theirs}"
