"""The way back to the release before: pure decisions over what the hosts' manifests say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional

from .intent import natural_key
from .refusal import Refusal, Refused


class NoWayBack(Refused):
    """The hosts have no release in common to go back to; nothing was changed."""

    title = "There is no way back; no host has been changed"


@dataclass(frozen=True)
class WayBack:
    """The release to go back to, and its id on each host (hosts may run different Pythons)."""

    release: str
    ids: Dict[str, str]


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


def switched(hosts: Mapping[str, Optional[Mapping[str, Any]]]) -> Optional[WayBack]:
    """Return the way back of a run that switched releases; None where it switched none, or not all from one.

    ``hosts`` maps each host of the play to the former release that pd_venv reported in this run, None where it
    switched nothing there.
    """
    former = {host: item for host, item in hosts.items() if item}
    if not former or len(former) < len(hosts) or len({item["release"] for item in former.values()}) > 1:
        return None
    return WayBack(next(iter(former.values()))["release"], {host: item["id"] for host, item in former.items()})


def _name(installed: Optional[Mapping[str, Any]]) -> str:
    return str(installed["id"]) if installed else "none"
