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
    """

    release: str
    ids: Dict[str, str]
    model: Dict[str, str] = field(default_factory=dict)


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


def switched(
    hosts: Mapping[str, Optional[Mapping[str, Any]]],
    before: Mapping[str, Optional[Mapping[str, Any]]],
    planned: Mapping[str, Any],
) -> Optional[WayBack]:
    """Return the way back of a run that switched the release, the model's commit, or both; None where there is none.

    ``hosts`` maps each host of the play to the former release that pd_venv reported in this run, None where it
    switched nothing there; a run that switched some hosts only, or from several releases, has no way back.
    ``before`` maps each host to the plan that it had, empty where the model is not to be gone back on.
    """
    former = {host: item for host, item in hosts.items() if item}
    if former and (len(former) < len(hosts) or len({item["release"] for item in former.values()}) > 1):
        return None
    model = _commit_before([before.get(host) or {} for host in hosts], planned)
    if former:
        return WayBack(next(iter(former.values()))["release"], {host: it["id"] for host, it in former.items()}, model)
    return WayBack(str(planned["release"]), {}, model) if model else None


def _commit_before(plans: List[Mapping[str, Any]], planned: Mapping[str, Any]) -> Dict[str, str]:
    """Return what all hosts served of the model that is planned, where its commit is another one now."""
    models = [plan.get("model") for plan in plans]
    now = planned.get("model")
    if not models or not now or any(model != models[0] for model in models):
        return {}
    was = models[0] or {}
    if was.get("repo") != now["repo"] or was["revision"] == now["revision"]:
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
