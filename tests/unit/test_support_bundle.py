"""playbooks/support_bundle.yml where something is broken: a host that is gone, a disk that is full."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from pdstack import support

HOST = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_user": "nobody"}
# The action alone, with a limit on the size of a file in place of a disk that is full: the same error of the same call.
PACK = """
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - pd_support_bundle:
        folder: "{{ folder }}"
        dest: "{{ folder }}/../b.tar.gz"
"""
FULL = (
    "import os, resource, sys\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (2**18,) * 2)\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def play(root: Path, cwd: Path, *words: str | Path, first: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ANSIBLE_CONFIG": str(root / "ansible.cfg"), "ANSIBLE_SSH_RETRIES": "0"}
    command = [*first, Path(sys.executable).parent / "ansible-playbook", *words]
    return subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_host_that_is_gone_is_named_and_the_rest_is_told(project_root: Path, tmp_path: Path) -> None:
    groups = {name: {"hosts": {"gpu1": None}} for name in ("gpu_hosts", "router_hosts")}
    (tmp_path / "inventory").mkdir()
    (tmp_path / "inventory/hosts.json").write_text(json.dumps({**groups, "all": {"vars": HOST}}))
    (tmp_path / "inventory/group_vars").symlink_to(project_root / "inventory/lab/group_vars")
    book = project_root / "playbooks/support_bundle.yml"
    done = play(project_root, project_root, "-i", tmp_path / "inventory", book, "-e", f"pd_bundle={tmp_path}/b.tar.gz")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Not all of these hosts could be read. The bundle has the rest." in done.stdout
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    (failed,) = json.loads((tmp_path / "b/controller/hosts.json").read_text())["gpu1"].items()
    assert failed[0] == "connection"
    assert "port 1: Connection refused" in failed[1]
    assert json.loads((tmp_path / "b/controller/drift.json").read_text())["result"] == "error"
    assert json.loads((tmp_path / "b/controller/inventory.json").read_text())["gpu1"]["pd_profile"] == "cpu"


def test_a_full_disk_is_said_and_nothing_is_left(project_root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "b.tar.gz.d"
    folder.mkdir()
    (folder / "journal.txt").write_bytes(os.urandom(2**20))  # gzip makes nothing smaller of it
    (tmp_path / "pack.yml").write_text(PACK)
    words = ("-i", "localhost,", tmp_path / "pack.yml", "-e", f"folder={folder}")
    done = play(project_root, tmp_path, *words, first=(sys.executable, "-c", FULL))
    assert done.returncode == 2, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "The bundle was not written, and nothing is left of it. Found: File too large" in said
    assert "Do: name another place with -e pd_bundle=PATH.tar.gz" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pack.yml"]


SIGNS = {"plan": "facts", "probe": "facts", "documents": "count"}


@pytest.mark.parametrize(
    ("results", "found"),
    [
        ({"plan": {"facts": {}}, "probe": {"facts": {}}, "documents": {"count": 90}}, {}),
        ({"plan": {"unreachable": True, "msg": "timed out\n"}}, {"connection": "timed out"}),
        (
            {"plan": {"msg": "MODULE FAILURE", "module_stderr": "No space left"}, "probe": {"facts": {}}},
            {"plan": "MODULE FAILURE\nNo space left", "documents": "not tried"},
        ),
    ],
)
def test_what_failed_on_a_host_by_step(results: dict, found: dict) -> None:
    assert support.failures(results, SIGNS) == found


def test_every_step_that_may_fail_is_told_by_what_it_registers_and_returns(project_root: Path) -> None:
    """The playbook's side of it: a step that is renamed, added or left out must not go missing from hosts.json."""
    (play,) = yaml.safe_load((project_root / "playbooks/support_bundle.yml").read_text())
    quiet = {task["register"]: task for task in play["tasks"] if task.get("failed_when") is False}
    steps = play["vars"]["__bundle_steps"]
    assert [step["result"] for step in steps] == list(quiet)
    for step in steps:
        (module,) = [name for name in quiet[step["result"]] if (project_root / f"library/{name}.py").exists()]
        source = (project_root / f"library/{module}.py").read_text()
        returned = yaml.safe_load(source.partition('RETURN = r"""')[2].partition('"""')[0])
        assert returned[step["returns"]]["returned"] == "always", f"{module} does not always return {step['returns']}"


@pytest.mark.parametrize("look", [{}, {"msg": "failed"}, {"plan": {}}, {"plan": {"instances": 5}}, {"plan": [1]}])
def test_a_plan_that_cannot_be_read_leaves_the_rest_of_the_bundle(project_root: Path, look: dict) -> None:
    """The filter that the playbook takes the plan from, with what the look at a broken host may have given."""
    spec = importlib.util.spec_from_file_location("pdstack_filters", project_root / "filter_plugins/pdstack.py")
    assert spec
    assert spec.loader
    filters = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(filters)
    assert filters.plan_in_force(["a"], {"a": {"pd_host": look} if look else {}}) == {}
