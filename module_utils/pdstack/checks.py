"""What forbids a plan as a whole: no room, a lane over TCP, ports that clash, instances without a router. Pure."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Set, Tuple

from .facts import HostFacts
from .intent import Intent, natural_key
from .placement import HostView
from .plan_types import Instance, Router, Seat
from .refusal import Refusal


def no_room(intent: Intent, views: Mapping[str, HostView]) -> List[Refusal]:
    """Explain why the instances do not fit on the GPUs that there are."""
    topology = intent.topology
    if topology.mode == "pd":
        shapes = [
            ("prefill", topology.prefill.tp, topology.prefill.count),
            ("decode", topology.decode.tp, topology.decode.count),
        ]
    elif topology.mode == "replicas":
        shapes = [("replicas", topology.replicas.tp, topology.replicas.count)]
    else:
        shapes = [("aggregated", topology.aggregated.tp, 1)]
    have = sum(len(view.usable) for view in views.values())
    each = "; ".join(f"{name}: {_gpus_of(views[name])}" for name in sorted(views, key=natural_key)[:8])
    largest = max((_largest_kind(view) for view in views.values()), default=0)
    if have == 0:
        remedy = "see lspci -d 10de: and pd_excluded_gpus"
        if intent.profile == "cpu":
            remedy = "point pd_sysfs_root to a tree with simulated GPUs, as the lab's hosts have one"
        return [Refusal("pd_topology", f"no usable GPU ({each})", "GPUs to place the instances on", remedy)]
    refusals: List[Refusal] = []
    for role, tp, _ in shapes:
        if tp > largest:
            remedy = "lower tp: an instance lives on one host and on GPUs of one model"
            refusals.append(
                Refusal(f"pd_topology.{role}.tp", f"{tp}; {each}", f"at most {largest} GPUs for one instance", remedy)
            )
    if refusals:
        return refusals
    wanted = sum(tp * (count or 1) for _, tp, count in shapes)
    words = " + ".join(f"{'at least 1' if count is None else count} x {role} of {tp}" for role, tp, count in shapes)
    if topology.mode == "pd" and have == 1:
        remedy = (
            "one GPU cannot be split into prefill and decode: set pd_topology.mode: aggregated with aggregated.tp: 1"
        )
    elif topology.mode == "pd":
        remedy = "lower tp or count (count: auto takes what fits), add hosts, or set pd_topology.mode: aggregated"
    else:
        remedy = "lower tp or count (count: auto takes what fits), or add hosts"
    found = f"{have} usable GPU{'s' if have != 1 else ''} on {len(views)} host{'s' if len(views) != 1 else ''} ({each})"
    return [Refusal("pd_topology", found, f"{wanted} GPUs: {words}, each instance on one host", remedy)]


def lanes(intent: Intent, seats: Sequence[Seat]) -> List[Refusal]:
    """Refuse a KV cache that would travel over TCP on GPU hosts."""
    if intent.topology.mode != "pd" or intent.profile != "gpu":
        return []
    facts = {seat.host.name: seat.view.facts for seat in seats}
    users = sorted(facts, key=natural_key)
    without = [name for name in users if not rdma_devices(facts[name])]
    members: Dict[str, Set[str]] = {}
    for seat in seats:
        members.setdefault(seat.set, set()).add(seat.host.name)
    refusals: List[Refusal] = []
    for name in sorted(members, key=natural_key):
        spread = sorted(members[name], key=natural_key)
        lacking = [host for host in spread if host in without]
        if len(spread) > 1 and lacking:
            refusals.append(
                Refusal(
                    f"KV lane of {name}",
                    f"prefill and decode on {', '.join(spread)}; no RDMA device is up on {', '.join(lacking)}: TCP",
                    "RDMA between the hosts of a pair, or both sides on one host",
                    "lower tp so that a pair fits on one host, add RDMA NICs, or set pd_topology.mode: replicas",
                )
            )
    if not refusals and len(users) > 1 and intent.settings.router.scope == "all" and without:
        refusals.append(
            Refusal(
                "pd_router.scope",
                f"all: the router pairs any prefill with any decode of {len(users)} hosts; no RDMA device is up on "
                f"{', '.join(without[:4])}{' and more' if len(without) > 4 else ''}: TCP",
                "RDMA between all hosts, or routers that pair within one host",
                "set pd_router.scope: host with every GPU host in router_hosts too, or pd_topology.mode: replicas",
            )
        )
    return refusals


def routing(intent: Intent, routers: Sequence[Router], instances: Sequence[Instance]) -> List[Refusal]:
    """Every instance must be behind a router, and every router must have all that it needs."""
    roles = ("prefill", "decode") if intent.topology.mode == "pd" else ("aggregated",)
    remedy = "put every host that serves, and no other, into router_hosts, or set pd_router.scope: all"
    found: List[Refusal] = []
    for router in routers:
        lacking = [role for role in roles if not router.workers.get(role)]
        if lacking:
            found.append(
                Refusal(
                    f"{router.name} on {router.host}",
                    f"no {' and no '.join(lacking)} instance",
                    "one of each role",
                    remedy,
                )
            )
    served = {router.host for router in routers}
    alone = sorted({item.host for item in instances} - served, key=natural_key)
    if intent.settings.router.scope == "host" and alone:
        found.append(
            Refusal(
                "pd_router.scope",
                f"host, and no router on {', '.join(alone[:8])}",
                "a router on every host that serves",
                remedy,
            )
        )
    return found


def rdma_devices(facts: HostFacts) -> List[str]:
    """Return the RDMA devices whose link is up."""
    return sorted({nic.rdma for nic in facts.nics if nic.rdma and nic.up})


def ports(instances: Sequence[Instance], routers: Sequence[Router]) -> List[Refusal]:
    """Refuse two users of one port on a host."""
    users: Dict[Tuple[str, int], List[str]] = {}
    high: List[Refusal] = []
    for host, port, user in port_users(instances, routers):
        users.setdefault((host, port), []).append(user)
        if port > 65535:
            high.append(
                Refusal(f"{host} port {port}", f"port of {user}", "at most 65535", "lower the first port in pd_ports")
            )
    clashes = [
        Refusal(
            f"{host} port {port}",
            f"wanted by {' and '.join(names)}",
            "one user for each port",
            "move one of them with pd_ports",
        )
        for (host, port), names in sorted(users.items())
        if len(names) > 1
    ]
    return clashes + high


def port_users(instances: Sequence[Instance], routers: Sequence[Router]) -> List[Tuple[str, int, str]]:
    """Return host, port and user of each port of a plan."""
    users = [(i.host, port, f"{i.name} ({kind})") for i in instances for kind, port in sorted(i.ports.items())]
    return users + [(r.host, port, f"{r.name} ({kind})") for r in routers for kind, port in sorted(r.ports.items())]


def _largest_kind(view: HostView) -> int:
    counts: Dict[str, int] = {}
    for i in view.usable:
        counts[view.kinds[i]] = counts.get(view.kinds[i], 0) + 1
    return max(counts.values(), default=0)


def _gpus_of(view: HostView) -> str:
    counts: Dict[str, int] = {}
    for i in view.usable:
        name = view.facts.gpus[i].name or "GPU"
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or "no usable GPU"
