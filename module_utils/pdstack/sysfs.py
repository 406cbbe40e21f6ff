"""What the kernel says of a host: NUMA nodes, PCI devices, IOMMU, ACS, modules, boot state.

Everything is read below an injected filesystem root, so a rendered tree answers like a machine.
A file that is missing or unreadable is None ("not known"), never a default. Nothing here judges.

Sources: https://docs.kernel.org/admin-guide/abi-testing.html (sysfs-bus-pci, sysfs-devices-node,
sysfs-kernel-iommu_groups), the PCI Express base specification for the ACS capability.
"""

from __future__ import annotations

import os
import platform
import re
import struct
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

from . import cpulist, pci
from .facts import Nic, NumaNode, PcieLink, System

NVIDIA = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers
NVSWITCH_CLASS = "0x0680"
_ACS_CAPABILITY = 0x000D
_ACS_REQUEST_REDIRECT = 0x0004
_SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # GT/s


_KERNEL_OPTIONS = re.compile(
    r"(intel_|amd_)?iommu|pci|pcie|nvidia|nouveau|nvme|numa|isolcpus|nohz|mitigations|mem|maxcpus|nr_cpus|nosmt|"
    r"(default_)?hugepage|transparent_hugepage|(rd\.driver|modprobe|module)[._]blacklist|intel_idle|processor\.|idle|"
    r"systemd\.unified_cgroup|cgroup|swiotlb|vfio"
)


class Tree:
    """A filesystem root to read from; ``/`` is the machine itself."""

    def __init__(self, root: str = "/") -> None:
        self.root = root

    @property
    def real(self) -> bool:
        return os.path.realpath(self.root) == "/"

    def path(self, *parts: str) -> str:
        return os.path.join(self.root, *parts)

    def exists(self, *parts: str) -> bool:
        return os.path.exists(self.path(*parts))

    def bytes(self, *parts: str) -> Optional[bytes]:
        try:
            with open(self.path(*parts), "rb") as stream:
                return stream.read()
        except OSError:
            return None

    def head(self, name: str, size: int) -> str:
        """Return the start of a file that is long and slow to make, "" where it cannot be read."""
        try:
            with open(self.path(name), "rb") as stream:
                return stream.read(size).decode("utf-8", "replace")
        except OSError:
            return ""

    def text(self, *parts: str) -> Optional[str]:
        data = self.bytes(*parts)
        return None if data is None else data.decode("utf-8", "replace").strip()

    def number(self, *parts: str) -> Optional[int]:
        try:
            return int(self.text(*parts) or "")
        except ValueError:
            return None

    def names(self, *parts: str) -> List[str]:
        try:
            return sorted(os.listdir(self.path(*parts)))
        except OSError:
            return []

    def resolve(self, *parts: str) -> str:
        """Return the path with links resolved (sysfs links are relative, so they stay below the root)."""
        return os.path.realpath(self.path(*parts))


@dataclass(frozen=True)
class Machine:
    """What the running kernel and interpreter say of themselves; never read from a simulated tree."""

    hostname: str = ""
    os_id: str = ""
    os_version: str = ""
    kernel: str = ""
    architecture: str = ""
    python: str = ""
    glibc: str = ""
    allowed_cpus: str = ""

    @classmethod
    def this(cls) -> Machine:
        """Read the machine that runs this process."""
        release = _os_release(Tree("/").text("etc/os-release") or "")
        kernel = os.uname()
        return cls(
            hostname=kernel.nodename,
            os_id=release.get("ID", ""),
            os_version=release.get("VERSION_ID", ""),
            kernel=kernel.release,
            architecture=kernel.machine,
            python=platform.python_version(),
            glibc=_glibc(),
            allowed_cpus=cpulist.render(os.sched_getaffinity(0)),
        )


@dataclass(frozen=True)
class PciGpu:
    """An NVIDIA GPU on the PCI bus, by sysfs alone."""

    pci: str
    numa_node: Optional[int]
    numa_source: str
    local_cpus: str
    path: List[str]
    root: str
    iommu_group: Optional[str]
    link: PcieLink
    problems: List[str] = field(default_factory=list)
    device_id: Optional[str] = None


@dataclass(frozen=True)
class Modules:
    """The kernel modules of interest, as loaded."""

    nvidia: Optional[str]  # version, "" when loaded without one, None when not loaded
    open_modules: Optional[bool]
    nouveau: bool


def _os_release(text: str) -> Dict[str, str]:
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key: value.strip().strip("\"'") for key, value in pairs}


def _glibc() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").replace("glibc ", "")
    except (ValueError, OSError):
        return ""


def system(tree: Tree, machine: Machine, nodes: List[NumaNode], gpus: List[PciGpu]) -> System:
    """Return the System section; IOMMU and ACS are those above the given GPUs."""
    redirect, unread = acs(tree, gpus)
    return System(
        os_id=machine.os_id,
        os_version=machine.os_version,
        kernel=machine.kernel,
        architecture=machine.architecture,
        python=machine.python,
        glibc=machine.glibc,
        memory_bytes=_memory(tree, nodes),
        secure_boot=secure_boot(tree),
        iommu_translating=iommu_translating(tree, gpus),
        acs_redirect=redirect,
        acs_unread=unread,
        virtual=virtual(tree),
        kernel_cmdline=kernel_options(tree.text("proc/cmdline") or ""),
        allowed_cpus=_allowed_cpus(tree, machine),
    )


def _allowed_cpus(tree: Tree, machine: Machine) -> str:
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", tree.text("proc/self/status") or "", re.MULTILINE)
    if match:
        return cpulist.render(cpulist.parse(match.group(1)))
    return machine.allowed_cpus if tree.real else ""


def _memory(tree: Tree, nodes: List[NumaNode]) -> Optional[int]:
    total = _meminfo(tree.text("proc/meminfo") or "")
    if total is not None:
        return total
    known = [node.memory_bytes for node in nodes if node.memory_bytes is not None]
    return sum(known) if known else None


def _meminfo(text: str) -> Optional[int]:
    match = re.search(r"MemTotal:\s*(\d+)\s*kB", text)
    return int(match.group(1)) * 1024 if match else None


def secure_boot(tree: Tree) -> Optional[bool]:
    """Return whether Secure Boot is on; a machine that booted without EFI has none."""
    if not tree.exists("sys/firmware/efi"):
        return False if tree.exists("sys/firmware") else None
    data = tree.bytes(_SECURE_BOOT)  # four bytes of attributes, then the value
    return bool(data[4]) if data and len(data) >= 5 else None


def virtual(tree: Tree) -> Optional[bool]:
    """Return whether the processor says that a hypervisor is below; not known where it has no flags (Arm)."""
    match = re.search(r"^flags\s*:(.*)$", tree.head("proc/cpuinfo", 16384), re.MULTILINE)
    return "hypervisor" in match.group(1).split() if match else None


def kernel_options(cmdline: str) -> str:
    """Return the options of a kernel command line that bear on GPUs, memory and CPUs; the rest is nobody's business."""
    return " ".join(word for word in cmdline.split(" -- ")[0].split() if _KERNEL_OPTIONS.match(word))


def online_cpus(tree: Tree) -> str:
    """Return the kernel's list of online CPUs."""
    return tree.text("sys/devices/system/cpu/online") or ""


def numa_nodes(tree: Tree) -> List[NumaNode]:
    """Return the NUMA nodes by number, with their online CPUs, cores, memory and distances.

    A kernel without NUMA has no node folder: the machine is then one node 0.
    """
    base = "sys/devices/system/node"
    online = cpulist.parse(online_cpus(tree))
    numbers = sorted(int(name[4:]) for name in tree.names(base) if re.match(r"^node\d+$", name))
    if not numbers and online:
        memory = _meminfo(tree.text("proc/meminfo") or "")
        return [NumaNode(0, cpulist.render(online), _cores(tree, sorted(online)), memory, [10])]
    nodes = []
    for number in numbers:
        cpus = cpulist.parse(tree.text(base, f"node{number}", "cpulist") or "")
        cpus = cpus & online if online else cpus
        nodes.append(
            NumaNode(
                node=number,
                cpus=cpulist.render(cpus),
                siblings=_cores(tree, sorted(cpus)),
                memory_bytes=_meminfo(tree.text(base, f"node{number}", "meminfo") or ""),
                distances=[int(word) for word in (tree.text(base, f"node{number}", "distance") or "").split()],
            )
        )
    return nodes


def _cores(tree: Tree, cpus: List[int]) -> List[str]:
    """Group CPUs by physical core: hyperthreads of one core must go to one owner."""
    left, cores = set(cpus), []
    for cpu in cpus:
        if cpu not in left:
            continue
        text = tree.text("sys/devices/system/cpu", f"cpu{cpu}", "topology/thread_siblings_list")
        core = (cpulist.parse(text) & left) if text else frozenset()
        core = core | {cpu}
        left -= core
        cores.append(cpulist.render(core))
    return cores


def pci_devices(tree: Tree) -> List[str]:
    """Return the PCI ids of the bus, ascending by number."""
    names = tree.names("sys/bus/pci/devices")
    return sorted((name for name in names if re.match(r"^[0-9a-f]{4,}:", name)), key=pci.sort_key)


def _of_class(tree: Tree, classes: Tuple[str, ...]) -> List[str]:
    found = []
    for name in pci_devices(tree):
        kind = tree.text("sys/bus/pci/devices", name, "class") or ""
        if kind.startswith(classes) and tree.text("sys/bus/pci/devices", name, "vendor") == NVIDIA:
            found.append(name)
    return found


def nvswitches(tree: Tree) -> List[str]:
    """Return the PCI ids of NVSwitches (NVIDIA devices of class 0680)."""
    return _of_class(tree, (NVSWITCH_CLASS,))


def gpus(tree: Tree, nodes: List[NumaNode]) -> List[PciGpu]:
    """Return the NVIDIA GPUs of the PCI bus, ascending by PCI id."""
    return [_gpu(tree, name, nodes) for name in _of_class(tree, DISPLAY_CLASSES)]


def _gpu(tree: Tree, name: str, nodes: List[NumaNode]) -> PciGpu:
    base = os.path.join("sys/bus/pci/devices", name)
    path = tree.resolve(base)
    local = tree.text(base, "local_cpulist") or ""
    node, source = numa_node(tree.number(base, "numa_node"), local, nodes)
    config = tree.bytes(base, "config") or b""
    problems = []
    if len(config) >= 4 and config[:4] == b"\xff\xff\xff\xff":
        problems.append("the PCI device answers only ff: it fell off the bus")
    return PciGpu(
        pci=name,
        numa_node=node,
        numa_source=source,
        local_cpus=local,
        path=pci.bridges(path),
        root=pci.root(path),
        iommu_group=_iommu_group(tree, base),
        link=_link(tree, base, path),
        problems=problems,
        device_id=(tree.text(base, "device") or "").replace("0x", "") or None,
    )


def numa_node(reported: Optional[int], local_cpus: str, nodes: List[NumaNode]) -> Tuple[Optional[int], str]:
    """Return a device's NUMA node and how it was found; -1 is never read as node 0.

    First sysfs ``numa_node``; then the one node whose CPUs contain ``local_cpulist``; then the
    only node that has CPUs; else not known.
    """
    if reported is not None and reported >= 0:
        return reported, "sysfs"
    with_cpus = [node for node in nodes if node.cpus]
    local = cpulist.parse(local_cpus)
    holders = [node.node for node in with_cpus if local and local <= cpulist.parse(node.cpus)]
    if len(holders) == 1:
        return holders[0], "local_cpulist"
    if len(with_cpus) == 1:
        return with_cpus[0].node, "only-node"
    return None, "none"


def _generation(text: Optional[str]) -> Optional[int]:
    try:
        return _GENERATIONS.get(float((text or "").split(" ")[0]))
    except ValueError:
        return None  # "Unknown"


def _width(number: Optional[int]) -> Optional[int]:
    return number if number and number < 255 else None  # 0 and 255 stand for "unknown"


def _link(tree: Tree, base: str, path: str) -> PcieLink:
    port = os.path.dirname(path)
    return PcieLink(
        max_gen=_generation(tree.text(base, "max_link_speed")),
        max_width=_width(tree.number(base, "max_link_width")),
        current_gen=_generation(tree.text(base, "current_link_speed")),
        current_width=_width(tree.number(base, "current_link_width")),
        port_max_gen=_generation(tree.text(port, "max_link_speed")),
        port_max_width=_width(tree.number(port, "max_link_width")),
    )


def _iommu_group(tree: Tree, base: str) -> Optional[str]:
    if not tree.exists(base, "iommu_group"):
        return None
    number = os.path.basename(tree.resolve(base, "iommu_group"))
    return f"{number} ({tree.text(base, 'iommu_group', 'type') or 'type not known'})"


def iommu_translating(tree: Tree, devices: List[PciGpu]) -> Optional[bool]:
    """Return whether an IOMMU translates the GPUs' DMA (group type DMA or DMA-FQ, not identity).

    A GPU without a group has no IOMMU in its way. Where the kernel does not give the type, the
    command line's ``iommu=pt`` decides; without that it is not known.
    """
    groups = [gpu.iommu_group for gpu in devices if gpu.iommu_group]
    if not groups:
        return False if devices else None
    if any("(DMA" in group for group in groups):
        return True
    if all("(identity)" in group for group in groups):
        return False
    options = (tree.text("proc/cmdline") or "").split()
    return False if {"iommu=pt", "iommu.passthrough=1"} & set(options) else None


def acs(tree: Tree, devices: List[PciGpu]) -> Tuple[List[str], List[str]]:
    """Return the bridges above the GPUs with ACS request redirect on, and those that root must read.

    Request redirect sends peer-to-peer traffic up to the root complex: slower, and with a
    translating IOMMU it can hang or corrupt.
    """
    redirect, unread = [], []
    for bridge in sorted({bridge for gpu in devices for bridge in gpu.path}, key=pci.sort_key):
        state = acs_request_redirect(tree.bytes("sys/bus/pci/devices", bridge, "config") or b"")
        if state is None:
            unread.append(bridge)
        elif state:
            redirect.append(bridge)
    return redirect, unread


def acs_request_redirect(config: bytes) -> Optional[bool]:
    """Return the P2P Request Redirect bit of a device's ACS control register.

    ``config`` is the configuration space as sysfs gives it: 4096 bytes to root, 64 to others
    (then None). A device without the capability redirects nothing. Walks the list of extended
    capabilities from 0x100: id in bits 0-15, next offset in bits 20-31; ACS control is at +6.
    """
    if len(config) < 0x104:
        return None
    offset, seen = 0x100, 0
    while 0x100 <= offset <= len(config) - 8 and seen < 256:
        (header,) = struct.unpack_from("<I", config, offset)
        if header in (0, 0xFFFFFFFF):
            break
        if header & 0xFFFF == _ACS_CAPABILITY:
            (control,) = struct.unpack_from("<H", config, offset + 6)
            return bool(control & _ACS_REQUEST_REDIRECT)
        offset, seen = header >> 20, seen + 1
    return False


def modules(tree: Tree) -> Modules:
    """Return what is loaded of the NVIDIA driver and of nouveau."""
    loaded = tree.exists("sys/module/nvidia")
    banner = tree.text("proc/driver/nvidia/version")
    return Modules(
        nvidia=(tree.text("sys/module/nvidia/version") or "") if loaded else None,
        open_modules=("Open Kernel Module" in banner) if banner else None,
        nouveau=tree.exists("sys/module/nouveau"),
    )


def nics(tree: Tree, nodes: List[NumaNode]) -> List[Nic]:
    """Return the network interfaces that stand on a device, and bonds; never loopback or veth."""
    found = []
    for name in tree.names("sys/class/net"):
        base = os.path.join("sys/class/net", name)
        device = tree.exists(base, "device")
        if not device and not tree.exists(base, "bonding"):
            continue
        address = None
        for part in reversed(tree.resolve(base, "device").split("/")) if device else ():
            if re.match(r"^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$", part):
                address = part
                break
        reported = tree.number("sys/bus/pci/devices", address, "numa_node") if address else None
        local = (tree.text("sys/bus/pci/devices", address, "local_cpulist") or "") if address else ""
        speed = tree.number(base, "speed")
        rdma = tree.names(base, "device", "infiniband")
        found.append(
            Nic(
                name=name,
                pci=address,
                numa_node=numa_node(reported, local, nodes)[0] if address else None,
                speed_mbps=speed if speed and speed > 0 else None,
                up=tree.text(base, "operstate") == "up",
                rdma=rdma[0] if rdma else None,
            )
        )
    return found
