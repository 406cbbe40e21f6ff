"""Where instances go: GPUs by NUMA node and PCIe switch, then CPUs by sibling pairs. Pure.

Rules (docs/architecture.md): an instance is filled inside one NUMA node, else over the nearest
nodes (a socket split by NPS4 or SNC), else it spans; a GPU whose node is not known is never
counted to node 0; cores are split by sibling groups and never by counting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, FrozenSet, Iterable, List, Optional, Sequence, Set, Tuple

from . import cpulist
from .facts import Gpu, HostFacts, NumaNode

Node = Optional[int]


@dataclass(frozen=True)
class HostView:
    """What placement needs of one host's facts, computed once."""

    facts: HostFacts
    nodes: Dict[int, NumaNode]  # nodes that have CPUs
    gpu_nodes: Tuple[Node, ...]  # by GPU position: a node with CPUs, or None
    switches: Tuple[Tuple[str, ...], ...]  # by GPU position: the bridges above it, without its own port
    kinds: Tuple[str, ...]  # by GPU position: only equal kinds work together in one instance
    usable: Tuple[int, ...]  # positions that may serve
    distances: Dict[Tuple[int, int], int]


@dataclass(frozen=True)
class Need:
    """One instance that wants a place: the ``index``-th of its role, in the set ``party``."""

    role: str
    index: int
    tp: int
    party: str

    @property
    def key(self) -> str:
        """The instance's name."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True)
class Spot:
    """GPUs of one instance and the nodes they hang on (None: not known)."""

    positions: Tuple[int, ...]
    nodes: Tuple[Node, ...]  # distinct, ascending, None last


@dataclass(frozen=True)
class Cpus:
    """CPUs and memory of one instance; ``reason`` explains both."""

    cpus: str
    memory_nodes: str
    reason: str
    memory_reason: str
    shared: bool = False


def view(facts: HostFacts, excluded: Iterable[str] = ()) -> HostView:
    """Prepare one host. ``excluded`` are PCI ids that the operator keeps from serving."""
    by_number = {node.node: node for node in facts.numa}
    order = sorted(by_number)
    distances = {
        (a, b): by_number[a].distances[j] for a in order for j, b in enumerate(order) if j < len(by_number[a].distances)
    }
    nodes = {number: node for number, node in by_number.items() if node.cpus}
    out = frozenset(excluded)
    return HostView(
        facts=facts,
        nodes=nodes,
        gpu_nodes=tuple(_cpu_node(gpu, by_number, nodes, distances) for gpu in facts.gpus),
        switches=tuple(tuple(gpu.pci_path[:-1]) or tuple(gpu.pci_path) or (gpu.pci,) for gpu in facts.gpus),
        kinds=tuple(f"{gpu.name} {gpu.compute_capability}" for gpu in facts.gpus),
        usable=tuple(i for i, gpu in enumerate(facts.gpus) if gpu.pci not in out),
        distances=distances,
    )


def fits(host: HostView, free: Set[int], sizes: Sequence[int]) -> bool:
    """Whether instances of these sizes fit on the free GPUs, each on GPUs of one kind."""
    left: Dict[str, int] = {}
    for position in free:
        left[host.kinds[position]] = left.get(host.kinds[position], 0) + 1
    for size in sorted(sizes, reverse=True):
        able = [kind for kind, count in left.items() if count >= size]
        if not able:
            return False
        left[min(able, key=lambda kind: (left[kind], kind))] -= size
    return True


def place(host: HostView, needs: Sequence[Need], taken: Sequence[Tuple[Need, Spot]]) -> Dict[str, Spot]:
    """Give each need its GPUs on this host; ``taken`` are places that are already settled.

    Larger instances choose first. Prefill and decode of one set go to different nodes where both
    fit inside a node. Raises ValueError when a need does not fit: call ``fits`` before.
    """
    free = set(host.usable)
    roles: Dict[Tuple[str, str], Set[Node]] = {}
    for settled, spot in taken:
        free -= set(spot.positions)
        roles.setdefault((settled.party, settled.role), set()).update(spot.nodes)
    spots: Dict[str, Spot] = {}
    for need in sorted(needs, key=lambda item: -item.tp):  # stable: ties keep the caller's order
        avoid: Set[Node] = set()
        for (party, role), used in roles.items():
            if party == need.party and role != need.role:
                avoid |= used
        spot = _choose(host, free, need.tp, frozenset(avoid))
        free -= set(spot.positions)
        roles.setdefault((need.party, need.role), set()).update(spot.nodes)
        spots[need.key] = spot
    return spots


def spot_of(host: HostView, positions: Iterable[int]) -> Spot:
    """Return the place that these GPU positions make."""
    chosen = tuple(sorted(positions))
    known = sorted({node for node in (host.gpu_nodes[i] for i in chosen) if node is not None})
    unknown: List[Node] = [None] if any(host.gpu_nodes[i] is None for i in chosen) else []
    return Spot(chosen, (*known, *unknown))


def locality(host: HostView, spot: Spot) -> str:
    """Return node | near | spans | unknown: how close the GPUs of a place are."""
    if None in spot.nodes:
        return "unknown"
    if len(spot.nodes) == 1:
        return "node"
    farthest = max(host.distances.get((a, b), 255) for a in host.nodes for b in host.nodes)
    inside = max(
        host.distances.get((a, b), 255) for a in spot.nodes for b in spot.nodes if a is not None and b is not None
    )
    return "near" if inside < farthest else "spans"


def split_cpus(host: HostView, spots: Sequence[Tuple[str, Spot]]) -> Dict[str, Cpus]:
    """Share each node's cores evenly between the instances whose GPUs hang on it."""
    allowed = cpulist.parse(host.facts.system.allowed_cpus)
    users: Dict[int, List[str]] = {}
    for key, spot in spots:
        for node in spot.nodes:
            if node is not None:
                users.setdefault(node, []).append(key)
    shares: Dict[Tuple[str, int], FrozenSet[int]] = {}
    crowded: Set[int] = set()
    for number, keys in users.items():
        groups = _cores(host.nodes[number], allowed)
        if len(groups) < len(keys):
            crowded.add(number)
        for i, key in enumerate(keys):
            part = groups if number in crowded else _part(groups, i, len(keys))
            shares[(key, number)] = frozenset(cpu for group in part for cpu in group)
    return {key: _describe(host, key, spot, shares, users, crowded, bool(allowed)) for key, spot in spots}


def _cpu_node(
    gpu: Gpu, known: Dict[int, NumaNode], nodes: Dict[int, NumaNode], distances: Dict[Tuple[int, int], int]
) -> Node:
    """The node whose CPUs drive this GPU: of a node without CPUs its nearest one. None and -1 mean not known."""
    node = gpu.numa_node
    if node is None or node not in known:
        return None
    if node in nodes:
        return node
    near = [other for other in sorted(nodes) if (node, other) in distances]
    return min(near, key=lambda other: (distances[(node, other)], other)) if near else None


def _choose(host: HostView, free: Set[int], size: int, avoid: FrozenSet[Node]) -> Spot:
    best: Optional[Tuple[Tuple[int, ...], Tuple[int, ...]]] = None
    for kind in sorted({host.kinds[i] for i in free}):
        pool = sorted(i for i in free if host.kinds[i] == kind)
        if len(pool) < size:
            continue
        cost, positions = _choose_in(host, pool, size, avoid)
        if best is None or (cost, positions) < best:
            best = (cost, positions)
    if best is None:
        raise ValueError(f"{size} free GPUs of one kind are not on {host.facts.host}")
    return spot_of(host, best[1])


def _choose_in(
    host: HostView, pool: List[int], size: int, avoid: FrozenSet[Node]
) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
    """Return (cost, positions); a lower cost is a better place."""
    by_node: Dict[int, List[int]] = {}
    unknown: List[int] = []
    for i in pool:
        node = host.gpu_nodes[i]
        if node is None:
            unknown.append(i)
        else:
            by_node.setdefault(node, []).append(i)
    able = [node for node, members in by_node.items() if len(members) >= size]
    if able:
        # Best fit keeps whole nodes for later instances; the other role's node comes last.
        node = min(able, key=lambda n: (n in avoid, len(by_node[n]), n))
        return (0, int(node in avoid), len(by_node[node]), node), tuple(_by_switch(host, by_node[node], size))
    options = [_grow(host, by_node, seed, size, avoid) for seed in sorted(by_node)]
    full = [option for option in options if option is not None]
    if full:
        return min(full)
    rest = size - sum(len(members) for members in by_node.values())
    chosen = [i for members in by_node.values() for i in members] + _by_switch(host, unknown, rest)
    return (2, 0, 0, 0), tuple(sorted(chosen))


def _grow(
    host: HostView, by_node: Dict[int, List[int]], seed: int, size: int, avoid: FrozenSet[Node]
) -> Optional[Tuple[Tuple[int, ...], Tuple[int, ...]]]:
    """Take whole nodes outward from ``seed`` until ``size`` GPUs are together."""
    order = sorted(by_node, key=lambda n: (host.distances.get((seed, n), 255), n in avoid, n))
    chosen: List[int] = []
    used: List[int] = []
    for node in order:
        if len(chosen) == size:
            break
        chosen += _by_switch(host, by_node[node], min(size - len(chosen), len(by_node[node])))
        used.append(node)
    if len(chosen) < size:
        return None
    spread = [host.distances.get((a, b), 255) for a in used for b in used]
    cost = (1, max(spread), sum(node in avoid for node in used), len(used), sum(spread), seed)
    return cost, tuple(sorted(chosen))


def _by_switch(host: HostView, members: List[int], size: int) -> List[int]:
    """Take ``size`` of these GPUs with as few PCIe switches as can be, whole switches first."""
    groups: Dict[Tuple[str, ...], List[int]] = {}
    for i in members:
        groups.setdefault(host.switches[i], []).append(i)
    chosen: List[int] = []
    while len(chosen) < size:
        left = size - len(chosen)
        covering = [key for key, group in groups.items() if len(group) >= left]
        # The smallest switch that covers the rest, else the largest whole one.
        key = (
            min(covering, key=lambda k: (len(groups[k]), groups[k]))
            if covering
            else min(groups, key=lambda k: (-len(groups[k]), groups[k]))
        )
        chosen += groups.pop(key)[:left]
    return sorted(chosen)


def _cores(node: NumaNode, allowed: FrozenSet[int]) -> List[FrozenSet[int]]:
    """Return the node's physical cores as sets of CPUs that this host lets us use, in CPU order."""
    online = cpulist.parse(node.cpus)
    usable = online & allowed if allowed else online
    groups = [cpulist.parse(text) & usable for text in node.siblings]
    covered = frozenset(cpu for group in groups for cpu in group)
    groups += [frozenset({cpu}) for cpu in usable - covered]
    return sorted((group for group in groups if group), key=min)


def _part(groups: List[FrozenSet[int]], i: int, parts: int) -> List[FrozenSet[int]]:
    base, extra = divmod(len(groups), parts)
    start = i * base + min(i, extra)
    return groups[start : start + base + (1 if i < extra else 0)]


def _describe(
    host: HostView,
    key: str,
    spot: Spot,
    shares: Dict[Tuple[str, int], FrozenSet[int]],
    users: Dict[int, List[str]],
    crowded: Set[int],
    limited: bool,
) -> Cpus:
    gpus = "GPU " + cpulist.render(spot.positions)
    if None in spot.nodes:
        reason = (
            f"{gpus}: the NUMA node of at least one GPU is not known (never taken for node 0), so nothing is pinned"
        )
        return Cpus("", "", reason, reason)
    numbers = [node for node in spot.nodes if node is not None]
    cpus = frozenset(cpu for node in numbers for cpu in shares[(key, node)])
    words = f"NUMA node{'s' if len(numbers) > 1 else ''} {cpulist.render(numbers)}"
    sources = sorted({host.facts.gpus[i].numa_source for i in spot.positions})
    reason = f"{gpus}: {words} ({', '.join(sources)})"
    if not cpus:
        return Cpus("", "", f"{reason}, none of whose CPUs this host lets us use: not pinned", _unbound(words))
    shared = any(node in crowded for node in numbers)
    most = max(len(users[node]) for node in numbers)
    if shared:
        reason += f"; {most} instances share cores: there are more instances than cores"
    elif most > 1:
        reason += f"; its cores are split by sibling groups between {most} instances"
    if limited and any(
        cpulist.parse(host.nodes[n].cpus) - cpulist.parse(host.facts.system.allowed_cpus) for n in numbers
    ):
        reason += "; only CPUs that this host's cpuset allows"
    if len(numbers) > 1:
        memory = f"the instance spans {words}: memory is not bound, the engine pins each rank to the node of its GPU"
        return Cpus(cpulist.render(cpus), "", reason, memory, shared)
    bound, why = _memory(host, numbers[0])
    return Cpus(cpulist.render(cpus), bound, reason, why, shared)


def _memory(host: HostView, node: int) -> Tuple[str, str]:
    if host.nodes[node].memory_bytes != 0:
        return str(node), f"all GPUs of the instance hang on node {node}"
    # A node without CPUs holds a GPU's or an expander's memory: not for a server's heap.
    with_memory = [other for other in sorted(host.nodes) if host.nodes[other].memory_bytes != 0]
    if not with_memory:
        return "", f"node {node} has no memory and no other node with CPUs has any: not bound"
    near = min(with_memory, key=lambda other: (host.distances.get((node, other), 255), other))
    return str(near), f"node {node} has no memory of its own; node {near} is the nearest that has"


def _unbound(words: str) -> str:
    return f"memory is not bound, since no CPU of {words} can be used"
