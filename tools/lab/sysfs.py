"""A simulated sysfs: two NUMA nodes and eight RTX PRO 6000, rendered from a small description.

`render` is pure: description in, relative path -> content out. A file's content is str, a symbolic
link is `Link`. The paths start with ``sys/`` or ``proc/``: they belong under a root folder that a
reader takes instead of ``/``.

Formats: Documentation/ABI/{stable,testing}/sysfs-devices-node, sysfs-devices-system-cpu,
sysfs-bus-pci. BDFs, device id and distances of the real host: local-inference-lab/rtx6kpro.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Iterable, Union


@dataclass(frozen=True)
class Link:
    """A symbolic link; the target is relative to the link's folder."""

    target: str


Entry = Union[str, Link]


@dataclass(frozen=True)
class Node:
    """One NUMA node: its CPUs and its memory (0: none of its own)."""

    cpus: tuple[int, ...]
    memory_kib: int
    distances: tuple[int, ...]


@dataclass(frozen=True)
class PciDevice:
    """A PCI function at the end of a chain of bridges. ``numa_node`` -1 is what firmware that says nothing gives."""

    path: tuple[str, ...]  # from the root port down to the device itself, each dddd:bb:dd.f
    numa_node: int
    vendor: int = 0x10DE
    device: int = 0x2BB5
    subsystem: int = 0x204B
    device_class: int = 0x030200
    max_speed: str = "32.0 GT/s PCIe"  # Gen5
    speed: str = "2.5 GT/s PCIe"  # an idle GPU rests at Gen1
    width: int = 16
    driver: str = "nvidia"
    interface: str = ""  # name of the network interface that the function is
    iommu_group: int | None = None


@dataclass(frozen=True)
class Machine:
    """What a simulated machine looks like from its sysfs."""

    nodes: tuple[Node, ...]
    siblings: tuple[tuple[int, ...], ...]  # online CPUs by physical core
    devices: tuple[PciDevice, ...] = ()
    possible: str = ""  # kernel list; empty: the online CPUs
    offline: str = ""
    driver_version: str = "595.58.03"
    cmdline: str = "BOOT_IMAGE=/boot/vmlinuz root=/dev/sda1 ro iommu=pt"
    interfaces: dict[str, str] = field(default_factory=dict)  # virtual ones, name -> operstate


RTX_PRO_6000_BUSES = ("06", "07", "75", "76", "84", "85", "f4", "f5")


def kernel_list(cpus: Iterable[int]) -> str:
    """Return CPUs in the kernel's list format, such as ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def kernel_mask(cpus: Iterable[int], width: int) -> str:
    """Return CPUs as the kernel's bitmap: 32-bit groups in hexadecimal, the highest first."""
    value = sum(1 << cpu for cpu in set(cpus))
    groups = max(1, (width + 31) // 32)
    return ",".join(f"{(value >> (32 * group)) & 0xFFFFFFFF:08x}" for group in reversed(range(groups)))


def eight_rtx_pro_6000(cpus: Iterable[int], memory_kib: int, siblings: Iterable[Iterable[int]]) -> Machine:
    """Return two sockets with four GPUs each, over the CPUs and the memory that a machine really has.

    Node 0 gets the first half of the CPUs and all of the memory, node 1 the second half and none,
    since a process can only be bound to memory that exists. A single CPU goes to node 0.
    """
    online = sorted(set(cpus))
    cut = (len(online) + 1) // 2
    nodes = (Node(tuple(online[:cut]), memory_kib, (10, 32)), Node(tuple(online[cut:]), 0, (32, 10)))
    cores = []
    for core in siblings:  # a core that the cut splits counts as one core on each side
        for node in nodes:
            part = tuple(sorted(set(core) & set(node.cpus)))
            if part and part not in cores:
                cores.append(part)
    devices = []
    for position, bus in enumerate(RTX_PRO_6000_BUSES):
        pair = RTX_PRO_6000_BUSES[position // 2 * 2]
        upstream = f"{int(pair, 16) - 2:02x}"
        devices.append(
            PciDevice(
                path=(
                    f"0000:{int(pair, 16) - 3:02x}:01.1",  # root port of the pair
                    f"0000:{upstream}:00.0",  # PCIe switch, upstream port
                    f"0000:{int(pair, 16) - 1:02x}:0{position % 2}.0",  # switch, downstream port
                    f"0000:{bus}:00.0",
                ),
                numa_node=position // 4,
                iommu_group=position + 20,
            )
        )
    return Machine(nodes, tuple(sorted(cores)), tuple(devices), interfaces={"lo": "unknown", "host0": "up"})


def render(machine: Machine) -> dict[str, Entry]:
    """Return the tree: relative path -> file content or link."""
    tree: dict[str, Entry] = {}
    tree.update(_cpus(machine))
    tree.update(_nodes(machine))
    tree.update(_pci(machine))
    tree.update(_interfaces(machine))
    if machine.driver_version:
        version = machine.driver_version
        tree["sys/module/nvidia/version"] = version + "\n"
        tree["proc/driver/nvidia/version"] = (
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
        )
    tree["proc/cmdline"] = machine.cmdline + "\n"
    return tree


def write(tree: dict[str, Entry], root: Path) -> None:
    """Write a rendered tree under ``root``."""
    for name, entry in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, Link):
            path.symlink_to(entry.target)
        else:
            path.write_text(entry)


def real_machine() -> tuple[list[int], int, list[list[int]]]:
    """Return this machine's online CPUs, memory in KiB and sibling groups."""
    online = sorted(os.sched_getaffinity(0))
    cores: dict[tuple[int, ...], None] = {}
    for cpu in online:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        group = _parse_list(path.read_text()) if path.exists() else [cpu]
        cores[tuple(c for c in group if c in online)] = None
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    return online, int(total.split()[1]), [list(core) for core in cores]


def _parse_list(text: str) -> list[int]:
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def _width(machine: Machine) -> int:
    return max((cpu for node in machine.nodes for cpu in node.cpus), default=0) + 1


def _cpus(machine: Machine) -> dict[str, Entry]:
    base = "sys/devices/system/cpu"
    online = kernel_list(cpu for node in machine.nodes for cpu in node.cpus)
    possible = machine.possible or online
    tree: dict[str, Entry] = {
        f"{base}/online": online + "\n",
        f"{base}/offline": machine.offline + "\n",
        f"{base}/possible": possible + "\n",
        f"{base}/present": possible + "\n",
    }
    for core_id, core in enumerate(machine.siblings):
        for cpu in core:
            topology = f"{base}/cpu{cpu}/topology"
            package = next(number for number, node in enumerate(machine.nodes) if cpu in node.cpus)
            tree[f"{topology}/core_id"] = f"{core_id}\n"
            tree[f"{topology}/physical_package_id"] = f"{package}\n"
            for name in ("thread_siblings", "core_cpus"):
                tree[f"{topology}/{name}_list"] = kernel_list(core) + "\n"
                tree[f"{topology}/{name}"] = kernel_mask(core, _width(machine)) + "\n"
            tree[f"{base}/cpu{cpu}/node{package}"] = Link(f"../../node/node{package}")
    return tree


def _nodes(machine: Machine) -> dict[str, Entry]:
    base = "sys/devices/system/node"
    numbers = range(len(machine.nodes))
    tree: dict[str, Entry] = {
        f"{base}/online": kernel_list(numbers) + "\n",
        f"{base}/possible": kernel_list(numbers) + "\n",
        f"{base}/has_cpu": kernel_list(n for n in numbers if machine.nodes[n].cpus) + "\n",
        f"{base}/has_memory": kernel_list(n for n in numbers if machine.nodes[n].memory_kib) + "\n",
        f"{base}/has_normal_memory": kernel_list(n for n in numbers if machine.nodes[n].memory_kib) + "\n",
    }
    for number, node in enumerate(machine.nodes):
        folder = f"{base}/node{number}"
        free = node.memory_kib * 9 // 10
        tree[f"{folder}/cpulist"] = kernel_list(node.cpus) + "\n"
        tree[f"{folder}/cpumap"] = kernel_mask(node.cpus, _width(machine)) + "\n"
        tree[f"{folder}/distance"] = " ".join(str(d) for d in node.distances) + "\n"
        tree[f"{folder}/meminfo"] = "".join(
            f"Node {number} {name + ':':<15} {kib:>8} kB\n"
            for name, kib in (("MemTotal", node.memory_kib), ("MemFree", free), ("MemUsed", node.memory_kib - free))
        )
        for cpu in node.cpus:
            tree[f"{folder}/cpu{cpu}"] = Link(f"../../cpu/cpu{cpu}")
    return tree


def _root(path: tuple[str, ...]) -> str:
    domain, bus, _ = path[0].split(":")
    return f"pci{domain}:{bus}"


def _pci(machine: Machine) -> dict[str, Entry]:
    tree: dict[str, Entry] = {}
    width = _width(machine)
    for device in machine.devices:
        local = machine.nodes[device.numa_node].cpus if device.numa_node >= 0 else range(width)
        folder = PurePosixPath("sys/devices", _root(device.path))
        for depth, bdf in enumerate(device.path):
            folder /= bdf
            last = depth == len(device.path) - 1
            where = str(folder)
            common = {
                "vendor": f"0x{device.vendor if last else 0x1022 if depth == 0 else 0x1000:04x}",
                "device": f"0x{device.device if last else 0x14AB if depth == 0 else 0xC030:04x}",
                "class": f"0x{device.device_class if last else 0x060400:06x}",
                "subsystem_vendor": f"0x{device.vendor if last else 0x1022:04x}",
                "subsystem_device": f"0x{device.subsystem if last else 0:04x}",
                "revision": "0xa1" if last else "0x00",
                "numa_node": str(device.numa_node),
                "local_cpulist": kernel_list(local),
                "local_cpus": kernel_mask(local, width),
                "max_link_speed": device.max_speed,
                "max_link_width": str(device.width),
                "current_link_speed": device.speed,
                "current_link_width": str(device.width),
                "enable": "1",
            }
            for name, value in common.items():
                tree[f"{where}/{name}"] = value + "\n"
            driver = device.driver if last else "pcieport"
            tree[f"{where}/driver"] = Link(_up(where, f"sys/bus/pci/drivers/{driver}"))
            tree[f"sys/bus/pci/drivers/{driver}/{bdf}"] = Link(_up(f"sys/bus/pci/drivers/{driver}", where))
            tree[f"{where}/subsystem"] = Link(_up(where, "sys/bus/pci"))
            tree[f"sys/bus/pci/devices/{bdf}"] = Link(_up("sys/bus/pci/devices", where))
        where = str(folder)
        if device.iommu_group is not None:
            group = f"sys/kernel/iommu_groups/{device.iommu_group}"
            tree[f"{group}/type"] = "identity\n"
            tree[f"{group}/devices/{device.path[-1]}"] = Link(_up(f"{group}/devices", where))
            tree[f"{where}/iommu_group"] = Link(_up(where, group))
        if device.interface:
            net = f"{where}/net/{device.interface}"
            tree.update(_interface(net, "up", "1"))
            tree[f"{net}/speed"] = "200000\n"
            tree[f"{net}/device"] = Link(f"../../../{device.path[-1]}")
            tree[f"sys/class/net/{device.interface}"] = Link(_up("sys/class/net", net))
    return tree


def _interfaces(machine: Machine) -> dict[str, Entry]:
    tree: dict[str, Entry] = {}
    for name, state in machine.interfaces.items():
        where = f"sys/devices/virtual/net/{name}"
        tree.update(_interface(where, state, "772" if name == "lo" else "1"))
        tree[f"sys/class/net/{name}"] = Link(_up("sys/class/net", where))
    return tree


def _interface(where: str, state: str, kind: str) -> dict[str, Entry]:
    return {
        f"{where}/operstate": state + "\n",
        f"{where}/carrier": "1\n",
        f"{where}/mtu": "1500\n",
        f"{where}/type": kind + "\n",
    }


def _up(folder: str, target: str) -> str:
    """Return ``target`` as seen from ``folder``, both relative to the root."""
    return os.path.relpath(target, folder)


def main() -> None:
    """Write the simulated tree of this machine: ``python3 -m lab.sysfs FOLDER``."""
    write(render(eight_rtx_pro_6000(*real_machine())), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
