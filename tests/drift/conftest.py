"""The deployed host of the scenario `drift`, the playbooks run against it, and what its units run."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest
import scenario

UNITS = ("pd-prefill@0.service", "pd-decode@0.service", "pd-router.service")


@dataclass
class Deployment:
    host: Any

    def look(self) -> tuple[int, dict[str, Any]]:
        """Run drift.yml; return its exit code and its report."""
        done = scenario.playbook("drift.yml", "-e", "pd_drift_report=-", ANSIBLE_STDOUT_CALLBACK="pd_quiet")
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout)

    def converge(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = scenario.playbook("deploy_pd.yml", *words)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        return done

    def processes(self) -> dict[str, str]:
        """Return the main process of each unit, told apart by its start too."""
        show = "systemctl show --value -p MainPID -p ExecMainStartTimestampMonotonic %s"
        return {unit: self.host.check_output(show, unit) for unit in UNITS}

    def run(self, command: str) -> str:
        return self.host.check_output(command)


@pytest.fixture(scope="module")
def deployment(host: Any) -> Deployment:
    return Deployment(host)
