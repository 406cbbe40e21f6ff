"""Every simulated host, probed end to end, gives the facts that are on file; and some of them are spelled out here."""

import json
import pathlib

import pytest
from hosts import build, catalogue
from pdstack import codec, facts

FACTS = pathlib.Path(build.FIXTURES) / "facts"


def on_file(name: str) -> facts.HostFacts:
    return codec.load(facts.HostFacts, json.loads((FACTS / f"{name}.json").read_text()))


@pytest.mark.parametrize("host", catalogue.HOSTS, ids=lambda host: host.name)
def test_the_facts_on_file_are_what_the_probe_finds(host, tmp_path, libraries):
    found = build.facts_text(host, tmp_path, libraries)
    assert found == (FACTS / f"{host.name}.json").read_text(), (
        "the probe finds other facts than tests/fixtures/facts holds; if that is meant, run\n"
        "PYTHONPATH=module_utils:tools:tests/fixtures python3 -m hosts.build"
    )


def test_no_file_is_left_of_a_host_that_is_gone():
    assert {path.stem for path in FACTS.glob("*.json")} == set(catalogue.BY_NAME)


@pytest.mark.parametrize(
    ("name", "nodes", "source"),
    [
        ("rtx-pro-6000-8", [0, 0, 0, 0, 1, 1, 1, 1], "sysfs"),
        ("rtx-4090-8", [0, 0, 0, 0, 1, 1, 1, 1], "sysfs"),
        ("five-gpus", [0, 0, 0, 0, 1], "sysfs"),
        ("two-on-node-3", [3, 3], "sysfs"),
        ("gb200-4", [0, 0, 1, 1], "sysfs"),
        ("p4-1", [0], "local_cpulist"),
        ("uneven-8", [0, 0, 0, 1, 2, 2, 2, 3], "sysfs"),
        ("eight-nodes-8", [3, 2, 1, 0, 7, 6, 5, 4], "sysfs"),
        ("h200-vm-2", [0, 0], "local_cpulist"),
        ("numa-unknown", [None] * 8, "none"),
    ],
)
def test_numa_node_and_how_it_was_found(name, nodes, source):
    gpus = on_file(name).gpus
    assert [gpu.numa_node for gpu in gpus] == nodes
    assert {gpu.numa_source for gpu in gpus} == {source}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("rtx-pro-6000-8", "X PIX NODE NODE SYS SYS SYS SYS"),
        ("rtx-4090-8", "X SYS SYS SYS SYS SYS SYS SYS"),
        ("five-gpus", "X PHB PHB NODE SYS"),
        ("two-on-node-3", "X NVL"),
        ("nvswitch-8", "X NVL NVL NVL NVL NVL NVL NVL"),
    ],
)
def test_link_types_are_those_of_nvidia_smi(name, row):
    assert on_file(name).p2p.link_type[0] == row.split()


@pytest.mark.parametrize(
    ("name", "state", "words"),
    [
        ("no-gpu", "absent", "no driver library"),
        ("no-driver", "absent", "no driver library"),
        ("mismatch", "mismatch", "(803)"),
        ("mismatch", "mismatch", "(18)"),
        ("not-loaded", "not_loaded", "(9)"),
        ("no-access", "no_access", "(4)"),
        ("cgroup-blocked", "no_access", "(17)"),
        ("stub-library", "error", "(34)"),
        ("compat-804", "error", "(804)"),
        ("nvswitch-802", "error", "Fabric Manager"),
        ("wedged", "wedged", "cuInit did not return within 1 s"),
        ("rtx-pro-6000-8", "ok", ""),
    ],
)
def test_driver_state(name, state, words):
    driver = on_file(name).driver
    assert driver.state == state
    assert words in driver.detail


def test_offline_cpu_and_siblings():
    node = on_file("rtx-pro-6000-8").numa[1]
    assert node.cpus == "64-127,192-238,240-255"
    assert node.siblings[:2] == ["64,192", "65,193"]
    assert "111" in node.siblings  # its sibling, 239, is offline
    assert len(node.siblings) == 64


def test_idle_link_is_judged_by_its_maximum():
    link = on_file("rtx-pro-6000-8").gpus[0].link
    assert (link.max_gen, link.max_width, link.port_max_gen, link.current_gen) == (5, 16, 5, 1)


def test_nodes_without_cpus_are_kept_and_the_gpus_own_memory_is_not_their_node():
    found = on_file("gb200-4")
    assert [gpu.memory_node for gpu in found.gpus] == [2, 10, 18, 26]
    assert [node.node for node in found.numa if node.cpus] == [0, 1]
    assert on_file("cpuless-node").numa[2].cpus == ""


def test_a_lost_gpu_shifts_cuda_indices_and_nothing_else():
    gpus = on_file("gpu-lost").gpus
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3, 4, None, 5, 6]
    assert gpus[5].pci == "0000:85:00.0"
    assert any("NVML 15" in problem for problem in gpus[5].problems)
    assert gpus[6].uuid == "GPU-00000000-0000-0000-0000-000000000007"


def test_mig_is_seen():
    gpu = on_file("mig-on").gpus[3]
    assert gpu.mig is True
    assert gpu.problems == ["the driver API does not list this GPU (MIG is on)"]


def test_domains_above_ffff_join():
    gpus = on_file("pci-domain").gpus
    assert [gpu.pci for gpu in gpus] == ["0000:01:00.0", "0000:11:00.0", "10000:21:00.0", "10000:31:00.0"]
    assert [gpu.nvml_index for gpu in gpus] == [gpu.index for gpu in gpus] == [0, 1, 2, 3]


def test_acs_and_iommu():
    bad, passthrough, reference = (on_file(n).system for n in ("acs-translating", "acs-passthrough", "rtx-pro-6000-8"))
    assert bad.iommu_translating is True
    assert "0000:03:01.1" in bad.acs_redirect
    assert passthrough.iommu_translating is False
    assert passthrough.acs_redirect == bad.acs_redirect
    assert (reference.iommu_translating, reference.acs_redirect, reference.acs_unread) == (False, [], [])


def test_secure_boot_and_nouveau():
    found = on_file("no-driver")
    assert found.system.secure_boot is True
    assert found.driver.nouveau_loaded is True
    assert on_file("rtx-pro-6000-8").driver.nouveau_loaded is False


def test_a_virtual_machine_says_so():
    assert on_file("h200-vm-2").system.virtual is True
    assert on_file("rtx-pro-6000-8").system.virtual is None  # the fixture has no cpuinfo


def test_cpuset():
    assert on_file("cpuset-limited").system.allowed_cpus == "0-7,128-135"


def test_nvswitches_fabric_manager_and_rdma_nics():
    found = on_file("nvswitch-8")
    assert (found.driver.nvswitches, found.driver.fabric_manager) == (4, "active")
    assert on_file("nvswitch-802").driver.fabric_manager == "inactive"
    assert [nic.numa_node for nic in found.nics] == [0] * 4 + [1] * 4
    assert [nic.rdma for nic in found.nics] == [f"mlx5_{i}" for i in range(8)]
    assert found.nics[0].speed_mbps == 200000
    assert found.gpus[0].nvlinks_active == 18


def step(found: facts.HostFacts, name: str, position: int = 0) -> facts.ProbeStep:
    return next(step for step in found.fabric.steps[position] if step.name == name)


def test_each_fabric_step_stands_alone():
    refused = on_file("h200-vm-2")
    assert step(refused, "attr_fabric").value == 1  # the attribute alone lies
    assert step(refused, "fabric_create").code == 800
    assert "IMEX" in step(refused, "fabric_create").words
    assert step(refused, "fd_create").code == 0
    assert step(refused, "nvlinks").value == 18  # 800 does not mean "no NVLink"
    assert step(on_file("fabric-ok"), "fabric_release").code == 0
    assert step(on_file("fabric-801"), "fabric_create").code == 801


def test_out_of_memory_is_not_known():
    found = on_file("busy")
    assert step(found, "fd_create").code == 2
    assert step(found, "fd_create").words.startswith("not known")
    assert step(found, "fd_create", 1).code == 0
    assert [(p.pid, p.command) for p in found.gpus[0].processes] == [(4242, "vllm")]


def test_the_architecture_gate():
    assert step(on_file("rtx-pro-6000-8"), "arch_gate").value == 0
    assert step(on_file("h200-vm-2"), "arch_gate").value == 1
    assert step(on_file("gb200-4"), "arch_gate").value == 1
