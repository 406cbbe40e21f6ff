"""Text for people: tables with fitted columns, and the plan with its reasons. Pure."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Union

from . import cpulist
from .plan_types import Instance, Plan, Router


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Return a text table whose columns are as wide as their contents; ``right`` names right-aligned headers."""
    widths = [max([len(head), *(len(row[i]) for row in rows)]) for i, head in enumerate(headers)]

    def line(cells: Sequence[str]) -> str:
        words = [
            cell.rjust(width) if head in right else cell.ljust(width)
            for head, cell, width in zip(headers, cells, widths)
        ]
        return "  ".join(words).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *(line(row) for row in rows)])


def plan_table(plan: Plan, states: Optional[Mapping[str, Mapping[str, str]]] = None) -> str:
    """Return what runs where.

    ``states`` maps an instance's or router's name to more columns, such as state and time to ready.
    """
    extra: List[str] = []
    for values in (states or {}).values():
        extra += [name for name in values if name not in extra]
    headers = ["instance", "role", "host", "GPUs", "NUMA", "CPUs", "memory", "port", *extra]
    rows: List[List[str]] = []
    for item in plan.instances:
        cells = [item.name, item.role, item.host, _gpus(item), _nodes(item.numa_nodes), item.cpus or "any"]
        cells += [f"node {item.memory_nodes}" if item.memory_nodes else "any", str(item.ports["http"])]
        rows.append(cells + [(states or {}).get(item.name, {}).get(name, "-") for name in extra])
    for router in plan.routers:
        cells = [router.name, "router", router.host, "-", "-", "any", "any", str(router.ports["http"])]
        rows.append(cells + [(states or {}).get(router.name, {}).get(name, "-") for name in extra])
    return table(headers, rows, right=("port",))


def plan_text(plan: Plan) -> str:
    """Return the table, the reasons (said once for instances that share them) and the notes."""
    head = (
        f"Plan: {plan.model.repo}@{plan.model.revision[:12]} with {plan.release}, mode {plan.topology.mode}, "
        f"context length {plan.topology.context_length}"
    )
    if plan.profile == "cpu":
        head += " (cpu profile: real engine, simulated GPUs)"
    parts = [head, "", plan_table(plan), "", "Why"]
    who: Dict[str, Dict[str, List[str]]] = {}
    everybody: List[Union[Instance, Router]] = [*plan.instances, *plan.routers]
    for item in everybody:
        for why in item.why:
            who.setdefault(why.decision, {}).setdefault(why.reason, []).append(item.name)
    for decision, reasons in who.items():
        for reason, names in reasons.items():
            parts.append(f"  {decision} [{_some(names)}]: {reason}")
    if plan.notes:
        parts += ["", "Notes", *(f"  {note}" for note in plan.notes)]
    return "\n".join(parts)


def _gpus(item: Instance) -> str:
    return cpulist.render(gpu.position for gpu in item.gpus)


def _nodes(nodes: Sequence[int]) -> str:
    return ",".join(str(node) for node in nodes) or "?"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
