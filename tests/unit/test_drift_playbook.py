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


def looking(root: Path) -> Any:
    """The callback in the middle of a look."""
    spec = importlib.util.spec_from_file_location("pd_drift_callback", root / "callback_plugins/pd_drift.py")
    assert spec
    assert spec.loader
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    callback = plugin.CallbackModule()
    callback.report = plugin.drift.Report()
    return callback


def test_a_module_that_could_not_begin_says_why(project_root: Path) -> None:
    callback = looking(project_root)
    words = "Traceback (most recent call last):\nFileNotFoundError: No usable temporary directory found in ['/tmp']\n"
    answer = {"msg": "Module result deserialization failed", "module_stderr": words}
    host = SimpleNamespace(name="gpu1")
    callback.v2_runner_on_failed(SimpleNamespace(host=host, task_name="Look", result=answer))
    (failure,) = callback.report.failures
    assert failure.message == (
        "Module result deserialization failed: FileNotFoundError: No usable temporary directory found in ['/tmp']"
    )


@pytest.mark.parametrize(("loop", "found"), [(None, ["differs"]), (["a", "b"], ["differs"])])
def test_results_of_a_module_are_not_those_of_a_loop(
    project_root: Path, loop: list[str] | None, found: list[str]
) -> None:
    """A module may return what it calls `results`: taken for a loop's, an empty list would hide its change."""
    callback = looking(project_root)
    answer = {"changed": True, "results": []} if loop is None else {"results": [{"changed": True}, {"changed": False}]}
    task = SimpleNamespace(loop=loop, action="pd_nixl_check")
    callback.v2_runner_on_ok(
        SimpleNamespace(host=SimpleNamespace(name="gpu1"), task=task, task_name="Prove that NIXL", result=answer)
    )
    assert [item.found for item in callback.report.items] == found
