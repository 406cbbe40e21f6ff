"""Import shim: the released sglang 0.5.23 on a host without a GPU (profile ``cpu``).

The wheel brings ``pdstack_cpu_shim.pth``, so that :func:`install` runs at the start of every interpreter of the
release's virtual environment. It puts one finder in front of ``sys.meta_path``; installed files stay as their
wheels brought them, and ``uv pip uninstall pdstack-cpu-shim`` takes everything back.

What it changes, each because the CPU profile cannot start or serve without it:

======================================= ==================================================================
module                                  change
======================================= ==================================================================
``triton``                              absent: the pass-through mock that sglang ships for macOS
``sgl_kernel``                          no CPU wheel exists: names import, a call raises NotImplementedError
``torchvision.extension``               CUDA wheel beside CPU torch: declare the operators its import needs
``sglang.srt.disaggregation.mooncake``  KV indices stay on the host: no pinned memory, no CUDA event
``nixl_cu12._api``, ``nixl_cu13._api``  sglang registers KV as "VRAM"; here it is "DRAM". The progress thread waits for
                                        events: it would spin on the one core that an engine has here
======================================= ==================================================================

Nothing here is used with ``profile: gpu``. Only light standard modules are imported, since every ``python`` of
the environment pays for it.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder

__all__ = ["CpuFinder", "install"]

#: Packages without a CPU build, replaced by modules whose names raise only when called.
UNAVAILABLE = ("sgl_kernel", "sgl_kernel.mamba")

#: Module -> name of the function in ``patches`` that runs right after the module's own code.
PATCHED = {
    "torchvision.extension": "declare_torchvision_operators",
    "sglang.srt.disaggregation.mooncake.conn": "keep_mooncake_indices_on_host",
    "nixl_cu12._api": "register_host_memory",
    "nixl_cu13._api": "register_host_memory",
}


class CpuFinder:
    """Meta-path finder that serves the modules of the table above and leaves every other import alone."""

    def __init__(self) -> None:
        self._triton_checked = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a spec for a module that needs a change, else None (the ordinary finders go on)."""
        if name == "sglang" and not self._triton_checked:
            self._triton_checked = True  # before the call: it looks for sglang itself
            if PathFinder.find_spec("triton") is None:
                from . import patches

                patches.install_triton_mock()
        if name in UNAVAILABLE:
            if PathFinder.find_spec(name, path) is not None:  # type: ignore[arg-type]
                return None  # somebody brought a real build
            from . import patches

            return ModuleSpec(name, patches.UnavailableLoader(), is_package=True)
        if name in PATCHED:
            from . import patches

            return patches.patch_after_import(name, path, getattr(patches, PATCHED[name]))
        return None


def install() -> None:
    """Put the finder in front of ``sys.meta_path``; a second call does nothing."""
    if not any(isinstance(finder, CpuFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, CpuFinder())  # type: ignore[arg-type]
