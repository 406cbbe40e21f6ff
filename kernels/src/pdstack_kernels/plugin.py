"""SGLang plugin (entry point group ``sglang.srt.plugins``): registers the hooks and proves that they run.

``PDSTACK_KERNELS`` switches it:

- ``off``: nothing is registered.
- ``auto`` (default): the hooks that `releases` marks for the release, on compute capability 12.x only.
- ``on``: every hook of the release; the process ends with an error when one does not apply, computes wrongly, or is not
  in the decode graphs.

The engine's hooks fail open: a target that is gone is logged, and the engine starts without the hook. So each target
is looked at again after the hooks are applied, and each kernel counts its calls. Before the graphs are captured each
kernel is compared with its reference on the card at hand; one that is off is left to the engine's own code, or ends
the process when ``on``. ``PDSTACK_KERNELS_REPORT`` names a file that receives the outcome as JSON, with ``{pid}`` in
its name one for each rank; the log has it in one line that starts with "pdstack-kernels"; and where the engine serves
``/metrics``, ``pdstack_kernel_live`` is 1 for each kernel that all ranks have in place.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import multiprocessing
import os
import pkgutil
import tempfile
from collections.abc import Callable
from typing import Any, NoReturn

from . import __version__
from .releases import RELEASES, Hook, Release

LOG = logging.getLogger("pdstack_kernels")
MODES = ("auto", "on", "off")
# Releases whose kernels were compared with their references in this process: once, not for a draft model again.
_SELFCHECKED: set[str] = set()
# Releases whose decode graphs this process holds: a draft model that comes after them has none of its own.
_CAPTURED: set[str] = set()
_GAUGES: list[Any] = []


def register() -> None:
    """Entry point; the engine calls it once in each of its processes.

    Raises:
        SystemExit: the switch has an unknown value; or it is ``on`` and the kernels cannot be live. The engine
            catches ``Exception`` around plugins and goes on, so only this ends the process.
    """
    mode = os.environ.get("PDSTACK_KERNELS", "auto")
    if mode not in MODES:
        _stop(f"PDSTACK_KERNELS is {mode!r}, needed one of {', '.join(MODES)}")
    if mode == "off":
        LOG.info("pdstack-kernels %s: off", __version__)
        return
    version = importlib.metadata.version("sglang")
    release = RELEASES.get(version)
    if release is None:
        _refuse(mode, f"sglang {version} is not a release it was read for ({', '.join(RELEASES)})")
        return
    capability = _capability()
    if mode == "auto" and capability[0] != 12:
        LOG.info("pdstack-kernels %s: auto is for sm_12x, this is sm_%d%d: no hook", __version__, *capability)
        return
    hooks = [hook for hook in release.hooks if hook.auto or mode == "on"]
    if multiprocessing.parent_process() is None:
        # The launcher runs no model: importing the targets there would only slow its start.
        LOG.info("pdstack-kernels %s: %s, sglang %s: %s", __version__, mode, version, _names(hooks))
        return
    _apply(mode, version, release, hooks)


def _apply(mode: str, version: str, release: Release, hooks: list[Hook]) -> None:
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    adapters = importlib.import_module("pdstack_kernels.adapters")
    before: dict[str, Any] = {}
    for hook in hooks:
        try:
            before[hook.kernel] = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            _refuse(mode, f"{hook.kernel}: {hook.target} of sglang {version} is not there: {error}")
            continue
        registry.HookRegistry.register(hook.target, getattr(adapters, hook.adapter), registry.HookType.AROUND)
    applied = [hook for hook in hooks if hook.kernel in before]
    runner_before = pkgutil.resolve_name(release.captured)
    capture = functools.partial(_around_capture, mode, version, applied)
    registry.HookRegistry.register(release.captured, capture, registry.HookType.AROUND)
    # Now rather than when the engine gets to it, so that the outcome can be looked at here; applying twice is harmless.
    registry.HookRegistry.apply_hooks()
    for hook in applied:
        if pkgutil.resolve_name(hook.target) is before[hook.kernel]:
            _refuse(mode, f"{hook.kernel}: the engine did not apply the hook on {hook.target}")
    if pkgutil.resolve_name(release.captured) is runner_before:
        _refuse(mode, f"the engine did not apply the hook on {release.captured}: nothing would prove the kernels")
    LOG.info("pdstack-kernels %s: %s, sglang %s: hooked %s", __version__, mode, version, _names(applied))


def _around_capture(
    mode: str, version: str, hooks: list[Hook], original: Callable[..., Any], runner: Any, *args: Any, **more: Any
) -> Any:
    """Around the capture of a model runner's graphs: the kernels must compute well before it, and be in it after it."""
    adapters = importlib.import_module("pdstack_kernels.adapters")
    if version not in _SELFCHECKED:
        _SELFCHECKED.add(version)
        failures = _failures([hook.kernel for hook in hooks])
        for kernel, wrong in failures.items():
            _refuse(mode, f"{kernel} does not compute what it should on this GPU ({wrong})")
        adapters.BROKEN.update(failures)
        # The line that `_apply` logs comes before the engine has set up its log.
        good = _names([hook for hook in hooks if hook.kernel not in failures])
        text = "pdstack-kernels %s: %s, sglang %s: hooked %s; those with a reference agree with it on this GPU"
        LOG.info(text, __version__, mode, version, good)
    result = original(runner, *args, **more)
    counts = {hook.kernel: int(adapters.CALLS[hook.kernel]) for hook in hooks}
    broken = sorted(adapters.BROKEN)
    silent = [hook.kernel for hook in hooks if hook.captured and not counts[hook.kernel] and hook.kernel not in broken]
    told = ", ".join(f"{kernel}={count}" for kernel, count in counts.items())
    LOG.info("pdstack-kernels %s: live on sglang %s, calls so far: %s", __version__, version, told)
    if _captured(runner):
        _CAPTURED.add(version)
    captured = version in _CAPTURED
    outcome = {"calls": counts, "silent": silent, "broken": broken, "captured": captured}
    _report(outcome | {"mode": mode, "sglang": version, "version": __version__})
    missing = {*broken, *(silent if captured else ())}
    _publish({hook.kernel: hook.kernel not in missing for hook in hooks if hook.captured})
    if silent and captured:
        _refuse(mode, f"the decode graphs were captured without {', '.join(silent)}")
    return result


def _captured(runner: Any) -> bool:
    """Whether the runner holds decode graphs; a prefill runner without any has not run a model yet."""
    if getattr(runner, "is_draft_worker", False):
        return False
    return any(getattr(runner, name, None) is not None for name in ("graph_runner", "decode_cuda_graph_runner"))


def _report(outcome: dict[str, Any]) -> None:
    path = os.environ.get("PDSTACK_KERNELS_REPORT", "").replace("{pid}", str(os.getpid()))
    if not path:
        return
    try:
        folder = os.path.dirname(path) or "."
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".pdstack-kernels", delete=False) as file:
            json.dump(outcome, file, sort_keys=True)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        LOG.warning("pdstack-kernels: no report in %s: %s", path, error)


def _publish(live: dict[str, bool]) -> None:
    """A gauge in the engine's own ``/metrics``: it collects what its processes write below PROMETHEUS_MULTIPROC_DIR."""
    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return  # the engine serves no metrics
    prometheus = importlib.import_module("prometheus_client")
    if not _GAUGES:
        text = "1 where every rank has this kernel of pdstack-kernels in place of the engine's own code"
        _GAUGES.append(prometheus.Gauge("pdstack_kernel_live", text, ["kernel"], multiprocess_mode="min"))
    for kernel, is_live in live.items():
        _GAUGES[0].labels(kernel).set(is_live)


def _failures(kernels: list[str]) -> dict[str, str]:
    import torch

    selfcheck = importlib.import_module("pdstack_kernels.selfcheck")
    found: dict[str, str] = selfcheck.failures(kernels, torch.device("cuda", torch.cuda.current_device()))
    return found


def _capability() -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def _names(hooks: list[Hook]) -> str:
    return ", ".join(hook.kernel for hook in hooks) or "no kernel"


def _refuse(mode: str, reason: str) -> None:
    if mode == "on":
        _stop(f"{reason}. PDSTACK_KERNELS=on demands it: set auto or off, or install a release it is for")
    LOG.error("pdstack-kernels %s: %s; the engine's own code runs instead", __version__, reason)


def _stop(reason: str) -> NoReturn:
    LOG.critical("pdstack-kernels %s: %s", __version__, reason)
    raise SystemExit(f"pdstack-kernels {__version__}: {reason}")
