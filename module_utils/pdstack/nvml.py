"""NVML: what the driver's management library says of each GPU.

Where the target's Python has nvidia-ml-py (module ``pynvml``) that is used; on a bare host a small
ctypes stand-in with the same names answers, so nothing need be installed. The survey is written
once against those names. Struct layouts are those of nvml.h.

This runs in a child process (see isolate.py).
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_int, c_ubyte, c_uint, c_ulonglong, c_void_p
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from . import codec, codes, cuda, pci
from .answers import NvmlAnswers, NvmlDevice
from .facts import GpuProcess

LIBRARY = "libnvidia-ml.so.1"
NOT_SUPPORTED = 3
MAX_LINKS = 36
COMMON_ANCESTOR = "nvmlDeviceGetTopologyCommonAncestor"
CAPS_INDEX_NVLINK = 2
MEMORY_V2 = 0x02000028
FABRIC_INFO_V2 = 0x02000024
FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
# "not supported" and "this driver has no such function" are answers, not troubles
QUIET = (NOT_SUPPORTED, 13)


class NVMLError(Exception):
    """An nvmlReturn_t other than success, as nvidia-ml-py raises it."""

    def __init__(self, value: int) -> None:
        super().__init__(f"{codes.nvml(value)} ({value})")
        self.value = value


class _PciInfo(ctypes.Structure):
    _fields_ = [
        ("busIdLegacy", c_char * 16),
        ("domain", c_uint),
        ("bus", c_uint),
        ("device", c_uint),
        ("pciDeviceId", c_uint),
        ("pciSubSystemId", c_uint),
        ("busId", c_char * 32),
    ]


class _Memory(ctypes.Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class _MemoryV2(ctypes.Structure):
    _fields_ = [
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    ]


class _Bar1Memory(ctypes.Structure):
    _fields_ = [("bar1Total", c_ulonglong), ("bar1Free", c_ulonglong), ("bar1Used", c_ulonglong)]


class _ProcessInfo(ctypes.Structure):
    _fields_ = [
        ("pid", c_uint),
        ("usedGpuMemory", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    ]


class _ConfComputeState(ctypes.Structure):
    _fields_ = [("environment", c_uint), ("ccFeature", c_uint), ("devToolsMode", c_uint)]


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t, 36 bytes."""

    _fields_ = [
        ("version", c_uint),
        ("clusterUuid", c_ubyte * 16),
        ("status", c_uint),
        ("cliqueId", c_uint),
        ("state", c_ubyte),
        ("healthMask", c_uint),
    ]


class CtypesNvml:
    """The part of nvidia-ml-py that the survey uses, by ctypes: same names, arguments and returns."""

    NVMLError = NVMLError
    nvmlMemory_v2 = MEMORY_V2  # noqa: N815
    c_nvmlGpuFabricInfo_v2_t = _FabricInfo  # noqa: N815

    def __init__(self, library: Any) -> None:
        self._library = library

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NVMLError(13) from None
        code = int(function(*arguments))
        if code:
            raise NVMLError(code)

    def _number(self, name: str, *arguments: Any) -> int:
        value = c_uint()
        self._call(name, *arguments, byref(value))
        return value.value

    def _pair(self, name: str, handle: Any) -> List[int]:
        first, second = c_uint(), c_uint()
        self._call(name, handle, byref(first), byref(second))
        return [first.value, second.value]

    def _text(self, name: str, *handle: Any) -> str:
        buffer = ctypes.create_string_buffer(128)
        self._call(name, *handle, buffer, c_uint(len(buffer)))
        return buffer.value.decode("utf-8", "replace")

    def _handle(self, name: str, key: Any) -> Any:
        handle = c_void_p()
        self._call(name, key, byref(handle))
        return handle

    def nvmlInit(self) -> None:
        self._call("nvmlInitWithFlags", c_uint(0))

    def nvmlShutdown(self) -> None:
        self._call("nvmlShutdown")

    def nvmlSystemGetDriverVersion(self) -> str:
        return self._text("nvmlSystemGetDriverVersion")

    def nvmlSystemGetConfComputeState(self) -> Any:
        state = _ConfComputeState()
        self._call("nvmlSystemGetConfComputeState", byref(state))
        return state

    def nvmlDeviceGetCount(self) -> int:
        return self._number("nvmlDeviceGetCount_v2")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._handle("nvmlDeviceGetHandleByIndex_v2", c_uint(index))

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: bytes) -> Any:
        return self._handle("nvmlDeviceGetHandleByPciBusId_v2", ctypes.c_char_p(bus_id))

    def nvmlDeviceGetPciInfo_v3(self, handle: Any) -> Any:
        info = _PciInfo()
        self._call("nvmlDeviceGetPciInfo_v3", handle, byref(info))
        return info

    def nvmlDeviceGetIndex(self, handle: Any) -> int:
        return self._number("nvmlDeviceGetIndex", handle)

    def nvmlDeviceGetMinorNumber(self, handle: Any) -> int:
        return self._number("nvmlDeviceGetMinorNumber", handle)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return self._text("nvmlDeviceGetUUID", handle)

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return self._text("nvmlDeviceGetName", handle)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> List[int]:
        return self._pair("nvmlDeviceGetCudaComputeCapability", handle)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Optional[int] = None) -> Any:
        if version:
            memory: Any = _MemoryV2(version=version)
            self._call("nvmlDeviceGetMemoryInfo_v2", handle, byref(memory))
            return memory
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", handle, byref(memory))
        return memory

    def nvmlDeviceGetBAR1MemoryInfo(self, handle: Any) -> Any:
        memory = _Bar1Memory()
        self._call("nvmlDeviceGetBAR1MemoryInfo", handle, byref(memory))
        return memory

    def nvmlDeviceGetNumaNodeId(self, handle: Any) -> int:
        node = c_int()
        self._call("nvmlDeviceGetNumaNodeId", handle, byref(node))
        return node.value

    def nvmlDeviceGetMigMode(self, handle: Any) -> List[int]:
        return self._pair("nvmlDeviceGetMigMode", handle)

    def nvmlDeviceGetEccMode(self, handle: Any) -> List[int]:
        return self._pair("nvmlDeviceGetEccMode", handle)

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> List[int]:
        counts = [c_uint() for _count in range(4)]
        self._call("nvmlDeviceGetRemappedRows", handle, *map(byref, counts))
        return [count.value for count in counts]

    def nvmlDeviceGetPersistenceMode(self, handle: Any) -> int:
        return self._number("nvmlDeviceGetPersistenceMode", handle)

    def nvmlDeviceGetComputeMode(self, handle: Any) -> int:
        return self._number("nvmlDeviceGetComputeMode", handle)

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int:
        return self._number("nvmlDeviceGetNvLinkState", handle, c_uint(link))

    def nvmlDeviceGetTopologyCommonAncestor(self, a: Any, b: Any) -> int:
        return self._number("nvmlDeviceGetTopologyCommonAncestor", a, b)

    def nvmlDeviceGetP2PStatus(self, a: Any, b: Any, index: int) -> int:
        return self._number("nvmlDeviceGetP2PStatus", a, b, c_uint(index))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> List[Any]:
        count = c_uint(64)
        for _attempt in range(3):  # processes may start between the calls
            processes = (_ProcessInfo * count.value)()
            try:
                self._call("nvmlDeviceGetComputeRunningProcesses_v3", handle, byref(count), processes)
                return list(processes[: count.value])
            except NVMLError as error:
                if error.value != 7:  # the array is too small; count is now what it takes
                    raise
                count = c_uint(count.value * 2 + 8)
        raise NVMLError(7)

    def nvmlDeviceGetGpuFabricInfoV(self, handle: Any, info: Any) -> int:
        self._call("nvmlDeviceGetGpuFabricInfoV", handle, info)
        return 0


def bind(folder: Optional[str], prefer_package: bool = True) -> Tuple[Any, str]:
    """Return the NVML interface and its name; the library is loaded. Raises OSError when there is none.

    The library is loaded by path first: the loader then gives nvidia-ml-py the same one, since it
    asks for the same soname.
    """
    library = cuda.load(LIBRARY, folder)
    if prefer_package:
        try:
            import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

            needed = [name for name in dir(CtypesNvml) if name.startswith("nvml")]
            if all(hasattr(pynvml, name) for name in needed):
                return pynvml, f"nvidia-ml-py {getattr(pynvml, '__version__', '')}".strip()
        except Exception:  # a broken package on the target must not cost the probe
            pass
    return CtypesNvml(library), "ctypes"


def survey(request: Mapping[str, Any], announce: Callable[[str], None]) -> Any:
    """Child entry: ask NVML everything and return NvmlAnswers as plain JSON.

    Request: ``folder`` (of the library, or None), ``pci`` (the GPUs that sysfs knows, which NVML
    may have lost), ``prefer_package`` (default true).
    """
    announce(f"dlopen {LIBRARY}")
    try:
        api, binding = bind(request.get("folder"), bool(request.get("prefer_package", True)))
    except OSError as error:
        return codec.dump(NvmlAnswers(status="missing", detail=str(error)))
    return codec.dump(ask(api, binding, cuda.loaded_file(LIBRARY), list(request.get("pci", [])), announce))


def ask(api: Any, binding: str, path: str, expected: List[str], announce: Callable[[str], None]) -> NvmlAnswers:
    """Return the answers of an NVML interface."""
    announce("nvmlInit")
    try:
        api.nvmlInit()
    except api.NVMLError as error:
        code = int(error.value)
        words = f"nvmlInit: {codes.nvml(code)} ({code})"
        return NvmlAnswers("error", path, binding, code, words)
    try:
        return _ask(api, binding, path, expected, announce)
    finally:
        announce("nvmlShutdown")
        api.nvmlShutdown()


def _ask(api: Any, binding: str, path: str, expected: List[str], announce: Callable[[str], None]) -> NvmlAnswers:
    quiet: List[str] = []
    asker = _Asker(api, quiet, announce)
    handles, devices = _open(api, expected, announce)
    opened = [device for device in devices if device.pci in handles]
    return NvmlAnswers(
        status="ok",
        library=path,
        binding=binding,
        init_code=0,
        driver_version=asker("nvmlSystemGetDriverVersion"),
        confidential_compute=_confidential(asker),
        devices=[_device(api, handles[d.pci], d, announce) if d.pci in handles else d for d in devices],
        topology=_matrix(devices, lambda a, b: asker(COMMON_ANCESTOR, handles[a], handles[b]), opened),
        nvlink=_matrix(devices, lambda a, b: _nvlink(asker, handles[a], handles[b]), opened),
    )


class _Asker:
    """Calls NVML and turns an error into None, noting those that are troubles."""

    def __init__(self, api: Any, problems: List[str], announce: Callable[[str], None]) -> None:
        self._api, self._problems, self._announce = api, problems, announce

    def __call__(self, name: str, *arguments: Any) -> Any:
        self._announce(name)
        try:
            return getattr(self._api, name)(*arguments)
        except self._api.NVMLError as error:
            code = int(error.value)
            words = f"NVML {code}: {codes.nvml(code)}"
            if code not in QUIET and words not in self._problems:
                self._problems.append(words)
            return None


def _open(api: Any, expected: List[str], announce: Callable[[str], None]) -> Tuple[Dict[str, Any], List[NvmlDevice]]:
    """Return handles by PCI id, and the devices: those by index, then those that only sysfs knows."""
    handles: Dict[str, Any] = {}
    devices: List[NvmlDevice] = []
    announce("nvmlDeviceGetCount")
    for index in range(api.nvmlDeviceGetCount()):
        announce(f"nvmlDeviceGetHandleByIndex {index}")
        try:
            handle = api.nvmlDeviceGetHandleByIndex(index)
            info = api.nvmlDeviceGetPciInfo_v3(handle)
        except api.NVMLError:
            continue  # found again below, by its PCI id, with its code
        address = pci.compose(info.domain, info.bus, info.device)
        handles[address] = handle
        devices.append(NvmlDevice(address, index))
    for address in expected:
        if address in handles:
            continue
        announce(f"nvmlDeviceGetHandleByPciBusId {address}")
        try:
            handles[address] = api.nvmlDeviceGetHandleByPciBusId(pci.nvml(address).encode())
            devices.append(NvmlDevice(address))
        except api.NVMLError as error:
            code = int(error.value)
            devices.append(NvmlDevice(address, problems=[f"NVML {code}: {codes.nvml(code)}"]))
    return handles, devices


def _device(api: Any, handle: Any, device: NvmlDevice, announce: Callable[[str], None]) -> NvmlDevice:
    problems: List[str] = []
    ask_for = _Asker(api, problems, announce)
    capability = ask_for("nvmlDeviceGetCudaComputeCapability", handle)
    memory = ask_for("nvmlDeviceGetMemoryInfo", handle, api.nvmlMemory_v2) or ask_for("nvmlDeviceGetMemoryInfo", handle)
    bar1 = ask_for("nvmlDeviceGetBAR1MemoryInfo", handle)
    mig, ecc = ask_for("nvmlDeviceGetMigMode", handle), ask_for("nvmlDeviceGetEccMode", handle)
    persistence = ask_for("nvmlDeviceGetPersistenceMode", handle)
    rows = ask_for("nvmlDeviceGetRemappedRows", handle)  # corrected, uncorrected, pending, failed
    if rows and rows[3]:
        problems.append("a bad row of its memory could not be replaced (row remapping failed)")
    fabric_state, fabric_status = _fabric(api, handle, ask_for)
    return NvmlDevice(
        pci=device.pci,
        index=device.index,
        minor=ask_for("nvmlDeviceGetMinorNumber", handle),
        uuid=_text(ask_for("nvmlDeviceGetUUID", handle)),
        name=_text(ask_for("nvmlDeviceGetName", handle)),
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        memory_bytes=memory.total if memory else None,
        memory_used_bytes=memory.used if memory else None,
        bar1_bytes=bar1.bar1Total if bar1 else None,
        memory_node=ask_for("nvmlDeviceGetNumaNodeId", handle),
        mig=bool(mig[0]) if mig else None,
        ecc=bool(ecc[0]) if ecc else None,
        persistence=None if persistence is None else bool(persistence),
        compute_mode=COMPUTE_MODES.get(ask_for("nvmlDeviceGetComputeMode", handle)),
        fabric_state=fabric_state,
        fabric_status=fabric_status,
        nvlinks_active=_nvlinks(api, handle, announce),
        processes=_processes(ask_for("nvmlDeviceGetComputeRunningProcesses", handle) or []),
        problems=problems,
    )


def _text(value: Any) -> Optional[str]:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _confidential(ask_for: _Asker) -> Optional[bool]:
    state = ask_for("nvmlSystemGetConfComputeState")
    return bool(state.ccFeature) if state is not None else None


def _fabric(api: Any, handle: Any, ask_for: _Asker) -> Tuple[Optional[str], Optional[int]]:
    info = api.c_nvmlGpuFabricInfo_v2_t()
    info.version = FABRIC_INFO_V2
    if ask_for("nvmlDeviceGetGpuFabricInfoV", handle, byref(info)) is None:
        return None, None
    return FABRIC_STATES.get(int(info.state), f"state {int(info.state)}"), int(info.status)


def _nvlinks(api: Any, handle: Any, announce: Callable[[str], None]) -> Optional[int]:
    """Count the active NVLinks; None where the GPU has none to ask about."""
    active, answered = 0, False
    for link in range(MAX_LINKS):
        announce(f"nvmlDeviceGetNvLinkState {link}")
        try:
            active += 1 if api.nvmlDeviceGetNvLinkState(handle, link) else 0
            answered = True
        except api.NVMLError:
            break  # past the last link, or no NVLink at all
    return active if answered else None


def _nvlink(ask_for: _Asker, a: Any, b: Any) -> Optional[bool]:
    status = ask_for("nvmlDeviceGetP2PStatus", a, b, CAPS_INDEX_NVLINK)
    return None if status is None else status == 0


def _processes(found: List[Any]) -> List[GpuProcess]:
    """Return processes; NVML gives no memory (all ones) where it may not see it."""
    processes = []
    for process in found:
        used = process.usedGpuMemory
        processes.append(GpuProcess(int(process.pid), "", None if used is None or used >= (1 << 63) else int(used)))
    return processes


def _matrix(devices: List[NvmlDevice], ask_for: Callable[[str, str], Any], opened: List[NvmlDevice]) -> List[List[Any]]:
    usable = {device.pci for device in opened}

    def cell(a: NvmlDevice, b: NvmlDevice) -> Any:
        return ask_for(a.pci, b.pci) if a.pci != b.pci and {a.pci, b.pci} <= usable else None

    return [[cell(a, b) for b in devices] for a in devices]
