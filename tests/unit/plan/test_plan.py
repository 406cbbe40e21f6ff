"""The plan: the reference's row, every topology, stability over re-runs, and size."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from pdstack import codec, intent, plan, refusal, report, rolling
from pdstack.facts import HostFacts, Nic
from unit.plan import inventories as inv
from unit.plan.asking import SMALL, named, positions, reasons
from unit.plan.recorded import recorded

RDMA = [Nic("ib0", up=True, rdma="mlx5_0"), Nic("ib1", up=False, rdma="mlx5_1")]


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
        assert item.env["UCX_TLS"] == "cuda_copy,cuda_ipc,sm,self,tcp"
        assert item.env["SGLANG_HOST_IP"] == item.address
        assert item.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert item.env["HF_HUB_OFFLINE"] == item.env["TRANSFORMERS_OFFLINE"] == "1"
        assert "expandable_segments" not in json.dumps(item.env)
        assert "numa-node" not in item.args
    assert prefill.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert decode.env["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert (decode.env["NCCL_PROTO"], decode.env["NCCL_ALGO"]) == ("LL", "Ring")
    assert not {"NCCL_PROTO", "NCCL_ALGO"} & set(prefill.env), "LL halves the bandwidth of prefill's large messages"
    assert prefill.args["disable-cuda-graph"] is True
    assert decode.args["cuda-graph-max-bs"] == 32
    (router,) = made.routers
    assert router.ports == {"http": 8000, "metrics": 29001}
    assert router.workers["prefill"] == [plan.Worker("http://192.0.2.1:30000", 8998)]
    assert router.args["health-check-interval-secs"] == 5
    assert router.args["prometheus-host"] == "192.0.2.1"
    limit = next(why for why in router.why if why.decision == "request-timeout-secs")
    assert "no client waits longer than 3003 s" in limit.reason, "five attempts of 600 s, and 0.2 to 1.6 s between them"


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
    made = plan.plan(wanted, {"gpu1": inv.host("gpu1"), "front": HostFacts("front")})
    (router,) = made.routers
    assert (router.host, router.address) == ("front", "192.0.2.9")
    assert router.workers["prefill"][0].url == "http://192.0.2.1:30000"


def test_a_run_over_some_of_the_hosts_is_refused_whatever_the_others_do() -> None:
    """With --limit engines would restart and a router beyond it would go on with what it knew."""
    hosts = {name: inv.variables(ansible_host=f"192.0.2.{i}") for i, name in enumerate(["gpu1", "gpu2", "front"], 1)}
    wanted = intent.parse(hosts, {"gpu_hosts": ["gpu1", "gpu2"], "router_hosts": ["front", "gpu1"]})
    with pytest.raises(refusal.PlanRefused) as error:
        plan.plan(wanted, {"gpu1": inv.host("gpu1")})
    assert [(item.subject, item.found) for item in error.value.refusals] == [
        ("gpu2", "no facts"),
        ("front", "no facts"),
    ]
    assert "run without --limit" in error.value.refusals[0].remedy


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


SPECULATIVE = "speculative-"


@pytest.mark.parametrize(
    ("wanted", "args"),
    [
        ({"algorithm": "EAGLE"}, {"algorithm": "EAGLE", "num-steps": 3, "eagle-topk": 1, "num-draft-tokens": 4}),
        (
            {"algorithm": "EAGLE", "num_steps": 2, "moe_runner_backend": "marlin"},
            {"num-steps": 2, "num-draft-tokens": 3, "moe-runner-backend": "marlin"},
        ),
        # The number is the draft's own: the engine ends where it is given another.
        ({"algorithm": "DSPARK"}, {"algorithm": "DSPARK", "eagle-topk": 1}),
        ({"algorithm": "DSPARK", "num_draft_tokens": 6}, {"num-draft-tokens": 6}),
    ],
)
def test_speculation_is_the_same_for_both_sides(wanted: dict[str, Any], args: dict[str, Any]) -> None:
    made = inv.planned(inv.host(), pd_speculative=wanted)
    for item in made.instances:
        found = {name.removeprefix(SPECULATIVE): value for name, value in item.args.items() if SPECULATIVE in name}
        assert found | args == found
        assert set(found) - set(args) <= {"algorithm", "eagle-topk"}
        if "moe-runner-backend" not in args:
            assert "the model's own" in reasons(item, "speculative-moe-runner-backend")


def test_levers_of_the_operator_win_and_are_named() -> None:
    made = inv.planned(
        inv.host(),
        pd_engine={"extra_env": {"NCCL_PROTO": "Simple"}, "extra_args": {"ep-size": 4}, "bootstrap_timeout_s": 33},
        pd_topology=inv.pd(prefill=4) | {"prefill": {"tp": 4, "extra_args": {"chunked-prefill-size": 2048}}},
    )
    prefill, decode = named(made, "prefill-0"), named(made, "decode-0")
    assert prefill.env["NCCL_PROTO"] == decode.env["NCCL_PROTO"] == "Simple"
    assert "replaces LL by Simple" in reasons(decode, "NCCL_PROTO")
    assert prefill.args["chunked-prefill-size"] == 2048
    assert "chunked-prefill-size" not in decode.args
    assert decode.args["ep-size"] == 4
    assert decode.env["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] == "33"


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


@pytest.mark.parametrize("document", [None, {}, [], "x", {"instances": 5}, {"instances": [], "routers": []}])
def test_a_host_whose_plan_cannot_be_read_counts_as_one_without(document: Any) -> None:
    whole = inv.planned(inv.host(), inv.host("gpu2"), pd_topology=inv.replicas(8, 2))
    found = plan.recorded({"gpu1": codec.dump(whole), "gpu2": document})
    assert found is not None
    assert [item.name for item in found.instances] == ["aggregated-0"]
    assert plan.recorded({"gpu1": document, "gpu2": document}) is None


def test_what_runs_on_a_host_that_is_not_asked_is_told_by_the_others() -> None:
    """With --limit, half of a pair would be drained, and its other half on a host beyond would run on."""
    hosts = [inv.host(name, nics=RDMA) for name in ("gpu1", "gpu2")]
    whole = inv.planned(*hosts, pd_topology=inv.pd(8, 8), pd_service_interface="eth0")
    pair = {item.name: item.host for item in whole.instances}
    assert len(set(pair.values())) == 2
    here, beyond = pair.values()
    found = plan.everywhere({here: codec.dump(whole)})
    assert found is not None
    assert {item.name: item.host for item in found.instances} == pair
    problem = rolling.selection(codec.dump(found), whole.instances[0].set, here, [here])["problem"]
    assert f"on {beyond}" in problem
    assert "run without --limit" in problem
    # A host that is asked knows best what runs on it: here an older plan, which had nothing there.
    older = plan.everywhere({here: codec.dump(whole), beyond: {**codec.dump(whole), "instances": []}})
    assert older is not None
    assert [item.host for item in older.instances] == [here]
    assert plan.everywhere({here: {}}) is None


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
