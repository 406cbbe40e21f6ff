"""The plan: the reference's row, every topology, every fixture host, and each refusal with its way out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pdstack import codec, cpulist, intent, plan, refusal, report
from pdstack.facts import Disk, Driver, Fabric, GpuProcess, HostFacts, Nic, P2p, Port, ProbeStep, System
from unit.plan import inventories as inv
from unit.plan.recorded import recorded

SMALL = {"repo": "pdstack/tiny", "revision": inv.COMMIT, "heads": 64}
RDMA = [Nic("ib0", up=True, rdma="mlx5_0"), Nic("ib1", up=False, rdma="mlx5_1")]


def named(made: plan.Plan, name: str) -> plan.Instance:
    return next(item for item in made.instances if item.name == name)


def positions(made: plan.Plan, name: str) -> list[int]:
    return [gpu.position for gpu in named(made, name).gpus]


def reasons(item: plan.Instance | plan.Router, decision: str) -> str:
    found = [why.reason for why in item.why if decision in why.decision]
    assert found, f"{item.name} has no reason for {decision}: {[why.decision for why in item.why]}"
    return " ".join(found)


def refusals(*facts: HostFacts, **changes: Any) -> list[refusal.Refusal]:
    with pytest.raises(refusal.PlanRefused) as error:
        inv.planned(*facts, **changes)
    return error.value.refusals


# The reference deployment


def test_the_reference_deployment() -> None:
    made = inv.planned(recorded()["rtx-pro-6000-8"], pd_release="sglang-0.5.13.post1")
    prefill, decode = named(made, "prefill-0"), named(made, "decode-0")
    assert positions(made, "prefill-0") == [0, 1, 2, 3]
    assert positions(made, "decode-0") == [4, 5, 6, 7]
    assert (prefill.cpus, prefill.memory_nodes) == ("0-63,128-191", "0")
    assert (decode.cpus, decode.memory_nodes) == ("64-127,192-238,240-255", "1")
    assert prefill.ports == {"http": 30000, "bootstrap": 8998}
    assert decode.ports == {"http": 30100}
    assert prefill.set == decode.set == "pair-0"
    assert (prefill.unit, decode.unit) == ("pd-prefill@0.service", "pd-decode@0.service")
    for item in (prefill, decode):
        assert item.args["tp-size"] == 4
        assert item.args["moe-runner-backend"] == "marlin"
        assert item.args["mem-fraction-static"] == 0.7
        assert item.args["disaggregation-transfer-backend"] == "nixl"
        assert item.args["disable-custom-all-reduce"] is True
        assert item.args["enforce-disable-flashinfer-allreduce-fusion"] is True
        assert item.env["NCCL_P2P_LEVEL"] == "SYS"
        assert (item.env["NCCL_PROTO"], item.env["NCCL_ALGO"]) == ("LL", "Ring")
        assert item.env["UCX_TLS"] == "cuda_copy,cuda_ipc,sm,self,tcp"
        assert item.env["SGLANG_HOST_IP"] == item.address
        assert item.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert item.env["HF_HUB_OFFLINE"] == item.env["TRANSFORMERS_OFFLINE"] == "1"
        assert "expandable_segments" not in json.dumps(item.env)
        assert "numa-node" not in item.args
    assert prefill.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert decode.env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert prefill.args["disable-cuda-graph"] is True
    assert decode.args["cuda-graph-max-bs"] == 32
    (router,) = made.routers
    assert router.ports == {"http": 8000, "metrics": 29001}
    assert router.workers["prefill"] == [plan.Worker("http://192.0.2.1:30000", 8998)]
    assert router.args["health-check-interval-secs"] == 10
    assert router.args["prometheus-host"] == "192.0.2.1"


def test_the_newer_release_spells_it_otherwise() -> None:
    made = inv.planned(recorded()["rtx-pro-6000-8"], pd_release="sglang-0.5.23")
    prefill, decode = named(made, "prefill-0"), named(made, "decode-0")
    assert prefill.args["disable-prefill-cuda-graph"] is True
    assert decode.args["cuda-graph-max-bs-decode"] == 32
    assert not {"disable-cuda-graph", "cuda-graph-max-bs"} & {*prefill.args, *decode.args}
    assert decode.args["moe-runner-backend"] == "auto"


def test_a_plan_survives_its_file() -> None:
    made = inv.planned(recorded()["rtx-pro-6000-8"])
    assert codec.load(plan.Plan, json.loads(json.dumps(codec.dump(made)))) == made


def test_every_decision_has_a_reason() -> None:
    made = inv.planned(recorded()["rtx-pro-6000-8"])
    explained = ("gpus", "cpus", "memory_nodes", "NCCL_P2P_LEVEL", "NCCL_PROTO", "UCX_TLS", "UCX_NET_DEVICES", "fusion")
    for item in made.instances:
        for decision in (*explained, "disable-custom-all-reduce", "moe-runner-backend", "CUDA_VISIBLE_DEVICES"):
            assert reasons(item, decision)
        assert "sysfs" in reasons(item, "cpus")
    assert all(reasons(made.routers[0], name) for name in ("policy", "health-check", "circuit breaker", "prometheus"))


def test_the_cpu_profile_is_the_same_plan_with_another_engine() -> None:
    facts = recorded()["rtx-pro-6000-8"]
    gpu, cpu = inv.planned(facts), inv.planned(facts, pd_profile="cpu", pd_service_interface="host0")
    place: Callable[[plan.Plan], Any] = lambda made: [  # noqa: E731
        (i.name, i.gpus, i.cpus, i.memory_nodes, i.ports, i.unit, i.set) for i in made.instances
    ]
    assert place(gpu) == place(cpu)
    decode = named(cpu, "decode-0")
    assert (decode.args["device"], decode.args["tp-size"], decode.args["dtype"]) == ("cpu", 1, "float32")
    assert decode.args["disaggregation-decode-retraction-backup"] == "none"
    assert decode.env["UCX_NET_DEVICES"] == decode.env["GLOO_SOCKET_IFNAME"] == "host0"
    assert decode.env["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] == "10"
    assert "CUDA_VISIBLE_DEVICES" not in decode.env
    assert "functional only" in reasons(decode, "profile cpu")
    assert "simulated GPUs" in report.plan_text(cpu)


# Topologies


def test_two_pairs_on_one_host_have_ports_of_their_own() -> None:
    made = inv.planned(inv.host(), pd_topology=inv.pd(2, 2, p=2, d=2), pd_model=SMALL)
    assert [(i.name, i.set, positions(made, i.name), i.ports) for i in made.instances] == [
        ("decode-0", "pair-0", [4, 5], {"http": 30100}),
        ("decode-1", "pair-1", [6, 7], {"http": 30101}),
        ("prefill-0", "pair-0", [0, 1], {"http": 30000, "bootstrap": 8998}),
        ("prefill-1", "pair-1", [2, 3], {"http": 30001, "bootstrap": 8999}),
    ]
    cpus = [named(made, f"prefill-{i}").cpus for i in (0, 1)]
    assert cpus == ["0-7,32-39", "8-15,40-47"]


def test_unequal_counts_make_groups() -> None:
    made = inv.planned(inv.host(), pd_topology=inv.pd(2, 2, p=1, d=3), pd_model=SMALL)
    assert {i.set for i in made.instances} == {"group-0"}
    assert [i.name for i in made.instances] == ["decode-0", "decode-1", "decode-2", "prefill-0"]
    four = inv.planned(inv.host(), pd_topology=inv.pd(1, 1, p=2, d=4), pd_model=SMALL)
    assert {i.set: sorted(j.name for j in four.instances if j.set == i.set) for i in four.instances} == {
        "group-0": ["decode-0", "decode-1", "prefill-0"],
        "group-1": ["decode-2", "decode-3", "prefill-1"],
    }


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (inv.pd(4, 4, p="auto", d="auto"), {"prefill": 2, "decode": 2}),
        (inv.pd(2, 2, p="auto", d="auto"), {"prefill": 4, "decode": 4}),
        (inv.pd(2, 2, p=2, d="auto"), {"prefill": 2, "decode": 6}),
        (inv.pd(4, 2, p="auto", d=2), {"prefill": 2, "decode": 2}),
        (inv.replicas(4, "auto"), {"aggregated": 4}),
        (inv.replicas(3, "auto"), {"aggregated": 4}),
        (inv.aggregated(8), {"aggregated": 1}),
    ],
)
def test_auto_takes_what_fits_on_two_hosts(topology: dict[str, Any], expected: dict[str, int]) -> None:
    facts = [inv.host("gpu1"), inv.host("gpu2")]
    made = inv.planned(
        *facts, pd_topology=topology, pd_model={**SMALL, "heads": 24}, pd_router={"scope": "all"}, pd_profile="cpu"
    )
    counts: dict[str, int] = {}
    for item in made.instances:
        counts[item.role] = counts.get(item.role, 0) + 1
    assert counts == expected


def test_pairs_are_spread_over_hosts_and_routers_know_whom_they_serve() -> None:
    facts = [inv.host(f"gpu{i}", nics=RDMA) for i in (1, 2, 3)]
    made = inv.planned(*facts, pd_topology=inv.pd(p=2, d=2))
    assert {i.name: i.host for i in made.instances} == {
        "prefill-0": "gpu1", "decode-0": "gpu1", "prefill-1": "gpu2", "decode-1": "gpu2",
    }  # fmt: skip
    assert [r.host for r in made.routers] == ["gpu1", "gpu2", "gpu3"]
    for router in made.routers:
        assert [w.url for w in router.workers["decode"]] == ["http://192.0.2.1:30100", "http://192.0.2.2:30100"]
    assert made.notes[-1] == "gpu3: GPUs 0-7 of 8 left idle"
    local = inv.planned(*facts[:2], pd_topology=inv.pd(p=2, d=2), pd_router={"scope": "host"})
    for router in local.routers:
        assert all(router.address in w.url for workers in router.workers.values() for w in workers)


def test_a_router_host_without_gpus() -> None:
    hosts = {"gpu1": inv.variables(ansible_host="192.0.2.1"), "front": inv.variables(ansible_host="192.0.2.9")}
    wanted = intent.parse(hosts, {"gpu_hosts": ["gpu1"], "router_hosts": ["front"]})
    made = plan.plan(wanted, {"gpu1": inv.host("gpu1")})
    (router,) = made.routers
    assert (router.host, router.address) == ("front", "192.0.2.9")
    assert router.workers["prefill"][0].url == "http://192.0.2.1:30000"


def test_a_pair_over_two_hosts_takes_rdma() -> None:
    facts = [inv.host("gpu1", nics=RDMA), inv.host("gpu2", nics=RDMA)]
    made = inv.planned(*facts, pd_topology=inv.pd(8, 8), pd_service_interface="eth0")
    assert {i.host for i in made.instances} == {"gpu1", "gpu2"}
    for item in made.instances:
        assert item.env["UCX_TLS"].startswith("rc,")
        assert item.env["UCX_NET_DEVICES"] == "mlx5_0:1,eth0"
        assert item.args["numa-node"] == [0, 0, 0, 0, 1, 1, 1, 1]
        assert item.env["SGLANG_CRASH_ON_NUMA_BIND_FAILURE"] == "1"
        assert item.memory_nodes == ""


def test_an_ipv6_address_stands_in_brackets() -> None:
    made = inv.planned(inv.host(), pd_service_address="2001:db8::1")
    assert made.routers[0].workers["decode"][0].url == "http://[2001:db8::1]:30100"


def test_speculation_is_explicit_about_the_draft_model() -> None:
    made = inv.planned(inv.host(), pd_speculative={"algorithm": "EAGLE"})
    assert named(made, "decode-0").args["speculative-moe-runner-backend"] == "triton"
    assert named(made, "prefill-0").args["speculative-algorithm"] == "EAGLE"


def test_levers_of_the_operator_win_and_are_named() -> None:
    made = inv.planned(
        inv.host(),
        pd_engine={"extra_env": {"NCCL_PROTO": "Simple"}, "extra_args": {"ep-size": 4}, "bootstrap_timeout_s": 33},
        pd_topology=inv.pd(prefill=4) | {"prefill": {"tp": 4, "extra_args": {"chunked-prefill-size": 2048}}},
    )
    prefill, decode = named(made, "prefill-0"), named(made, "decode-0")
    assert prefill.env["NCCL_PROTO"] == "Simple"
    assert "replaces LL by Simple" in reasons(prefill, "NCCL_PROTO")
    assert prefill.args["chunked-prefill-size"] == 2048
    assert "chunked-prefill-size" not in decode.args
    assert decode.args["ep-size"] == 4
    assert decode.env["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] == "33"


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
        plan.plan(wanted, {"gpu1": inv.host("gpu1"), "gpu2": inv.host("gpu2")})
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


# How GPUs talk


def steps(codes: dict[str, int | None]) -> list[ProbeStep]:
    return [ProbeStep(name, code, "words") for name, code in codes.items()]


@pytest.mark.parametrize(
    ("capability", "codes", "off", "said"),
    [
        ("12.0", {"multicast_granularity": 0, "fd_create": 0}, True, "gate"),
        ("9.0", {"multicast_granularity": 0, "fd_create": 0}, False, "answers 0"),
        ("9.0", {"multicast_granularity": 800, "fd_create": 0}, True, "multicast_granularity answers 800 on GPU 4"),
        ("10.0", {"multicast_granularity": 0, "fd_create": 801}, True, "fd_create answers 801"),
        ("9.0", {"multicast_granularity": 0, "fd_create": 2}, False, "proves nothing"),
        ("9.0", {"multicast_granularity": None, "fd_create": 0}, False, "proves nothing"),
        ("9.0", {}, False, "proves nothing"),
        (None, {}, False, "not known"),
    ],
)
def test_fusion_is_decided_by_gate_and_probe(
    capability: str | None, codes: dict[str, int | None], off: bool, said: str
) -> None:
    facts = inv.host(fabric=Fabric([steps(codes)] * 8))
    facts = replace(facts, gpus=[replace(gpu, compute_capability=capability) for gpu in facts.gpus])
    item = named(inv.planned(facts), "decode-0")
    assert ("enforce-disable-flashinfer-allreduce-fusion" in item.args) is off
    assert said in reasons(item, "fusion")


def test_nvlink_leaves_nccl_alone() -> None:
    item = named(inv.planned(recorded()["nvswitch-8"]), "decode-0")
    assert not [name for name in item.env if name.startswith("NCCL_")]
    assert "disable-custom-all-reduce" not in item.args
    assert "NVLink" in reasons(item, "NCCL")


@pytest.mark.parametrize(
    ("answer", "level", "said"), [(True, "SYS", "claims"), (False, None, "denies"), (None, None, "not known")]
)
def test_peer_access_decides_nccls_level(answer: bool | None, level: str | None, said: str) -> None:
    facts = inv.host()
    claimed = [[None if a == b else answer for b in range(8)] for a in range(8)]
    item = named(inv.planned(replace(facts, p2p=P2p(claimed=claimed, link_type=facts.p2p.link_type))), "decode-0")
    assert item.env.get("NCCL_P2P_LEVEL") == level
    assert said in reasons(item, "NCCL_P2P_LEVEL")
    if answer is False:
        assert "staged through host memory" in reasons(item, "KV lane")


def test_one_switch_needs_no_level() -> None:
    item = named(inv.planned(inv.host(switch=4), pd_topology=inv.pd(4, 4)), "prefill-0")
    assert "NCCL_P2P_LEVEL" not in item.env
    assert "disable-custom-all-reduce" not in item.args


@pytest.mark.parametrize(
    ("host", "release", "wanted", "on", "said"),
    [
        ("rtx-pro-6000-8", "sglang-0.5.13.post1", "auto", True, "tensor cores"),
        ("rtx-pro-6000-8", "sglang-0.5.23", "auto", False, "kernels of its own"),
        ("rtx-pro-6000-8", "sglang-0.5.23", "on", True, "pd_kernel_extension: on"),
        ("rtx-pro-6000-8", "sglang-0.5.13.post1", "off", False, "pd_kernel_extension: off"),
        ("nvswitch-8", "sglang-0.5.13.post1", "auto", False, "compute capability 9.0"),
        ("nvswitch-8", "sglang-0.5.13.post1", "on", True, "pd_kernel_extension: on"),
    ],
)
def test_the_kernel_extension_is_named_or_nothing_is(host: str, release: str, wanted: str, on: bool, said: str) -> None:
    made = inv.planned(recorded()[host], pd_release=release, pd_kernel_extension=wanted)
    assert made.kernel_extension is on
    item = named(made, "decode-0")
    assert item.env["SGLANG_PLUGINS"] == ("pdstack_kernels" if on else "none")
    assert said in reasons(item, "kernel extension")


# Stability and size


def test_a_lost_host_moves_only_its_own() -> None:
    facts = [inv.host(f"gpu{i}") for i in (1, 2, 3)]
    before = inv.planned(*facts, pd_topology=inv.replicas(4, 4))
    after = inv.planned(facts[0], facts[2], pd_topology=inv.replicas(4, 4), previous=before)
    moved = {
        i.name
        for i, j in zip(before.instances, after.instances)
        if (i.host, i.gpus, i.ports) != (j.host, j.gpus, j.ports)
    }
    assert moved == {i.name for i in before.instances if i.host == "gpu2"}


def test_each_host_knows_its_own_part_of_the_previous_plan() -> None:
    """gpu2 was away when a set was moved off it, and gpu3 is new and has no plan."""
    facts = [inv.host(f"gpu{i}") for i in (1, 2, 3)]
    both = inv.planned(*facts[:2], pd_topology=inv.replicas(8, 2))
    alone = inv.planned(facts[0], pd_topology=inv.replicas(8, 1), previous=both)
    assert plan.in_force({}) is None
    before = plan.in_force({"gpu1": alone, "gpu2": both})
    assert before is not None
    assert [(i.name, i.host) for i in before.instances] == [("aggregated-0", "gpu1"), ("aggregated-1", "gpu2")]
    after = inv.planned(*facts, pd_topology=inv.replicas(8, 3), previous=before)
    assert [i.host for i in after.instances] == ["gpu1", "gpu2", "gpu3"]


def test_one_more_decode_moves_nobody() -> None:
    before = inv.planned(inv.host(), pd_topology=inv.pd(2, 2), pd_model=SMALL)
    after = inv.planned(inv.host(), pd_topology=inv.pd(2, 2, p=1, d=2), pd_model=SMALL, previous=before)
    assert {i.set for i in after.instances} == {"group-0"}
    for name in ("prefill-0", "decode-0"):
        assert (named(after, name).gpus, named(after, name).ports) == (
            named(before, name).gpus,
            named(before, name).ports,
        )
    assert not {gpu.pci for gpu in named(after, "decode-1").gpus} & {g.pci for i in before.instances for g in i.gpus}


def test_a_set_whose_gpus_are_gone_moves_as_a_whole() -> None:
    facts = [inv.host("gpu1"), inv.host("gpu2")]
    before = inv.planned(*facts)
    out = {"gpu1": {"pd_excluded_gpus": [facts[0].gpus[0].pci]}}
    after = plan.plan(inv.read("gpu1", "gpu2", per_host=out), {f.host: f for f in facts}, before)
    assert {i.host for i in before.instances} == {"gpu1"}
    assert {i.host for i in after.instances} == {"gpu2"}
    alone = plan.plan(inv.read("gpu1", per_host=out, pd_topology=inv.pd(2, 2), pd_model=SMALL), {"gpu1": facts[0]},
                      inv.planned(facts[0], pd_topology=inv.pd(2, 2), pd_model=SMALL))  # fmt: skip
    assert positions(alone, "decode-0") == [4, 5]
    assert positions(alone, "prefill-0") == [2, 3]


def test_a_changed_topology_is_planned_afresh() -> None:
    before = inv.planned(inv.host(), pd_topology=inv.pd(2, 2, p=2, d=2), pd_model=SMALL)
    after = inv.planned(inv.host(), pd_topology=inv.pd(4, 4), pd_model=SMALL, previous=before)
    assert after == inv.planned(inv.host(), pd_topology=inv.pd(4, 4), pd_model=SMALL)


def test_ports_follow_pd_ports_on_a_second_run() -> None:
    before = inv.planned(inv.host())
    after = inv.planned(inv.host(), pd_ports={"decode": 31000}, previous=before)
    assert named(after, "decode-0").ports == {"http": 31000}
    assert named(after, "decode-0").gpus == named(before, "decode-0").gpus


def test_a_thousand_hosts() -> None:
    """Ten times the hosts may take about ten times as long. Prints what it took (goal: under 1 s for 1,000)."""
    seconds = {}
    for count in (100, 1000):
        facts = [inv.host(f"gpu{i}") for i in range(count)]
        names = [item.host for item in facts]
        hosts = {
            name: {
                "ansible_host": f"10.0.{i // 250}.{i % 250 + 1}",
                **inv.variables(pd_topology=inv.pd(p="auto", d="auto"), pd_router={"scope": "host"}),
            }
            for i, name in enumerate(names)
        }
        wanted = intent.parse(hosts, {"gpu_hosts": names, "router_hosts": names})
        best = float("inf")
        for _ in range(2):
            start = time.process_time()
            made = plan.plan(wanted, {item.host: item for item in facts})
            best = min(best, time.process_time() - start)
        assert len(made.instances) == 2 * count
        seconds[count] = best
        print(f"plan of {count} hosts, {8 * count} GPUs: {best:.3f} s of processor time")
    assert seconds[1000] < 25 * max(seconds[100], 0.01)


def test_the_report_fits_its_columns() -> None:
    made = inv.planned(inv.host())
    states = {"decode-0": {"state": "ready", "time to ready": "31.0 s"}, "router-0": {"state": "starting"}}
    lines = report.plan_table(made, states).splitlines()
    assert [line[lines[0].index("state") :].split("  ")[0] for line in lines[2:]] == ["ready", "-", "starting"]
    text = report.plan_text(made)
    assert "NCCL_P2P_LEVEL [decode-0]" in text
    assert "pd_router.policy" in text
    assert text.count("UCX_NET_DEVICES [decode-0, prefill-0]") == 1
