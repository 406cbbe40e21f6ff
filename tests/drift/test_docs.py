"""The commands of docs/operations.md that a lab host can show are run, as they stand there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scenario
from unit.test_operations_docs import PLAYBOOKS, commands

# On the host: left out, with the reason.
NO_GPU = {
    "cat /run/pdstack/decode-0/kernels-*.json": "the kernels run on GPUs alone",
    "journalctl -u pd-decode@0 | grep pdstack-kernels": "the kernels run on GPUs alone",
    "curl -s http://ADDRESS:PORT/metrics | grep pdstack_kernel_live": "the kernels run on GPUs alone",
}
NOT_HERE = {
    **NO_GPU,
    "systemctl stop pd.target": "stops what the other tests look at; test_walk does it",
    "rm /etc/pdstack/credentials/admin_key": "test_repair breaks and repairs it, and test_walk does it",
    "systemctl stop pd-canary.timer": "says nothing; test_repair stops and repairs it",
}
# On the controller: what only looks, and is for any inventory.
LOOKS = ("validate.yml", "preflight.yml", "verify.yml", "drift.yml", "support_bundle.yml", "probe.yml")


@pytest.mark.parametrize("command", [command for command in commands("#") if command not in NOT_HERE])
def test_a_command_on_the_host_says_something(host: Any, command: str) -> None:
    command = command.replace("journalctl -fu", "journalctl -n 20 --no-pager -u")
    done = host.run(f"export SYSTEMD_PAGER=cat; {command}")
    # 3: a unit that is shown does not run, as the canary's service between two looks
    assert done.rc in ((0, 3) if command.startswith("systemctl status") else (0,)), done
    assert done.stdout.strip()


@pytest.mark.parametrize("command", [line for line in PLAYBOOKS if any(name in line for name in LOOKS)])
def test_a_command_that_looks_ends_well(host: Any, tmp_path: Path, command: str) -> None:
    line = command.replace("-i inventory/mine", "").replace("reports/", f"{tmp_path}/")
    if "support_bundle" in line and "pd_bundle" not in line:
        line += f" -e pd_bundle={tmp_path}/default.tar.gz"
    line = line.replace("ansible-playbook", f"{Path(sys.executable).parent}/ansible-playbook -i {scenario.inventory()}")
    if "validate.yml" not in line and "preflight.yml" not in line:
        pytest.skip("other tests of this scenario run this playbook, and test_walk this line")
    done = subprocess.run(line, shell=True, cwd=scenario.ROOT, env=scenario.env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
