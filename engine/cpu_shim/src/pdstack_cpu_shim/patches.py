"""The changes themselves, imported only when one is needed."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


def patch_after_import(name: str, path: Any, patch: Callable[[Any], None]) -> ModuleSpec | None:
    """Return the module's ordinary spec with ``patch(module)`` appended to its execution."""
    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None:
        return None
    execute = spec.loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        execute(module)
        patch(module)

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this loader serves this module only
    return spec


class UnavailableLoader:
    """Loader of an empty package: any public name is a function that raises NotImplementedError when called."""

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return the module; its ``__getattr__`` makes the names."""
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def attribute(name: str) -> Callable[..., Any]:
            if name.startswith("__"):
                raise AttributeError(name)

            def missing(*args: Any, **kwargs: Any) -> Any:
                raise NotImplementedError(
                    f"{spec.name}.{name}: the package has no CPU build; the functional profile must not reach it"
                )

            return missing

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install_triton_mock() -> None:
    """Install the Triton mock that sglang carries for Apple machines (``sglang/_platform_stubs.py``).

    ``install_platform_stubs`` first asks whether it runs on such a machine. It is loaded here as a module of
    its own in which the answer is yes; the process's real ``sys`` and ``platform`` stay untouched.
    """
    package = PathFinder.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return
    spec = importlib.util.spec_from_file_location(
        "_pdstack_sglang_platform_stubs", next(iter(package.submodule_search_locations)) + "/_platform_stubs.py"
    )
    if spec is None or spec.loader is None:
        return
    stubs: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs  # its dataclasses look themselves up
    spec.loader.exec_module(stubs)
    stubs.sys = types.SimpleNamespace(platform="darwin", modules=sys.modules, meta_path=sys.meta_path)
    stubs.platform = types.SimpleNamespace(machine=lambda: "arm64")

    import torch.backends.mps as mps

    really_available = mps.is_available
    mps.is_available = lambda: True
    try:
        stubs.install_platform_stubs()
    finally:
        mps.is_available = really_available


def declare_torchvision_operators(extension: Any) -> None:
    """Declare the operators that ``torchvision`` describes at import but whose CUDA library cannot load here."""
    if extension._has_ops():
        return
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    extension.pdstack_library = library  # the declaration lives as long as this object


def keep_mooncake_indices_on_host(conn: Any) -> None:
    """Keep prefill from pinning index tensors and recording CUDA events for the mooncake transport."""
    conn.MooncakeKVSender.supports_host_tensor_indices = False


#: Microseconds that NIXL's progress thread waits for an event; 0, which NIXL's Python sets, spins on a whole core.
PROGRESS_WAIT_US = 10_000


def _with_calm_progress_thread(bindings: Any) -> Any:
    """Return NIXL's bindings with an agent configuration whose progress thread waits for events."""

    class CalmConfig(bindings.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, max(value, PROGRESS_WAIT_US) if name == "pthrDelay" else value)

    names = [name for name in dir(bindings) if not name.startswith("__")]
    calm = types.SimpleNamespace(**{name: getattr(bindings, name) for name in names})
    calm.nixlAgentConfig = CalmConfig
    return calm


def register_host_memory(api: Any) -> None:
    """Make NIXL agents read memory kind "VRAM" as "DRAM": without a GPU the KV cache is host memory."""

    def on_host(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            positional = ["DRAM" if isinstance(arg, str) and arg == "VRAM" else arg for arg in args]
            if kwargs.get("mem_type") == "VRAM":
                kwargs["mem_type"] = "DRAM"
            return method(*positional, **kwargs)

        return call

    api.nixlBind = _with_calm_progress_thread(api.nixlBind)
    for name in ("register_memory", "get_xfer_descs", "get_reg_descs", "prep_xfer_dlist"):
        setattr(api.nixl_agent, name, on_host(getattr(api.nixl_agent, name)))
