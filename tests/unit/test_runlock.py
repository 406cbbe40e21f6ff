"""The lock of a deployment, on real files; owners that live and die are real processes."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pdstack import runlock

ALICE = runlock.Owner("alice@ctl1", "kernel-1 pid:[1]", 100, 5000, "inventory mine")
BOB = runlock.Owner("bob@ctl2", "kernel-2 pid:[1]", 100, 5000, "inventory mine")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run/deploy.lock")


def test_the_second_is_told_who_was_first(path: str) -> None:
    assert runlock.take(path, ALICE, 1000.0).held
    second = runlock.take(path, BOB, 1720.0)
    assert (second.held, second.holder) == (False, replace(ALICE, since=1000.0))
    words = runlock.refusal("gpu1", second, None)
    for part in ("gpu1", "alice@ctl1", "process 100", "1970-01-01 00:16:40 UTC", "12 min", "cannot be seen"):
        assert part in words
    assert "runs on this controller" in runlock.refusal("gpu1", second, True)


def test_the_holder_takes_it_again_and_gives_it_back(path: str) -> None:
    assert runlock.take(path, ALICE, 1.0).held
    assert runlock.take(path, ALICE, 2.0).held
    assert not runlock.release(path, BOB)
    assert runlock.release(path, ALICE)
    assert not runlock.release(path, ALICE)
    assert runlock.take(path, BOB, 3.0) == runlock.Outcome(True, None, 3.0)


def test_another_process_with_the_same_number_is_another_run(path: str) -> None:
    runlock.take(path, ALICE, 1.0)
    assert not runlock.take(path, replace(ALICE, started=9999), 2.0).held


def test_a_lock_is_taken_over_from_the_holder_that_was_named_and_no_other(path: str) -> None:
    runlock.take(path, ALICE, 1.0)
    carol = replace(BOB, pid=7)
    assert not runlock.take(path, carol, 2.0, instead_of=BOB).held
    assert runlock.take(path, carol, 2.0, instead_of=ALICE) == runlock.Outcome(True, replace(ALICE, since=1.0), 2.0)
    assert not runlock.take(path, BOB, 3.0, instead_of=ALICE).held


def test_a_lock_that_was_cut_short_holds_nobody(path: str) -> None:
    runlock.take(path, ALICE, 1.0)
    Path(path).write_text('{"who": "al')
    assert runlock.take(path, BOB, 2.0).held


def _take(path: str, number: int, results: multiprocessing.Queue[int]) -> None:
    if runlock.take(path, replace(ALICE, pid=number), 1.0).held:
        results.put(number)


def test_one_of_many_at_once_gets_it(path: str) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    runs = [context.Process(target=_take, args=(path, number, results)) for number in range(1, 9)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert json.loads(Path(path).read_text())["pid"] == results.get(timeout=5)
    assert results.empty()


def test_the_death_of_an_owner_is_seen_on_its_own_machine_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        owner = runlock.myself(process.pid, "alice@here", "x")
        assert runlock.lives(owner, owner) is True
        assert runlock.lives(replace(owner, started=owner.started + 1), owner) is False
        assert runlock.lives(replace(owner, place="elsewhere"), owner) is None
        process.kill()
    assert runlock.lives(owner, replace(owner, pid=1)) is False


ASK = """
- hosts: all
  gather_facts: false
  tasks:
    - pd_lock: {state: asked, path: "{{ lock }}"}
      register: asked
    - pd_host_info: {lock: "{{ lock }}"}
      register: looked
    - pd_lock: {state: asked, path: /nowhere, seen: "{{ looked.lock }}"}
      register: seen
    - ansible.builtin.assert:
        that: (asked | combine(dict(now=0))) == (seen | combine(dict(now=0)))
    - ansible.builtin.copy: {content: "{{ asked | to_json }}", dest: "{{ lock }}.answer"}
"""


def test_a_look_is_told_of_holders_that_live_and_of_those_that_nobody_here_can_see(
    tmp_path: Path, project_root: Path
) -> None:
    dead = subprocess.Popen(["sleep", "60"])
    with subprocess.Popen(["sleep", "60"]) as alive:
        owners = {
            "alive": runlock.myself(alive.pid, "alice@here", "inventory mine"),
            "dead": runlock.myself(dead.pid, "bob@here", "inventory mine"),
            "elsewhere": BOB,
        }
        dead.kill()
        dead.wait()
        for name, owner in owners.items():
            runlock.take(str(tmp_path / name), owner, 1000.0)
        local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        hosts = {name: {**local, "lock": str(tmp_path / name)} for name in [*owners, "nobody"]}
        (tmp_path / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
        (tmp_path / "play.yml").write_text(ASK)
        command = [Path(sys.executable).parent / "ansible-playbook", "-i", tmp_path / "hosts.json"]
        done = subprocess.run(
            [*command, tmp_path / "play.yml"], cwd=project_root, capture_output=True, text=True, check=False
        )
        alive.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    answers = {name: json.loads((tmp_path / f"{name}.answer").read_text()) for name in hosts}
    assert {name: answer.get("alive", "nobody") for name, answer in answers.items()} == {
        "alive": True,
        "dead": "nobody",
        "elsewhere": None,
        "nobody": "nobody",
    }
    assert [answers[name]["holder"] for name in ("dead", "nobody")] == [None, None]
    assert f"alive is held by alice@here, process {alive.pid} (inventory mine), since" in answers["alive"]["told"]
    assert "whether it still runs cannot be seen" in answers["elsewhere"]["told"]
    assert runlock.read(str(tmp_path / "dead")) == replace(owners["dead"], since=1000.0), "asking takes nothing over"


ORPHAN = """
import importlib.util, multiprocessing, os, signal, sys, time
spec = importlib.util.spec_from_file_location("pd_lock_action", sys.argv[1])
plugin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)
def work():
    end = time.monotonic() + 10
    while os.getppid() == parent and time.monotonic() < end:
        time.sleep(0.01)
    print(os.getppid() != parent, plugin.run_pid(), flush=True)
parent = os.getpid()
print(parent, flush=True)
multiprocessing.get_context("fork").Process(target=work).start()
os.kill(parent, signal.SIGKILL)
"""


def test_a_worker_whose_run_was_killed_does_not_take_the_lock_for_process_1(project_root: Path) -> None:
    command = [sys.executable, "-c", ORPHAN, str(project_root / "action_plugins/pd_lock.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    parent, answer = done.stdout.splitlines()
    assert answer == f"True {parent}"
