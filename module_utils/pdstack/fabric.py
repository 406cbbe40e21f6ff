"""How the GPUs of a host reach each other: claimed P2P, link types, and the fabric probe's steps. Pure."""

from __future__ import annotations

from typing import Dict, List, Optional

from .answers import CudaAnswers, NvmlAnswers
from .facts import Fabric, Gpu, P2p, ProbeStep
from .gpu import by_position

# nvmlGpuTopologyLevel_t in the words of `nvidia-smi topo -m`
_LEVELS: Dict[int, str] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def p2p(gpus: List[Gpu], cuda: CudaAnswers, nvml: NvmlAnswers) -> P2p:
    """Return the claimed matrices. What the driver claims is not proof: see p2p.measure."""
    cuda_order = [device.pci for device in cuda.devices]
    nvml_order = [device.pci for device in nvml.devices]
    levels = by_position(gpus, nvml_order, nvml.topology)
    nvlink = by_position(gpus, nvml_order, nvml.nvlink)

    def way(i: int, j: int) -> str:
        return link_type(gpus[i], gpus[j], levels[i][j], nvlink[i][j])

    positions = range(len(gpus))
    return P2p(
        claimed=by_position(gpus, cuda_order, cuda.peer),
        link_type=[[way(i, j) for j in positions] for i in positions],
        atomics=by_position(gpus, cuda_order, cuda.atomics),
    )


def link_type(a: Gpu, b: Gpu, level: Optional[int] = None, nvlink: Optional[bool] = None) -> str:
    """Return the way between two GPUs in the words of ``nvidia-smi topo -m``.

    NVLink first, then NVML's common ancestor, then the PCI paths of sysfs: PIX through one switch,
    PXB through several bridges, PHB through one host bridge, NODE within a NUMA node, SYS across.
    """
    if a.pci == b.pci:
        return "X"
    if nvlink:
        return "NVL"
    if level is not None:
        return _LEVELS.get(level, "?")
    common = 0
    for left, right in zip(a.pci_path, b.pci_path):
        if left != right:
            break
        common += 1
    if common:
        return "PIX" if max(len(a.pci_path), len(b.pci_path)) - common <= 1 else "PXB"
    if a.pci_root and a.pci_root == b.pci_root:
        return "PHB"
    if a.numa_node is None or b.numa_node is None:
        return "?"
    return "NODE" if a.numa_node == b.numa_node else "SYS"


def steps(gpus: List[Gpu], cuda: CudaAnswers, nvml: NvmlAnswers) -> Fabric:
    """Return, per GPU, each step that bears on fabric memory and all-reduce fusion."""
    by_pci = {device.pci: device.steps for device in cuda.devices}
    status = {device.pci: device.fabric_status for device in nvml.devices}
    found = []
    for gpu in gpus:
        asked = by_pci.get(gpu.pci)
        calls = list(asked) if asked else [ProbeStep("fd_create", None, "not called: " + _why_not(gpu, cuda))]
        found.append(
            [
                *calls,
                arch_gate(gpu.compute_capability),
                _fabric_state(gpu, status.get(gpu.pci)),
                _flag("cc_mode", nvml.confidential_compute, "Confidential Compute on", "Confidential Compute off"),
                _nvlinks(gpu),
            ]
        )
    return Fabric(found)


def _why_not(gpu: Gpu, cuda: CudaAnswers) -> str:
    if cuda.status == "missing":
        return "no driver library"
    return cuda.detail or (gpu.problems[0] if gpu.problems else "the probe was not asked for it")


def arch_gate(capability: Optional[str]) -> ProbeStep:
    """Return whether the engine's all-reduce fusion considers this architecture at all (9.0 and 10.x).

    Source: sglang srt/layers/flashinfer_comm_fusion.py: others, such as 12.0, are refused before
    any memory probe.
    """
    if capability is None:
        return ProbeStep("arch_gate", None, "not known: no compute capability")
    passes = capability == "9.0" or capability.startswith("10.")
    words = "considered for" if passes else "outside"
    return ProbeStep("arch_gate", None, f"compute capability {capability}: {words} all-reduce fusion", int(passes))


def _fabric_state(gpu: Gpu, status: Optional[int]) -> ProbeStep:
    if gpu.fabric_state is None:
        return ProbeStep("nvml_fabric_state", None, "NVML does not say")
    return ProbeStep("nvml_fabric_state", status, gpu.fabric_state.replace("_", " "))


def _flag(name: str, value: Optional[bool], yes: str, no: str) -> ProbeStep:
    words = "NVML does not say" if value is None else (yes if value else no)
    return ProbeStep(name, None, words, None if value is None else int(value))


def _nvlinks(gpu: Gpu) -> ProbeStep:
    count = gpu.nvlinks_active
    words = "no NVLink" if not count else f"{count} NVLinks active"
    return ProbeStep("nvlinks", None, words, count or 0)
