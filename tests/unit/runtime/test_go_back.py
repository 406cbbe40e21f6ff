"""playbooks/tasks/attempt.yml and go_back.yml on two hosts: who goes back, what is restarted. The phases are stubs."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
PHASES = ("runtime", "checkpoint", "serve", "verify")
FORMER = {"a": {"id": "old-aaa", "release": "old"}, "b": {"id": "old-bbb", "release": "old"}}
MODEL = {"repo": "a/b", "revision": 8 * "22", "served_name": "b"}
RELEASE = """
import json
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule(argument_spec={"activate": {"type": "str"}, "foreign": {"type": "dict"}})
open(%r, "a").write("activate " + module.params["activate"] + "\\n")
module.exit_json(changed=True)
"""


# The phases that fail do so once: the way back runs them again.
PHASE = """
- name: Run
  ansible.builtin.lineinfile: {{path: {log}, line: "{phase} {{{{ inventory_hostname }}}}", create: true}}
  throttle: 1
- name: Break
  ansible.builtin.fail: {{msg: it broke}}
  when: [inventory_hostname in broken, phase == "{phase}", __pd_back is not defined]
"""
PLAN = """
from ansible.module_utils.basic import AnsibleModule
asked = {"facts": {"type": "dict"}, "previous": {"type": "dict"}, "release": {}, "variables": {"type": "dict"}}
module = AnsibleModule(argument_spec=asked)
assert sorted(module.params["facts"]) == ["a", "b"] == sorted(module.params["previous"]), "not all are planned for"
revision = module.params["variables"].get("pd_model", {}).get("revision", "as it is")
open(%r, "a").write(f"plan {module.params['release']} {revision}\\n")
module.exit_json(plan={"release": "old"})
"""
LOCK = """
from ansible.module_utils.basic import AnsibleModule
AnsibleModule(argument_spec={"state": {"type": "str"}}).exit_json(held=False)
"""


def play(phase: str) -> str:
    """Return a phase's play with nothing but the very task that runs it, or tries it, and the rescue around it."""
    (play,) = yaml.safe_load((ROOT / f"playbooks/{phase}.yml").read_text())
    (guarded,) = play["tasks"]
    guarded["block"] = [task for task in guarded["block"] if task.get("vars", {}).get("__pd_phase") == phase]
    return yaml.safe_dump([{**play, "hosts": "a:b"}])


def inventory(folder: pathlib.Path, served: bool = True, **hosts: dict[str, object]) -> None:
    """``served``: the run has been through the serve phase, as it has through that of the runtime."""
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    now = {"pd_planned": {"plan": {"release": "new", "model": MODEL}}, "pd_model": MODEL, "__sglang_runtime_seen": {}}
    now |= {"__pd_service_files": {}} if served else {}
    told = {"all": {"hosts": {name: {**local, **now, **known} for name, known in hosts.items()}}}
    (folder / "hosts.json").write_text(json.dumps(told))


def host(
    former: dict[str, str], now: str = "new", switches: bool = True, revision: str = MODEL["revision"], **plan: object
) -> dict[str, object]:
    """A host that was proven with its former release and a commit of the model; this run or an earlier one switched."""
    proven = {**former, "model": {**MODEL, "revision": revision}}
    current = f"{now}-{former['id'][-3:]}"
    found = former["id"] if switches else current
    looked = {"facts": {}, "proven": proven, "plan": {**proven, **plan}, "current_release": found}
    switched = {"changed": True, "id": current} if switches else {}
    return {"pd_gpu": {"facts": {}}, "pd_host": looked, "sglang_runtime_switched": switched}


@pytest.fixture
def book(tmp_path: pathlib.Path) -> pathlib.Path:
    """A play as runtime.yml, checkpoint.yml, serve.yml and verify.yml have it, around the real tasks."""
    tasks, library, log = tmp_path / "tasks", tmp_path / "library", tmp_path / "log"
    tasks.mkdir()
    library.mkdir()
    for name in ("attempt", "go_back", "make_plan", "failed"):
        (tasks / f"{name}.yml").symlink_to(ROOT / f"playbooks/tasks/{name}.yml")
    for phase in PHASES:
        (tasks / f"run_{phase}.yml").write_text(PHASE.format(log=log, phase=phase))
    (library / "pd_plan.py").write_text(PLAN % str(log))
    (library / "pd_lock.py").write_text(LOCK)
    (library / "pd_release.py").write_text(RELEASE % str(log))
    for phase in PHASES:
        (tmp_path / f"{phase}.yml").write_text(play(phase))
    inventory(tmp_path, **{name: host(former) for name, former in FORMER.items()})
    return tmp_path


def run(book: pathlib.Path, phase: str, broken: list[str]) -> tuple[int, str, list[str]]:
    program = pathlib.Path(sys.executable).parent / "ansible-playbook"
    command = [program, "-i", book / "hosts.json", book / f"{phase}.yml"]
    extra = {"phase": phase, "broken": broken}
    env = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_LIBRARY": str(book / "library"),
        "ANSIBLE_ACTION_PLUGINS": str(book / "none"),
        "ANSIBLE_FILTER_PLUGINS": str(ROOT / "filter_plugins"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_SSH_RETRIES": "0",
    }
    done = subprocess.run([*command, "-e", json.dumps(extra)], env=env, capture_output=True, text=True, check=False)
    log = book / "log"
    return done.returncode, " ".join(done.stdout.split()), log.read_text().splitlines() if log.exists() else []


def test_where_one_host_fails_all_go_back_and_what_was_restarted_restarts(book: pathlib.Path) -> None:
    status, words, log = run(book, "verify", ["b"])
    assert status == 2, words
    assert "What failed: b: it broke" in words
    again = [f"{name} {host}" for name in ("serve", "verify") for host in FORMER]
    assert sorted(set(log)) == sorted({"plan old as it is", "activate old-aaa", "activate old-bbb", *again}), words
    assert "new did not serve, so that this run went back: every host is on old again, and it is proven" in words
    assert "Set pd_release: old in the inventory until the cause is found; the next deployment tries new" in words


def test_before_serving_nothing_restarts_and_changed_locks_point_to_the_version_before(book: pathlib.Path) -> None:
    """An earlier version of the bundle installed a release of the same name by other locks."""
    inventory(book, **{name: host({"id": f"new-old{name}", "release": "new"}) for name in FORMER})
    status, words, log = run(book, "runtime", ["b"])
    assert status == 2
    assert sorted(set(log)) == ["activate new-olda", "activate new-oldb", "runtime a", "runtime b"], words
    assert "every host is on new as it was before again, and what runs there was not touched" in words
    assert "deploy with the version of the bundle before until the cause is found" in words
    assert "Set pd_release" not in words


def test_a_commit_of_the_model_that_does_not_serve_is_gone_back_on_with_the_release_left_alone(
    book: pathlib.Path,
) -> None:
    before = host({"id": "new-aaa", "release": "new"}, switches=False, revision=8 * "11")
    inventory(book, a=before, b=before)
    status, words, log = run(book, "serve", ["b"])
    assert status == 2
    again = {f"{name} {host}" for name in ("serve", "verify") for host in FORMER}
    assert set(log) == {"plan new 1111111111111111", *again}, words
    assert "commit 222222222222 of the model did not serve, so that this run went back" in words
    assert "every host is on commit 111111111111 of the model again, and it is proven" in words
    assert "Set pd_model.revision: 1111111111111111 in the inventory" in words


def test_what_a_killed_run_switched_to_is_gone_back_on_in_an_early_phase_too(book: pathlib.Path) -> None:
    """Its plan is in force, and it may have restarted some: so all is served and proven again."""
    killed = {"switches": False, "revision": 8 * "11", "release": "new", "model": MODEL}
    inventory(book, served=False, **{name: host(former, **killed) for name, former in FORMER.items()})
    status, words, log = run(book, "runtime", ["b"])
    assert status == 2
    again = {f"{name} {host}" for name in ("serve", "verify") for host in FORMER}
    tried = {f"runtime {name}" for name in FORMER}
    assert set(log) == {"plan old 1111111111111111", "activate old-aaa", "activate old-bbb", *tried, *again}, words
    assert "new with commit 222222222222 of the model did not serve, so that this run went back" in words
    assert "every host is on old with commit 111111111111 of the model again, and it is proven" in words


def test_with_a_host_gone_nobody_goes_back(book: pathlib.Path) -> None:
    gone = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    inventory(book, a=host(FORMER["a"]), b={**host(FORMER["b"]), **gone})
    status, words, log = run(book, "runtime", [])
    assert status != 0
    assert "b cannot be reached, so that the hosts cannot go back together. They are all on new" in words
    assert log == ["runtime a"], words


def test_a_run_that_switched_not_every_host_stops_at_the_failure(book: pathlib.Path) -> None:
    inventory(book, a=host(FORMER["a"]), b=host({"id": "new-bbb", "release": "new"}))
    status, words, log = run(book, "runtime", ["b"])
    assert status == 2
    assert not [line for line in log if "activate" in line], words


def test_where_nothing_was_restarted_yet_only_current_goes_back(book: pathlib.Path) -> None:
    """Such as --tags sglang_runtime,pd_verify: what runs has the release and the commit from before."""
    inventory(book, served=False, **{name: host(former, revision=8 * "11") for name, former in FORMER.items()})
    status, words, log = run(book, "verify", ["b"])
    assert status == 2
    assert sorted(set(log)) == ["activate old-aaa", "activate old-bbb", "verify a", "verify b"], words
    assert "new did not serve, so that this run went back: every host is on old again" in words
    assert "what runs there was not touched" in words
