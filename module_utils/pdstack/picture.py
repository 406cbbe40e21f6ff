"""A host's topology as text for a terminal: nodes, GPUs, links, P2P, the fabric probe. Pure.

With a plan, each GPU says which instance it serves. svg.py draws the same facts.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Dict, FrozenSet, List, Optional, Sequence, Tuple

from . import cpulist
from .facts import Gpu, HostFacts, Nic, NumaNode, ProbeStep
from .plan_types import Instance, Plan
from .report import table

WIDTH = 100
GIB = 1 << 30

LINK_WORDS = {
    "NVL": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe bridges",
    "PHB": "one host bridge",
    "NODE": "within the NUMA node",
    "SYS": "across sockets or nodes",
    "?": "not known",
}


@dataclass(frozen=True)
class Place:
    """A NUMA node with what hangs on it; ``node`` None gathers what hangs on no known node."""

    node: Optional[NumaNode]
    gpus: List[int]  # positions
    nics: List[Nic]


def places(facts: HostFacts) -> List[Place]:
    """Return the nodes that have CPUs, GPUs or NICs, and last the devices of no known node.

    Nodes with memory alone (CXL, or a GPU's own) are left to ``memory_nodes``: GB200 has dozens.
    """
    known = {node.node for node in facts.numa}
    found = []
    for node in facts.numa:
        gpus = [i for i, gpu in enumerate(facts.gpus) if gpu.numa_node == node.node]
        nics = [nic for nic in facts.nics if nic.numa_node == node.node]
        if node.cpus or gpus or nics:
            found.append(Place(node, gpus, nics))
    stray = [i for i, gpu in enumerate(facts.gpus) if gpu.numa_node not in known]
    stray_nics = [nic for nic in facts.nics if nic.numa_node not in known]
    if stray or stray_nics:
        found.append(Place(None, stray, stray_nics))
    return found


def memory_nodes(facts: HostFacts) -> List[NumaNode]:
    """Return the nodes that have memory and nothing else."""
    shown = {place.node.node for place in places(facts) if place.node}
    return [node for node in facts.numa if node.node not in shown and node.memory_bytes]


def serving(facts: HostFacts, plan: Optional[Plan]) -> Dict[str, Instance]:
    """Return, by PCI id, the instance that the plan gives each GPU of this host."""
    mine = [item for item in plan.instances if item.host == facts.host] if plan else []
    return {ref.pci: item for item in mine for ref in item.gpus}


def gib(size: Optional[int]) -> str:
    """Return a size in GiB, ``?`` where it is not known."""
    if size is None:
        return "?"
    value = size / GIB
    return f"{value:.0f} GiB" if value >= 10 or value == 0 else f"{value:.1f} GiB"


def short_name(gpu: Gpu) -> str:
    """Return a GPU's model without the words that every model has."""
    if not gpu.name:
        return f"NVIDIA device {gpu.device_id}" if gpu.device_id else "unknown GPU"
    name = gpu.name
    for word in ("NVIDIA ", "GeForce ", " Blackwell", " Edition"):
        name = name.replace(word, "")
    return name


def link(gpu: Gpu) -> str:
    """Return the best that device and port can do together: an idle link shows less."""
    generation = _least(gpu.link.max_gen, gpu.link.port_max_gen)
    width = _least(gpu.link.max_width, gpu.link.port_max_width)
    if generation is None and width is None:
        return "PCIe ?"
    text = f"Gen{generation or '?'} x{width or '?'}"
    held = [
        word
        for word, device, port in (
            ("generation", gpu.link.max_gen, gpu.link.port_max_gen),
            ("width", gpu.link.max_width, gpu.link.port_max_width),
        )
        if device is not None and port is not None and port < device
    ]
    return text + (f" (port limits the {' and '.join(held)})" if held else "")


def _least(a: Optional[int], b: Optional[int]) -> Optional[int]:
    values = [value for value in (a, b) if value is not None]
    return min(values) if values else None


def flags(gpu: Gpu) -> List[str]:
    """Return what is out of the ordinary about a GPU."""
    found = []
    if gpu.mig:
        found.append("MIG on")
    if gpu.ecc is False:
        found.append("ECC off")
    if gpu.persistence is False:
        found.append("persistence off")
    if gpu.compute_mode not in (None, "default"):
        found.append(str(gpu.compute_mode).replace("_", " "))
    if gpu.numa_source not in ("sysfs", "none"):
        found.append(f"node by {gpu.numa_source.replace('_', ' ')}")
    found += [f"in use: {process.command or 'process'} ({process.pid})" for process in gpu.processes[:1]]
    return found


def headline(facts: HostFacts) -> str:
    """Return the driver and the system in one line."""
    driver = facts.driver
    parts = []
    if driver.state == "ok":
        kind = {True: " open", False: " proprietary", None: ""}[driver.open_modules]
        parts.append(f"driver {driver.loaded_version or '?'}{kind}")
        if driver.cuda_version:
            parts.append(f"CUDA {driver.cuda_version // 1000}.{driver.cuda_version % 1000 // 10}")
    else:
        parts.append(f"driver: {driver.state.replace('_', ' ')}")
    if facts.system.os_id:
        parts.append(f"{facts.system.os_id} {facts.system.os_version}".strip())
    if facts.system.kernel:
        parts.append(f"kernel {facts.system.kernel}")
    parts.append(f"memory {gib(facts.system.memory_bytes)}")
    return ", ".join(parts)


def node_line(node: NumaNode) -> str:
    """Return a node's CPUs, cores and memory."""
    threads = len(cpulist.parse(node.cpus))
    cores = f", {len(node.siblings)} cores" if node.siblings and len(node.siblings) != threads else ""
    return f"CPUs {node.cpus or 'none'} ({threads} CPUs{cores}), memory {gib(node.memory_bytes)}"


def state_lines(facts: HostFacts) -> List[Tuple[str, str]]:
    """Return what bears on GPUs in the system's settings, as (subject, words)."""
    system, driver = facts.system, facts.driver
    iommu = {True: "translates", False: "off or passthrough", None: "not known"}[system.iommu_translating]
    redirect = f"request redirect on {_some(system.acs_redirect)}" if system.acs_redirect else "no request redirect"
    if system.acs_unread:
        redirect += f"; not readable on {_some(system.acs_unread)} (needs root)"
    if not facts.gpus:
        redirect = "no GPU to look above"
    found = [("IOMMU", iommu), ("ACS", redirect), ("Secure Boot", _yes_no(system.secure_boot))]
    if system.virtual:
        found.insert(0, ("virtual machine", "the hypervisor's IOMMU, bridges and NVSwitches are not visible from here"))
    if driver.nouveau_loaded:
        found.append(("nouveau", "loaded: it holds the GPUs, blacklist it"))
    if driver.nvswitches:
        found.append(("NVSwitch", f"{driver.nvswitches}, Fabric Manager {driver.fabric_manager or 'not known'}"))
    if driver.confidential_compute is not None:
        found.append(("Confidential Compute", _yes_no(driver.confidential_compute)))
    if driver.library_version and driver.loaded_version and driver.library_version != driver.loaded_version:
        found.append(("driver versions", f"loaded {driver.loaded_version}, installed {driver.library_version}"))
    if system.allowed_cpus and cpulist.parse(system.allowed_cpus) < _all_cpus(facts):
        found.append(("cpuset", f"only CPUs {system.allowed_cpus} are allowed"))
    return found


def _all_cpus(facts: HostFacts) -> FrozenSet[int]:
    return frozenset(cpu for node in facts.numa for cpu in cpulist.parse(node.cpus))


def _yes_no(value: Optional[bool]) -> str:
    return {True: "on", False: "off", None: "not known"}[value]


def _some(items: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(items[:most])
    return shown + (f" and {len(items) - most} more" if len(items) > most else "")


def problems(facts: HostFacts) -> List[str]:
    """Return what is wrong, one sentence each."""
    found = [f"driver: {facts.driver.detail}"] if facts.driver.state != "ok" and facts.driver.detail else []
    for position, gpu in enumerate(facts.gpus):
        found += [f"GPU {position} ({gpu.pci}): {problem}" for problem in gpu.problems]
    return found


def step_groups(facts: HostFacts) -> List[Tuple[List[int], List[ProbeStep]]]:
    """Return the fabric steps, once for GPUs that answered alike."""
    groups: List[Tuple[List[int], List[ProbeStep]]] = []
    for position, steps in enumerate(facts.fabric.steps):
        for positions, known in groups:
            if known == steps:
                positions.append(position)
                break
        else:
            groups.append(([position], steps))
    return groups


def step_code(step: ProbeStep) -> str:
    """Return a step's code; ``-`` where nothing was called."""
    return "-" if step.code is None else str(step.code)


def step_words(step: ProbeStep) -> str:
    """Return a step's words, with its value where that is a size."""
    if step.value is not None and step.name.endswith("granularity"):
        return f"{step.words}, {step.value >> 10} KiB"
    return step.words


def p2p_lines(facts: HostFacts) -> List[str]:
    """Return what was measured, or why not, and what got worse."""
    p2p, found = facts.p2p, []
    if p2p.concurrent_gb_s is not None:
        sets = " and ".join("{" + cpulist.render(side) + "}" for side in p2p.concurrent_sets)
        found.append(
            f"All pairs between {sets} at once: slowest {p2p.concurrent_gb_s:.1f} GB/s, "
            f"together {p2p.concurrent_total_gb_s or 0:.0f} GB/s one way."
        )
    if p2p.data_ok is not None:
        found.append("Every copied byte was right." if p2p.data_ok else "Copied bytes were WRONG.")
    if p2p.note:
        found.append(p2p.note[0].upper() + p2p.note[1:] + ".")
    found += [f"Slower than the baseline: {line}." for line in p2p.regressions]
    return found


# ---- the text ----


def text(facts: HostFacts, plan: Optional[Plan] = None, width: int = WIDTH) -> str:
    """Return the picture, lines of at most ``width`` columns where words can be broken."""
    instances = serving(facts, plan)
    name = f"{facts.host}{' (simulated)' if facts.simulated else ''}"
    lines = [*_wrap(f"{name}: {headline(facts)}", width), "=" * width]
    found = problems(facts)
    if found:
        lines += ["Problems", *(line for words in found for line in _wrap(words, width, "  ")), ""]
    for place in places(facts):
        lines += [*_place(facts, place, instances, width), ""]
    if not facts.gpus:
        lines += ["No NVIDIA GPU on the PCI bus.", ""]
    extra = [f"node {node.node} {gib(node.memory_bytes)}" for node in memory_nodes(facts)]
    if extra:
        lines += [*_wrap("Memory without CPUs: " + ", ".join(extra), width), ""]
    if len(facts.p2p.link_type) > 1:
        lines += [*_matrix(facts), ""]
    if facts.p2p.measured_gb_s:
        lines += [*_measured(facts), ""]
    lines += [line for words in p2p_lines(facts) for line in _wrap(words, width)]
    while lines[-1] == "":
        lines.pop()
    for positions, steps in step_groups(facts):
        lines += ["", f"Fabric probe, GPU {cpulist.render(positions)}"]
        lines += _indent(table(["step", "code", "meaning"], _step_rows(steps, width)))
    lines += ["", "Settings"]
    for subject, words in state_lines(facts):
        lines += textwrap.wrap(words, width, initial_indent=f"  {subject:<20}  ", subsequent_indent=" " * 24)
    if facts.probe_seconds:
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in facts.probe_seconds.items())
        lines += ["", f"Probe: {seconds}"]
    return "\n".join(line.rstrip() for line in lines)


def _step_rows(steps: List[ProbeStep], width: int) -> List[List[str]]:
    room = width - 4 - 4 - 2 - max((len(step.name) for step in steps), default=0) - 2
    rows = []
    for step in steps:
        first, *more = textwrap.wrap(step_words(step), room) or [""]
        rows += [[step.name, step_code(step), first], *(["", "", part] for part in more)]
    return rows


def _place(facts: HostFacts, place: Place, instances: Dict[str, Instance], width: int) -> List[str]:
    if place.node is None:
        lines = ["No known NUMA node"]
    else:
        lines = [f"NUMA node {place.node.node}", *_wrap(node_line(place.node), width, "  ")]
    rows, heads = [], []
    for position in place.gpus:
        gpu = facts.gpus[position]
        instance = instances.get(gpu.pci)
        heads.append(gpu.pci_path[0] if gpu.pci_path else "")
        notes = [*flags(gpu), *(["PROBLEM"] if gpu.problems else [])]
        rows.append(
            [
                str(position),
                gpu.pci,
                short_name(gpu),
                f"sm_{(gpu.compute_capability or '?').replace('.', '')}",
                gib(gpu.memory_bytes),
                link(gpu),
                instance.name if instance else "",
                ", ".join(notes),
            ]
        )
    if rows:
        headers = ["GPU", "PCI", "model", "arch", "memory", "link", "serves", "notes"]
        kept = [i for i in range(len(headers)) if i < 6 or any(row[i] for row in rows)]
        head, rule, *body = table([headers[i] for i in kept], [[row[i] for i in kept] for row in rows]).split("\n")
        lines += [f"     {head}", f"     {rule}"]
        for number, line in enumerate(body):
            lines.append(f"  {_branch(heads, number)} {line}")
    for nic in place.nics:
        speed = f"{nic.speed_mbps / 1000:g} Gb/s" if nic.speed_mbps else "speed not known"
        rdma = f", RDMA {nic.rdma}" if nic.rdma else ""
        lines.append(f"     NIC {nic.name} {nic.pci or ''} {speed}, {'up' if nic.up else 'down'}{rdma}")
    return lines


def _branch(heads: List[str], number: int) -> str:
    """Draw the brace of GPUs below one root port: ``+-`` alone, else ``/-`` to ``\\-``."""
    head = heads[number]
    above = number > 0 and heads[number - 1] == head and head
    below = number + 1 < len(heads) and heads[number + 1] == head and head
    return "|-" if above and below else "\\-" if above else "/-" if below else "+-"


def _matrix(facts: HostFacts) -> List[str]:
    count = range(len(facts.gpus))
    denied = False

    def cell(a: int, b: int) -> str:
        nonlocal denied
        kind = facts.p2p.link_type[a][b]
        if a != b and facts.p2p.claimed and facts.p2p.claimed[a][b] is False:
            denied = True
            return kind.lower()
        return kind

    rows = [[f"GPU {a}", *(cell(a, b) for b in count)] for a in count]
    seen = sorted({kind for row in facts.p2p.link_type for kind in row} - {"X"}, key=list(LINK_WORDS).index)
    legend = ", ".join(f"{kind} {LINK_WORDS[kind]}" for kind in seen)
    title = "P2P (" + legend + ("; small letters: the driver denies peer access)" if denied else ")")
    return [*_wrap(title, WIDTH), *_indent(table(["", *(str(b) for b in count)], rows))]


def _measured(facts: HostFacts) -> List[str]:
    speeds = facts.p2p.measured_gb_s or []
    rows = [[f"GPU {a}", *("-" if s is None else f"{s:.1f}" for s in row)] for a, row in enumerate(speeds)]
    title = f"P2P measured, GB/s one way from row to column, one pair at a time ({facts.p2p.measured_at})"
    headers = ["", *(str(b) for b in range(len(speeds)))]
    return [title, *_indent(table(headers, rows, right=headers[1:]))]


def _indent(block: str) -> List[str]:
    return [f"  {line}" for line in block.split("\n")]


def _wrap(words: str, width: int, indent: str = "") -> List[str]:
    return textwrap.wrap(words, width, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False)
