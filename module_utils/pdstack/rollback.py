"""The way back to the release and the commit of the model before: pure decisions over what the hosts say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional

from .intent import natural_key
from .refusal import Refusal, Refused


class NoWayBack(Refused):
    """The hosts have no release in common to go back to; nothing was changed."""

    title = "There is no way back; no host has been changed"


@dataclass(frozen=True)
class WayBack:
    """The release to go back to, its id on each host (hosts may run different Pythons), and the commit of the model.

    ``ids`` is empty where the release stays. ``model`` has what of pd_model was in force, and is empty where it stays.
    ``touched``: something may run with what is planned, so that the way back serves and proves what was before.
    """

    release: str
    ids: Dict[str, str]
    model: Dict[str, str] = field(default_factory=dict)
    touched: bool = True


def way_back(hosts: Mapping[str, Mapping[str, Any]]) -> WayBack:
    """Return the way back from what pd_release says of each host (current and previous). Raises NoWayBack.

    All hosts must have the same release before them: the sides of a pair must agree on theirs.
    """
    problems: List[Refusal] = []
    for host in sorted(hosts, key=natural_key):
        before = hosts[host]["previous"]
        if not before:
            found = f"only {_name(hosts[host]['current'])}"
            remedy = "deploy another release with pd_release: playbooks/deploy_pd.yml installs it beside this one"
            problems.append(Refusal(host, found, "a release before it (/opt/pdstack/previous)", remedy))
        elif before["problems"]:
            remedy = f"run playbooks/deploy_pd.yml with pd_release={before['release'] or 'its name'}, which repairs it"
            problems.append(
                Refusal(f"{host} {before['id']}", "; ".join(before["problems"][:5]), "a whole release", remedy)
            )
    names = sorted({item["previous"]["release"] for item in hosts.values() if item["previous"]})
    if len(names) > 1:
        remedy = "decide on one and bring all hosts to it: playbooks/deploy_pd.yml -e pd_release=NAME"
        problems.append(
            Refusal("the hosts' releases", f"they differ\n{table(hosts)}", "one release before, on all hosts", remedy)
        )
    if problems:
        raise NoWayBack(problems)
    return WayBack(names[0], {host: item["previous"]["id"] for host, item in hosts.items()})


def table(hosts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return which release each host runs and which is before it, one line per host."""
    rows = [("host", "current", "previous")]
    rows += [
        (host, _name(hosts[host]["current"]), _name(hosts[host]["previous"])) for host in sorted(hosts, key=natural_key)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "      " + "  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in rows
    )


@dataclass(frozen=True)
class HostState:
    """What a host had when the run began, and the release that ``current`` names by now."""

    plan: Mapping[str, Any]  # in force, as the serve phase wrote it; empty where there is none
    proven: Mapping[str, Any]  # ``record`` of the last run that proved the service; empty where there is none
    found: str  # id that ``current`` named when the run began, "" for none
    now: str  # id that it names now


RECORDED = ("repo", "revision", "served_name")  # of the plan's model


def record(planned: Mapping[str, Any], identity: str) -> Dict[str, Any]:
    """Return what is kept of a service that was proven: its release, the release's id on the host, the model's commit.

    It outlives runs that are killed: what they switched to is measured by it, and gone back on to it.
    """
    model = {key: planned["model"][key] for key in RECORDED}
    return {"release": planned["release"], "id": identity, "model": model}


def switched(states: Mapping[str, HostState], planned: Mapping[str, Any], serves: bool) -> Optional[WayBack]:
    """Return the way back from what is planned to what was proven last; None where there is none.

    There is one where all hosts were proven with the same release or the same commit of the model and have the planned
    one in its place now, whether this run switched them or one that was killed. Before the run ``serves`` it is about
    what `current` names, unless an earlier run had gone further.
    """
    before = {host: _before(state) for host, state in states.items()}
    proven = [item for item in before.values() if item]
    if not proven or len(proven) < len(before) or not planned:
        return None
    if any(_name_of(state.now) != planned["release"] for state in states.values()):
        return None  # the planned release is kept beside the one that serves
    moved = [host for host, item in before.items() if item and item["id"] != states[host].now]
    if moved and (len(moved) < len(states) or len({item["release"] for item in proven}) > 1):
        return None
    touched = serves or any(
        item is not None and (states[host].found != item["id"] or _commit(states[host].plan) != _commit(item))
        for host, item in before.items()
    )
    model = _commit_before([item["model"] for item in proven], planned["model"]) if touched else {}
    if not moved and not model:
        return None
    ids = {host: str(item["id"]) for host, item in before.items() if item} if moved else {}
    return WayBack(str(proven[0]["release"] if moved else planned["release"]), ids, model, touched)


def _before(state: HostState) -> Optional[Mapping[str, Any]]:
    """Return what was proven last: of a host without a whole record, as an earlier version left it, what it serves."""
    model = state.proven.get("model")
    if {"release", "id"} <= set(state.proven) and isinstance(model, dict) and {*RECORDED} <= set(model):
        return state.proven
    if state.plan and _name_of(state.found) == state.plan["release"]:
        return {"release": state.plan["release"], "id": state.found, "model": state.plan["model"]}
    return None


def _commit(plan: Mapping[str, Any]) -> str:
    return str((plan.get("model") or {}).get("revision", ""))


def _name_of(identity: str) -> str:
    """Return the name of a release by its id (release.release_id)."""
    return identity.rpartition("-")[0]


def _commit_before(models: List[Mapping[str, Any]], now: Mapping[str, Any]) -> Dict[str, str]:
    """Return what all hosts served of the model that is planned, where its commit is another one now."""
    was = models[0]
    told = [(model["repo"], model["revision"]) for model in models]
    if len(set(told)) > 1 or was["repo"] != now["repo"] or was["revision"] == now["revision"]:
        return {}
    return {key: str(was[key]) for key in ("revision", "served_name")}


def words(way: WayBack, planned: Mapping[str, Any]) -> Dict[str, str]:
    """Return what was ``tried``, what it goes ``back`` to, and what the inventory has to say (``advice``)."""
    tried, back, settings = [], [], []
    if way.ids:
        tried, back = [str(planned["release"])], [way.release]
        settings = [f"pd_release: {way.release}"]
    if way.model:
        tried.append(f"commit {planned['model']['revision'][:12]} of the model")
        back.append(f"commit {way.model['revision'][:12]} of the model")
        settings.append(f"pd_model.revision: {way.model['revision']}")
    told = {"tried": " with ".join(tried), "back": " with ".join(back)}
    if way.ids and way.release == planned["release"]:
        told["back"] = " with ".join([f"{way.release} as it was before", *back[1:]])
        advice = "The release's locks are others now: deploy with the version of the bundle before"
        advice += "".join(f" and with {setting}" for setting in settings[1:])
    else:
        advice = f"Set {' and '.join(settings)} in the inventory"
    return {
        **told,
        "advice": f"{advice} until the cause is found; the next deployment tries {told['tried']} otherwise.",
    }


def _name(installed: Optional[Mapping[str, Any]]) -> str:
    return str(installed["id"]) if installed else "none"
