"""A deployment that fails in any phase, on one host of three, holds none of them afterwards, and says what failed.

The playbooks and task files are the real ones; roles and modules are stubs, and a lock is a file per host.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOSTS = ("a", "b", "c")
LONG = pytest.mark.skipif(not os.environ.get("PDSTACK_LONG"), reason="the policy test sees the same; PDSTACK_LONG=1")
ROLES = ("gpu_host", "cuda_toolkit", "sglang_runtime", "checkpoint", "firewall", "pd_service", "pd_verify", "nixl_ucx")
# An action plugin for every module that would look at a host or change it.
ACTION = """
import os
from ansible.plugins.action import ActionBase
NAME = {name!r}
LOCKS = {locks!r}

class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        host = task_vars["inventory_hostname"]
        if NAME == "pd_lock":
            path = os.path.join(LOCKS, host)
            if self._task.args["state"] == "held":
                open(path, "w").close()
                return {{"held": True}}
            if os.path.exists(path):
                os.unlink(path)
            return {{"held": False}}
        if task_vars.get("breaks") == NAME and host == task_vars["on"]:
            return {{"failed": True, "msg": NAME + " broke"}}
        if NAME == "pd_release":
            return {{"current": {{}}, "previous": {{}}}}
        return {{"facts": {{"system": {{"os_id": "debian"}}}}, "intent": {{}}}}
"""
ROLE = """
- name: Do the work of {role}
  ansible.builtin.fail: {{msg: {role} broke}}
  when: breaks == "{role}" and inventory_hostname == on
- name: Lose the host
  ansible.builtin.ping:
  vars: {{ansible_connection: ssh, ansible_host: 127.0.0.1, ansible_port: 1}}
  when: breaks == "unreachable {role}" and inventory_hostname == on
"""
PLAN = {"profile": "gpu", "release": "r", "topology": {"mode": "aggregated"}, "instances": [], "routers": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("given-back")
    for name in ("locks", "actions", "library"):
        (made / name).mkdir()
    for name in ("pd_lock", "pd_validate", "pd_gpu_info", "pd_host_info", "pd_release", "pd_units", "pd_files"):
        (made / f"actions/{name}.py").write_text(ACTION.format(name=name, locks=str(made / "locks")))
    for role in ROLES:
        (made / f"roles/{role}/tasks").mkdir(parents=True)
        for entry in ("main", "driver"):
            (made / f"roles/{role}/tasks/{entry}.yml").write_text(ROLE.format(role=role))
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    variables = {**local, "pd_model": {"repo": "a/b", "revision": "1"}, "gpu_host_reboot_required": ""}
    groups = {"gpu_hosts": {"hosts": dict.fromkeys(HOSTS[:2])}, "router_hosts": {"hosts": {"c": None}}}
    (made / "hosts.json").write_text(json.dumps({**groups, "all": {"vars": variables}}))
    return made


def deploy(folder: pathlib.Path, breaks: str, on: str, playbook: str = "deploy_pd.yml", **known: object) -> str:
    """Run a deployment that fails; return what it said, in one line."""
    env = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_ACTION_PLUGINS": str(folder / "actions"),
        "ANSIBLE_ROLES_PATH": str(folder / "roles"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_SSH_RETRIES": "0",
    }
    program = pathlib.Path(sys.executable).parent / "ansible-playbook"
    command = [program, "-i", folder / "hosts.json", ROOT / "playbooks" / playbook]
    extra = json.dumps({"breaks": breaks, "on": on, **known})
    done = subprocess.run([*command, "-e", extra], env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0, done.stdout
    return " ".join(done.stdout.split())


def held(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in (folder / "locks").iterdir())


def test_without_facts(folder: pathlib.Path) -> None:
    words = deploy(folder, "pd_gpu_info", "b")
    assert held(folder) == [], words
    said = "[b]: FAILED! => changed: false msg: 'facts_again | Probe GPUs, topology and fabric: pd_gpu_info broke'"
    assert words.rpartition("fatal: ")[2].startswith(said), words


def test_a_refusal_for_all_hosts_is_said_once(folder: pathlib.Path) -> None:
    words = deploy(folder, "", "", "rollback.yml")
    assert held(folder) == [], words
    said = "Refuse hosts that have no release in common to go back to: There is no way back"
    assert said in words.rpartition("fatal: ")[2], words
    assert words.count("fatal: ") == 2


@pytest.mark.parametrize(
    ("breaks", "on"),
    [
        pytest.param("gpu_host", "a", marks=LONG),
        pytest.param("cuda_toolkit", "b", marks=LONG),
        pytest.param("sglang_runtime", "b", marks=LONG),
        pytest.param("checkpoint", "b", marks=LONG),
        pytest.param("firewall", "c", marks=LONG),
        pytest.param("pd_service", "b", marks=LONG),
        pytest.param("pd_verify", "c", marks=LONG),
    ],
)
def test_in_a_phase(folder: pathlib.Path, breaks: str, on: str) -> None:
    words = deploy(folder, breaks, on, pd_planned={"plan": PLAN, "report": "the plan"})
    assert held(folder) == [], words
    assert words.rpartition("fatal: ")[2].startswith(f"[{on}]: FAILED!"), words
    assert f"msg: 'Do the work of {breaks}: {breaks} broke'" in words.rpartition("fatal: ")[2]
    assert words.count(f"msg: {breaks} broke") == 1


def test_a_host_that_is_gone_keeps_its_lock_and_is_named(folder: pathlib.Path) -> None:
    words = deploy(folder, "unreachable gpu_host", "b", pd_planned={"plan": PLAN, "report": "the plan"})
    assert held(folder) == ["b"], words
    assert "b cannot be reached, so that nothing more was done on any host" in words.rpartition("fatal: ")[2]
    (folder / "locks/b").unlink()


def test_a_retirement_that_fails(folder: pathlib.Path) -> None:
    words = deploy(folder, "nixl_ucx", "b", "retire.yml", pd_retire=folder.name, checkpoint_root=str(folder / "models"))
    assert held(folder) == [], words
    assert "[b]: FAILED! => changed: false msg: 'Do the work of nixl_ucx: nixl_ucx broke'" in words
