"""The firewall of one host: from the plan to an nftables ruleset. Pure.

One table of our own, of which every rule is about a port of ours. Whatever else arrives meets no rule
here, and the tables of others decide about it as before. Only packets that open a TCP connection are
looked at, so KV traffic costs one comparison and no connection tracking.
"""

from __future__ import annotations

import difflib
import ipaddress
from typing import Any, Iterable, List, Mapping

from .service import instances_of, routers_of

TABLE = "inet pdstack"
RULES = "/etc/pdstack/firewall.nft"
UNIT = "pd-firewall.service"
UNIT_FILE = "/etc/systemd/system/pd-firewall.service"
# Where engines put the sockets that they choose themselves: the process group's store (sglang 0.5.23:
# 22000 to 29999), NIXL and UCX (the kernel's own range), zmq (49152 to 65535).
CHOSEN_BY_ENGINES = "22000-29999, 32768-65535"


def wanted(plan: Mapping[str, Any], host: str) -> bool:
    """Whether a host gets a firewall: it is on, and something of ours listens there."""
    return bool(plan["security"]["firewall"] and (instances_of(plan, host) or routers_of(plan, host)))


def ruleset(plan: Mapping[str, Any], host: str) -> str:
    """Return the host's ruleset, as ``nft -f`` takes it: it replaces an older one in one step."""
    security = plan["security"]
    members = [item["address"] for item in [*plan["instances"], *plan["routers"]]]
    engines, routers = instances_of(plan, host), routers_of(plan, host)
    http = sorted(item["ports"]["http"] for item in engines)
    bootstrap = sorted(item["ports"]["bootstrap"] for item in engines if "bootstrap" in item["ports"])
    lines = [
        f"# Firewall of {host}, from /etc/pdstack/plan.json; deploy_pd.yml rewrites it, pd-firewall.service loads it.",
        f"table {TABLE}",
        f"delete table {TABLE}",
        f"table {TABLE} {{",
        "\t# hosts of this inventory",
        "\tchain members {",
        *_admit(members),
        "\t\t# said at once and not by silence",
        "\t\tmeta l4proto tcp reject with tcp reset",
        "\t}",
        "",
        "\t# whoever reads metrics, and members",
        "\tchain metrics {",
        *_admit(security["metrics_networks"]),
        "\t\tgoto members",
        "\t}",
        "",
        "\t# whoever sends requests, and members",
        "\tchain clients {",
        *(
            [*_admit(security["client_networks"]), "\t\tgoto members"]
            if security["client_networks"]
            else ["\t\taccept"]
        ),
        "\t}",
        "",
        "\tchain input {",
        "\t\ttype filter hook input priority filter; policy accept;",
        '\t\tiifname "lo" accept',
        "\t\ttcp flags & (fin | syn | rst | ack) != syn accept",
    ]
    for words, ports, chain in (
        ("router", [item["ports"]["http"] for item in routers], "clients"),
        ("metrics of the router", [item["ports"]["metrics"] for item in routers], "metrics"),
        ("engines; their metrics are on the same port", http, "metrics"),
        ("bootstrap of prefill engines", bootstrap, "members"),
    ):
        if ports:
            lines += [f"\t\t# {words}", f"\t\ttcp dport {_set(ports)} goto {chain}"]
    if engines:
        kept = sorted({*security["ssh_ports"], *security["open_ports"]})
        if kept:
            lines += ["\t\t# ssh, and what the operator keeps open", f"\t\ttcp dport {_set(kept)} accept"]
        lines += ["\t\t# what engines choose themselves: NIXL, UCX, process groups"]
        lines += [f"\t\ttcp dport {{ {CHOSEN_BY_ENGINES} }} goto members"]
    return "\n".join([*lines, "\t}", "}"]) + "\n"


def difference(before: str, after: str) -> str:
    """Return the lines by which two listings of the table differ, each with its sign."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "; ".join(" ".join(line.split()) for line in lines if not line.startswith(("---", "+++", "@@")))


def _admit(networks: Iterable[str]) -> List[str]:
    """Return a rule for each family that these addresses and networks are of; a name is a host alone with itself."""
    rules = []
    for family, version in (("ip", 4), ("ip6", 6)):
        found = sorted({item for item in map(_network, networks) if item is not None and item.version == version})
        # nft refuses a set of which one element lies in another
        outer = [item for item in found if not any(item != other and item.subnet_of(other) for other in found)]
        if outer:
            texts = [str(item.network_address) if item.num_addresses == 1 else str(item) for item in outer]
            rules.append(f"\t\t{family} saddr {{ {', '.join(texts)} }} accept")
    return rules


def _network(text: str) -> Any:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def _set(ports: Iterable[int]) -> str:
    return f"{{ {', '.join(str(port) for port in sorted(set(ports)))} }}"
