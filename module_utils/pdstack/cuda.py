"""The CUDA driver API by ctypes: what the probe asks of libcuda, without ever making a context.

Struct layouts and enums are those of cuda.h 13.0, functions by their ABI names (``_v2``). The
cuMemCreate steps mirror the probe that decides flashinfer's all-reduce fusion (a pinned device
allocation of one granule, GPUDirect RDMA capable), each step reported apart with its code.

Two things never happen here: a multicast object is never created (only its granularity is asked:
a failed creation can take an NVSwitch domain down) and managed memory is never used. Whatever a
step creates is released before the next one, and an exported file descriptor is closed.

This runs in a child process (see isolate.py): a wedged driver blocks the child alone.
"""

from __future__ import annotations

import ctypes
import os
import re
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from typing import Any, Callable, List, Mapping, Optional, Tuple

from . import codec, codes, pci
from .answers import CudaAnswers, CudaDevice
from .facts import ProbeStep

LIBRARY = "libcuda.so.1"
# Where a library may be that the loader's cache does not know: images with the driver mounted in.
FOLDERS = ("/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/run/opengl-driver/lib")

ATTR_PCI_BUS, ATTR_PCI_DEVICE, ATTR_PCI_DOMAIN = 33, 34, 50
ATTR_MAJOR, ATTR_MINOR = 75, 76
ATTR_NUMA_CONFIG, ATTR_NUMA_ID = 130, 131
ATTRIBUTE_STEPS = (
    ("attr_vmm", 102),
    ("attr_posix_fd", 103),
    ("attr_gdr", 110),
    ("attr_fabric", 128),
    ("attr_multicast", 132),
)
P2P_ATOMICS = 3
HANDLE_FD, HANDLE_FABRIC = 1, 8
RECOMMENDED = 1
FABRIC_HANDLE_BYTES = 64


class Location(ctypes.Structure):
    """CUmemLocation: DEVICE is 1."""

    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp, 32 bytes."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("compression", c_ubyte),
        ("gpu_direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class MulticastProp(ctypes.Structure):
    """CUmulticastObjectProp, 32 bytes. Used for the granularity query and nothing else."""

    _fields_ = [("devices", c_uint), ("size", c_size_t), ("handle_types", c_ulonglong), ("flags", c_ulonglong)]


class FunctionMissing(Exception):
    """This driver's library does not have the function."""


class Library:
    """libcuda with every call announced before it is made, so that a hang has a name."""

    def __init__(self, handle: Any, announce: Callable[[str], None] = lambda name: None) -> None:
        self._handle = handle
        self._announce = announce

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function and return its CUresult. Raises FunctionMissing."""
        try:
            function = getattr(self._handle, name)
        except AttributeError:
            raise FunctionMissing(name) from None
        self._announce(name)
        return int(function(*arguments))

    def attribute(self, attribute: int, device: int) -> Tuple[int, int]:
        """Return (code, value) of a device attribute."""
        value = c_int()
        code = self.call("cuDeviceGetAttribute", byref(value), c_int(attribute), c_int(device))
        return code, value.value


def load(name: str, folder: Optional[str]) -> Any:
    """Load a driver library from a folder, or by the loader's own search. Raises OSError."""
    if folder:
        return ctypes.CDLL(os.path.join(folder, name))
    try:
        return ctypes.CDLL(name)
    except OSError:
        for known in FOLDERS:
            if os.path.exists(os.path.join(known, name)):
                return ctypes.CDLL(os.path.join(known, name))
        raise


def loaded_file(name: str, maps: str = "/proc/self/maps") -> str:
    """Return the file behind a loaded library, links resolved: its suffix is the driver's version."""
    stem = name.split(".so")[0]
    try:
        with open(maps, encoding="utf-8") as stream:
            for line in stream:
                path = line.rstrip("\n").partition("/")[2]
                if os.path.basename(path).startswith(stem + ".so"):
                    return os.path.realpath("/" + path)
    except OSError:
        pass
    return ""


def file_version(path: str) -> Optional[str]:
    """Return the driver version in a library's file name (``libcuda.so.595.58.03``), if it has one."""
    match = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)$", path)
    return match.group(1) if match else None


def survey(request: Mapping[str, Any], announce: Callable[[str], None]) -> Any:
    """Child entry: ask libcuda everything and return CudaAnswers as plain JSON.

    Request: ``folder`` (of the library, or None), ``fabric`` (run the cuMemCreate steps).
    """
    announce(f"dlopen {LIBRARY}")
    try:
        handle = load(LIBRARY, request.get("folder"))
    except OSError as error:
        return codec.dump(CudaAnswers(status="missing", detail=str(error)))
    return codec.dump(ask(Library(handle, announce), loaded_file(LIBRARY), bool(request.get("fabric", True))))


def ask(library: Library, path: str, fabric: bool) -> CudaAnswers:
    """Return the answers of a loaded library."""
    version = c_int()
    version_code = library.call("cuDriverGetVersion", byref(version))
    code = library.call("cuInit", c_uint(0))
    known_version = version.value if version_code == 0 else None
    if code:
        return CudaAnswers("error", path, code, f"cuInit: {codes.cuda(code)} ({code})", known_version)
    count = c_int()
    code = library.call("cuDeviceGetCount", byref(count))
    if code:
        return CudaAnswers("error", path, code, f"cuDeviceGetCount: {codes.cuda(code)} ({code})", known_version)
    opened = [_open(library, index) for index in range(count.value)]
    numbers = [number for _code, number in opened]
    return CudaAnswers(
        status="ok",
        library=path,
        init_code=0,
        version=known_version,
        devices=[_device(library, index, code, number, fabric) for index, (code, number) in enumerate(opened)],
        peer=[[_pair(library, _peer, a, b) for b in numbers] for a in numbers],
        atomics=[[_pair(library, _atomics, a, b) for b in numbers] for a in numbers],
    )


def _open(library: Library, index: int) -> Tuple[int, Optional[int]]:
    """Return (code, CUdevice) of an ordinal; the two numbers need not be equal."""
    device = c_int()
    code = library.call("cuDeviceGet", byref(device), c_int(index))
    return code, None if code else device.value


def _pair(
    library: Library, ask_pair: Callable[[Library, int, int], Optional[bool]], a: Optional[int], b: Optional[int]
) -> Optional[bool]:
    return None if a is None or b is None or a == b else ask_pair(library, a, b)


def _device(library: Library, index: int, code: int, device: Optional[int], fabric: bool) -> CudaDevice:
    if device is None:
        return CudaDevice(index=index, problems=[f"cuDeviceGet: {codes.cuda(code)} ({code})"])
    number = device
    problems: List[str] = []

    def attribute(which: int) -> Optional[int]:
        code, value = library.attribute(which, number)
        if code:
            problems.append(f"cuDeviceGetAttribute({which}): {codes.cuda(code)} ({code})")
        return None if code else value

    domain, bus, slot = (attribute(which) for which in (ATTR_PCI_DOMAIN, ATTR_PCI_BUS, ATTR_PCI_DEVICE))
    major, minor = attribute(ATTR_MAJOR), attribute(ATTR_MINOR)
    numa_code, numa_config = library.attribute(ATTR_NUMA_CONFIG, number)
    memory_node = library.attribute(ATTR_NUMA_ID, number)[1] if numa_code == 0 and numa_config == 1 else None
    known = domain is not None and bus is not None and slot is not None
    return CudaDevice(
        index=index,
        pci=pci.compose(domain or 0, bus or 0, slot or 0) if known else "",
        uuid=_uuid(library, number),
        name=_name(library, number),
        compute_capability=None if major is None or minor is None else f"{major}.{minor}",
        memory_bytes=_memory(library, number),
        memory_node=memory_node,
        steps=steps(library, number) if fabric else [],
        problems=problems,
    )


def _uuid(library: Library, device: int) -> Optional[str]:
    raw = (c_ubyte * 16)()
    if library.call("cuDeviceGetUuid_v2", raw, c_int(device)):
        return None
    text = bytes(raw).hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _name(library: Library, device: int) -> Optional[str]:
    buffer = ctypes.create_string_buffer(256)
    if library.call("cuDeviceGetName", buffer, c_int(256), c_int(device)):
        return None
    return buffer.value.decode("utf-8", "replace")


def _memory(library: Library, device: int) -> Optional[int]:
    size = c_size_t()
    return None if library.call("cuDeviceTotalMem_v2", byref(size), c_int(device)) else size.value


def _peer(library: Library, a: int, b: int) -> Optional[bool]:
    value = c_int()
    return None if library.call("cuDeviceCanAccessPeer", byref(value), c_int(a), c_int(b)) else bool(value.value)


def _atomics(library: Library, a: int, b: int) -> Optional[bool]:
    value = c_int()
    code = library.call("cuDeviceGetP2PAttribute", byref(value), c_int(P2P_ATOMICS), c_int(a), c_int(b))
    return None if code else bool(value.value)


def steps(library: Library, device: int) -> List[ProbeStep]:
    """Run the cuMemCreate probe on one device and return each step with its code.

    The multicast granularity is asked for each GPU alone (numDevices 1), as the engine does.
    """
    found: List[ProbeStep] = []
    values = {}
    for name, attribute in ATTRIBUTE_STEPS:
        code, value = library.attribute(attribute, device)
        values[name] = value if code == 0 else 0
        found.append(ProbeStep(name, code, _words(code, "yes" if value else "no"), None if code else value))
    found += _allocate(library, device, "fd", HANDLE_FD, bool(values["attr_gdr"]))
    if values["attr_fabric"]:
        found += _allocate(library, device, "fabric", HANDLE_FABRIC, bool(values["attr_gdr"]))
    else:
        found.append(ProbeStep("fabric_create", None, "not called: the device has no fabric handles"))
    prop, granularity = MulticastProp(devices=1, size=2 << 20, handle_types=HANDLE_FD), c_size_t()
    found.append(
        _step(
            library,
            "multicast_granularity",
            "cuMulticastGetGranularity",
            (byref(granularity), byref(prop), c_int(RECOMMENDED)),
            lambda: granularity.value,
        )
    )
    return found


def _allocate(library: Library, device: int, kind: str, handle_type: int, rdma: bool) -> List[ProbeStep]:
    """Granularity, create, export and release of one granule with one kind of handle."""
    prop = AllocationProp(type=1, handle_types=handle_type, location=Location(1, device), gpu_direct_rdma=int(rdma))
    granularity, handle = c_size_t(), c_ulonglong()
    found = [
        _step(
            library,
            f"{kind}_granularity",
            "cuMemGetAllocationGranularity",
            (byref(granularity), byref(prop), c_int(RECOMMENDED)),
            lambda: granularity.value,
        )
    ]
    if found[0].code != 0:
        found.append(ProbeStep(f"{kind}_create", None, "not called: the granularity is not known"))
        return found
    arguments = (byref(handle), c_size_t(granularity.value), byref(prop), c_ulonglong(0))
    found.append(_step(library, f"{kind}_create", "cuMemCreate", arguments))
    if found[-1].code != 0:
        return found
    try:
        found.append(_export(library, kind, handle, handle_type))
    finally:
        found.append(_step(library, f"{kind}_release", "cuMemRelease", (handle,)))
    return found


def _export(library: Library, kind: str, handle: c_ulonglong, handle_type: int) -> ProbeStep:
    descriptor, fabric = c_int(-1), (c_ubyte * FABRIC_HANDLE_BYTES)()
    target: Any = byref(descriptor) if handle_type == HANDLE_FD else fabric
    arguments = (target, handle, c_int(handle_type), c_ulonglong(0))
    step = _step(library, f"{kind}_export", "cuMemExportToShareableHandle", arguments)
    if handle_type == HANDLE_FD and step.code == 0 and descriptor.value >= 0:
        os.close(descriptor.value)
    return step


def _step(
    library: Library, name: str, function: str, arguments: Tuple[Any, ...], value: Optional[Callable[[], int]] = None
) -> ProbeStep:
    try:
        code = library.call(function, *arguments)
    except FunctionMissing:
        return ProbeStep(name, None, f"not called: this driver's library has no {function}")
    return ProbeStep(name, code, _words(code, "ok"), value() if value and code == 0 else None)


def _words(code: int, ok: str) -> str:
    if code == codes.OUT_OF_MEMORY:
        return "not known: out of memory, the GPU is in use"
    return codes.cuda(code) if code else ok
