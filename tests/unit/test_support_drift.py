"""The support bundle's look for drift: it gets what the run around it was given, and no secret is in its words."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

SECRET = "Qz7-vX9_kLm"
OUTER = """
- hosts: gpu_hosts
  gather_facts: false
  tasks:
    - pd_support_drift:
        playbook: "{{ playbook_dir }}/inner.yml"
      register: look
    - debug:
        msg: "{{ {'rc': look.rc, 'out': look.stdout, 'err': look.stderr} | to_json }}"
"""
# Stands for drift.yml: it says what it got, and what of it everybody on the controller could read.
INNER = """
- hosts: gpu1
  gather_facts: false
  connection: local
  tasks:
    - command: cat /proc/{{ lookup('ansible.builtin.pipe', 'echo $PPID') }}/cmdline
      register: words
    - copy:
        content: "{{ {'key': pd_security.api_key, 'report': pd_drift_report, 'more': more, 'from': from_inventory,
                  'words': words.stdout.split('\\0')} | to_json }}"
        dest: "{{ playbook_dir }}/got.json"
    - fail:
        msg: over
"""


def test_it_runs_as_the_run_around_it(project_root: Path, tmp_path: Path) -> None:
    (tmp_path / "outer.yml").write_text(OUTER)
    (tmp_path / "inner.yml").write_text(INNER)
    hosts = {"gpu_hosts": {"hosts": {"gpu1": {"from_inventory": "yes", "ansible_python_interpreter": sys.executable}}}}
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    command = [Path(sys.executable).parent / "ansible-playbook", "-i", tmp_path / "hosts.json", tmp_path / "outer.yml"]
    command += ["-e", json.dumps({"pd_security": {"api_key": SECRET}}), "-e", "more='{{ 1 + 1 }}'"]
    env = {**os.environ, "ANSIBLE_CONFIG": str(project_root / "ansible.cfg"), "ANSIBLE_LOCALHOST_WARNING": "0"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"rc\W+2\b", done.stdout), "the inner run's own exit code"
    got = json.loads((tmp_path / "got.json").read_text())
    assert (got["key"], got["report"], got["from"]) == (SECRET, "-", "yes")
    assert str(got["more"]) == "2"
    assert any(word.endswith("inner.yml") for word in got["words"]), "these are the words of the inner run"
    assert SECRET not in json.dumps(got["words"])
    (variables,) = [word.partition("@")[2] for word in got["words"] if word.startswith("--extra-vars=@")]
    assert variables.startswith("/dev/shm/"), "on no disk, whatever kills the run"
    assert not Path(variables).exists()


def test_what_the_command_line_said_is_said_again(project_root: Path) -> None:
    path = project_root / "action_plugins/pd_support_drift.py"
    spec = importlib.util.spec_from_file_location("pd_support_drift_action", path)
    assert spec
    assert spec.loader
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    said = {
        "inventory": ("/a", "/b"),
        "become": True,
        "remote_user": "bob",
        "vault_ids": (),
        "timeout": None,
        "tags": "x",
    }
    assert plugin.options(said) == ["--become", "--inventory=/a", "--inventory=/b", "--user=bob"]
