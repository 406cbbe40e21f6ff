"""Properties that hold on every host: what no placement may do, whatever the machine looks like."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from pdstack import cpulist, placement, plan, refusal
from pdstack.facts import HostFacts, System
from unit.plan import inventories as inv

TINY = {"repo": "pdstack/tiny", "revision": inv.COMMIT}


@st.composite
def hosts(draw: st.DrawFn, name: str = "gpu1") -> HostFacts:
    """One to four nodes in one or two sockets, up to twelve GPUs anywhere, some at unknown nodes."""
    nodes = draw(st.integers(1, 4))
    where: list[int | None] = draw(
        st.lists(st.sampled_from([*range(nodes)] * 4 + [None]), min_size=1, max_size=12)  # type: ignore[list-item]
    )
    sockets = draw(st.integers(1, nodes))
    matrix = [[10 if a == b else 12 if a % sockets == b % sockets else 32 for b in range(nodes)] for a in range(nodes)]
    cores = draw(st.integers(1, 8))
    allowed = draw(st.one_of(st.just(""), st.just(f"0-{cores}")))
    facts = inv.host(
        name,
        where,
        nodes=nodes,
        cores=cores,
        distances=matrix,
        switch=draw(st.integers(1, 4)),
        system=System(allowed_cpus=allowed),
    )
    silent = draw(st.integers(-1, nodes - 1))
    return replace(facts, numa=[replace(n, memory_bytes=0) if n.node == silent else n for n in facts.numa])


SIZES = st.sampled_from([1, 2, 3, 4, 8])
COUNTS = st.one_of(st.just("auto"), st.integers(1, 3))
TOPOLOGIES = st.one_of(
    st.builds(lambda p, d, x, y: inv.pd(p, d, p=x, d=y), SIZES, SIZES, COUNTS, COUNTS),
    st.builds(inv.replicas, SIZES, COUNTS),
    st.builds(inv.aggregated, SIZES),
)


def attempt(facts: list[HostFacts], topology: dict[str, Any], previous: plan.Plan | None = None) -> plan.Plan | None:
    try:
        return inv.planned(
            *facts, pd_topology=topology, pd_model=TINY, pd_profile="cpu", pd_ports={"decode": 31000}, previous=previous
        )
    except refusal.Refused:
        return None


@settings(max_examples=300, deadline=None)
@given(facts=hosts(), topology=TOPOLOGIES)
def test_nothing_is_given_out_twice(facts: HostFacts, topology: dict[str, Any]) -> None:
    made = attempt([facts], topology)
    if made is None:
        return
    gpus = [gpu.pci for item in made.instances for gpu in item.gpus]
    assert len(gpus) == len(set(gpus))
    ports = [port for item in [*made.instances, *made.routers] for port in item.ports.values()]
    assert len(ports) == len(set(ports))
    seen: set[int] = set()
    for item in made.instances:
        mine = cpulist.parse(item.cpus)
        shared = any("more instances than cores" in why.reason for why in item.why)
        assert shared or not mine & seen, made
        seen |= mine


@settings(max_examples=300, deadline=None)
@given(facts=hosts(), topology=TOPOLOGIES)
def test_an_instance_stays_inside_a_node_that_can_hold_it(facts: HostFacts, topology: dict[str, Any]) -> None:
    made = attempt([facts], topology)
    if made is None:
        return
    node_of = {gpu.pci: gpu.numa_node for gpu in facts.gpus}
    used = {gpu.pci for item in made.instances for gpu in item.gpus}
    for item in made.instances:
        mine = {gpu.pci for gpu in item.gpus}
        if len({node_of[pci] for pci in mine}) == 1:
            continue
        for node in {n for n in node_of.values() if n is not None}:
            there = {pci for pci, at in node_of.items() if at == node and (pci in mine or pci not in used)}
            assert len(there) < len(mine), f"{item.name} spans, and node {node} could have held it"


@settings(max_examples=200, deadline=None)
@given(facts=hosts(), topology=TOPOLOGIES)
def test_cpus_and_memory_belong_to_the_gpus(facts: HostFacts, topology: dict[str, Any]) -> None:
    made = attempt([facts], topology)
    if made is None:
        return
    online = {node.node: cpulist.parse(node.cpus) for node in facts.numa}
    memory = {node.node: node.memory_bytes for node in facts.numa}
    allowed = cpulist.parse(facts.system.allowed_cpus)
    node_of = {gpu.pci: gpu.numa_node for gpu in facts.gpus}
    for item in made.instances:
        at = {node_of[gpu.pci] for gpu in item.gpus}
        mine = cpulist.parse(item.cpus)
        assert item.numa_nodes == sorted(n for n in at if n is not None)
        if None in at:
            assert (item.cpus, item.memory_nodes) == ("", ""), "a GPU at an unknown node pins nothing"
            continue
        assert mine <= frozenset().union(*(online[n] for n in at if n is not None))
        if allowed:
            assert mine <= allowed
        if len(at) > 1:
            assert item.memory_nodes == ""
        elif item.memory_nodes:
            assert memory[int(item.memory_nodes)] != 0


@settings(max_examples=150, deadline=None)
@given(
    facts=st.integers(1, 4).flatmap(lambda n: st.tuples(*(hosts(f"gpu{i}") for i in range(n)))),
    topology=TOPOLOGIES,
    seed=st.randoms(use_true_random=False),
)
def test_the_order_of_the_input_changes_nothing(
    facts: tuple[HostFacts, ...], topology: dict[str, Any], seed: random.Random
) -> None:
    made = attempt(list(facts), topology)
    if made is None:
        return
    wanted = {item.host: item for item in facts}
    names = list(wanted)
    seed.shuffle(names)
    hosts_vars = {
        name: {
            "ansible_host": f"192.0.2.{list(wanted).index(name) + 1}",
            **inv.variables(pd_topology=topology, pd_model=TINY, pd_profile="cpu", pd_ports={"decode": 31000}),
        }
        for name in names
    }
    from pdstack import intent

    again = intent.parse(hosts_vars, {"router_hosts": names, "gpu_hosts": names[::-1]})
    assert plan.plan(again, {name: wanted[name] for name in names}) == made


@settings(max_examples=150, deadline=None)
@given(facts=st.integers(1, 3).flatmap(lambda n: st.tuples(*(hosts(f"gpu{i}") for i in range(n)))), topology=TOPOLOGIES)
def test_a_second_run_keeps_everything(facts: tuple[HostFacts, ...], topology: dict[str, Any]) -> None:
    made = attempt(list(facts), topology)
    if made is not None:
        assert attempt(list(facts), topology, previous=made) == made


@settings(max_examples=100, deadline=None)
@given(facts=st.tuples(hosts("gpu1"), hosts("gpu2")), new=hosts("gpu0"), tp=SIZES)
def test_a_new_host_moves_nothing(facts: tuple[HostFacts, ...], new: HostFacts, tp: int) -> None:
    """With one more host, in front of the others, every instance stays where it is, on its port."""
    before = attempt(list(facts), inv.replicas(tp, "auto"))
    after = attempt([*facts, new], inv.replicas(tp, "auto"), previous=before)
    if before is None or after is None:
        return
    now = {item.name: (item.host, item.gpus, item.ports) for item in after.instances}
    assert all(now[item.name] == (item.host, item.gpus, item.ports) for item in before.instances)


def spot(facts: HostFacts, size: int) -> placement.Spot:
    return placement.place(placement.view(facts), [placement.Need("aggregated", 0, size, "s")], [])["aggregated-0"]


@pytest.mark.parametrize(
    ("facts", "size", "positions"),
    [
        (inv.host(gpus=[0, 0, 0, 0, 1, 1, 1, 1]), 4, (0, 1, 2, 3)),
        (inv.host(gpus=[0, 0, 1, 1]), 4, (0, 1, 2, 3)),
        (inv.host(gpus=[0, 1, 1, 1]), 1, (0,)),  # the smallest node that holds it: the larger one stays whole
        (inv.host(gpus=[0, 0, 0, 1, 1]), 2, (3, 4)),
        (inv.host(gpus=[0, 0, 0, 0], switch=3), 2, (0, 1)),  # below one switch, not across
        (inv.host(gpus=[0, 0, 0, 0, 0], switch=3), 2, (3, 4)),  # the switch that it fills
        (inv.host(gpus=[None, 0, 0, None]), 2, (1, 2)),
        (inv.host(gpus=[None, None, None]), 2, (0, 1)),
    ],
)
def test_choice_of_gpus(facts: HostFacts, size: int, positions: tuple[int, ...]) -> None:
    assert spot(facts, size).positions == positions


def test_nps4_fills_a_socket_before_it_crosses() -> None:
    """Eight nodes, two sockets, one GPU each, in the order of pegaflow#72."""
    matrix = [[10 if a == b else 12 if a // 4 == b // 4 else 32 for b in range(8)] for a in range(8)]
    facts = inv.host(gpus=[3, 2, 1, 0, 7, 6, 5, 4], nodes=8, distances=matrix)
    chosen = spot(facts, 4)
    assert chosen.positions == (0, 1, 2, 3)
    assert placement.locality(placement.view(facts), chosen) == "near"
    assert placement.locality(placement.view(facts), spot(facts, 8)) == "spans"


def test_minus_one_is_never_node_zero() -> None:
    for unknown in (None, -1, 7):
        facts = inv.host(gpus=[unknown, unknown])
        assert placement.view(facts).gpu_nodes == (None, None)
        assert spot(facts, 2).nodes == (None,)


def test_a_node_without_cpus_lends_its_nearest_one() -> None:
    facts = inv.host(gpus=[0, 2], nodes=3, distances=[[10, 32, 20], [32, 10, 12], [20, 12, 10]])
    facts = replace(facts, numa=[replace(n, cpus="", siblings=[]) if n.node == 2 else n for n in facts.numa])
    assert placement.view(facts).gpu_nodes == (0, 1)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_cores_are_split_by_siblings_around_offline_holes(parts: int) -> None:
    """CPU 7 is offline: its sibling stays a core of its own, and no core is cut in two."""
    facts = inv.host(gpus=[0] * 5, nodes=1, cores=8)
    node = replace(facts.numa[0], cpus="0-6,8-15", siblings=[f"{i},{i + 8}" for i in range(7)] + ["15"])
    view = placement.view(replace(facts, numa=[node]))
    spots = [(f"i{n}", placement.spot_of(view, [n])) for n in range(parts)]
    shares = placement.split_cpus(view, spots)
    given_out = [cpulist.parse(share.cpus) for share in shares.values()]
    assert sorted(cpu for share in given_out for cpu in share) == [*range(7), *range(8, 16)]
    for group in map(cpulist.parse, node.siblings):
        assert sum(bool(group & share) for share in given_out) == 1
    sizes = [sum(bool(g & share) for g in map(cpulist.parse, node.siblings)) for share in given_out]
    assert max(sizes) - min(sizes) <= 1


def test_more_instances_than_cores_share_and_say_so() -> None:
    view = placement.view(inv.host(gpus=[0, 0, 0], nodes=1, cores=2))
    shares = placement.split_cpus(view, [(f"i{n}", placement.spot_of(view, [n])) for n in range(3)])
    assert {share.cpus for share in shares.values()} == {"0-3"}
    assert all(share.shared and "more instances than cores" in share.reason for share in shares.values())


def test_a_node_without_memory_binds_to_the_nearest_that_has() -> None:
    matrix = [[10, 20, 32], [20, 10, 12], [32, 12, 10]]
    facts = inv.host(gpus=[1], nodes=3, distances=matrix)
    memory: Callable[[int], int] = lambda node: 0 if node == 1 else 1 << 38  # noqa: E731
    view = placement.view(replace(facts, numa=[replace(n, memory_bytes=memory(n.node)) for n in facts.numa]))
    share = placement.split_cpus(view, [("a", placement.spot_of(view, [0]))])["a"]
    assert (share.memory_nodes, "node 2 is the nearest" in share.memory_reason) == ("2", True)
