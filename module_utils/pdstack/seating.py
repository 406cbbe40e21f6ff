"""Which instances there are, and on which host and GPUs each one sits. Pure.

Places of the previous plan are kept where they still can be: a re-run never reshuffles GPUs or ports.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from . import placement
from .intent import Host, Intent, natural_key
from .placement import HostView, Need, Spot
from .plan_types import Plan, Seat


@dataclass(frozen=True)
class WantedSet:
    """Instances that restart together."""

    name: str
    needs: Tuple[Need, ...]


def sets(intent: Intent, views: Mapping[str, HostView]) -> List[WantedSet]:
    """Return the sets that the topology asks for; an empty list when "auto" finds room for none."""
    topology = intent.topology
    if topology.mode == "aggregated":
        return [WantedSet("aggregated-0", (Need("aggregated", 0, topology.aggregated.tp, "aggregated-0"),))]
    sizes = [len(view.usable) for view in views.values()]
    if topology.mode == "replicas":
        tp, count = topology.replicas.tp, topology.replicas.count
        number = sum(size // tp for size in sizes) if count is None else count
        return [WantedSet(f"replica-{i}", (Need("aggregated", i, tp, f"replica-{i}"),)) for i in range(number)]
    prefill, decode = topology.prefill, topology.decode
    p, d = _pair_counts(prefill.tp, prefill.count, decode.tp, decode.count, sizes)
    number = math.gcd(p, d)
    if not p or not d:
        return []
    kind = "pair" if p == d else "group"
    found: List[WantedSet] = []
    for i in range(number):
        name = f"{kind}-{i}"
        needs = [Need("prefill", k, prefill.tp, name) for k in range(i * p // number, (i + 1) * p // number)]
        needs += [Need("decode", k, decode.tp, name) for k in range(i * d // number, (i + 1) * d // number)]
        found.append(WantedSet(name, tuple(needs)))
    return found


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


@dataclass(frozen=True)
class Kept:
    """A place of the previous plan."""

    host: str
    spot: Spot
    offset: int


class Room:
    """How many GPUs each host still has while instances are promised to hosts."""

    def __init__(self, views: Mapping[str, HostView], kept: Mapping[str, Kept]) -> None:
        self.views = views
        self.names = sorted(views, key=natural_key)
        self.free: Dict[str, Set[int]] = {name: set(view.usable) for name, view in views.items()}
        for item in kept.values():
            self.free[item.host] -= set(item.spot.positions)
        self.needs: Dict[str, List[Need]] = {name: [] for name in self.names}
        self._left = {name: len(free) for name, free in self.free.items()}
        self._rank = {name: rank for rank, name in enumerate(self.names)}
        self._heap = [(-left, self._rank[name]) for name, left in self._left.items()]
        heapq.heapify(self._heap)

    def promise(self, needs: Sequence[Need]) -> bool:
        """Promise all of ``needs`` to the emptiest host that can take them together."""
        size = sum(need.tp for need in needs)
        refused: List[Tuple[int, int]] = []
        done = False
        while not done and self._heap and -self._heap[0][0] >= size:
            entry = heapq.heappop(self._heap)
            name = self.names[entry[1]]
            if -entry[0] != self._left[name]:
                continue  # the host has changed since, and has another entry
            done = self.promise_on(name, needs)
            if not done:
                refused.append(entry)
        for entry in refused:
            heapq.heappush(self._heap, entry)
        return done

    def promise_on(self, name: str, needs: Sequence[Need]) -> bool:
        """Promise all of ``needs`` to this host, if it can take them."""
        sizes = [need.tp for need in [*self.needs[name], *needs]]
        if not placement.fits(self.views[name], self.free[name], sizes):
            return False
        self.needs[name] += needs
        self._change(name, -sum(need.tp for need in needs))
        return True

    def release(self, item: Kept) -> None:
        """Take back the GPUs of a place that was kept."""
        self.free[item.host] |= set(item.spot.positions)
        self._change(item.host, len(item.spot.positions))

    def _change(self, name: str, by: int) -> None:
        self._left[name] += by
        heapq.heappush(self._heap, (-self._left[name], self._rank[name]))


def seats(
    hosts: Mapping[str, Host], views: Mapping[str, HostView], wanted: List[WantedSet], previous: Optional[Plan]
) -> Optional[List[Seat]]:
    """Give every instance a host and GPUs, or return None when they do not all fit.

    A set stays on one host where one can hold it; otherwise its instances are spread.
    """
    kept = _keep(wanted, views, previous)
    room = Room(views, kept)
    split: List[Need] = []
    for item in wanted:
        needs = item.needs
        new = [need for need in needs if need.key not in kept]
        homes = sorted({kept[need.key].host for need in needs if need.key in kept}, key=natural_key)
        if not new or any(room.promise_on(home, new) for home in homes):
            continue
        for need in needs:  # the set does not fit where it was: it moves as a whole
            if need.key in kept:
                room.release(kept.pop(need.key))
        if not room.promise(needs):
            split += needs
    for need in sorted(split, key=lambda n: -n.tp):  # large ones first, while a host can still hold them
        if not room.promise([need]):
            return None
    return _settle(hosts, views, wanted, kept, room)


def _keep(wanted: List[WantedSet], views: Mapping[str, HostView], previous: Optional[Plan]) -> Dict[str, Kept]:
    """Return the places of the previous plan's instances that are wanted again and still possible."""
    if previous is None:
        return {}
    old = {item.name: item for item in previous.instances}
    used: Set[Tuple[str, int]] = set()
    kept: Dict[str, Kept] = {}
    where = {
        name: {gpu.pci: i for i, gpu in enumerate(view.facts.gpus) if i in view.usable} for name, view in views.items()
    }
    for need in (need for item in wanted for need in item.needs):
        before = old.get(need.key)
        if before is None or before.host not in where or len(before.gpus) != need.tp:
            continue
        view = views[before.host]
        chosen = {i for i in (where[before.host].get(gpu.pci) for gpu in before.gpus) if i is not None}
        taken = any((before.host, i) in used for i in chosen)
        if len(chosen) == need.tp and not taken and len({view.kinds[i] for i in chosen}) == 1:
            kept[before.name] = Kept(before.host, placement.spot_of(view, chosen), before.offset)
            used |= {(before.host, i) for i in chosen}
    return kept


def _settle(
    hosts: Mapping[str, Host],
    views: Mapping[str, HostView],
    wanted: List[WantedSet],
    kept: Mapping[str, Kept],
    room: Room,
) -> List[Seat]:
    """Choose the GPUs on each host and number the instances of a role there."""
    taken: Dict[str, List[Tuple[Need, Spot]]] = {}
    offsets: Dict[Tuple[str, str], Set[int]] = {}
    for need in (need for item in wanted for need in item.needs if need.key in kept):
        place = kept[need.key]
        taken.setdefault(place.host, []).append((need, place.spot))
        offsets.setdefault((place.host, need.role), set()).add(place.offset)
    spots = {
        key: (name, spot)
        for name, needs in room.needs.items()
        if needs
        for key, spot in placement.place(views[name], needs, taken.get(name, [])).items()
    }
    found: List[Seat] = []
    for need in (need for item in wanted for need in item.needs):
        if need.key in kept:
            name, spot, offset = kept[need.key].host, kept[need.key].spot, kept[need.key].offset
        else:
            name, spot = spots[need.key]
            used = offsets.setdefault((name, need.role), set())
            offset = next(i for i in range(len(used) + 1) if i not in used)
            used.add(offset)
        found.append(Seat(need.role, need.index, need.party, need.tp, hosts[name], views[name], spot, offset))
    return sorted(found, key=lambda seat: (seat.role, seat.index))
