"""How the GPUs of an instance and the sides of a pair talk to each other: NCCL, all-reduce, UCX. Pure.

Sources: the reference deployment on 8x RTX PRO 6000, NCCL's environment documentation
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html) and UCX's issue tracker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence

from . import cpulist
from .facts import HostFacts
from .placement import HostView
from .plan_types import Why

FUSION_ARCHITECTURES = ("9.0", "10.0", "10.3")  # the engine's own gate, before any probe
_OUT_OF_MEMORY = 2
_OWN_ROOT = ("PHB", "NODE", "SYS")
LANES = "cuda_copy,cuda_ipc,sm,self,tcp"


@dataclass
class Choices:
    """Arguments and environment with their reasons."""

    args: Dict[str, Any] = field(default_factory=dict)
    env: Dict[str, str] = field(default_factory=dict)
    why: List[Why] = field(default_factory=list)

    def because(self, decision: str, reason: str) -> None:
        self.why.append(Why(decision, reason))


def all_reduce(view: HostView, positions: Sequence[int], role: str, pcie_kernels: str = "") -> Choices:
    """Decide NCCL's environment and the all-reduce kernels for GPUs that work together.

    ``role`` is that of the instance; ``pcie_kernels`` names the variable that turns on the release's own all-reduce for
    GPUs without NVLink, where it has one.
    """
    chosen = Choices()
    if len(positions) < 2:
        chosen.because("all-reduce", "one GPU: there is nothing to reduce over")
        return chosen
    facts = view.facts
    gpus = f"GPU {cpulist.render(positions)}"
    fusion = _fusion(facts, positions)
    if fusion.args:
        chosen.args.update(fusion.args)
    chosen.why += fusion.why
    if _nvlink(facts, positions):
        chosen.because("NCCL", f"{gpus} are joined by NVLink: NCCL's own choice stands")
        return chosen
    roots = _roots(view, positions)
    claimed = _claimed(facts, positions)
    if roots > 1 and claimed:
        chosen.env["NCCL_P2P_LEVEL"] = "SYS"
        chosen.because(
            "NCCL_P2P_LEVEL",
            f"{gpus} hang on {roots} root ports without NVLink and the driver claims peer access; NCCL's default level "
            "PXB would go through host memory",
        )
    elif claimed is False:
        chosen.because(
            "NCCL_P2P_LEVEL",
            f"not set: the driver denies peer access between some of {gpus}; NCCL goes through host memory",
        )
    elif claimed is None:
        chosen.because("NCCL_P2P_LEVEL", f"not set: peer access between {gpus} is not known")
    if role == "prefill":
        chosen.because(
            "NCCL_PROTO, NCCL_ALGO",
            "not set: LL sends a flag with every 4 bytes, which halves the bandwidth for the 64 MB that a prefill step "
            "of 8192 tokens reduces; NCCL chooses by size",
        )
    else:
        chosen.env["NCCL_PROTO"] = "LL"
        chosen.env["NCCL_ALGO"] = "Ring"
        chosen.because(
            "NCCL_PROTO, NCCL_ALGO",
            "no NVLink: ring with LL reached the PCIe floor of decode in the reference (19% of GPU time); "
            "pd_engine.extra_env wins",
        )
    if pcie_kernels and role != "prefill" and _sm_12x(facts, positions):
        chosen.because(
            "PCIe all-reduce",
            f"off: {pcie_kernels}=1 in pd_engine.extra_env turns on the release's kernels for GPUs without NVLink; its "
            "authors measured 13.6 instead of 21.1 ms a token on 8 sm_120 GPUs, nobody did with this bundle",
        )
    if roots > 1 and _sm_12x(facts, positions):
        chosen.args["disable-custom-all-reduce"] = True
        chosen.because(
            "disable-custom-all-reduce",
            f"{gpus} are sm_12x on {roots} root ports: the engine's kernel is made for NVLink or one PCIe switch",
        )
    return chosen


def transfer(
    here: HostView,
    mine: Sequence[int],
    peers: Sequence[int],
    rdma: Sequence[str],
    interface: Optional[str],
    across: bool,
) -> Choices:
    """Decide UCX's transports for the KV cache between ``mine`` and ``peers`` (GPUs of the same host).

    ``rdma`` names the host's RDMA devices that are up; ``across`` says that a peer is on another host.
    """
    chosen = Choices()
    if across and rdma:
        chosen.env["UCX_TLS"] = "rc," + LANES
        devices = [f"{name}:1" for name in rdma] + ([interface] if interface else [])
        chosen.env["UCX_NET_DEVICES"] = ",".join(devices)
        chosen.because(
            "UCX_TLS", f"peers on other hosts: RDMA over {', '.join(rdma)} carries the KV cache, tcp only the handshake"
        )
        chosen.because(
            "UCX_NET_DEVICES",
            "the RDMA devices that are up" + (f" and {interface} for the handshake" if interface else ""),
        )
        return chosen
    chosen.env["UCX_TLS"] = LANES
    chosen.because(
        "UCX_TLS",
        "KV cache between GPUs of one host: cuda_ipc carries it, cuda_copy is needed for device memory, tcp only for "
        "the handshake",
    )
    if interface:
        chosen.env["UCX_NET_DEVICES"] = interface
        chosen.because("UCX_NET_DEVICES", f"pd_service_interface: {interface}")
    else:
        chosen.because("UCX_NET_DEVICES", "not set: pd_service_interface is not given, UCX chooses")
    denied = [(a, b) for a in mine for b in peers if _pair(here.facts, a, b) is False]
    if denied:
        a, b = denied[0]
        chosen.because(
            "KV lane",
            f"the driver denies peer access between GPU {a} and GPU {b}: the KV cache is staged through host memory",
        )
    return chosen


def _fusion(facts: HostFacts, positions: Sequence[int]) -> Choices:
    """FlashInfer's all-reduce fusion: the engine's architecture gate, then each step of the cuMemCreate probe."""
    chosen = Choices()
    name = "flashinfer all-reduce fusion"
    off = "enforce-disable-flashinfer-allreduce-fusion"
    capabilities = {facts.gpus[i].compute_capability for i in positions}
    if None in capabilities:
        chosen.because(name, "left to the engine: the compute capability is not known")
        return chosen
    outside = sorted(c for c in capabilities if c is not None and c not in FUSION_ARCHITECTURES)
    if outside:
        chosen.args[off] = True
        chosen.because(
            name,
            f"off: compute capability {', '.join(outside)}; the engine's gate is {', '.join(FUSION_ARCHITECTURES)}",
        )
        return chosen
    unknown = False
    for i in positions:
        steps = {step.name: step for step in facts.fabric.steps[i]} if i < len(facts.fabric.steps) else {}
        # As the engine's probe does it: a fabric handle where the device says it has one, else a file descriptor.
        fabric = steps.get("attr_fabric")
        handle = "fabric_create" if fabric is not None and fabric.value == 1 else "fd_create"
        for wanted in ("multicast_granularity", handle):
            step = steps.get(wanted)
            if step is None or step.code is None or step.code == _OUT_OF_MEMORY:
                unknown = True
            elif step.code != 0:
                chosen.args[off] = True
                chosen.because(name, f"off: {wanted} answers {step.code} on GPU {i} ({step.words})")
                return chosen
    if unknown:
        chosen.because(
            name,
            "left to the engine's own probe: a step of ours was not called or met a full GPU, which proves nothing",
        )
    else:
        chosen.because(name, "on where the engine chooses it: every step of the cuMemCreate probe answers 0")
    return chosen


def _sm_12x(facts: HostFacts, positions: Sequence[int]) -> bool:
    return any((facts.gpus[i].compute_capability or "").startswith("12.") for i in positions)


def _nvlink(facts: HostFacts, positions: Sequence[int]) -> bool:
    links = facts.p2p.link_type
    return all(
        a == b or (a < len(links) and b < len(links[a]) and links[a][b].startswith("NV"))
        for a in positions
        for b in positions
    )


def _roots(view: HostView, positions: Sequence[int]) -> int:
    """The number of PCIe root ports above these GPUs, by sysfs, else by the link types."""
    paths = [view.facts.gpus[i].pci_path for i in positions]
    if all(paths):
        return len({path[0] for path in paths})
    links = view.facts.p2p.link_type
    apart = any(
        a < len(links) and b < len(links[a]) and links[a][b] in _OWN_ROOT
        for a in positions
        for b in positions
        if a != b
    )
    return len(positions) if apart else 1


def _claimed(facts: HostFacts, positions: Sequence[int]) -> Optional[bool]:
    answers = [_pair(facts, a, b) for a in positions for b in positions if a != b]
    if any(answer is False for answer in answers):
        return False
    return None if any(answer is None for answer in answers) else True


def _pair(facts: HostFacts, a: int, b: int) -> Optional[bool]:
    matrix = facts.p2p.claimed
    return matrix[a][b] if a < len(matrix) and b < len(matrix[a]) else None
