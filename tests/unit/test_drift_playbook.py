"""playbooks/drift.yml on its way to a host: no further without check mode, and an unreachable host is exit 1."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ansible.utils.vars import load_options_vars

NOWHERE = {"gpu_hosts": {"hosts": {"gpu1": None}}, "router_hosts": {"hosts": {"gpu1": None}}}


@pytest.fixture
def inventory(tmp_path: Path, project_root: Path) -> Path:
    folder = tmp_path / "inventory"
    folder.mkdir()
    host = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_user": "nobody"}
    (folder / "hosts.json").write_text(json.dumps({**NOWHERE, "all": {"vars": host}}))
    (folder / "group_vars").symlink_to(project_root / "inventory/lab/group_vars")
    return folder


def drift(root: Path, inventory: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "ansible-playbook", "-i", inventory, "playbooks/drift.yml", *words]
    env = {**os.environ, "ANSIBLE_SSH_RETRIES": "0", **environment}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_an_unreachable_host_is_an_error_and_named(project_root: Path, inventory: Path) -> None:
    done = drift(project_root, inventory, "-e", "pd_drift_report=-", ANSIBLE_STDOUT_CALLBACK="pd_quiet")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["result"], report["items"]) == ("error", [])
    assert [(failure["host"], failure["message"][:11]) for failure in report["failures"]] == [("gpu1", "unreachable")]


def test_without_its_callback_it_goes_no_further(project_root: Path, inventory: Path, tmp_path: Path) -> None:
    """Check mode comes from the callback; without it the roles behind this play would change the hosts."""
    done = drift(project_root, inventory, ANSIBLE_CALLBACK_PLUGINS=str(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "did not get into check mode, so nothing was done" in done.stdout + done.stderr
    assert "unreachable=0" in done.stdout


@pytest.fixture
def callback(project_root: Path) -> Any:
    """The callback in a run of drift.yml that has looked at nothing yet."""
    spec = importlib.util.spec_from_file_location("pd_drift_callback", project_root / "callback_plugins/pd_drift.py")
    assert spec
    assert spec.loader
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    made = plugin.CallbackModule()
    made.report = plugin.drift.Report()
    return made


def result(host: str, answer: dict[str, Any], action: str = "pd_files", loop: list[str] | None = None) -> Any:
    task = SimpleNamespace(loop=loop, action=action)
    return SimpleNamespace(host=SimpleNamespace(name=host), task=task, task_name="Keep it", result=answer)


@pytest.mark.parametrize(("loop", "found"), [(None, ["differs"]), (["a", "b"], ["differs"])])
def test_results_of_a_module_are_not_those_of_a_loop(callback: Any, loop: list[str] | None, found: list[str]) -> None:
    """A module may return what it calls `results`: taken for a loop's, an empty list would hide its change."""
    answer = {"changed": True, "results": []} if loop is None else {"results": [{"changed": True}, {"changed": False}]}
    callback.v2_runner_on_ok(result("gpu1", answer, "pd_nixl_check", loop))
    assert [item.found for item in callback.report.items] == found


def test_a_module_that_could_not_begin_says_why(callback: Any) -> None:
    words = "Traceback (most recent call last):\nFileNotFoundError: No usable temporary directory found in ['/tmp']\n"
    answer = {"msg": "Module result deserialization failed", "module_stderr": words}
    callback.v2_runner_on_failed(result("gpu1", answer))
    (failure,) = callback.report.failures
    assert failure.message == (
        "Module result deserialization failed: FileNotFoundError: No usable temporary directory found in ['/tmp']"
    )


def test_what_ends_a_phase_is_no_second_failure(callback: Any) -> None:
    failed = result("gpu1", {"msg": "it broke"})
    callback.v2_runner_on_failed(failed)
    failed.task_name = "failed | End with what failed"
    callback.v2_runner_on_failed(failed)
    assert [failure.message for failure in callback.report.failures] == ["it broke"]


SAME = {"changed": False, "declared": ["/etc/x"], "paths": {}}
EDITED = {"changed": True, "declared": ["/etc/x"], "paths": {"/etc/x": "update"}, "diff": []}


@pytest.mark.parametrize(
    ("answers", "unreachable", "code", "word"),
    [
        ({"a": SAME, "b": SAME}, [], 0, "none"),
        ({"a": SAME, "b": EDITED}, [], 2, "drift"),
        ({"a": EDITED}, ["b"], 1, "error"),
        ({}, [], 1, "error"),
    ],
    ids=["intact", "one host drifted", "one drifted and one does not answer", "nobody was looked at"],
)
@pytest.mark.parametrize("target", ["-", "file", ""])
def test_cron_gets_a_code_and_json(  # type: ignore[no-untyped-def]
    callback, capsys, tmp_path, answers, unreachable, code, word, target
) -> None:
    """0 none, 2 drift, 1 where a question got no answer: a host that does not answer may have drifted, too."""
    report = tmp_path / "reports" / "drift.json"
    callback.target = str(report) if target == "file" else target
    for host, answer in answers.items():
        callback.v2_runner_on_ok(result(host, answer))
    for host in unreachable:
        callback.v2_runner_on_unreachable(result(host, {"msg": "Connection timed out"}))
    with pytest.raises(SystemExit) as ended:
        callback.v2_playbook_on_stats(None)
    assert ended.value.code == code
    output = capsys.readouterr().out
    if target == "":
        assert [host for host in unreachable if f"ERROR {host}, Keep it: unreachable" not in output] == []
        assert not report.exists()
        return
    document = json.loads(output if target == "-" else report.read_text())
    assert (document["exit_code"], document["result"], document["hosts"]) == (code, word, [*answers])
    assert [item["host"] for item in document["items"]] == [host for host in answers if answers[host] is EDITED]
    assert [failure["host"] for failure in document["failures"]][: len(unreachable)] == unreachable


def test_a_report_that_cannot_be_written_is_an_error(callback: Any, tmp_path: Path) -> None:
    """Whoever reads the file next would read an old one."""
    (tmp_path / "file").touch()
    callback.target = str(tmp_path / "file" / "drift.json")
    callback.v2_runner_on_ok(result("a", SAME))
    with pytest.raises(SystemExit) as ended:
        callback.v2_playbook_on_stats(None)
    assert ended.value.code == 1


HELD = {"holder": {"who": "a@b", "pid": 1, "what": "x", "since": 1.0}, "told": "gpu1 is held by a@b"}


def test_while_a_deployment_runs_nothing_is_judged_and_its_refusal_is_no_error(callback: Any, capsys: Any) -> None:
    callback.target = "-"
    callback.v2_runner_on_ok(result("gpu2", EDITED))
    callback.v2_runner_on_ok(result("gpu1", {**HELD, "alive": True}, "pd_lock"))
    callback.v2_runner_on_failed(result("gpu1", {"msg": HELD["told"]}, "ansible.builtin.fail"))
    with pytest.raises(SystemExit) as ended:
        callback.v2_playbook_on_stats(None)
    assert ended.value.code == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["items"], document["failures"], document["deploying"][0]["host"]) == ([], [], "gpu1")


def test_a_host_that_nobody_holds_is_compared(callback: Any) -> None:
    callback.v2_runner_on_ok(result("gpu1", {"held": False, "holder": None, "now": 1.0}, "pd_lock"))
    callback.v2_runner_on_ok(result("gpu1", EDITED))
    assert (callback.report.exit_code, callback.report.deploying) == (2, [])


def test_a_look_takes_no_lock(project_root: Path) -> None:
    """A locked host can be looked at, and a look stands in no deployment's way."""
    plays = yaml.safe_load((project_root / "playbooks/drift.yml").read_text())
    imported = [name for play in plays for key, name in play.items() if key.endswith("import_playbook")]
    assert "host.yml" in imported
    texts = [(project_root / "playbooks" / name).read_text() for name in imported]
    assert [text for text in texts if "pd_lock" in text or "lock.yml" in text] == []
    asked = [task["pd_lock"] for play in plays for task in play.get("tasks", []) if "pd_lock" in task]
    assert [one["state"] for one in asked] == ["asked"] * 2, "at the beginning and at the end"


@pytest.mark.parametrize(("answers", "asks"), [([SAME], False), ([EDITED], True), ([], True)])
def test_who_holds_the_hosts_is_asked_again_where_something_differs(
    callback: Any, project_root: Path, answers: list[dict[str, Any]], asks: bool
) -> None:
    """A deployment that began meanwhile could explain it, and a question that got no answer, too."""
    if not answers:
        callback.v2_runner_on_unreachable(result("gpu1", {"msg": "Connection timed out"}))
    for answer in answers:
        callback.v2_runner_on_ok(result("gpu1", answer))
    manager = SimpleNamespace(extra_vars={})
    callback.v2_playbook_on_play_start(SimpleNamespace(get_variable_manager=lambda: manager))
    assert load_options_vars(None)["__drift_differs"] is asks
    leave, ask = yaml.safe_load((project_root / "playbooks/drift.yml").read_text())[-1]["tasks"]
    assert (leave["ansible.builtin.meta"], leave["when"]) == ("end_play", "not __drift_differs")
    assert ask["pd_lock"] == {"state": "asked"}
