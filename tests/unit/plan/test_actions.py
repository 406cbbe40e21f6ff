"""pd_validate and pd_plan through a real ansible-playbook, on hosts that nobody can reach."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from pdstack import codec, plan
from pdstack.facts import Port
from unit.plan import inventories as inv

ROOT = pathlib.Path(__file__).resolve().parents[3]
BIN = pathlib.Path(sys.executable).parent


@dataclass(frozen=True)
class Done:
    rc: int
    text: str  # as the operator sees it
    connected: bool


@pytest.fixture
def play(tmp_path: pathlib.Path) -> Callable[..., Done]:
    """Return a function that runs tasks on an inventory of three hosts whose ssh only leaves a trace."""
    trace = tmp_path / "connected"
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\ntouch {trace}\nexit 255\n")
    ssh.chmod(0o755)

    def run(
        variables: dict[str, Any], *tasks: dict[str, Any], words: tuple[str, ...] = (), **groups: list[str]
    ) -> Done:
        members = {"gpu_hosts": ["gpu1", "gpu2"], "router_hosts": ["front"], **groups}
        everybody = {f"{name}": {"ansible_host": f"192.0.2.{i}"} for i, name in enumerate(["gpu1", "gpu2", "front"], 1)}
        inventory = {
            "all": {
                "vars": {"ansible_ssh_executable": str(ssh), **variables},
                "hosts": everybody,
                "children": {name: {"hosts": {host: {} for host in hosts}} for name, hosts in members.items()},
            }
        }
        (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
        playbook = [{"name": "Test", "hosts": "all", "gather_facts": False, "tasks": list(tasks)}]
        (tmp_path / "play.yml").write_text(yaml.safe_dump(playbook, sort_keys=False))
        done = subprocess.run(
            [BIN / "ansible-playbook", "-i", tmp_path / "hosts.yml", tmp_path / "play.yml", *words],
            env={
                **os.environ,
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_HOME": str(tmp_path / "home"),
                "NO_COLOR": "1",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return Done(done.returncode, done.stdout + done.stderr, trace.exists())

    return run


VALIDATE = {"name": "Validate", "pd_validate": {}}
HOSTS = ("gpu1", "gpu2", "front")
PING = {"name": "Reach the hosts", "ansible.builtin.ping": {}}
GOOD = inv.variables(pd_topology=inv.replicas(4, "auto"), pd_kernel_extension="off")


def planning(tmp_path: pathlib.Path, *, names: tuple[str, ...] = HOSTS, **arguments: Any) -> dict[str, Any]:
    """Return the task that plans with facts as a probe would have registered them."""
    facts = {name: codec.dump(inv.host(name)) for name in names}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    read = "{{ lookup('ansible.builtin.file', 'facts.json') | from_json }}"
    return {"name": "Plan", "pd_plan": {"facts": read, **arguments}, "register": "planned"}


SHOW = {"name": "Show", "ansible.builtin.debug": {"msg": "{{ planned.report }}"}, "run_once": True}
KEEP = {
    "name": "Keep",
    "ansible.builtin.copy": {"content": "{{ planned.plan | to_json }}", "dest": "{{ playbook_dir }}/plan.json"},
    "delegate_to": "localhost",
    "connection": "local",
    "vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable},
    "run_once": True,
}


def test_a_good_inventory_passes_without_a_connection(play: Callable[..., Done]) -> None:
    done = play(
        GOOD,
        {**VALIDATE, "register": "seen"},
        {"name": "Show", "ansible.builtin.debug": {"var": "seen"}, "run_once": True},
    )
    assert done.rc == 0, done.text
    assert not done.connected
    assert "with sglang-0.5.23, mode replicas: auto x replicas of 4 GPUs; GPU hosts: gpu1, gpu2" in " ".join(
        done.text.split()
    )
    assert "changed=0" in done.text


def test_what_a_playbook_acts_by_is_judged_alone_whatever_the_rest_is_like(play: Callable[..., Done]) -> None:
    """A host is retired with an inventory that could not be deployed, but not with a slip in what is to be kept."""
    only = {**VALIDATE, "pd_validate": {"only": ["pd_retire", "pd_retire_keep"]}}
    broken = {"pd_retire": "gpu1", "pd_topology": {"mode": "nonsense"}}
    assert play(broken, only).rc == 0
    done = play({**broken, "pd_retire_keep": "checkpoint", "pd_retire_kept": [], "checkpoint_rot": "/x"}, only)
    assert done.rc == 2
    assert not done.connected
    words = " ".join(done.text.split())
    assert "checkpoint_rot found: an unknown variable" in words
    assert "pd_retire_kept found: an unknown variable" in words
    assert "pd_retire_keep found: 'checkpoint' needed: a list, each item a string" in words
    assert "nonsense" not in words


def test_who_holds_our_ports_is_for_a_person_but_for_whom_a_deployment_stops(
    play: Callable[..., Done], tmp_path: pathlib.Path
) -> None:
    stale = [Port(8000, "0.0.0.0", 42, "python3", "old.service"), Port(29001, "0.0.0.0", 43, "python3")]
    facts = {name: codec.dump(inv.host(name, ports=stale if name == "front" else [])) for name in HOSTS}
    empty: dict[str, dict[str, Any]] = {name: {} for name in HOSTS}
    show = {"name": "Show", "ansible.builtin.debug": {"msg": "{{ one.drift | to_json }}"}, "run_once": True}
    look = {"name": "Look", "pd_drift": {"facts": facts, "previous": empty, "baselines": empty}, "register": "one"}
    done = play({**GOOD, "pd_stop_foreign": ["old"]}, look, show)
    assert done.rc == 0, done.text
    items = json.loads(re.findall(r"msg: '?(\[.*\])", " ".join(done.text.split()))[0])
    repairs = {item["item"]: item["repair"] for item in items if item["kind"] == "in use"}
    assert repairs.pop("port 8000") == "deploy_pd.yml"
    assert [(item, repair[:26]) for item, repair in repairs.items()] == [("port 29001", "stop it if nobody needs it")]


def test_the_trace_of_a_connection_would_be_seen(play: Callable[..., Done]) -> None:
    assert play(GOOD, PING).connected


def test_a_wrong_inventory_stops_before_any_connection(play: Callable[..., Done]) -> None:
    wrong = {**GOOD, "pd_modle": 1, "checkpoint_rot": "/x", "pd_ports": {"ruter": 8000}, "pd_transfer": "tcp"}
    done = play(wrong, VALIDATE, PING)
    assert done.rc == 2
    assert not done.connected
    assert "no host has been contacted (4 problems)" in done.text
    for line in (
        "did you mean 'pd_model'?",
        "did you mean 'checkpoint_root'?",
        "did you mean 'router'?",
        "pd_transfer",
    ):
        assert line in done.text
    assert "\n  pd_modle\n    found:  an unknown variable (on front, gpu1, gpu2)\n" in done.text, done.text


def test_the_whole_inventory_is_checked_whatever_the_limit(play: Callable[..., Done]) -> None:
    done = play(
        {**GOOD, "pd_transfer": "{{ 'nixl' if inventory_hostname != 'gpu2' else 'tcp' }}"},
        VALIDATE,
        words=("--limit", "gpu1"),
    )
    assert done.rc == 2
    assert "'tcp' on gpu2" in done.text


ENTRIES = ("all", "all/vault.yml", "all.yml", "all.yaml", "all.json")


@pytest.mark.parametrize("kind", ["group_vars", "host_vars"])
def test_a_file_of_variables_that_ansible_leaves_out_is_found(tmp_path: pathlib.Path, kind: str) -> None:
    """Every choice of what may lie beside each other; what is read is asked of Ansible's own loader."""
    spec = importlib.util.spec_from_file_location("pd_validate_action", ROOT / "action_plugins/pd_validate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seen = set()
    for number, choice in enumerate(itertools.product([False, True], repeat=len(ENTRIES))):
        files = [name for name, chosen in zip(ENTRIES, choice, strict=True) if chosen]
        if {"all", "all/vault.yml"} <= set(files):
            continue  # a file and a folder of one name
        folder = tmp_path / str(number) / kind
        for name in [*files, "all.yml.bak", "other/a.yml", "other/b.yml"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        read = {str(path) for path in DataLoader().find_vars_files(str(folder), "all")}
        left_out = sorted({str(folder / name) for name in files} - read)
        (folder.parent / "hosts.yml").touch()
        for source in (folder.parent, folder.parent / "hosts.yml"):
            told = module.unread_files({"ansible_inventory_sources": [str(source), "gpu1,gpu2,"]})
            assert sorted(item.subject for item in told) == left_out
        seen.add(len(left_out))
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("arguments", [{}, {"only": ["pd_retire"]}])
def test_a_file_of_variables_that_ansible_leaves_out_is_refused_before_any_connection(
    play: Callable[..., Done], tmp_path: pathlib.Path, arguments: dict[str, Any]
) -> None:
    for name in ("all.yml", "all/vault.yml"):
        (tmp_path / "group_vars" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "group_vars" / name).write_text("{}")
    done = play(GOOD, {**VALIDATE, "pd_validate": arguments}, PING)
    assert (done.rc, done.connected) == (2, False), done.text
    assert f"{tmp_path}/group_vars/all.yml\n    found:  all beside it, which is all that Ansible reads" in done.text
    assert "move it, or what it holds, into all/" in done.text


def test_an_empty_group(play: Callable[..., Done]) -> None:
    done = play(GOOD, VALIDATE, gpu_hosts=[])
    assert (done.rc, "group gpu_hosts" in done.text) == (2, True)


def test_templates_and_undefined_names(play: Callable[..., Done]) -> None:
    fine = {
        **GOOD,
        "size": 2,
        "pd_topology": {"mode": "replicas", "replicas": {"tp": "{{ size * 2 }}", "count": "auto"}},
    }
    assert play(fine, VALIDATE).rc == 0
    done = play({**fine, "size": "{{ sizze }}"}, VALIDATE)
    assert done.rc == 2
    assert "pd_topology on gpu1" in done.text
    assert "sizze" in done.text


def test_secrets_stay_out_of_every_output(play: Callable[..., Done], tmp_path: pathlib.Path) -> None:
    (tmp_path / "password").write_text("open sesame\n")
    encrypt = [
        BIN / "ansible-vault",
        "encrypt_string",
        "--vault-password-file",
        tmp_path / "password",
        "s3cret-key-of-clients",
        "--name",
        "x",
    ]
    shown = subprocess.run(
        encrypt,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "ANSIBLE_HOME": str(tmp_path)},
        cwd=tmp_path,
    )
    group = tmp_path / "group_vars/all"
    group.mkdir(parents=True)
    (group / "vault.yml").write_text(shown.stdout.replace("x:", "vault_key:", 1))
    words = ("--vault-password-file", str(tmp_path / "password"), "-vvv", "--diff")
    beside = {**GOOD, "some_other_secret": "{{ vault_key }}", "pd_security": {"api_key": "{{ vault_key }}"}}
    done = play(beside, VALIDATE, planning(tmp_path), SHOW, words=words)
    assert done.rc == 0, done.text
    assert "s3cret-key" not in done.text
    wrong = {
        **GOOD,
        "pd_security": {"api_key": "{{ vault_key }}", "tls_cert_file": "/c"},
        "pd_engine": {"extra_args": {"api-key": "{{ vault_key }}"}},
    }
    done = play(wrong, VALIDATE, words=words)
    assert done.rc == 2
    assert "s3cret-key" not in done.text


def test_a_given_certificate_is_tried_before_any_connection(play: Callable[..., Done], tmp_path: pathlib.Path) -> None:
    for name in ("one", "other"):
        argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        argv += ["-subj", "/CN=x", "-keyout", str(tmp_path / f"{name}.key"), "-out", str(tmp_path / f"{name}.pem")]
        subprocess.run(argv, check=True, capture_output=True)

    def given(cert: str, key: str) -> Done:
        files = {"tls_cert_file": str(tmp_path / cert), "tls_key_file": str(tmp_path / key)}
        return play({**GOOD, "pd_security": {"tls": "given", **files}}, VALIDATE)

    assert given("one.pem", "one.key").rc == 0
    done = given("one.pem", "other.key")
    assert (done.rc, "pd_security.tls_cert_file" in done.text, "belongs to it" in done.text) == (2, True, True)
    done = given("none.pem", "one.key")
    assert (done.rc, "no such file here" in done.text) == (2, True)


def test_registered_results_are_no_variables(play: Callable[..., Done]) -> None:
    check = {"name": "Check", "ansible.builtin.assert": {"that": "true"}, "register": "pd_something"}
    assert play(GOOD, check, VALIDATE).rc == 0


def test_a_plan_is_made_shown_kept_and_kept_to(play: Callable[..., Done], tmp_path: pathlib.Path) -> None:
    made = play(GOOD, VALIDATE, planning(tmp_path), SHOW, KEEP)
    assert made.rc == 0, made.text
    assert not made.connected
    assert "aggregated-3  aggregated  gpu2" in made.text
    kept = codec.load(plan.Plan, json.loads((tmp_path / "plan.json").read_text()))
    assert [item.name for item in kept.instances] == [f"aggregated-{i}" for i in range(4)]
    again = play(GOOD, planning(tmp_path, previous=str(tmp_path / "plan.json")), words=("--check", "--diff"))
    assert (again.rc, "changed=0" in again.text) == (0, True), again.text
    other = {**GOOD, "pd_topology": inv.replicas(8, "auto")}
    changed = play(other, planning(tmp_path, previous=str(tmp_path / "plan.json")), words=("--check", "--diff"))
    assert "changed=1" in changed.text
    assert '-      "tp-size": 4' in changed.text or '-        "tp-size": 4' in changed.text, changed.text
    assert '+        "tp-size": 8' in changed.text or '+      "tp-size": 8' in changed.text


def test_a_previous_plan_that_cannot_be_read_counts_as_none(play: Callable[..., Done], tmp_path: pathlib.Path) -> None:
    tasks = [
        planning(tmp_path, previous=previous)
        for previous in (str(tmp_path / "no.json"), {"instances": 1}, "", {"gpu1": None})
    ]
    done = play(GOOD, *tasks, SHOW)
    assert (done.rc, "aggregated-0" in done.text) == (0, True), done.text


def test_a_plan_that_cannot_work_says_why(play: Callable[..., Done], tmp_path: pathlib.Path) -> None:
    done = play(GOOD, planning(tmp_path, names=("gpu1",)), PING)
    assert done.rc == 2
    assert not done.connected
    assert "\n  gpu2\n    found:  no facts\n" in done.text


def test_a_port_in_the_hands_of_others(play: Callable[..., Done], tmp_path: pathlib.Path) -> None:
    task = planning(tmp_path)
    facts = json.loads((tmp_path / "facts.json").read_text())
    facts["gpu1"]["ports"] = [
        {"port": 30200, "address": "0.0.0.0", "pid": 77, "command": "python3", "since": "2026-01-01T00:00:00Z"}
    ]
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    done = play(GOOD, task)
    assert done.rc == 2
    assert "process 77 (python3) since 2026-01-01T00:00:00Z" in done.text
    task["pd_plan"]["check_use"] = False
    assert play(GOOD, task).rc == 0


def test_facts_in_parts_and_facts_of_another_shape(play: Callable[..., Done], tmp_path: pathlib.Path) -> None:
    task = planning(tmp_path)
    facts = json.loads((tmp_path / "facts.json").read_text())
    whole = facts["gpu1"]
    parts = [{k: v for k, v in whole.items() if k != "ports"}, {"host": "localhost", "ports": whole["ports"]}]
    (tmp_path / "facts.json").write_text(json.dumps({**facts, "gpu1": parts}))
    assert play(GOOD, task).rc == 0
    (tmp_path / "facts.json").write_text(json.dumps({**facts, "gpu1": {"gpuz": []}}))
    done = play(GOOD, task)
    assert (done.rc, "gpuz" in done.text) == (2, True)


@pytest.mark.parametrize("module", ["pd_validate", "pd_plan"])
def test_documentation(module: str) -> None:
    done = subprocess.run(
        [BIN / "ansible-doc", "-t", "module", "--json", module],
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    (found,) = json.loads(done.stdout).values()
    assert found["doc"]["has_action"]
    assert found["examples"]
    assert "msg" in found["return"]
