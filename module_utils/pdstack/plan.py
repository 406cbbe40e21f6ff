"""From intent and facts to one plan: which instance runs where, with which arguments, and why. Pure.

``plan`` is deterministic and does not depend on the order of its inputs. Given the previous plan
it keeps every set whose GPUs are still there, so that a re-run never reshuffles GPUs or ports.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from . import checks, cpulist, hostchecks, placement, render
from .facts import HostFacts, Port
from .intent import Host, Intent, natural_key
from .placement import HostView, Need, Spot
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
    "foreign_ports",
    "foreign_processes",
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
    sets = _sets(intent, views)
    seats = _seat(hosts, views, sets, previous) if sets else None
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
    notes = notes + _idle(views, seats)
    return Plan(
        release=intent.release.name,
        profile=intent.profile,
        model=render.model(intent),
        topology=TopologyRef(intent.topology.mode, intent.topology.context_length),
        instances=instances,
        routers=routers,
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


def foreign_ports(wanted: Plan, facts: Mapping[str, HostFacts]) -> List[Refusal]:
    """Return a refusal for each planned port that a process holds which is not the plan's own unit.

    A port held by the unit that the plan gives it to is ours. So is one of any ``pd-`` unit of
    ours: an earlier plan's instance, which the deployment stops before it starts the new ones.
    """
    found: List[Refusal] = []
    for host, port, user in checks.port_users(wanted.instances, wanted.routers):
        holders = [item for item in facts[host].ports if item.port == port] if host in facts else []
        for holder in holders:
            if not _ours(holder):
                found.append(_held(host, port, user, holder))
                break
    return found


def foreign_processes(wanted: Plan, facts: Mapping[str, HostFacts]) -> List[Refusal]:
    """Return a refusal for each planned GPU on which a program that is no engine holds memory."""
    return hostchecks.in_use(wanted, facts)


def _ours(holder: Port) -> bool:
    unit = holder.unit or ""
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
        f"stop it if nobody needs it ({stop}), or move our port with pd_ports",
    )


@dataclass(frozen=True)
class _Set:
    name: str
    needs: Tuple[Tuple[str, int, int], ...]  # role, index, tp


def _sets(intent: Intent, views: Mapping[str, HostView]) -> List[_Set]:
    """Return the sets that the topology asks for; an empty list when "auto" finds room for none."""
    topology = intent.topology
    if topology.mode == "aggregated":
        return [_Set("aggregated-0", (("aggregated", 0, topology.aggregated.tp),))]
    sizes = [len(view.usable) for view in views.values()]
    if topology.mode == "replicas":
        tp, count = topology.replicas.tp, topology.replicas.count
        number = sum(size // tp for size in sizes) if count is None else count
        return [_Set(f"replica-{i}", (("aggregated", i, tp),)) for i in range(number)]
    prefill, decode = topology.prefill, topology.decode
    p, d = _pair_counts(prefill.tp, prefill.count, decode.tp, decode.count, sizes)
    if not p or not d:
        return []
    number = math.gcd(p, d)
    each_p, each_d = p // number, d // number
    kind = "pair" if each_p == each_d == 1 else "group"
    return [
        _Set(
            f"{kind}-{i}",
            tuple(("prefill", i * each_p + k, prefill.tp) for k in range(each_p))
            + tuple(("decode", i * each_d + k, decode.tp) for k in range(each_d)),
        )
        for i in range(number)
    ]


def _pair_counts(
    p_tp: int, p_count: Optional[int], d_tp: int, d_count: Optional[int], sizes: Sequence[int]
) -> Tuple[int, int]:
    """Resolve "auto": as many as fit, one prefill for each decode unless one count is given."""
    if p_count is not None and d_count is not None:
        return p_count, d_count
    if p_count is None and d_count is None:
        pairs = sum(size // (p_tp + d_tp) for size in sizes)
        if not pairs:  # a pair needs two hosts
            slots = sum(size // max(p_tp, d_tp) for size in sizes)
            pairs = slots // 2
        return pairs, pairs
    fixed, fixed_tp, other_tp = (p_count, p_tp, d_tp) if p_count is not None else (d_count, d_tp, p_tp)
    left = [-size for size in sizes]
    heapq.heapify(left)
    for _ in range(fixed or 0):
        if not left or -left[0] < fixed_tp:
            return 0, 0
        heapq.heapreplace(left, left[0] + fixed_tp)
    other = sum(-size // other_tp for size in left)
    return (fixed or 0, other) if p_count is not None else (other, fixed or 0)


class _Room:
    """How many GPUs each host still has while instances are promised to hosts, the emptiest first."""

    def __init__(self, views: Mapping[str, HostView], kept: Mapping[str, _Kept]) -> None:
        self.views = views
        self.names = sorted(views, key=natural_key)
        self.free: Dict[str, Set[int]] = {name: set(view.usable) for name, view in views.items()}
        for item in kept.values():
            self.free[item.host] -= set(item.spot.positions)
        self.needs: Dict[str, List[Need]] = {name: [] for name in self.names}
        self._heap = [(-len(self.free[name]), rank) for rank, name in enumerate(self.names)]
        heapq.heapify(self._heap)

    def promise(self, needs: Sequence[Need]) -> bool:
        """Promise all of ``needs`` to the emptiest host that can take them together."""
        size = sum(need.tp for need in needs)
        refused: List[Tuple[int, int]] = []
        done = False
        while self._heap and -self._heap[0][0] >= size:
            left, rank = heapq.heappop(self._heap)
            name = self.names[rank]
            sizes = [need.tp for need in [*self.needs[name], *needs]]
            if placement.fits(self.views[name], self.free[name], sizes):
                self.needs[name] += needs
                heapq.heappush(self._heap, (left + size, rank))
                done = True
                break
            refused.append((left, rank))
        for item in refused:
            heapq.heappush(self._heap, item)
        return done


@dataclass(frozen=True)
class _Kept:
    host: str
    spot: Spot
    offset: int


def _seat(
    hosts: Mapping[str, Host], views: Mapping[str, HostView], sets: List[_Set], previous: Optional[Plan]
) -> Optional[List[Seat]]:
    """Give every instance a host and GPUs, or return None when they do not all fit.

    A set stays on one host where one can hold it; otherwise its instances are spread.
    """
    kept = _keep(sets, views, previous)
    room = _Room(views, kept)
    split: List[Need] = []
    for item in sets:
        needs = [Need(f"{role}-{index}", tp, item.name, role) for role, index, tp in item.needs]
        if needs[0].key not in kept and not room.promise(needs):
            split += needs
    for need in sorted(split, key=lambda n: -n.tp):  # large ones first, while a host can still hold them
        if not room.promise([need]):
            return None
    return _settle(hosts, views, sets, kept, room)


def _keep(sets: List[_Set], views: Mapping[str, HostView], previous: Optional[Plan]) -> Dict[str, _Kept]:
    """Return the places of the previous plan's sets that are wanted again and still possible."""
    if previous is None:
        return {}
    old = {item.name: item for item in previous.instances}
    used: Set[Tuple[str, int]] = set()
    kept: Dict[str, _Kept] = {}
    where = {
        name: {gpu.pci: i for i, gpu in enumerate(view.facts.gpus) if i in view.usable} for name, view in views.items()
    }
    for item in sets:
        places: Dict[str, _Kept] = {}
        for role, index, tp in item.needs:
            before = old.get(f"{role}-{index}")
            if before is None or before.set != item.name or len(before.gpus) != tp or before.host not in where:
                break
            positions = [where[before.host].get(gpu.pci) for gpu in before.gpus]
            chosen = [i for i in positions if i is not None]
            clash = any((before.host, i) in used for i in chosen)
            view = views[before.host]
            if clash or len(set(chosen)) != tp or len({view.kinds[i] for i in chosen}) != 1:
                break
            places[before.name] = _Kept(before.host, placement.spot_of(view, chosen), before.offset)
        if len(places) == len(item.needs):
            kept.update(places)
            used |= {(place.host, i) for place in places.values() for i in place.spot.positions}
    return kept


def _settle(
    hosts: Mapping[str, Host],
    views: Mapping[str, HostView],
    sets: List[_Set],
    kept: Mapping[str, _Kept],
    room: _Room,
) -> List[Seat]:
    """Choose the GPUs on each host and number the instances of a role there."""
    places: Dict[str, Tuple[str, Spot]] = {key: (item.host, item.spot) for key, item in kept.items()}
    taken: Dict[str, Dict[str, Spot]] = {}
    for key, item in kept.items():
        taken.setdefault(item.host, {})[key] = item.spot
    for name, needs in room.needs.items():
        if needs:
            for key, spot in placement.place(views[name], needs, taken.get(name, {})).items():
                places[key] = (name, spot)
    offsets: Dict[Tuple[str, str], Set[int]] = {}
    for key, item in kept.items():
        offsets.setdefault((item.host, key.rpartition("-")[0]), set()).add(item.offset)
    seats: List[Seat] = []
    for item_set in sets:
        for role, index, tp in item_set.needs:
            key = f"{role}-{index}"
            name, spot = places[key]
            if key in kept:
                offset = kept[key].offset
            else:
                used = offsets.setdefault((name, role), set())
                offset = next(i for i in range(len(used) + 1) if i not in used)
                used.add(offset)
            seats.append(Seat(role, index, item_set.name, tp, hosts[name], views[name], spot, offset))
    return sorted(seats, key=lambda seat: (seat.role, seat.index))


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
