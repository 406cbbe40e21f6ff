"""From the plan to the files of one host: units, placement, engine configuration, environment.

Pure text: the role renders its unit templates and hands them in; pd_files compares and writes.
"""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set

from .folders import JIT_DIR

UNIT_FOLDER = "/etc/systemd/system"
CONFIG_FOLDER = "/etc/pdstack"
# Keys and the router's certificate, mode 0600 root: for systemd, which hands them to units, and for our modules.
CREDENTIALS = f"{CONFIG_FOLDER}/credentials"
LAUNCHER = "/opt/pdstack/launch.py"
# Of the longer prompt that proves an engine on GPUs: more than decode's kernels take, less than a chunk of prefill.
LONG_WORDS = 2048
# Where the canary finds this package: as much of it as it imports.
LIBRARY = "/opt/pdstack/lib"
CANARY_UNITS = ("pd-canary.service", "pd-canary.timer")
CANARY_MODULES = (
    "__init__",
    "canary",
    "cgroup",
    "completion",
    "cpulist",
    "http",
    "runner",
    "verify",
)
CURRENT = "/opt/pdstack/current"
# A release that was repaired in place keeps its link; its manifest is new.
RELEASE = (CURRENT, f"{CURRENT}/manifest.json")
# pd_kernel_wheel writes this last, whenever it changed a file of the kernels.
KERNELS = f"{CURRENT}/venv/lib/python3*/site-packages/pdstack_kernels-*.dist-info/RECORD"


def instances_of(plan: Mapping[str, Any], host: str) -> List[Dict[str, Any]]:
    """Return the engine instances that the plan puts on a host."""
    return [instance for instance in plan["instances"] if instance["host"] == host]


def routers_of(plan: Mapping[str, Any], host: str) -> List[Dict[str, Any]]:
    """Return the routers that the plan puts on a host (one or none)."""
    return [router for router in plan["routers"] if router["host"] == host]


def files(
    plan: Mapping[str, Any],
    host: str,
    unit_texts: Mapping[str, str],
    hardware: Optional[Mapping[str, Any]] = None,
    user: str = "pdstack",
) -> List[Dict[str, Any]]:
    """Return every file of a host, as pd_files takes them.

    ``unit_texts`` maps unit file names to their rendered text; those that this host needs are used.
    ``hardware`` is what the host is deployed on, kept for later looks (drift.hardware_of).
    ``user`` is whom engines run as: their JIT caches are that user's, or none of them could start.
    """
    found: List[Dict[str, Any]] = [_file(f"{CONFIG_FOLDER}/plan.json", _json(plan))]
    if hardware:
        found.append(_file(f"{CONFIG_FOLDER}/baseline.json", _json(hardware)))
    if instances_of(plan, host) or routers_of(plan, host):
        found.append(_file(f"{UNIT_FOLDER}/pd.target", unit_texts["pd.target"]))
        found.append(_file(LAUNCHER, unit_texts["launch.py"]))
        if plan["canary"]["enabled"]:
            found.append(_file(f"{CONFIG_FOLDER}/canary.json", _json(canary(plan, host))))
            found += [_file(f"{UNIT_FOLDER}/{name}", unit_texts[name]) for name in CANARY_UNITS] + library()
    for role in sorted({instance["role"] for instance in instances_of(plan, host)}):
        found.append(_file(f"{UNIT_FOLDER}/pd-{role}@.service", unit_texts[f"pd-{role}@.service"]))
    for instance in instances_of(plan, host):
        for path, text in (
            (_unit_folder(instance), None),
            (f"{_unit_folder(instance)}/placement.conf", placement(instance)),
            (f"{CONFIG_FOLDER}/instances/{instance['name']}.yaml", engine_config(instance)),
            (f"{CONFIG_FOLDER}/instances/{instance['name']}.env", environment(instance)),
        ):
            found.append(_file(path, text))
    if instances_of(plan, host):  # where a plan names no cache of its own, the unit does: the release's folder
        caches = {f"{JIT_DIR}/{plan['release']}"}
        caches |= {instance["env"].get("SGLANG_CACHE_DIR", "") for instance in instances_of(plan, host)} - {""}
        found += [{"path": path, "mode": "0700", "owner": user, "group": user} for path in sorted(caches)]
    if routers_of(plan, host):
        found.append(_file(f"{UNIT_FOLDER}/pd-router.service", unit_texts["pd-router.service"]))
    return found


def units(plan: Mapping[str, Any], host: str) -> List[Dict[str, Any]]:
    """Return the units of a host, as pd_units takes them."""
    found: List[Dict[str, Any]] = []
    for instance in instances_of(plan, host):
        found.append(
            {
                "name": instance["unit"],
                "set": instance["set"],
                "files": [
                    f"{UNIT_FOLDER}/pd-{instance['role']}@.service",
                    f"{_unit_folder(instance)}/*",
                    *_by_hand(instance["unit"], f"pd-{instance['role']}@.service"),
                    f"{CONFIG_FOLDER}/instances/{instance['name']}.yaml",
                    f"{CONFIG_FOLDER}/instances/{instance['name']}.env",
                    LAUNCHER,
                    *(f"{CREDENTIALS}/{name}" for name in credential_names(plan, "engine")),
                    *RELEASE,
                    KERNELS,
                ],
                "checkpoint": instance["args"]["model-path"],
            }
        )
    for router in routers_of(plan, host):
        found.append({"name": router["unit"], "set": router["name"], "files": _router_files(plan, router["unit"])})
    if found:
        if plan["canary"]["enabled"]:
            found.append({"name": "pd-canary.timer", "set": "", "files": [f"{UNIT_FOLDER}/pd-canary.timer"]})
        found.append({"name": "pd.target", "set": "", "files": []})
    return found


def live(plan: Mapping[str, Any], host: str) -> List[Dict[str, Any]]:
    """Return what the processes of a host's units must be like, as pd_units takes it."""
    return [
        {"unit": item["unit"], "cpus": item["cpus"], "memory_nodes": item["memory_nodes"], "env": item["env"]}
        for item in instances_of(plan, host)
    ] + [{"unit": item["unit"], "env": item["env"]} for item in routers_of(plan, host)]


def credential_names(plan: Mapping[str, Any], program: str) -> List[str]:
    """Return the names of the credentials that an engine or a router needs."""
    security = plan["security"]
    found = (["api_key"] if security["api_key"] else []) + ["admin_key"]
    return found + (["tls_cert", "tls_key"] if program == "router" and security["tls"] != "off" else [])


def credentials(plan: Mapping[str, Any], host: str, values: Mapping[str, str]) -> Dict[str, Any]:
    """Return the credentials of a host, as pd_credentials takes them. ``values`` are those that the operator gave."""
    security, routers = plan["security"], routers_of(plan, host)
    names = set(credential_names(plan, "engine") if instances_of(plan, host) else [])
    names |= set(credential_names(plan, "router") if routers else [])
    random = ["admin_key"] if "admin_key" in names and security["admin_key"] == "random" else []
    own = bool(routers) and security["tls"] == "own"
    given = sorted(names - set(random) - ({"tls_cert", "tls_key"} if own else set()))
    return {
        "given": {name: values[name] for name in given},
        "random": random,
        "certificate": [host, *(item["address"] for item in routers), *security["tls_names"]] if own else [],
    }


def engine_targets(plan: Mapping[str, Any], host: str, sets: Optional[Sequence[str]] = None) -> List[Dict[str, str]]:
    """Return the engines of a host (of these sets only), as pd_service_wait takes them."""
    found = []
    for item in instances_of(plan, host):
        if sets is not None and item["set"] not in sets:
            continue
        target = target_of(plan, item)
        found.append({**target, "url": f"{target['base']}/health", "alive_url": f"{target['base']}/v1/models"})
    return found


def router_targets(plan: Mapping[str, Any], host: str) -> List[Dict[str, str]]:
    """Return the routers of a host, as pd_service_wait takes them.

    /health of a router is 200 with no worker at all; /readiness needs both sides of a pair. It
    follows the workers by a health interval, so it means something once all engines answer.
    """
    found = []
    for item in routers_of(plan, host):
        target = target_of(plan, item)
        found.append({**target, "url": f"{target['base']}/readiness", "alive_url": ""})
    return found


def router_lag_s(plan: Mapping[str, Any], host: str) -> int:
    """Return for how many seconds a router of a host may rightly not know yet that its workers answer."""
    looks = [
        sum(int(item["args"].get(f"health-check-{name}-secs", 0)) for name in ("interval", "timeout"))
        for item in routers_of(plan, host)
    ]
    return max(looks, default=0)


def targets(plan: Mapping[str, Any], host: str) -> List[Dict[str, str]]:
    """Return all that answers on a host."""
    return engine_targets(plan, host) + router_targets(plan, host)


def router_workers(plan: Mapping[str, Any], host: str) -> List[Dict[str, Any]]:
    """Return the workers that the routers of a host should have, as pd_router takes them."""
    wanted = {
        worker["url"] for router in routers_of(plan, host) for role in router["workers"].values() for worker in role
    }
    found = []
    for item in plan["instances"]:
        target = target_of(plan, item)
        if target["base"] in wanted:
            found.append(
                {
                    "name": item["name"],
                    "set": item["set"],
                    "role": item["role"],
                    "url": target["base"],
                    "bootstrap_port": item["ports"].get("bootstrap", 0),
                    "key_file": target["key_file"],
                }
            )
    return found


def probes(plan: Mapping[str, Any], host: str, sets: Sequence[str]) -> List[Dict[str, Any]]:
    """Return the completions that prove these sets, as pd_completion takes them.

    Each decode of this host answers with every prefill of its set, so that the KV cache crosses each lane. On GPUs a
    longer prompt follows the short one: it takes other kernels, and what is compiled at the first of them lets the
    engine look dead to its router for as long. Better now, while no client waits.
    """
    found: List[Dict[str, Any]] = []
    for item in instances_of(plan, host):
        if item["set"] not in sets:
            continue
        if item["role"] == "aggregated":
            found.append({"through": endpoint(plan, item)})
        elif item["role"] == "decode":
            peers = [peer for peer in plan["instances"] if peer["role"] == "prefill" and peer["set"] == item["set"]]
            found += [{"through": endpoint(plan, item), "prefill": endpoint(plan, peer)} for peer in peers]
    if plan["profile"] != "gpu" or not found:
        return found
    # A word is some five bytes, and no tokenizer makes more tokens than bytes: this fits any context.
    words = min(LONG_WORDS, min(item["args"]["context-length"] for item in instances_of(plan, host)) // 8)
    return found + [{**probe, "words": words} for probe in found]


def router_probes(plan: Mapping[str, Any], host: str) -> List[Dict[str, Any]]:
    """Return the completions that prove the routers of a host, as pd_completion takes them."""
    return [{"through": endpoint(plan, item)} for item in routers_of(plan, host)]


def endpoint(plan: Mapping[str, Any], item: Mapping[str, Any]) -> Dict[str, Any]:
    """Return how completions are sent to an engine or a router (completion.Endpoint)."""
    target = target_of(plan, item)
    port = item["ports"].get("bootstrap", 0)
    return {
        "name": item["name"],
        "base": target["base"],
        "set": item.get("set", ""),
        "key_file": target["key_file"],
        "ca_file": target["ca_file"],
        "bootstrap_host": item["address"] if port else "",
        "bootstrap_port": port,
    }


def canary(plan: Mapping[str, Any], host: str) -> Dict[str, Any]:
    """Return what the canary of a host watches, as canary.watched_of reads it.

    An engine is asked with the engines of its set on the other side, a router's peers are all engines behind it.
    """
    other = {"prefill": "decode", "decode": "prefill"}
    watched: List[Dict[str, Any]] = []
    for item in instances_of(plan, host):
        peers = [
            endpoint(plan, peer)
            for peer in plan["instances"]
            if peer["set"] == item["set"] and peer["role"] == other.get(item["role"])
        ]
        watched.append({"unit": item["unit"], "role": item["role"], "endpoint": endpoint(plan, item), "peers": peers})
    for router in routers_of(plan, host):
        behind = [item for item in plan["instances"] if target_of(plan, item)["base"] in worker_urls(router)]
        peers = [endpoint(plan, item) for item in behind]
        watched.append({"unit": router["unit"], "role": "router", "endpoint": endpoint(plan, router), "peers": peers})
    limits = {name: plan["canary"][name] for name in ("failures", "timeout_s", "cooldown_s", "per_day")}
    return {"model": plan["model"]["served_name"], "limits": limits, "watched": watched}


def library() -> List[Dict[str, Any]]:
    """Return the files of this package that the canary runs from, as pd_files takes them."""
    found = []
    for name in CANARY_MODULES:
        module = importlib.import_module(f"{__package__}.{name}" if name != "__init__" else str(__package__))
        found.append(_file(f"{LIBRARY}/pdstack/{name}.py", inspect.getsource(module)))
    return found


def placement(instance: Mapping[str, Any]) -> str:
    """Return the drop-in that pins an instance, with the plan's reasons as its comments."""
    lines = [f"# Placement of {instance['name']}, from /etc/pdstack/plan.json."]
    lines += [f"# {why['decision']}: {why['reason']}" for why in instance["why"] if why["decision"] in PLACEMENT]
    lines.append("[Service]")
    if instance["cpus"]:
        lines.append(f"CPUAffinity={instance['cpus']}")
    if instance["memory_nodes"]:
        lines += ["NUMAPolicy=bind", f"NUMAMask={instance['memory_nodes']}"]
    return "\n".join(lines) + "\n"


PLACEMENT = ("gpus", "cpus", "memory_nodes", "numa_nodes")


def engine_config(instance: Mapping[str, Any]) -> str:
    """Return the engine's ``--config`` YAML. JSON scalars are YAML, so no library is needed."""
    lines = [f"# Engine arguments of {instance['name']}, from /etc/pdstack/plan.json; deploy_pd.yml rewrites it."]
    lines += [f"{option}: {json.dumps(value)}" for option, value in sorted(instance["args"].items())]
    return "\n".join(lines) + "\n"


def environment(instance: Mapping[str, Any]) -> str:
    """Return the unit's EnvironmentFile (systemd.exec(5)): values quoted, no secrets."""
    lines = [f"# Environment of {instance['name']}, from /etc/pdstack/plan.json."]
    for name, value in sorted(instance["env"].items()):
        escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'{name}="{escaped}"')
    return "\n".join(lines) + "\n"


def worker_urls(router: Mapping[str, Any]) -> Set[str]:
    """Return the addresses of a router's workers."""
    return {worker["url"] for role in router["workers"].values() for worker in role}


def _unit_folder(instance: Mapping[str, Any]) -> str:
    return f"{UNIT_FOLDER}/{instance['unit']}.d"


def target_of(plan: Mapping[str, Any], item: Mapping[str, Any]) -> Dict[str, str]:
    """Return how an engine or a router is reached from its own host.

    ``key_file`` opens what clients use, ``admin_key_file`` what changes the server (flush, profile, workers).
    """
    security = plan["security"]
    tls = security["tls"] != "off" and item in plan["routers"]
    return {
        "name": item["name"],
        "unit": item["unit"],
        "base": f"{'https' if tls else 'http'}://{_in_url(item['address'])}:{item['ports']['http']}",
        "key_file": f"{CREDENTIALS}/api_key" if security["api_key"] else "",
        "admin_key_file": f"{CREDENTIALS}/admin_key",
        "ca_file": f"{CREDENTIALS}/tls_pin" if tls else "",
    }


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _router_files(plan: Mapping[str, Any], unit: str) -> List[str]:
    keys = [f"{CREDENTIALS}/{name}" for name in credential_names(plan, "router")]
    return [f"{UNIT_FOLDER}/{unit}", f"{UNIT_FOLDER}/{unit}.d", *_by_hand(unit), LAUNCHER, *keys, *RELEASE]


def _by_hand(*units: str) -> List[str]:
    """Return the folders of drop-ins that nobody but a person makes; pd_service removes them."""
    folders = [f"{UNIT_FOLDER}/pd-.service.d"] + [f"{UNIT_FOLDER}/{unit}.d" for unit in units[1:]]
    for place in ("/etc/systemd/system.control", "/run/systemd/system", "/run/systemd/system.control"):
        folders += [f"{place}/{unit}.d" for unit in (*units, "pd-.service")]
    return folders


def _file(path: str, text: Any) -> Dict[str, Any]:
    if text is None:
        return {"path": path, "mode": "0755"}
    return {"path": path, "content": text}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
