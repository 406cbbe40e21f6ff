"""The plan document: what runs where, with which arguments, and why. JSON by codec.dump and codec.load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from . import settings_router
from .intent import Host
from .placement import HostView, Spot

SCHEMA = 1


@dataclass(frozen=True)
class Why:
    """A decision and the fact behind it."""

    decision: str
    reason: str


@dataclass(frozen=True)
class ModelRef:
    repo: str
    revision: str
    path: str  # on every GPU host
    served_name: str


@dataclass(frozen=True)
class TopologyRef:
    mode: str
    context_length: int


@dataclass(frozen=True)
class GpuRef:
    position: int  # in HostFacts.gpus
    pci: str
    uuid: Optional[str] = None
    index: Optional[int] = None  # CUDA's, with CUDA_DEVICE_ORDER=PCI_BUS_ID


@dataclass(frozen=True)
class Instance:
    """One engine process tree: a systemd unit on one host."""

    name: str
    role: str  # prefill | decode | aggregated
    index: int
    host: str
    unit: str
    set: str  # instances of one set restart together
    address: str
    gpus: List[GpuRef]
    numa_nodes: List[int]
    memory_nodes: str  # kernel list to bind memory to; "" binds nothing
    cpus: str  # kernel list for CPUAffinity=; "" pins nothing
    ports: Dict[str, int]
    offset: int  # what was added to the first port of its role: kept over re-runs
    args: Dict[str, Any]  # long options without dashes; true is a bare flag
    env: Dict[str, str]
    why: List[Why] = field(default_factory=list)


@dataclass(frozen=True)
class Worker:
    url: str
    bootstrap_port: Optional[int] = None


@dataclass(frozen=True)
class Router:
    name: str
    host: str
    address: str
    unit: str
    ports: Dict[str, int]
    args: Dict[str, Any]  # without the workers
    env: Dict[str, str]
    workers: Dict[str, List[Worker]]  # by role
    implementation: str = "sglang-router"  # sglang-router | smg
    venv: str = "router"  # below the release
    argv: List[str] = field(default_factory=list)  # args and workers as the router's command line
    why: List[Why] = field(default_factory=list)


@dataclass(frozen=True)
class SecurityRef:
    """What is protected and how: that a key exists, never its value."""

    api_key: bool = False
    admin_key: str = "random"  # given | random: each host makes one
    tls: str = "off"  # off | given | own
    tls_names: List[str] = field(default_factory=list)
    firewall: bool = False
    client_networks: List[str] = field(default_factory=list)  # [] is everybody
    metrics_networks: List[str] = field(default_factory=list)
    open_ports: List[int] = field(default_factory=list)
    ssh_ports: List[int] = field(default_factory=list)  # found on the hosts: never closed


@dataclass(frozen=True)
class Plan:
    release: str
    profile: str
    model: ModelRef
    topology: TopologyRef
    instances: List[Instance]
    routers: List[Router]
    canary: settings_router.Canary = field(default_factory=settings_router.Canary)
    info_path: str = "/server_info"  # where an engine of this release tells its own configuration
    security: SecurityRef = field(default_factory=SecurityRef)
    kernel_extension: bool = False  # whether any instance loads the bundle's own kernels
    notes: List[str] = field(default_factory=list)
    schema: int = SCHEMA


@dataclass(frozen=True)
class Seat:
    """An instance with a place: what the renderer of arguments and environment reads."""

    role: str
    index: int  # over the whole inventory, by role
    set: str
    tp: int
    host: Host
    view: HostView
    spot: Spot
    offset: int  # number of the instance among those of its role on its host: added to its ports

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"
