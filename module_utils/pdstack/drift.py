"""Drift: what differs from the intent, per host and item, with the reason and what puts it right. Pure.

The roles run in check mode and say what they would change; ``of_result`` reads that from a task's
result. What no role can repair, such as another GPU or somebody's process on our port, comes from
``hardware`` and from the plan's own checks.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence

from . import codec, report
from .facts import HostFacts
from .refusal import Refusal

SCHEMA = 1
DEPLOY = "deploy_pd.yml"
BASELINE = "/etc/pdstack/baseline.json"
NONE, ERROR, DRIFT, UNDER_WAY = 0, 1, 2, 3  # exit codes

# Modules that keep something, other than those whose results are read item by item: kind of their items.
KEEPERS = {
    "pd_venv": "release",
    "pd_checkpoint": "checkpoint",
    "pd_nixl_check": "transport",
    "pd_kernel_wheel": "kernels",
    "pd_warm_up": "kernels",
    "pd_cuda_toolkit": "toolkit",
    "pd_repository_key": "key",
    "pd_credentials": "credentials",
    "pd_firewall": "firewall",
    "ansible.builtin.user": "user",
    "ansible.builtin.apt": "package",
    "ansible.builtin.dnf": "package",
}
_SHOWN_LINES = 6


@dataclass(frozen=True)
class Item:
    """One thing that differs. ``repair`` is the playbook that puts it right, or words for a person."""

    host: str
    kind: str  # file, unit, release, checkpoint, package, user, port, hardware, plan, ...
    item: str
    found: str
    why: str
    repair: str = DEPLOY


@dataclass(frozen=True)
class Failure:
    """A question that got no answer."""

    host: str
    task: str
    message: str


@dataclass(frozen=True)
class Deploying:
    """Who holds a host for a deployment (runlock.Owner). ``alive`` None: it is another controller's, and not seen."""

    host: str
    who: str
    pid: int
    what: str
    since: float  # seconds since the epoch
    alive: Optional[bool]
    told: str  # in words


@dataclass
class Report:
    """Everything that one look at the hosts gave. ``managed`` is what was compared, by host.

    Half-done work of a deployment looks like drift. Where one is known to run, nothing counts; where one may run,
    what differs is told, with that doubt.
    """

    items: List[Item] = field(default_factory=list)
    failures: List[Failure] = field(default_factory=list)
    deploying: List[Deploying] = field(default_factory=list)
    managed: Dict[str, List[str]] = field(default_factory=dict)
    hosts: List[str] = field(default_factory=list)
    started: str = ""  # UTC, ISO 8601
    seconds: float = 0.0

    def add(self, items: Sequence[Item]) -> None:
        """Add what is not there yet: two tasks may look at one thing."""
        self.items += [item for item in items if item not in self.items]

    def held(self, host: str, answer: Mapping[str, Any]) -> None:
        """Add who holds a host, as pd_lock answers; drop what was found where that run is known to live."""
        holder = {key: answer["holder"][key] for key in ("who", "pid", "what", "since")}
        one = Deploying(host, alive=answer["alive"], told=answer["told"], **holder)
        if host not in [item.host for item in self.deploying]:
            self.deploying.append(one)
        if not self.judges:
            self.items.clear()

    @property
    def judges(self) -> bool:
        """Whether what was found counts: no deployment is known to be under way."""
        return not any(one.alive for one in self.deploying)

    @property
    def exit_code(self) -> int:
        """0 none, 2 drift, 1 where a question got no answer: then nobody can say that there is no drift.

        3 where a deployment is under way, or may be and something differs.
        """
        if not self.judges:
            return UNDER_WAY
        if self.failures:
            return ERROR
        return (UNDER_WAY if self.deploying else DRIFT) if self.items else NONE

    def document(self) -> Dict[str, Any]:
        """Return the report as plain JSON values."""
        words = {NONE: "none", DRIFT: "drift", ERROR: "error", UNDER_WAY: "under way"}[self.exit_code]
        return {"schema": SCHEMA, "result": words, "exit_code": self.exit_code, **codec.dump(self)}

    def text(self) -> str:
        """Return the report as a table, and below it what failed."""
        parts = []
        if self.items:
            rows = [[item.host, item.kind, item.item, _one_line(item.found), item.repair] for item in self.items]
            parts += [report.table(["host", "kind", "item", "found", "put right by"], rows), ""]
            parts += [f"{item.host} {item.item}: {item.why}" for item in self.items if item.why]
            parts.append("")
        for failure in self.failures:
            parts.append(f"ERROR {failure.host}, {failure.task}: {failure.message}")
        parts += [f"UNDER WAY {one.told}" for one in self.deploying]
        where = f"{len(self.hosts)} host{'' if len(self.hosts) == 1 else 's'}"
        if not self.judges:
            parts.append(
                "not judged: a deployment is under way, and what it has not finished would look like drift. Files, "
                f"units, processes, releases and checkpoints of {where} were not compared. Look again when it is done."
            )
            return "\n".join(parts)
        doubt = "where that deployment still runs, it may be its half-done work"
        verdict = {
            NONE: "no drift",
            DRIFT: f"drift in {len(self.items)} items",
            ERROR: "the look was not complete",
            UNDER_WAY: f"{len(self.items)} items differ ({doubt}; where it is dead, {DEPLOY} -e pd_lock_break=true)",
        }
        count = sum(len(names) for names in self.managed.values())
        parts.append(f"{verdict[self.exit_code]}: {count} managed items on {where} compared in {self.seconds:.1f} s")
        return "\n".join(parts)


def of_result(host: str, task: str, action: str, result: Mapping[str, Any]) -> List[Item]:
    """Return the items of one task's result, as check mode gives it."""
    if "drift" in result:
        return [codec.load(Item, item) for item in result["drift"]]
    if isinstance(result.get("checks"), list):
        return _checks(host, result["checks"])
    if not result.get("changed") or (action == "pd_router" and result.get("out")):
        return []  # workers are taken out for a restart, which is an item of its own
    kind = KEEPERS.get(action, action.rpartition(".")[2])
    keeps_files, keeps_units = (isinstance(result.get(key), dict) for key in ("paths", "actions"))
    items = _files(host, result) if keeps_files else []
    items += _units(host, result) if keeps_units else []
    steps = result["steps"] if isinstance(result.get("steps"), list) else []
    items += [Item(host, kind, step["subject"], step["action"], step["why"]) for step in steps]
    if items or keeps_files or keeps_units:
        return items  # none where what differs is told elsewhere, as the baseline is
    name = task.rpartition(" : ")[2].rpartition(" | ")[2]
    services = [str(path) for path in result.get("service_files") or []]
    items = [Item(host, kind, path, "missing, edited or stopped", "") for path in services]
    reason = _reason(result)
    return items if items and not reason else [*items, Item(host, kind, name, "differs", reason)]


def managed_of(task: str, action: str, result: Mapping[str, Any]) -> List[str]:
    """Return the names of all that a task compared, whether it differs or not."""
    if isinstance(result.get("declared"), list):
        return [str(name) for name in result["declared"]]
    # The role asks the first, and the second where what it says differs.
    users = {"pd_host_info": result.get("user"), "ansible.builtin.user": result}
    name = (users.get(action) or {}).get("name")
    if name:
        return [f"user: {name}"]
    return [f"{KEEPERS[action]}: {task.rpartition(' : ')[2]}"] if action in KEEPERS else []


def _files(host: str, result: Mapping[str, Any]) -> List[Item]:
    texts = {str(one.get("after_header", "")).rpartition(" (")[0]: one for one in result.get("diff") or []}
    found = {
        "create": "missing",
        "update": "edited",
        "comments": "comments edited",
        "attributes": "owner or mode changed",
        "remove": "not ours, or of an older plan",
    }
    return [
        Item(host, "file", path, found.get(action, action), _change(texts.get(path, {}), action))
        for path, action in result["paths"].items()
        if path != BASELINE or action == "create"  # of another content ``hardware`` says more
    ]


def _units(host: str, result: Mapping[str, Any]) -> List[Item]:
    reasons = result.get("reasons") or {}
    items = []
    for verb, names in result["actions"].items():
        if verb == "reload" and names:
            items.append(
                Item(host, "unit", "systemd", "needs daemon-reload", "unit files are newer than what it has read")
            )
        for name in names if isinstance(names, list) else []:
            items.append(Item(host, "unit", name, f"to {verb}", str(reasons.get(name, ""))))
    return items


def _checks(host: str, checks: Sequence[Mapping[str, Any]]) -> List[Item]:
    """What pd_verify found wrong with running processes. A restart alone does not mend an engine's own account."""
    repair = f"{DEPLOY}; where the unit is untouched, systemctl restart"
    return [
        Item(host, "process", check["subject"], check["found"], f"wanted: {check['wanted']}", repair)
        for check in checks
        if not check["ok"]
    ]


def _change(diff: Mapping[str, Any], action: str) -> str:
    before, after = str(diff.get("before", "")), str(diff.get("after", ""))
    if action in ("create", "remove"):
        return ""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    shown = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    more = [f"and {len(shown) - _SHOWN_LINES} lines more"] if len(shown) > _SHOWN_LINES else []
    return "; ".join(shown[:_SHOWN_LINES] + more)


def _reason(result: Mapping[str, Any]) -> str:
    diffs = result.get("diff")
    diffs = diffs if isinstance(diffs, list) else [diffs] if isinstance(diffs, dict) else []
    lines = [_change({"before": _text(one.get("before")), "after": _text(one.get("after"))}, "update") for one in diffs]
    return "; ".join(line for line in lines if line) or _one_line(str(result.get("msg", "")))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {item}" for key, item in sorted(value.items()))
    return "" if value is None else str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def hardware_of(facts: HostFacts) -> Dict[str, Any]:
    """Return what of a host's hardware and driver a deployment was made for: the baseline of later looks."""
    return {
        "gpus": [
            {"pci": gpu.pci, "uuid": gpu.uuid, "name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in facts.gpus
        ],
        "driver": {
            "loaded": facts.driver.loaded_version,
            "library": facts.driver.library_version,
            "cuda": facts.driver.cuda_version,
        },
        "numa": {str(node.node): node.cpus for node in facts.numa},
    }


def hardware(facts: HostFacts, baseline: Mapping[str, Any]) -> List[Item]:
    """Compare a host's hardware with what it was deployed on; nothing recorded is nothing to compare with."""
    if not baseline:
        return []
    if not _is_baseline(baseline):
        return [Item(facts.host, "hardware", BASELINE, "damaged", "it holds what the last deployment ran on", DEPLOY)]
    now = hardware_of(facts)
    items: List[Item] = []
    repair = f"replace what broke, or accept it with {DEPLOY}"

    def differs(item: str, found: Any, recorded: Any) -> None:
        items.append(Item(facts.host, "hardware", item, str(found), f"recorded at the deployment: {recorded}", repair))

    before = {gpu["pci"]: gpu for gpu in baseline.get("gpus", [])}
    here = {gpu["pci"]: gpu for gpu in now["gpus"]}
    for pci in sorted({*before, *here}):
        if pci not in here:
            differs(f"GPU {pci}", "gone", f"{before[pci].get('name')} {before[pci].get('uuid')}")
        elif pci not in before:
            differs(f"GPU {pci}", f"new: {here[pci]['name']} {here[pci]['uuid']}", "no GPU there")
        else:
            for key, value in here[pci].items():
                if value != before[pci].get(key):
                    differs(f"GPU {pci} {key}", value, before[pci].get(key))
    for section in ("driver", "numa"):
        old = baseline.get(section) or {}
        for key in sorted({*old, *now[section]}):
            if old.get(key) != now[section].get(key):
                differs(f"{section} {key}", now[section].get(key), old.get(key))
    return items


def _is_baseline(document: Mapping[str, Any]) -> bool:
    """Whether a document of a host has the shape that hardware_of gives."""
    gpus = document.get("gpus")
    sections = [document.get(section) for section in ("driver", "numa")]
    return (
        isinstance(gpus, list)
        and all(isinstance(gpu, dict) and isinstance(gpu.get("pci"), str) for gpu in gpus)
        and all(isinstance(section, dict) for section in sections)
    )


def of_refusals(kind: str, refusals: Sequence[Refusal], hosts: Sequence[str]) -> List[Item]:
    """Return refusals of the plan as items; the host is the first word of the subject where it is one of ``hosts``."""
    items = []
    for refusal in refusals:
        host, _, rest = refusal.subject.partition(" ")
        subject = (host, rest) if host in hosts and rest else ("all hosts", refusal.subject)
        items.append(Item(subject[0], kind, subject[1], refusal.found, f"needed: {refusal.needed}", refusal.remedy))
    return items
