"""Every fixture host as the probe found it, and each refusal with its way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pdstack import cpulist, intent, plan, refusal
from pdstack.facts import Disk, Driver, GpuProcess, HostFacts, Port, System
from unit.plan import inventories as inv
from unit.plan.asking import SMALL, positions, refusals
from unit.plan.recorded import recorded

# Hosts of the topology table, as the probe found them


@pytest.mark.parametrize(
    ("name", "topology", "expected"),
    [
        # GPUs, CPUs and memory node of each instance
        ("rtx-pro-6000-8", inv.pd(2, 2, p=2, d=2), {
            "prefill-0": ("0-1", "0-31,128-159", "0"), "prefill-1": ("2-3", "32-63,160-191", "0"),
            "decode-0": ("4-5", "64-95,192-223", "1"), "decode-1": ("6-7", "96-127,224-238,240-255", "1")}),
        ("seven-of-eight", inv.pd(4, 2), {
            "prefill-0": ("0-3", "0-63,128-191", "0"), "decode-0": ("4-5", "64-127,192-238,240-255", "1")}),
        ("gb200-4", inv.pd(2, 2), {
            "prefill-0": ("0-1", "0,3-9,11-17", "0"), "decode-0": ("2-3", "1,19-25,27-33", "1")}),
        ("h200-vm-2", inv.pd(1, 1), {"prefill-0": ("0", "0-15", "0"), "decode-0": ("1", "16-31", "0")}),
        ("uneven-8", inv.pd(4, 4), {
            "prefill-0": ("0-3", "0-47,96-143", ""), "decode-0": ("4-7", "48-95,144-191", "")}),
        ("uneven-8", inv.pd(3, 3), {
            "prefill-0": ("0-2", "0-23,96-119", "0"), "decode-0": ("4-6", "48-71,144-167", "2")}),
        ("eight-nodes-8", inv.pd(4, 4), {
            "prefill-0": ("0-3", "0-63,128-191", ""), "decode-0": ("4-7", "64-127,192-255", "")}),
        ("eight-nodes-8", inv.replicas(1, 2), {
            "aggregated-0": ("3", "0-15,128-143", "0"), "aggregated-1": ("2", "16-31,144-159", "1")}),
        ("numa-unknown", inv.pd(4, 4), {"prefill-0": ("0-3", "", ""), "decode-0": ("4-7", "", "")}),
        ("cpuless-node", inv.pd(4, 4), {
            "prefill-0": ("0-3", "0-63,128-191", "0"), "decode-0": ("4-7", "64-127,192-238,240-255", "1")}),
        ("cpuset-limited", inv.pd(4, 4), {"prefill-0": ("0-3", "0-7,128-135", "0"), "decode-0": ("4-7", "", "")}),
        ("pci-domain", inv.pd(2, 2), {
            "prefill-0": ("0-1", "0-63,128-191", "0"), "decode-0": ("2-3", "64-127,192-255", "1")}),
        ("nvswitch-8", inv.aggregated(8), {"aggregated-0": ("0-7", "0-191", "")}),
    ],
)  # fmt: skip
def test_fixture_hosts(name: str, topology: dict[str, Any], expected: dict[str, tuple[str, str, str]]) -> None:
    model = {**SMALL, "heads": 192}
    made = inv.planned(recorded()[name], pd_topology=topology, pd_model=model)
    found = {i.name: (cpulist.render(g.position for g in i.gpus), i.cpus, i.memory_nodes) for i in made.instances}
    assert found == expected


@pytest.mark.parametrize(
    ("name", "topology", "expected"),
    [
        # the cards of these rows are too old for the engine: their topology is planned with the functional profile
        ("rtx-4090-8", inv.pd(4, 4), {
            "prefill-0": ("0-3", "0-55,112-167", "0"), "decode-0": ("4-7", "56-111,168-223", "1")}),
        ("five-gpus", inv.pd(2, 2), {"prefill-0": ("0-1", None, "0"), "decode-0": ("2-3", None, "0")}),
        ("five-gpus", inv.pd(4, 1), {"prefill-0": ("0-3", None, "0"), "decode-0": ("4", None, "1")}),
        ("two-on-node-3", inv.pd(1, 1), {
            "prefill-0": ("0", "48-55,176-183", "3"), "decode-0": ("1", "56-63,184-191", "3")}),
        ("p4-1", inv.aggregated(1), {"aggregated-0": ("0", "0-7", "0")}),
    ],
)  # fmt: skip
def test_fixture_hosts_with_older_cards(
    name: str, topology: dict[str, Any], expected: dict[str, tuple[str, str | None, str]]
) -> None:
    made = inv.planned(recorded()[name], pd_topology=topology, pd_model=SMALL, pd_profile="cpu")
    assert {item.name for item in made.instances} == set(expected)
    for item in made.instances:
        gpus, cpus, memory = expected[item.name]
        assert cpulist.render(g.position for g in item.gpus) == gpus
        assert cpus is None or item.cpus == cpus
        assert item.memory_nodes == memory


@pytest.mark.parametrize(
    ("name", "found", "remedy"),
    [
        ("no-gpu", "no GPU", "lspci"),
        ("no-driver", "driver absent", "nouveau"),
        ("not-loaded", "driver not_loaded", "modprobe"),
        ("mismatch", "(803)", "reboot"),
        ("no-access", "driver no_access", "root"),
        ("cgroup-blocked", "cgroup", "/dev/nvidia"),
        ("stub-library", "(34)", "stubs folder"),
        ("compat-804", "(804)", "compat"),
        ("nvswitch-802", "(802)", "nvidia-fabricmanager"),
        ("wedged", "did not return", "reboot"),
        ("gpu-lost", "GPU is lost", "pd_excluded_gpus"),
        ("mig-on", "MIG is on", "-mig 0"),
        ("mixed-models", "compute capability 8.9", "pd_excluded_gpus"),
        ("rtx-4090-8", "compute capability 8.9", "other GPUs"),
        ("acs-translating", "ACS redirect", "iommu=pt"),
    ],
)
def test_fixture_hosts_that_cannot_serve(name: str, found: str, remedy: str) -> None:
    (item,) = refusals(recorded()[name], pd_topology=inv.pd(1, 1), pd_model=SMALL)
    assert item.subject.startswith(name)
    assert found in item.found
    assert remedy in item.remedy


def test_the_p4_is_refused_for_two_reasons() -> None:
    found = refusals(recorded()["p4-1"], pd_topology=inv.aggregated(1), pd_model=SMALL)
    assert [item.found.split(",")[0] for item in found] == ["driver 535.183.01", "Tesla P4"]
    assert "580" in found[0].needed


def test_a_lost_gpu_can_be_left_out() -> None:
    made = inv.planned(
        recorded()["gpu-lost"], pd_topology=inv.pd(2, 2), pd_excluded_gpus=["0000:85:00.0"], pd_model=SMALL
    )
    assert "0000:85:00.0" not in {gpu.pci for item in made.instances for gpu in item.gpus}
    assert any("kept from serving" in note for note in made.notes)
    (item,) = refusals(recorded()["rtx-pro-6000-8"], pd_excluded_gpus=["0000:99:00.0"])
    assert "0000:06:00.0" in item.needed


def test_mixed_models_never_share_an_instance() -> None:
    facts = inv.host()
    other = [replace(gpu, name="NVIDIA RTX 5090") if i in (1, 5) else gpu for i, gpu in enumerate(facts.gpus)]
    mixed = replace(facts, gpus=other)
    made = inv.planned(mixed, pd_topology=inv.pd(3, 3), pd_model={**SMALL, "heads": 12})
    assert (positions(made, "prefill-0"), positions(made, "decode-0")) == ([0, 2, 3], [4, 6, 7])
    (item, _) = refusals(mixed, pd_topology=inv.pd(8, 8), pd_model=SMALL)
    assert "GPUs of one model" in item.remedy
    assert "2 x NVIDIA RTX 5090" in item.found


# Refusals


@pytest.mark.parametrize(
    ("facts", "topology", "found", "remedy"),
    [
        (inv.host(gpus=[0]), inv.pd(1, 1), "1 usable GPU on 1 host", "aggregated.tp: 1"),
        (inv.host(gpus=[0, 1]), inv.pd(2, 2), "2 usable GPUs", "mode: aggregated"),
        (inv.host(), inv.pd(4, 4, p=2, d=1), "8 usable GPUs", "count: auto"),
        (inv.host(), inv.replicas(4, 3), "8 usable GPUs", "add hosts"),
        (inv.host(), inv.aggregated(16), "16; gpu1: 8 x", "lower tp"),
        (inv.host(gpus=[0, 0]), inv.replicas(4, "auto"), "4; gpu1: 2 x", "lower tp"),
    ],
)
def test_more_gpus_asked_than_there_are(facts: HostFacts, topology: dict[str, Any], found: str, remedy: str) -> None:
    item = refusals(facts, pd_topology=topology, pd_model=SMALL)[0]
    assert found in item.found
    assert remedy in item.remedy


def test_the_cpu_profile_needs_simulated_gpus() -> None:
    (item,) = refusals(inv.host(gpus=[]), pd_profile="cpu")
    assert "pd_sysfs_root" in item.remedy
    facts = inv.host(gpus=[0])
    (item,) = refusals(facts, pd_excluded_gpus=[facts.gpus[0].pci], pd_topology=inv.aggregated(1), pd_model=SMALL)
    assert "pd_excluded_gpus" in item.remedy


def test_weights_that_do_not_fit_the_gpus() -> None:
    first, second = refusals(inv.host(), pd_topology=inv.pd(2, 2), pd_engine={"mem_fraction_static": 0.6})
    assert first.subject == "pd_topology.prefill.tp on gpu1"
    assert "73 GB of weights on each GPU of 103 GB" in first.found
    assert "tp to at least 4" in second.remedy


def test_a_disk_smaller_than_the_checkpoint() -> None:
    disks = [Disk("/", 10**11, 10**12), Disk("/var/lib/pdstack", 10**10, 10**11)]
    (item,) = refusals(inv.host(disks=disks))
    assert (item.found, item.needed[:6]) == ("/var/lib/pdstack on a disk of 100 GB", "146 GB")
    assert inv.planned(inv.host(disks=disks[:1]))


def test_a_name_is_no_address_to_bind_to() -> None:
    (item,) = refusals(inv.host(), ansible_host="gpu1.example")
    assert (item.subject, "pd_service_address" in item.remedy) == ("pd_service_address on gpu1", True)


def test_no_facts_of_a_host() -> None:
    with pytest.raises(refusal.PlanRefused) as error:
        plan.plan(inv.read("gpu1", "gpu2"), {"gpu1": inv.host("gpu1")})
    assert [item.subject for item in error.value.refusals] == ["gpu2"]


@pytest.mark.parametrize(
    ("driver", "needed"),
    [
        (Driver(state="ok", loaded_version="575.64.03", open_modules=True), "driver 580"),
        (Driver(state="ok", loaded_version="595.58.03", open_modules=False), "open kernel modules"),
        (
            Driver(state="ok", loaded_version="595.58.03", nvswitches=4, fabric_manager="inactive"),
            "nvidia-fabricmanager active",
        ),
    ],
)
def test_drivers_that_cannot_serve(driver: Driver, needed: str) -> None:
    (item,) = refusals(inv.host(driver=driver))
    assert needed in item.needed


def test_a_gpu_that_only_one_process_may_use() -> None:
    facts = inv.host()
    (item,) = refusals(replace(facts, gpus=[replace(gpu, compute_mode="exclusive_process") for gpu in facts.gpus]))
    assert item.subject.count("0000:") == 8
    assert "-c 0" in item.remedy


def test_copies_that_arrive_broken() -> None:
    facts = inv.host()
    (item,) = refusals(replace(facts, p2p=replace(facts.p2p, data_ok=False)))
    assert "other bytes" in item.found
    proven = replace(
        facts,
        p2p=replace(facts.p2p, data_ok=True),
        system=System(iommu_translating=True, acs_redirect=["0000:00:01.1"]),
    )
    assert "ACS redirect" in " ".join(inv.planned(proven).notes)


@pytest.mark.parametrize(
    ("ports", "clash"),
    [
        ({"router": 30000}, "30000"),
        ({"router_metrics": 8000}, "8000"),
        ({"decode": 30001}, "30001"),
        ({"bootstrap": 30100}, "30100"),
        ({"prefill": 65535}, "65536"),
    ],
)
def test_ports_that_clash(ports: dict[str, int], clash: str) -> None:
    found = refusals(inv.host(), pd_topology=inv.pd(2, 2, p=2, d=2), pd_ports=ports, pd_model=SMALL)
    assert f"gpu1 port {clash}" in {item.subject for item in found}
    assert all("pd_ports" in item.remedy for item in found)


def test_a_kv_lane_over_tcp() -> None:
    facts = [inv.host("gpu1"), inv.host("gpu2")]
    (item,) = refusals(*facts, pd_topology=inv.pd(8, 8))
    assert (item.subject, "TCP" in item.found) == ("KV lane of pair-0", True)
    (item,) = refusals(*facts, pd_topology=inv.pd(p=2, d=2))
    assert (item.subject, "pd_router.scope: host" in item.remedy) == ("pd_router.scope", True)
    assert inv.planned(*facts, pd_topology=inv.replicas(4, "auto"))
    assert inv.planned(*facts, pd_topology=inv.pd(p=2, d=2), pd_router={"scope": "host"})


def test_every_instance_is_behind_a_router() -> None:
    hosts = {name: inv.variables(ansible_host=f"192.0.2.{i}", pd_router={"scope": "host"}, pd_topology=inv.pd(p=2, d=2))
             for i, name in enumerate(["gpu1", "gpu2", "front"])}  # fmt: skip
    wanted = intent.parse(hosts, {"gpu_hosts": ["gpu1", "gpu2"], "router_hosts": ["gpu1", "front"]})
    with pytest.raises(refusal.PlanRefused) as error:
        plan.plan(wanted, {name: inv.host(name) for name in hosts})
    said = " ".join(item.found for item in error.value.refusals)
    assert "no router on gpu2" in said
    assert "no prefill and no decode instance" in said


def test_ports_and_gpus_in_the_hands_of_others() -> None:
    """The reference met a stale router on 8000 and 29001; ours, and an earlier plan's, are no strangers."""
    made = inv.planned(inv.host())
    ports = [
        Port(8000, "0.0.0.0", 4242, "sglang_router", "router.service", "2026-06-15T10:00:00Z"),
        Port(29001, "::", 4243, "python3"),
        Port(30000, "192.0.2.1", 99, "sglang", "pd-prefill@0.service"),
        Port(30100, "192.0.2.1", 98, "sglang", "pd-decode@7.service"),
        Port(8998, "127.0.0.1"),
        Port(22, "0.0.0.0", 1, "sshd", "ssh.service"),
    ]
    facts = inv.host(ports=ports)
    found = plan.foreign_ports(made, {"gpu1": facts})
    assert [item.subject for item in found] == ["gpu1 port 8998", "gpu1 port 8000", "gpu1 port 29001"]
    assert all(word in found[1].found for word in ("4242", "sglang_router", "router.service", "2026-06-15T10:00:00Z"))
    assert found[1].remedy.startswith("stop it if nobody needs it (systemctl disable --now router.service)")
    assert "kill 4243" in found[2].remedy
    busy = replace(facts, gpus=[replace(g, processes=[GpuProcess(7, "vllm", 10**11), GpuProcess(8, "sglang::schedul")])
                                if i < 2 else g for i, g in enumerate(facts.gpus)])  # fmt: skip
    (item,) = plan.foreign_processes(made, {"gpu1": busy})
    assert (item.subject, "100.0 GB" in item.found) == ("gpu1 GPU 0000:10:00.0, 0000:11:00.0", True)


def test_who_else_is_on_a_planned_gpu_is_told_by_its_unit() -> None:
    """An engine of a former deployment has our engines' name. Its memory is missed when ours has loaded for minutes."""
    made = inv.planned(inv.host())
    users = [
        GpuProcess(7, "sglang::schedul", 9 * 10**10, "pd-decode@0.service"),  # ours
        GpuProcess(8, "sglang::schedul", 9 * 10**10, "old-model.service"),
        GpuProcess(9, "VLLM::Worker_TP0", 9 * 10**10, "docker-1a2b.scope"),
        GpuProcess(10, "VLLM::Worker_TP0", 9 * 10**10, "vllm.service"),  # told, or stopped, because of its port
    ]
    facts = inv.host(ports=[Port(8000, "0.0.0.0", 11, "vllm", "vllm.service", "2026-06-15T10:00:00Z")])
    facts = replace(facts, gpus=[replace(gpu, processes=users if not i else []) for i, gpu in enumerate(facts.gpus)])
    found = plan.foreign_processes(made, {"gpu1": facts})
    assert [item.found.partition(" holds")[0] for item in found] == [
        "process 8 (sglang::schedul) of unit old-model.service",
        "process 9 (VLLM::Worker_TP0) of unit docker-1a2b.scope",
    ]
    assert "systemctl disable --now old-model.service" in found[0].remedy
    assert "kill 9" in found[1].remedy
