"""The simulated machine: kernel formats, real CPUs, and links that lead somewhere."""

from __future__ import annotations

import os
import pathlib
import re

import pytest
from lab import sysfs
from lab.sysfs import Link

GIB = 1 << 20  # in KiB


def machine(cpus=range(8), memory=64 * GIB, siblings=((0, 4), (1, 5), (2, 6), (3, 7))):
    return sysfs.eight_rtx_pro_6000(cpus, memory, siblings)


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    sysfs.write(sysfs.render(machine()), tmp_path)
    return tmp_path


def read(root: pathlib.Path, name: str) -> str:
    return (root / name).read_text()


def test_lists_and_masks_are_the_kernels():
    assert sysfs.kernel_list([3, 1, 2, 9]) == "1-3,9"
    assert sysfs.kernel_list([]) == ""
    assert sysfs.kernel_mask([0, 33], 34) == "00000002,00000001"
    assert sysfs.kernel_mask([1], 2) == "00000002"


def test_node_0_has_the_first_half_of_the_cpus_and_all_memory(root):
    node = "sys/devices/system/node"
    assert read(root, f"{node}/online") == "0-1\n"
    assert read(root, f"{node}/node0/cpulist") == "0-3\n"
    assert read(root, f"{node}/node1/cpulist") == "4-7\n"
    assert read(root, f"{node}/has_memory") == "0\n"
    assert read(root, f"{node}/node1/distance") == "32 10\n"
    assert re.search(r"^Node 0 MemTotal: +67108864 kB$", read(root, f"{node}/node0/meminfo"), re.MULTILINE)
    assert re.search(r"^Node 1 MemTotal: +0 kB$", read(root, f"{node}/node1/meminfo"), re.MULTILINE)
    assert read(root, "sys/devices/system/cpu/online") == "0-7\n"


@pytest.mark.parametrize(
    ("cpus", "first", "second"),
    [((0, 1), "0", "1"), ((0, 1, 2), "0-1", "2"), ((5,), "5", ""), ((0, 2, 4, 6), "0,2", "4,6")],
)
def test_the_cut_follows_the_online_cpus(cpus, first, second):
    tree = sysfs.render(machine(cpus, siblings=[(cpu,) for cpu in cpus]))
    assert tree["sys/devices/system/node/node0/cpulist"] == first + "\n"
    assert tree["sys/devices/system/node/node1/cpulist"] == second + "\n"


def test_a_core_that_the_cut_splits_is_a_core_on_each_side():
    tree = sysfs.render(machine())
    assert tree["sys/devices/system/cpu/cpu0/topology/thread_siblings_list"] == "0\n"
    assert tree["sys/devices/system/cpu/cpu4/topology/physical_package_id"] == "1\n"


def test_the_gpus_are_those_of_the_real_host(root):
    devices = root / "sys/bus/pci/devices"
    gpus = sorted(d.name for d in devices.iterdir() if (d / "class").read_text() == "0x030200\n")
    assert gpus == [f"0000:{bus}:00.0" for bus in ("06", "07", "75", "76", "84", "85", "f4", "f5")]
    for name in gpus:
        assert (devices / name / "vendor").read_text() == "0x10de\n"
        assert (devices / name / "device").read_text() == "0x2bb5\n"
        assert (devices / name / "max_link_speed").read_text() == "32.0 GT/s PCIe\n"
    assert [(devices / name / "numa_node").read_text() for name in gpus] == ["0\n"] * 4 + ["1\n"] * 4
    assert (devices / "0000:f5:00.0" / "local_cpulist").read_text() == "4-7\n"


def test_pairs_share_a_switch_and_nothing_else_is_shared(root):
    def bridges(bus: str) -> list[str]:
        path = os.path.realpath(root / f"sys/bus/pci/devices/0000:{bus}:00.0")
        return [part for part in path.split("/") if re.fullmatch(r"0000:..:..\..", part)][:-1]

    assert bridges("06")[:2] == bridges("07")[:2]
    assert bridges("06")[2] != bridges("07")[2]
    assert not set(bridges("07")) & set(bridges("75"))


def test_every_link_leads_to_something_inside_the_tree(root):
    links = [path for path in root.rglob("*") if path.is_symlink()]
    assert len(links) > 40
    for link in links:
        target = pathlib.Path(os.path.realpath(link))
        assert target.is_relative_to(root), link
        assert target.exists(), link


def test_render_is_pure():
    assert sysfs.render(machine()) == sysfs.render(machine())
    assert all(isinstance(entry, (str, Link)) for entry in sysfs.render(machine()).values())
    assert all(name.startswith(("sys/", "proc/")) for name in sysfs.render(machine()))


def test_the_real_machine_can_be_described():
    cpus, memory, siblings = sysfs.real_machine()
    assert cpus == sorted(os.sched_getaffinity(0))
    assert memory > 0
    assert sorted(cpu for core in siblings for cpu in core) == cpus
