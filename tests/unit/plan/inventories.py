"""Small inventories and hosts for the planner's tests: what a test does not name is the reference's."""

from __future__ import annotations

from typing import Any

from pdstack import intent, plan
from pdstack.facts import Driver, Gpu, HostFacts, NumaNode, P2p

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FLASH = {"repo": "deepseek-ai/DeepSeek-V4-Flash", "revision": COMMIT}


def host(
    name: str = "gpu1",
    gpus: list[int | None] | None = None,
    *,
    cores: int = 16,
    nodes: int = 2,
    switch: int = 2,
    distances: list[list[int]] | None = None,
    **changes: Any,
) -> HostFacts:
    """Return a host whose GPU i hangs on node ``gpus[i]``; ``switch`` neighbours share a PCIe switch.

    Core c of node n has the CPUs ``n * cores + c`` and, as its sibling, the same plus all cores of the host.
    """
    placed: list[int | None] = [0, 0, 0, 0, 1, 1, 1, 1] if gpus is None else gpus
    total = nodes * cores
    matrix = distances or [[10 if a == b else 32 for b in range(nodes)] for a in range(nodes)]
    numa = [
        NumaNode(
            node,
            f"{node * cores}-{(node + 1) * cores - 1},{total + node * cores}-{total + (node + 1) * cores - 1}",
            [f"{cpu},{total + cpu}" for cpu in range(node * cores, (node + 1) * cores)],
            1 << 38,
            matrix[node],
        )
        for node in range(nodes)
    ]
    cards = [
        Gpu(
            pci=f"0000:{16 + i:02x}:00.0",
            index=i,
            uuid=f"GPU-{name}-{i}",
            name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
            compute_capability="12.0",
            memory_bytes=97887 << 20,
            numa_node=node,
            numa_source="none" if node is None else "sysfs",
            pci_path=[f"0000:{128 + i // switch:02x}:01.1", f"0000:{192 + i // switch:02x}:00.0", f"0000:e0:{i:02x}.0"],
            mig=False,
            compute_mode="default",
        )
        for i, node in enumerate(placed)
    ]
    count = len(cards)
    types = [
        ["X" if a == b else "PIX" if a // switch == b // switch else "SYS" for b in range(count)] for a in range(count)
    ]
    facts = {
        "numa": numa,
        "gpus": cards,
        "driver": Driver(state="ok", loaded_version="595.58.03", open_modules=True),
        "p2p": P2p(claimed=[[None if a == b else True for b in range(count)] for a in range(count)], link_type=types),
    }
    return HostFacts(host=name, **{**facts, **changes})


def variables(**changes: Any) -> dict[str, Any]:
    """Return the variables of a host; the reference's topology unless changed."""
    return {"pd_model": FLASH, **changes}


def read(*names: str, per_host: dict[str, dict[str, Any]] | None = None, **changes: Any) -> intent.Intent:
    """Return the intent of an inventory whose hosts are all GPU and router hosts."""
    hosts = {
        name: {"ansible_host": f"192.0.2.{i + 1}", **variables(**changes), **(per_host or {}).get(name, {})}
        for i, name in enumerate(names)
    }
    return intent.parse(hosts, {"gpu_hosts": names, "router_hosts": names}, known_role_variables=())


def planned(*facts: HostFacts, previous: plan.Plan | None = None, **changes: Any) -> plan.Plan:
    """Return the plan of these hosts, all of them GPU and router hosts."""
    return plan.plan(read(*(item.host for item in facts), **changes), {item.host: item for item in facts}, previous)


def pd(prefill: int = 4, decode: int = 4, *, p: int | str = 1, d: int | str = 1, **changes: Any) -> dict[str, Any]:
    return {"mode": "pd", "prefill": {"tp": prefill, "count": p}, "decode": {"tp": decode, "count": d}, **changes}


def aggregated(tp: int) -> dict[str, Any]:
    return {"mode": "aggregated", "aggregated": {"tp": tp}}


def replicas(tp: int, count: int | str) -> dict[str, Any]:
    return {"mode": "replicas", "replicas": {"tp": tp, "count": count}}
