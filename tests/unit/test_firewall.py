"""The ruleset of a host: which ports it names, and what nft makes of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pdstack import firewall

SECURITY: dict[str, Any] = {
    "firewall": True,
    "client_networks": [],
    "metrics_networks": [],
    "open_ports": [],
    "ssh_ports": [22],
}


def plan(**security: Any) -> dict[str, Any]:
    ports = {"prefill": {"http": 30000, "bootstrap": 8998}, "decode": {"http": 30100}}
    return {
        "security": {**SECURITY, **security},
        "instances": [
            {"host": host, "role": role, "address": address, "ports": ports[role]}
            for host, role, address in (("b", "prefill", "10.0.0.2"), ("c", "decode", "10.0.0.3"))
        ],
        "routers": [{"host": "a", "address": "fd00::1", "ports": {"http": 8000, "metrics": 29001}}],
    }


def rules(text: str, chain: str) -> list[str]:
    body = re.search(rf"chain {chain} {{\n(.*?)\n\t}}", text, re.DOTALL)
    assert body is not None
    return [line.strip() for line in body.group(1).splitlines() if not line.strip().startswith("#")]


def test_an_engine_host_closes_its_own_ports_to_all_but_members() -> None:
    text = firewall.ruleset(plan(), "b")
    assert rules(text, "input")[3:] == [
        "tcp dport { 30000 } goto metrics",
        "tcp dport { 8998 } goto members",
        "tcp dport { 22 } accept",
        "tcp dport { 22000-29999, 32768-65535 } goto members",
    ]
    assert rules(text, "members") == [
        "ip saddr { 10.0.0.2, 10.0.0.3 } accept",
        "ip6 saddr { fd00::1 } accept",
        "meta l4proto tcp reject with tcp reset",
    ]
    assert rules(text, "metrics") == ["goto members"]


def test_a_router_host_opens_its_port_to_clients_and_not_its_metrics() -> None:
    text = firewall.ruleset(plan(), "a")
    assert rules(text, "input")[3:] == ["tcp dport { 8000 } goto clients", "tcp dport { 29001 } goto metrics"]
    assert rules(text, "clients")[0] == "accept"


def test_networks_are_admitted_where_they_are_named() -> None:
    text = firewall.ruleset(
        plan(client_networks=["10.8.0.0/16"], metrics_networks=["10.9.0.1", "10.9.0.0/30", "fd01::/64"]), "a"
    )
    assert rules(text, "clients") == ["ip saddr { 10.8.0.0/16 } accept", "goto members"]
    assert rules(text, "metrics")[:2] == ["ip saddr { 10.9.0.0/30 } accept", "ip6 saddr { fd01::/64 } accept"]


@pytest.mark.parametrize("ssh", [22, 50022])
def test_ssh_is_never_closed_and_other_programs_only_where_engines_choose_ports(ssh: int) -> None:
    text = firewall.ruleset(plan(ssh_ports=[ssh], open_ports=[40000]), "b")
    lines = rules(text, "input")
    kept = ", ".join(str(port) for port in sorted([ssh, 40000]))
    assert lines.index(f"tcp dport {{ {kept} }} accept") < lines.index(
        "tcp dport { 22000-29999, 32768-65535 } goto members"
    )
    assert "policy accept" in lines[0]


def test_no_rules_where_nothing_of_ours_runs_or_the_firewall_is_off() -> None:
    assert firewall.wanted(plan(), "b")
    assert not firewall.wanted(plan(), "d")
    assert not firewall.wanted(plan(firewall=False), "b")


def test_it_names_its_own_table_alone() -> None:
    for host in "abc":
        found = re.findall(r"^(?:delete )?table (.*?)(?: {)?$", firewall.ruleset(plan(), host), re.MULTILINE)
        assert found == [firewall.TABLE] * 3


def test_the_unit_loads_what_the_role_writes(project_root: Path) -> None:
    unit = (project_root / "roles/firewall/files/pd-firewall.service").read_text()
    assert f"ExecStop=-/usr/sbin/nft delete table {firewall.TABLE}\n" in unit
    assert "/etc/pdstack/firewall.nft" in (project_root / "roles/firewall/vars/main.yml").read_text()


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft is on hosts; the cluster scenario loads these rules there")
def test_nft_takes_it() -> None:
    for host in "abc":
        done = subprocess.run(
            ["nft", "-c", "-f", "-"], input=firewall.ruleset(plan(), host), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
