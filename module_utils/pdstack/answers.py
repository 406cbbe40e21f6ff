"""What the two driver libraries answered: the documents that the probe's children print.

Recorded answers can be replayed (a simulated host's ``pdstack-simulated.json`` holds them under
``cuda`` and ``nvml``), so every consumer sees one shape whether a driver was asked or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional

from .facts import GpuProcess, ProbeStep


@dataclass(frozen=True)
class CudaDevice:
    """One device of the driver API, under CUDA_DEVICE_ORDER=PCI_BUS_ID with nothing masked."""

    index: int
    pci: str = ""
    uuid: Optional[str] = None
    name: Optional[str] = None
    compute_capability: Optional[str] = None
    memory_bytes: Optional[int] = None
    memory_node: Optional[int] = None  # attribute 131 where attribute 130 says that there is one
    steps: List[ProbeStep] = field(default_factory=list)
    problems: List[str] = field(default_factory=list)


@dataclass(frozen=True)
class CudaAnswers:
    """The driver API's answers. Matrices are indexed by ``devices``."""

    status: str = "missing"  # ok | missing (no library) | error (init_code) | wedged | crashed
    library: str = ""  # the file that was loaded, links resolved
    init_code: Optional[int] = None  # cuInit
    detail: str = ""  # words when status is not ok
    version: Optional[int] = None  # cuDriverGetVersion
    devices: List[CudaDevice] = field(default_factory=list)
    peer: List[List[Optional[bool]]] = field(default_factory=list)
    atomics: List[List[Optional[bool]]] = field(default_factory=list)


@dataclass(frozen=True)
class NvmlDevice:
    """One GPU by NVML. A GPU that NVML cannot open has a problem and nothing else."""

    pci: str
    index: Optional[int] = None
    minor: Optional[int] = None
    uuid: Optional[str] = None
    name: Optional[str] = None
    compute_capability: Optional[str] = None
    memory_bytes: Optional[int] = None
    memory_used_bytes: Optional[int] = None
    bar1_bytes: Optional[int] = None
    memory_node: Optional[int] = None
    mig: Optional[bool] = None
    ecc: Optional[bool] = None
    persistence: Optional[bool] = None
    compute_mode: Optional[str] = None
    fabric_state: Optional[str] = None
    fabric_status: Optional[int] = None  # the code of the fabric registration itself
    nvlinks_active: Optional[int] = None
    processes: List[GpuProcess] = field(default_factory=list)
    problems: List[str] = field(default_factory=list)


@dataclass(frozen=True)
class NvmlAnswers:
    """NVML's answers. ``topology`` (common ancestor) and ``nvlink`` are indexed by ``devices``."""

    status: str = "missing"
    library: str = ""
    binding: str = ""  # nvidia-ml-py <version> | ctypes
    init_code: Optional[int] = None
    detail: str = ""
    driver_version: Optional[str] = None
    confidential_compute: Optional[bool] = None
    devices: List[NvmlDevice] = field(default_factory=list)
    topology: List[List[Optional[int]]] = field(default_factory=list)
    nvlink: List[List[Optional[bool]]] = field(default_factory=list)
