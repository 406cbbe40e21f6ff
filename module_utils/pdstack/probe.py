"""The probe of one host, end to end: ask the kernel and both driver libraries, join, return facts.

Reads only. probe_cli.py runs it by hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from . import codec, cuda, fabric, gpu, isolate, nvml, p2p, sysfs
from .answers import CudaAnswers, NvmlAnswers
from .cgroup import unit_of
from .facts import HostFacts

SIMULATED_ANSWERS = "pdstack-simulated.json"
FABRIC_MANAGER = "nvidia-fabricmanager.service"

Clock = Callable[[], float]
Runner = Callable[[Sequence[str]], str]  # returns stdout, whatever the exit status


@dataclass(frozen=True)
class Request:
    """What to probe. ``library`` is a folder that holds libcuda.so.1 and libnvidia-ml.so.1, or a file in it."""

    host: str = ""
    root: str = "/"
    library: Optional[str] = None
    timeout: float = 60.0  # seconds for each driver library; cuInit without persistence takes seconds for each GPU
    fabric: bool = True
    prefer_package: bool = True  # nvidia-ml-py where it is installed

    @property
    def folder(self) -> Optional[str]:
        if not self.library:
            return None
        return self.library if os.path.isdir(self.library) else os.path.dirname(self.library)


def run_command(command: Sequence[str]) -> str:
    """Run a short read-only command; "" where it cannot be run."""
    try:
        done = subprocess.run(list(command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()


def probe(
    request: Request,
    machine: Optional[sysfs.Machine] = None,
    runner: Runner = run_command,
    clock: Clock = time.monotonic,
) -> HostFacts:
    """Return the facts of one host: every section but ports and disks.

    A driver that is absent, broken or wedged is a fact (``driver.state``), not an exception.
    """
    started = clock()
    machine = machine or sysfs.Machine.this()
    tree = sysfs.Tree(request.root)
    asked = _Drivers(request, tree)
    nodes = sysfs.numa_nodes(tree)
    bus = sysfs.gpus(tree, nodes)
    asked.start(request, [device.pci for device in bus])
    system = sysfs.system(tree, machine, nodes, bus)
    nics, modules, switches = sysfs.nics(tree, nodes), sysfs.modules(tree), sysfs.nvswitches(tree)
    manager = _fabric_manager(tree, bool(switches), asked.recorded, runner)
    kernel_seconds = clock() - started
    cuda_answers, nvml_answers, seconds = asked.collect()
    gpus = gpu.join(
        bus,
        cuda_answers,
        nvml_answers,
        nodes,
        lambda pid: tree.text("proc", str(pid), "comm") or "",
        lambda pid: unit_of(tree.path("proc"), pid),
    )
    facts = HostFacts(
        host=request.host or machine.hostname,
        simulated=not tree.real or request.library is not None,
        system=system,
        numa=nodes,
        gpus=gpus,
        driver=gpu.driver(modules, cuda_answers, nvml_answers, bus, len(switches), manager),
        nics=nics,
        probe_seconds={"sysfs": round(kernel_seconds, 3), **seconds},
    )
    if request.fabric:
        facts = replace(
            facts,
            p2p=fabric.p2p(gpus, cuda_answers, nvml_answers),
            fabric=fabric.steps(gpus, cuda_answers, nvml_answers),
        )
    return replace(facts, probe_seconds={**facts.probe_seconds, "total": round(clock() - started, 3)})


class _Drivers:
    """The two driver libraries: asked in children side by side, or replayed for a simulated host."""

    def __init__(self, request: Request, tree: sysfs.Tree) -> None:
        self._children: Dict[str, isolate.Child] = {}
        self._replay = not tree.real and request.library is None
        text = None if tree.real else tree.text(SIMULATED_ANSWERS)
        self.recorded: Mapping[str, Any] = json.loads(text) if text else {}

    def start(self, request: Request, addresses: List[str]) -> None:
        if self._replay:
            return
        environment = isolate.driver_environment(os.environ)
        common = {"folder": request.folder, "fabric": request.fabric}
        ask_nvml = {**common, "pci": addresses, "prefer_package": request.prefer_package}
        self._children = {
            "cuda": isolate.Child(cuda.survey, common, request.timeout, environment),
            "nvml": isolate.Child(nvml.survey, ask_nvml, request.timeout, environment),
        }

    def collect(self) -> Tuple[CudaAnswers, NvmlAnswers, Dict[str, float]]:
        if self._replay:
            cuda_answers = codec.load(CudaAnswers, self.recorded.get("cuda", {}), "$.cuda")
            return cuda_answers, codec.load(NvmlAnswers, self.recorded.get("nvml", {}), "$.nvml"), {}
        outcomes = {name: child.collect() for name, child in self._children.items()}
        seconds = {name: round(outcome.seconds, 3) for name, outcome in outcomes.items()}
        cu, ml = outcomes["cuda"], outcomes["nvml"]
        return (
            codec.load(CudaAnswers, cu.value) if cu.status == "ok" else CudaAnswers(cu.status, detail=cu.detail),
            codec.load(NvmlAnswers, ml.value) if ml.status == "ok" else NvmlAnswers(ml.status, detail=ml.detail),
            seconds,
        )


def _fabric_manager(tree: sysfs.Tree, switches: bool, recorded: Mapping[str, Any], runner: Runner) -> Optional[str]:
    """Return the Fabric Manager's unit state, only where an NVSwitch makes it matter."""
    if not switches:
        return None
    if not tree.real:
        state = recorded.get("fabric_manager")
        return str(state) if state else None
    return runner(["systemctl", "is-active", FABRIC_MANAGER]) or None


SECTIONS = {
    "gpu": ("system", "numa", "gpus", "driver", "nics"),
    "fabric": ("p2p", "fabric"),
}


def partial(facts: HostFacts, *groups: str) -> Dict[str, Any]:
    """Return the plain document with only the sections of the given groups (see facts.merge)."""
    whole = codec.dump(facts)
    wanted = [section for group in groups for section in SECTIONS[group]]
    return {key: whole[key] for key in ("host", "schema", "simulated", *wanted, "probe_seconds")}


def with_measurement(
    facts: HostFacts,
    request: Request,
    force: bool,
    timeout: float,
    when: str,
    before: Optional[p2p.Baseline] = None,
    clock: Clock = time.monotonic,
) -> HostFacts:
    """Return the facts with P2P measured, or with the reason why not. ``when`` is ISO 8601 UTC.

    A simulated host without a driver library has nothing to measure.
    """
    started = clock()
    if not sysfs.Tree(request.root).real and request.library is None:
        return replace(facts, p2p=replace(facts.p2p, note="not measured: a simulated host has no driver to copy with"))
    found = replace(facts, p2p=p2p.measured(facts, request.folder, force, timeout, when, before))
    return replace(found, probe_seconds={**facts.probe_seconds, "measure": round(clock() - started, 3)})
