"""The generated part of an inventory: literal connection values (testinfra reads no Jinja). Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

HEADER = "# Written by `lab up`, removed by `lab down`. Do not edit, do not commit.\n"


@dataclass(frozen=True)
class Connection:
    """How to reach one host."""

    name: str
    address: str


def ssh_options(known_hosts: str) -> list[str]:
    """Return ssh's options: the lab's own known_hosts, and host keys checked."""
    return [
        "-o",
        f"UserKnownHostsFile={known_hosts}",
        "-o",
        "GlobalKnownHostsFile=/dev/null",
        "-o",
        "StrictHostKeyChecking=yes",
        "-o",
        "IdentitiesOnly=yes",
        "-o",
        "IdentityAgent=none",
    ]


def variables(host: Connection, key: str, known_hosts: str) -> dict[str, str]:
    """Return the connection variables of one host."""
    return {
        "ansible_connection": "ssh",
        "ansible_host": host.address,
        "ansible_user": "root",
        "ansible_ssh_private_key_file": key,
        "ansible_ssh_common_args": " ".join(ssh_options(known_hosts)),
        "ansible_python_interpreter": "/usr/bin/python3",
    }


def render(hosts: list[Connection], key: str, known_hosts: str) -> str:
    """Return a YAML inventory: the hosts under ``all``, scalars quoted as JSON (which YAML contains)."""
    lines = [HEADER + "all:", "  hosts:"]
    for host in sorted(hosts, key=lambda h: h.name):
        lines.append(f"    {host.name}:")
        lines += [f"      {name}: {json.dumps(value)}" for name, value in variables(host, key, known_hosts).items()]
    if not hosts:
        lines[-1] += " {}"
    return "\n".join(lines) + "\n"
