"""The facts document: what a probe found on one host. Numbers and codes, no judgement.

``HostFacts`` is filled by ``pd_gpu_info`` (all but what follows, the last measurement of P2P included),
``pd_fabric_info`` (P2P and fabric, in probe.yml: what it has just measured) and ``pd_host_info`` (ports, disks),
and read by the planner, the report, drift and the support bundle. Every field that a machine may be unable to answer is
Optional, and None means "not known", never "no" and never node 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence

from . import codec

SCHEMA = 1


@dataclass(frozen=True)
class NumaNode:
    """One node of /sys/devices/system/node."""

    node: int
    cpus: str  # online CPUs, kernel list; "" for a node without CPUs
    siblings: List[str] = field(default_factory=list)  # one kernel list per physical core, online CPUs only
    memory_bytes: Optional[int] = None  # 0: the node has no memory of its own
    distances: List[int] = field(default_factory=list)  # to each node, in the order of the node numbers


@dataclass(frozen=True)
class PcieLink:
    """A PCIe link's generation (1 to 6) and width (lanes). Idle GPUs report current_gen 1."""

    max_gen: Optional[int] = None
    max_width: Optional[int] = None
    current_gen: Optional[int] = None
    current_width: Optional[int] = None
    port_max_gen: Optional[int] = None  # of the parent port: the lower of the two bounds the link
    port_max_width: Optional[int] = None


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    command: str
    memory_bytes: Optional[int] = None
    unit: Optional[str] = None  # the systemd unit of that process


@dataclass(frozen=True)
class Gpu:
    """One GPU, joined by PCI id across sysfs, NVML and the driver API."""

    pci: str  # dddd:bb:dd.f, lower case, four or more digits of domain (sysfs form)
    index: Optional[int] = None  # CUDA's index with CUDA_DEVICE_ORDER=PCI_BUS_ID and nothing masked
    nvml_index: Optional[int] = None
    uuid: Optional[str] = None
    name: Optional[str] = None
    compute_capability: Optional[str] = None  # "12.0"
    memory_bytes: Optional[int] = None
    memory_used_bytes: Optional[int] = None
    numa_node: Optional[int] = None  # the CPU node the GPU hangs on
    numa_source: str = "none"  # sysfs | local_cpulist | only-node | none
    local_cpus: str = ""
    pci_path: List[str] = field(default_factory=list)  # bridges from the root port down to the GPU's parent
    pci_root: str = ""  # the host bridge, such as pci0000:00; GPUs of one root reach each other below the CPU
    iommu_group: Optional[str] = None  # "12 (DMA-FQ)": number and type
    link: PcieLink = field(default_factory=PcieLink)
    device_id: Optional[str] = None  # PCI device id, such as 2bb5: the model where no driver names it
    minor: Optional[int] = None  # N of /dev/nvidiaN; need not equal the index
    bar1_bytes: Optional[int] = None
    memory_node: Optional[int] = None  # the GPU's own memory as a NUMA node (GB200): never the CPU's
    mig: Optional[bool] = None
    ecc: Optional[bool] = None
    persistence: Optional[bool] = None
    compute_mode: Optional[str] = None  # default | exclusive_process | prohibited
    fabric_state: Optional[str] = None  # NVML's words: not_supported | not_started | in_progress | completed
    nvlinks_active: Optional[int] = None
    processes: List[GpuProcess] = field(default_factory=list)
    problems: List[str] = field(default_factory=list)  # e.g. "NVML 15: GPU is lost"


@dataclass(frozen=True)
class Nic:
    name: str
    pci: Optional[str] = None
    numa_node: Optional[int] = None
    speed_mbps: Optional[int] = None
    up: bool = False
    rdma: Optional[str] = None  # the RDMA device's name, such as mlx5_0


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver as loaded and as installed."""

    state: str = "absent"  # ok | absent | not_loaded | mismatch | no_device | no_access | wedged | error
    loaded_version: Optional[str] = None  # /sys/module/nvidia/version
    library_version: Optional[str] = None  # of libnvidia-ml / libcuda on disk
    cuda_version: Optional[int] = None  # cuDriverGetVersion: 13000 is 13.0
    open_modules: Optional[bool] = None
    nouveau_loaded: Optional[bool] = None
    fabric_manager: Optional[str] = None  # systemd state of nvidia-fabricmanager where an NVSwitch exists
    nvswitches: int = 0
    confidential_compute: Optional[bool] = None
    detail: str = ""  # code and words when state is not ok


@dataclass(frozen=True)
class ProbeStep:
    """One call of the driver's API: its return code, and what that code means."""

    name: str
    code: Optional[int]  # None: not called, `words` says why
    words: str
    value: Optional[int] = None


@dataclass(frozen=True)
class P2p:
    """Peer-to-peer matrices, indexed by the position of the GPU in ``HostFacts.gpus``."""

    claimed: List[List[Optional[bool]]] = field(default_factory=list)  # cuDeviceCanAccessPeer
    link_type: List[List[str]] = field(default_factory=list)  # NVL | PIX | PXB | PHB | NODE | SYS | X | ?
    atomics: List[List[Optional[bool]]] = field(default_factory=list)  # native atomics, cuDeviceGetP2PAttribute
    measured_gb_s: Optional[List[List[Optional[float]]]] = None  # one way, one pair at a time
    concurrent_gb_s: Optional[float] = None  # the slowest flow with all pairs between two sets at once
    concurrent_total_gb_s: Optional[float] = None  # the sum of those flows
    concurrent_sets: List[List[int]] = field(default_factory=list)  # the two sets of GPU positions
    data_ok: Optional[bool] = None  # the copied bytes were compared
    measured_at: Optional[str] = None  # ISO 8601 UTC
    note: str = ""  # why nothing was measured, or what went wrong; in words
    regressions: List[str] = field(default_factory=list)  # against the host's baseline


@dataclass(frozen=True)
class Fabric:
    """The cuMemCreate probe, per GPU position: every step apart, never one boolean."""

    steps: List[List[ProbeStep]] = field(default_factory=list)


@dataclass(frozen=True)
class Port:
    """A listening TCP socket and who holds it."""

    port: int
    address: str  # "0.0.0.0", "::", or an address
    pid: Optional[int] = None
    command: Optional[str] = None
    unit: Optional[str] = None  # the systemd unit of that process
    since: Optional[str] = None  # when that process started, ISO 8601 UTC


@dataclass(frozen=True)
class Disk:
    """The filesystem that holds a path (which may not exist yet)."""

    path: str
    free_bytes: int
    total_bytes: int
    filesystem: str = ""


@dataclass(frozen=True)
class System:
    os_id: str = ""
    os_version: str = ""
    kernel: str = ""
    architecture: str = ""
    python: str = ""
    glibc: str = ""
    memory_bytes: Optional[int] = None
    secure_boot: Optional[bool] = None
    iommu_translating: Optional[bool] = None  # an IOMMU is on and not in passthrough
    acs_redirect: List[str] = field(default_factory=list)  # bridges above GPUs with ReqRedir+ set
    acs_unread: List[str] = field(default_factory=list)  # bridges whose ACS state needs root to read
    virtual: Optional[bool] = None  # a hypervisor is below: its IOMMU and bridges are not visible from here
    kernel_cmdline: str = ""  # the options that bear on GPUs, memory and CPUs
    allowed_cpus: str = ""  # what this process may run on (cpuset), kernel list


@dataclass(frozen=True)
class HostFacts:
    """Everything that is known of one host."""

    host: str
    schema: int = SCHEMA
    simulated: bool = False  # the sysfs tree or the driver library is not the machine's own
    system: System = field(default_factory=System)
    numa: List[NumaNode] = field(default_factory=list)
    gpus: List[Gpu] = field(default_factory=list)  # ascending by PCI id
    driver: Driver = field(default_factory=Driver)
    p2p: P2p = field(default_factory=P2p)
    fabric: Fabric = field(default_factory=Fabric)
    nics: List[Nic] = field(default_factory=list)
    ports: List[Port] = field(default_factory=list)
    disks: List[Disk] = field(default_factory=list)
    probe_seconds: Dict[str, float] = field(default_factory=dict)


class FactsError(ValueError):
    """Documents that do not belong together."""


def merge(documents: Sequence[Mapping[str, Any]]) -> HostFacts:
    """Return one document from the partial ones that the modules of one host returned.

    A partial document has ``host``, ``schema``, ``simulated`` and whole sections (``gpus``,
    ``p2p``, ...); of a section that two documents fill, the later one counts. ``probe_seconds``
    are joined, and one simulated part makes the whole simulated. Raises FactsError when hosts or
    schemas differ or none is given, codec.CodecError when a document has another shape.
    """
    if not documents:
        raise FactsError("no facts document was given")
    whole: Dict[str, Any] = {}
    for document in documents:
        for key in ("host", "schema"):
            if key in document and whole.setdefault(key, document[key]) != document[key]:
                raise FactsError(f"{key} differs between facts documents: {whole[key]!r} and {document[key]!r}")
        simulated = bool(whole.get("simulated")) or bool(document.get("simulated"))
        seconds = {**whole.get("probe_seconds", {}), **document.get("probe_seconds", {})}
        whole.update(document)
        whole.update(simulated=simulated, probe_seconds=seconds)
    if whole.get("schema", SCHEMA) != SCHEMA:
        raise FactsError(f"facts of schema {whole['schema']!r}; this version reads schema {SCHEMA}")
    return codec.load(HostFacts, whole)
