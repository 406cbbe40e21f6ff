"""From intent and facts to one plan: which instance runs where, with which arguments, and why. Pure.

``plan`` is deterministic and does not depend on the order of its inputs. Given the previous plan
it keeps every set whose GPUs are still there, so that a re-run never reshuffles GPUs or ports.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from . import checks, codec, cpulist, flags, hostchecks, placement, render, seating
from .facts import HostFacts, Port
from .intent import Intent, natural_key
from .placement import HostView
from .plan_types import GpuRef, Instance, ModelRef, Plan, Router, Seat, TopologyRef, Why, Worker
from .refusal import PlanRefused, Refusal

__all__ = [
    "GpuRef",
    "Instance",
    "ModelRef",
    "Plan",
    "Router",
    "Seat",
    "TopologyRef",
    "Why",
    "Worker",
    "foreign_holders",
    "foreign_ports",
    "foreign_processes",
    "foreign_stops",
    "in_force",
    "plan",
]


def plan(intent: Intent, facts: Mapping[str, HostFacts], previous: Optional[Plan] = None) -> Plan:
    """Return the plan for these hosts. Raises PlanRefused with every reason found."""
    refusals, notes = hostchecks.hosts(intent, facts)
    if refusals:
        raise PlanRefused(refusals)
    hosts = {host.name: host for host in intent.gpu_hosts}
    views = {name: placement.view(facts[name], hosts[name].excluded_gpus) for name in hosts}
    sets = seating.sets(intent, views)
    seats = seating.seats(hosts, views, sets, previous) if sets else None
    if seats is None:
        raise PlanRefused(checks.no_room(intent, views))
    cpus = _cpus(seats)
    peers = _peers(intent, seats)
    instances = [render.instance(intent, seat, cpus[seat.name], peers(seat)) for seat in seats]
    routers = render.routers(intent, instances)
    refusals = (
        checks.lanes(intent, seats) + checks.routing(intent, routers, instances) + checks.ports(instances, routers)
    )
    if refusals:
        raise PlanRefused(refusals)
    notes = notes + _idle(views, seats) + _unequal(intent)
    return Plan(
        release=intent.release.name,
        profile=intent.profile,
        model=render.model(intent),
        topology=TopologyRef(intent.topology.mode, intent.topology.context_length),
        instances=instances,
        routers=routers,
        canary=intent.settings.canary,
        info_path=intent.release.engine.info_endpoints[0],
        security=render.security(intent, facts),
        kernel_extension=any(item.env.get("SGLANG_PLUGINS") == flags.KERNEL_PLUGIN for item in instances),
        notes=notes,
    )


def in_force(plans: Mapping[str, Plan]) -> Optional[Plan]:
    """Return the previous plan as each host knows it: of host h's plan, the instances on h.

    A host that was away during the last deployment still has an older plan than the others.
    """
    if not plans:
        return None
    hosts = sorted(plans, key=natural_key)
    instances: Dict[str, Instance] = {}
    for host in hosts:
        for item in plans[host].instances:
            if item.host == host:
                instances.setdefault(item.name, item)
    ordered = sorted(instances.values(), key=lambda item: (item.role, item.index))
    return replace(plans[hosts[0]], instances=ordered)


def readable(document: Any) -> Optional[Plan]:
    """Return a plan from its document, None for one that is empty, damaged, or of another version of the bundle."""
    try:
        return codec.load(Plan, document, "previous plan")
    except codec.CodecError:
        return None


def recorded(documents: Mapping[str, Any]) -> Optional[Plan]:
    """Return the plan in force from what each host keeps of it (/etc/pdstack/plan.json).

    A document that cannot be read counts as none: GPUs and ports are then chosen afresh.
    """
    return in_force(_readable(documents))


def everywhere(documents: Mapping[str, Any]) -> Optional[Plan]:
    """Return the plan in force on all hosts from what some of them keep: of the others, what these know of them."""
    plans = _readable(documents)
    found = in_force(plans)
    if found is None:
        return None
    instances = {item.name: item for item in found.instances}
    for host in sorted(plans, key=natural_key):
        for item in plans[host].instances:
            if item.host not in plans:
                instances.setdefault(item.name, item)
    return replace(found, instances=sorted(instances.values(), key=lambda item: (item.role, item.index)))


def _readable(documents: Mapping[str, Any]) -> Dict[str, Plan]:
    plans = {host: readable(document) for host, document in documents.items()}
    return {host: found for host, found in plans.items() if found is not None}


def foreign_holders(wanted: Plan, facts: Mapping[str, HostFacts]) -> List[Tuple[str, int, str, Port]]:
    """Return host, port, planned user and holder of each planned port that is not held by a unit of ours.

    A port held by the unit that the plan gives it to is ours. So is one of any ``pd-`` unit of
    ours: an earlier plan's instance, which the deployment stops before it starts the new ones.
    """
    found: List[Tuple[str, int, str, Port]] = []
    for host, port, user in checks.port_users(wanted.instances, wanted.routers):
        holders = [item for item in facts[host].ports if item.port == port] if host in facts else []
        foreign = [holder for holder in holders if not _ours(holder.unit or "")]
        found += [(host, port, user, holder) for holder in foreign[:1]]
    return found


def foreign_ports(wanted: Plan, facts: Mapping[str, HostFacts], stopped: Sequence[str] = ()) -> List[Refusal]:
    """Return a refusal for each planned port that a process holds which is not ours and is not to be stopped."""
    return [
        _held(host, port, user, holder)
        for host, port, user, holder in foreign_holders(wanted, facts)
        if not _named(holder, stopped)
    ]


def foreign_stops(wanted: Plan, facts: Mapping[str, HostFacts], stopped: Sequence[str]) -> Dict[str, List[Port]]:
    """Return by host the holders of our ports that ``stopped`` names, by port or by unit: serve stops them."""
    found: Dict[str, List[Port]] = {}
    for host, _, _, holder in foreign_holders(wanted, facts):
        if _named(holder, stopped):
            found.setdefault(host, []).append(holder)
    return found


def _named(holder: Port, names: Sequence[str]) -> bool:
    unit = holder.unit or ""
    return holder.pid is not None and bool({str(holder.port), unit, unit.rpartition(".")[0]} & set(names))


def foreign_processes(wanted: Plan, facts: Mapping[str, HostFacts]) -> List[Refusal]:
    """Return a refusal for each planned GPU on which a program holds memory that is neither ours nor told elsewhere.

    What also holds one of our ports is told, or stopped, because of that.
    """
    told: Dict[str, Set[str]] = {}
    for host, _, _, holder in foreign_holders(wanted, facts):
        told.setdefault(host, set()).add(holder.unit or "")
    return hostchecks.in_use(wanted, facts, lambda host, unit: _ours(unit) or unit in told.get(host, set()))


def _ours(unit: str) -> bool:
    return unit == "pd-router.service" or unit.startswith(("pd-prefill@", "pd-decode@", "pd-aggregated@"))


def _held(host: str, port: int, user: str, holder: Port) -> Refusal:
    who = f"process {holder.pid} ({holder.command or 'unknown command'})" if holder.pid else "an unknown process"
    unit = f" of unit {holder.unit}" if holder.unit else ""
    since = f" since {holder.since}" if holder.since else ""
    stop = (
        f"systemctl disable --now {holder.unit}"
        if holder.unit
        else f"kill {holder.pid}"
        if holder.pid
        else f"ss -ltnp sport = :{port}"
    )
    return Refusal(
        f"{host} port {port}",
        f"held by {who}{unit}{since} on {holder.address}",
        f"free for {user}",
        f"stop it if nobody needs it ({stop}), let serve stop it with pd_stop_foreign: "
        f"[{holder.unit or port}], or move our port with pd_ports",
    )


def _peers(intent: Intent, seats: List[Seat]) -> Callable[[Seat], List[Seat]]:
    """Return who the router may pair an instance with: everybody of the other role, or those of its host.

    One representative of each other host is enough to say that a lane leaves the host.
    """
    by_host: Dict[Tuple[str, str], List[Seat]] = {}
    for seat in seats:
        by_host.setdefault((seat.role, seat.host.name), []).append(seat)
    by_set: Dict[Tuple[str, str], List[Seat]] = {}
    for seat in seats:
        by_set.setdefault((seat.role, seat.set), []).append(seat)
    roles: Dict[str, List[Seat]] = {}
    for (role, _), group in by_host.items():
        roles.setdefault(role, []).append(group[0])

    def peers(seat: Seat) -> List[Seat]:
        other = {"prefill": "decode", "decode": "prefill"}.get(seat.role, "")
        local = by_host.get((other, seat.host.name), [])
        if intent.settings.router.scope == "host":
            return local + [peer for peer in by_set.get((other, seat.set), []) if peer.host.name != seat.host.name]
        return local + [peer for peer in roles.get(other, [])[:2] if peer.host.name != seat.host.name]

    return peers


def _cpus(seats: List[Seat]) -> Dict[str, placement.Cpus]:
    by_host: Dict[str, List[Seat]] = {}
    for seat in seats:
        by_host.setdefault(seat.host.name, []).append(seat)
    result: Dict[str, placement.Cpus] = {}
    for group in by_host.values():
        # In the order of their GPUs, so that neighbours on the bus get neighbouring cores.
        group.sort(key=lambda seat: seat.spot.positions)
        result.update(placement.split_cpus(group[0].view, [(seat.name, seat.spot) for seat in group]))
    return result


def _idle(views: Mapping[str, HostView], seats: List[Seat]) -> List[str]:
    """Say which GPUs serve nothing."""
    used: Dict[str, Set[int]] = {name: set() for name in views}
    for seat in seats:
        used[seat.host.name] |= set(seat.spot.positions)
    notes: List[str] = []
    for name in sorted(views, key=natural_key):
        idle = sorted(set(views[name].usable) - used[name])
        if idle:
            plural = "s" if len(idle) > 1 else ""
            notes.append(f"{name}: GPU{plural} {cpulist.render(idle)} of {len(views[name].facts.gpus)} left idle")
        out = len(views[name].facts.gpus) - len(views[name].usable)
        if out:
            notes.append(f"{name}: {out} GPU{'s' if out > 1 else ''} kept from serving by pd_excluded_gpus")
    return notes


def _unequal(intent: Intent) -> List[str]:
    topology = intent.topology
    if topology.mode != "pd" or topology.prefill.tp == topology.decode.tp:
        return []
    return [
        f"prefill tp {topology.prefill.tp} and decode tp {topology.decode.tp} differ: the release's source allows it "
        "for models with latent attention, nobody here has run it"
    ]
