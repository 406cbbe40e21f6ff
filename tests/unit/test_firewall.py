"""The ruleset of a host: which ports it names, and what nft makes of it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pdstack import drift, firewall, runner

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
    assert f"ExecStart=/usr/sbin/nft -f {firewall.RULES}\n" in unit


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft is on hosts; the cluster scenario loads these rules there")
def test_nft_takes_it() -> None:
    for host in "abc":
        done = subprocess.run(
            ["nft", "-c", "-f", "-"], input=firewall.ruleset(plan(), host), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


class Ended(Exception):
    """The module's answer, or its refusal."""


@pytest.fixture
def module(project_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with its files below a folder."""
    spec = importlib.util.spec_from_file_location("pd_firewall", project_root / "library/pd_firewall.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.setattr(firewall, "RULES", str(tmp_path / "firewall.nft"))
    monkeypatch.setattr(firewall, "UNIT_FILE", str(tmp_path / "pd-firewall.service"))
    return made


class Host:
    """nft and systemctl as the module calls them: a table, and one unit by its enabled and active state."""

    def __init__(self) -> None:
        self.table, self.enabled, self.active = "", "", "inactive"
        self.said: list[str] = []

    def run(self, argv: list[str], **_: Any) -> runner.Completed:
        words = [*argv]
        self.said.append(" ".join(words[:2]))
        out = ""
        if words[0] == "unshare":
            out = "table inet pdstack {\n}\n" + Path(words[words.index("sh") + 4]).read_text()
        elif words[:2] == ["nft", "-s"]:
            out = self.table
        elif words[:2] == ["nft", "-f"]:
            self.table = "table inet pdstack {\n}\n" + Path(words[2]).read_text()
        elif words[:2] == ["nft", "delete"]:
            self.table = ""
        elif words[1].startswith("list-unit"):
            out = f"{firewall.UNIT} x\n" if self.enabled else ""
        elif words[1] == "show":
            out = f"Id={firewall.UNIT}\nLoadState=loaded\nActiveState={self.active}\nUnitFileState={self.enabled}\n"
        elif words[1] in ("enable", "disable"):
            self.enabled = {"enable": "enabled", "disable": ""}[words[1]]
        elif words[1] in ("start", "stop"):
            self.active = {"start": "active", "stop": "inactive"}[words[1]]
        return runner.Completed(0, out, "")


def call(module: ModuleType, monkeypatch: pytest.MonkeyPatch, host: Host, ruleset: str, check: bool) -> dict[str, Any]:
    def end(**answer: Any) -> None:
        raise Ended(answer)

    made = SimpleNamespace(
        params={"ruleset": ruleset, "unit": "[Unit]\n"},
        check_mode=check,
        get_bin_path=lambda *_, **__: "nft",
        exit_json=end,
        fail_json=end,
    )
    monkeypatch.setattr(module, "AnsibleModule", lambda **_: made)
    monkeypatch.setattr(module.runner, "run", host.run)
    with pytest.raises(Ended) as ended:
        module.main()
    answer: dict[str, Any] = ended.value.args[0]
    return answer


def told(answer: dict[str, Any]) -> list[tuple[str, str, str]]:
    found = drift.of_result("a", "firewall : Keep the rules", "pd_firewall", answer)
    return [(item.kind, Path(item.item).name, item.found) for item in found]


def test_table_files_and_unit_are_kept_and_each_is_told_alone(module, monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    host, rules_file = Host(), tmp_path / "firewall.nft"
    monkeypatch.setattr(module.files, "_ids", lambda entry: (-1, -1))
    monkeypatch.setattr(module.files, "_name", lambda found: "root:root")
    rehearsed = call(module, monkeypatch, host, "a\n", check=True)
    assert not rules_file.exists()
    assert host.table == ""
    done = call(module, monkeypatch, host, "a\n", check=False)
    assert {**done, "table": ""} == {**rehearsed, "table": ""}, "a rehearsal says what the run does"
    assert (host.enabled, host.active, rules_file.read_text()) == ("enabled", "active", "a\n")
    assert host.said.index("nft -f") < host.said.index("systemctl start")
    again = call(module, monkeypatch, host, "a\n", check=False)
    assert (again["changed"], told(again)) == (False, [])
    assert [Path(name).name for name in again["declared"]] == [
        "table inet pdstack",
        "firewall.nft",
        "pd-firewall.service",
        "pd-firewall.service",
    ]

    host.table = "flushed\n"
    assert told(call(module, monkeypatch, host, "a\n", check=False)) == [("firewall", "table inet pdstack", "differs")]
    rules_file.write_text("a\nb\n")
    assert told(call(module, monkeypatch, host, "a\n", check=False)) == [("file", "firewall.nft", "edited")]
    host.enabled = "disabled"
    assert told(call(module, monkeypatch, host, "a\n", check=False)) == [("unit", "pd-firewall.service", "to enable")]

    gone = call(module, monkeypatch, host, "", check=False)
    assert gone["changed"]
    assert (host.table, host.enabled, host.active) == ("", "", "inactive")
    assert list(tmp_path.iterdir()) == []
    assert not call(module, monkeypatch, host, "", check=False)["changed"]
