"""Join what sysfs, NVML and the driver API say of the GPUs, by PCI id. Pure.

Indices are never joined: CUDA's and NVML's differ under masks and orders, PCI ids do not.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Tuple, TypeVar

from . import cuda, pci, sysfs
from .answers import CudaAnswers, CudaDevice, NvmlAnswers, NvmlDevice
from .facts import Driver, Gpu, GpuProcess, NumaNode, PcieLink

T = TypeVar("T")


def join(
    bus: List[sysfs.PciGpu],
    cuda_answers: CudaAnswers,
    nvml_answers: NvmlAnswers,
    nodes: List[NumaNode],
    command: Callable[[int], str] = lambda pid: "",
    unit: Callable[[int], Optional[str]] = lambda pid: None,
) -> List[Gpu]:
    """Return every GPU that any source knows, ascending by PCI id.

    ``command`` names a process by its pid, ``unit`` its systemd unit. A sandbox may hide the PCI bus: such a GPU has no
    path, and its node follows from the only-node rule or is not known.
    """
    by_bus = {gpu.pci: gpu for gpu in bus}
    by_cuda = {device.pci: device for device in cuda_answers.devices if device.pci}
    by_nvml = {device.pci: device for device in nvml_answers.devices}
    addresses = sorted({*by_bus, *by_cuda, *by_nvml}, key=pci.sort_key)
    return [
        _gpu(
            by_bus.get(address) or _unseen(address, nodes),
            by_cuda.get(address),
            by_nvml.get(address) or NvmlDevice(address),
            cuda_answers.status,
            nvml_answers.status,
            lambda seen: GpuProcess(seen.pid, seen.command or command(seen.pid), seen.memory_bytes, unit(seen.pid)),
        )
        for address in addresses
    ]


def _unseen(address: str, nodes: List[NumaNode]) -> sysfs.PciGpu:
    node, source = sysfs.numa_node(None, "", nodes)
    return sysfs.PciGpu(address, node, source, "", [], "", None, PcieLink(), ["sysfs does not show this GPU"])


def _gpu(
    bus: sysfs.PciGpu,
    device: Optional[CudaDevice],
    nvml: NvmlDevice,
    cuda_status: str,
    nvml_status: str,
    named: Callable[[GpuProcess], GpuProcess],
) -> Gpu:
    problems = [*bus.problems, *nvml.problems, *(device.problems if device else [])]
    if cuda_status == "ok" and device is None:
        problems.append("the driver API does not list this GPU" + (" (MIG is on)" if nvml.mig else ""))
    if nvml_status == "ok" and nvml.index is None and not nvml.problems:
        problems.append("NVML does not list this GPU")
    seen = device or CudaDevice(index=-1)
    return Gpu(
        pci=bus.pci,
        index=device.index if device else None,
        nvml_index=nvml.index,
        uuid=_first(nvml.uuid, seen.uuid),
        name=_first(nvml.name, seen.name),
        compute_capability=_first(seen.compute_capability, nvml.compute_capability),
        memory_bytes=_first(nvml.memory_bytes, seen.memory_bytes),
        memory_used_bytes=nvml.memory_used_bytes,
        numa_node=bus.numa_node,
        numa_source=bus.numa_source,
        local_cpus=bus.local_cpus,
        pci_path=bus.path,
        pci_root=bus.root,
        iommu_group=bus.iommu_group,
        link=bus.link,
        device_id=bus.device_id,
        minor=nvml.minor,
        bar1_bytes=nvml.bar1_bytes,
        memory_node=_first(nvml.memory_node, seen.memory_node),
        mig=nvml.mig,
        ecc=nvml.ecc,
        persistence=nvml.persistence,
        compute_mode=nvml.compute_mode,
        fabric_state=nvml.fabric_state,
        nvlinks_active=nvml.nvlinks_active,
        processes=[named(process) for process in nvml.processes],
        problems=problems,
    )


def _first(*values: Optional[T]) -> Optional[T]:
    return next((value for value in values if value is not None), None)


def driver(
    modules: sysfs.Modules,
    cuda_answers: CudaAnswers,
    nvml_answers: NvmlAnswers,
    bus: List[sysfs.PciGpu],
    nvswitches: int,
    fabric_manager: Optional[str],
) -> Driver:
    """Return the Driver section: the state in one word, and the code and words behind it."""
    state, detail = _state(modules, cuda_answers, nvml_answers, bus)
    library = _first(cuda.file_version(cuda_answers.library), cuda.file_version(nvml_answers.library))
    loaded = modules.nvidia or nvml_answers.driver_version
    if state == "mismatch" and loaded and library and loaded != library:
        detail += f"; loaded {loaded}, installed {library}"
    return Driver(
        state=state,
        loaded_version=loaded,
        library_version=library or nvml_answers.driver_version,
        cuda_version=cuda_answers.version,
        open_modules=modules.open_modules,
        nouveau_loaded=modules.nouveau,
        fabric_manager=fabric_manager,
        nvswitches=nvswitches,
        confidential_compute=nvml_answers.confidential_compute,
        detail=detail,
    )


def _state(modules: sysfs.Modules, cu: CudaAnswers, ml: NvmlAnswers, bus: List[sysfs.PciGpu]) -> Tuple[str, str]:
    details = "; ".join(answer.detail for answer in (cu, ml) if answer.status not in ("ok", "missing"))
    if "wedged" in (cu.status, ml.status):
        return "wedged", details
    if "crashed" in (cu.status, ml.status):
        return "error", details
    if cu.status == "missing":
        if ml.status == "missing":
            loaded = modules.nvidia is not None
            return "absent", "no driver library" + (", but the kernel module is loaded" if loaded else "")
        return "error", "; ".join(filter(None, ("NVML is there but libcuda.so.1 is not", cu.detail, details)))
    if cu.status == "ok":
        return ("ok", details) if cu.devices else ("no_device", details or "cuInit succeeded and found no device")
    if cu.init_code == 803 or ml.init_code == 18:
        return "mismatch", details
    not_loaded = modules.nvidia is None and ml.status != "ok"
    if ml.init_code == 9 or (cu.init_code == 100 and not_loaded):
        return "not_loaded", details
    if ml.init_code in (4, 17) or (cu.init_code == 100 and (bus or _any_device(ml))):
        return "no_access", details
    if cu.init_code == 100:
        return "no_device", details
    return "error", details


def _any_device(ml: NvmlAnswers) -> bool:
    return any(not device.problems for device in ml.devices)


def by_position(gpus: List[Gpu], order: List[str], matrix: List[List[Optional[T]]]) -> List[List[Optional[T]]]:
    """Re-index a library's matrix (rows and columns in ``order``, PCI ids) by the position in ``gpus``."""
    at: Dict[str, int] = {address: index for index, address in enumerate(order)}

    def cell(a: Gpu, b: Gpu) -> Optional[T]:
        if a.pci not in at or b.pci not in at or not matrix:
            return None
        return matrix[at[a.pci]][at[b.pci]]

    return [[cell(a, b) for b in gpus] for a in gpus]
