"""In which order sets start, restart, leave and come back, and what clients notice of it. Pure."""

from __future__ import annotations

import difflib
from typing import Any, Dict, List, Mapping, Sequence

from . import service


def batches(plan: Mapping[str, Any], observed: Mapping[str, Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """Return the order in which sets are started and restarted: a list of batches, none when nothing is to be done.

    ``observed`` is what pd_units found on each host. First comes what does not serve now: it takes nothing away.
    Then stale sets of engines restart one after the other, so that the others go on serving, then routers.
    Where engines left the plan or are new to a host, everything concerned restarts at once: what is new may need the
    GPUs of what has not restarted yet, and an old router may be of another mode. A changed key restarts everything that
    uses it at once, too: who has the old one and who has the new one refuse each other, so nothing is ``drained``
    through a router that does not know our key yet. A batch has ``sets``, those ``restarting`` of them, whether they
    are drained first, and an ``announcement``.
    """
    of = {(host, unit["name"]): unit["set"] for host in observed for unit in service.units(plan, host)}
    stale = {name for found in observed.values() for name in found["stale_sets"]}
    waiting, moving = set(), False
    for host, found in observed.items():
        actions = found["actions"]
        moving = moving or bool(actions["stop"] or actions["disable"])
        moving = moving or bool(set(actions["start"]) & set(actions["enable"]))
        for unit in [*actions["start"], *actions["enable"], *found["never_ready"]]:
            waiting.add(of.get((host, unit), ""))
    engines = list(dict.fromkeys(item["set"] for item in plan["instances"]))
    routers = [item["name"] for item in plan["routers"]]
    waiting = (waiting - stale) & {*engines, *routers}
    rekeyed = any(_names_a_key(why) for found in observed.values() for why in found.get("reasons", {}).values())
    if (moving or rekeyed) and stale:
        steps = [[name for name in engines + routers if name in stale | waiting]]
    else:
        # A router that is stale restarts with what it may not know yet, else after all engines.
        first = waiting | (stale & set(routers) if waiting else set())
        pending = first or any(found["pending"] and not found["stale_sets"] for found in observed.values())
        steps = [[name for name in engines + routers if name in first]] if pending else []
        steps += [[name] for name in engines + routers if name in stale - first]
    return [
        {
            "sets": sets,
            "restarting": [name for name in sets if name in stale],
            "drained": not rekeyed,
            "announcement": _announcement(plan, [name for name in sets if name in stale]),
        }
        for sets in steps
    ]


def _names_a_key(why: str) -> bool:
    return any(f"{service.CREDENTIALS}/{name}" in why for name in ("api_key", "admin_key"))


def _announcement(plan: Mapping[str, Any], restarting: Sequence[str]) -> str:
    """Say what clients will notice while these sets restart, "" when nothing."""
    said = []
    for router in plan["routers"]:
        if router["name"] in restarting:
            said.append(f"{router['name']} finishes what is in flight, and refuses connections until it is back")
            continue
        urls = service.worker_urls(router)
        mine = [item for item in plan["instances"] if service.target_of(plan, item)["base"] in urls]
        left = {item["role"] for item in mine if item["set"] not in restarting}
        if any(item["set"] in restarting for item in mine) and left != {item["role"] for item in mine}:
            said.append(
                f"{router['name']} answers 503 from here until {', '.join(restarting)} is back: nothing else can serve"
            )
    return "; ".join(said)


_NOTHING = (
    "those of /etc/pdstack/plan.json, which no host has in a shape that can be read; do: run playbooks/deploy_pd.yml"
)


def selection(plan: Mapping[str, Any], name: str, here: str, hosts: Sequence[str]) -> Dict[str, Any]:
    """Return what a name of the plan means: an instance, a set, a router, or a host with all that runs on it.

    ``instances`` and ``sets`` are of all hosts, ``units`` and ``targets`` of the host ``here``. ``problem`` is set
    when the plan has no such name, or when some of it runs on none of the ``hosts`` that this run covers.
    """
    items = [*plan.get("instances", []), *plan.get("routers", [])]
    chosen = [item for item in items if name in (item["name"], item.get("set"), item["host"])]
    engines = [item for item in chosen if "set" in item]
    names = {item["name"] for item in chosen}
    problem = ""
    if not chosen:
        known = list(
            dict.fromkeys(word for item in items for word in (item["name"], item.get("set"), item["host"]) if word)
        )
        near = difflib.get_close_matches(name, known, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        problem = f"{name!r} is not in the plan{hint}; needed: one of {', '.join(known) or _NOTHING}"
    beyond = [f"{item['name']} on {item['host']}" for item in chosen if item["host"] not in hosts]
    if beyond:
        problem = (
            f"{name!r} is {', '.join(item['name'] for item in chosen)}, of which this run does not reach "
            f"{', '.join(beyond)}; needed: all of their hosts; do: run without --limit, on the inventory deployed"
        )
    return {
        "problem": problem,
        "instances": [item["name"] for item in engines],
        "routers": [item["name"] for item in chosen if item not in engines],
        "sets": list(dict.fromkeys(item["set"] for item in engines)),
        "units": [item["unit"] for item in chosen if item["host"] == here],
        "targets": [target for target in service.engine_targets(plan, here) if target["name"] in names]
        if items
        else [],
    }


def outage(plan: Mapping[str, Any], selected: Mapping[str, Any], left: Mapping[str, Mapping[str, int]]) -> str:
    """Say what would be missing without the selection, "" when the rest serves. ``left`` is pd_router's, by router."""
    staying = [item["name"] for item in plan.get("routers", []) if item["name"] not in selected["routers"]]
    if not staying:
        return "no router would be left"
    unknown = [name for name in staying if name not in left]
    if unknown:
        names = ", ".join(unknown)
        return f"{names} did not answer (mend it), or is on a host that this run does not reach (run without --limit)"
    lacking = {role for name in staying for role, count in left[name].items() if not count}
    return f"no healthy {' and no healthy '.join(sorted(lacking))} would be left" if lacking else ""
