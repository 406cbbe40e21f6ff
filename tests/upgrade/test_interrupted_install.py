"""An installation that is killed beside a service that runs. First of the scenario: the former release still serves."""

import json
import os
import subprocess
import sys

import scenario

KILLS, SPAN = (20, 70) if os.environ.get("PDSTACK_LONG") else (3, 12)


def test_a_killed_installation_never_shows():
    """Three kills here, twenty with PDSTACK_LONG=1; the upgrade that follows finishes the installation."""
    command = [sys.executable, scenario.ROOT / "tests/scenarios/interrupted_install.py", "--leave"]
    command += ["--inventory", scenario.inventory(), "--host", "upgrade1"]
    command += ["--release", "cpu-0.5.23", "--kills", str(KILLS), "--span", str(SPAN)]
    done = subprocess.run(command, env=scenario.env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["kills"] == KILLS, done.stderr
    assert "in the middle" in answer["reached"], f"no kill met the installation: {done.stderr}"
    assert answer["requests"] > KILLS
