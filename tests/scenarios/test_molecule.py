"""Molecule's scenarios as tests, so that one runner counts everything: lab hosts boot, playbooks run, machines answer.

`make test PYTEST_ARGS="-k default"` runs one of them; a scenario's own output is shown as it comes.
"""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCENARIOS = sorted(path.parent.name for path in ROOT.glob("molecule/*/molecule.yml"))
# Scenario -> the variable that asks for it: the machine has what it needs, or the time does not matter.
NEEDS = {"gpu": "PDSTACK_GPU", "drift": "PDSTACK_LONG"}


def test_there_are_scenarios():
    assert "default" in SCENARIOS


@pytest.mark.molecule
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario, capfd):
    if scenario in NEEDS and not os.environ.get(NEEDS[scenario]):
        pytest.skip(f"{NEEDS[scenario]} is not set: it needs a machine, or more time, of its own")
    binaries = pathlib.Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"}
    command = [binaries / "molecule", "test", "--scenario-name", scenario]
    with capfd.disabled():
        done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"molecule test --scenario-name {scenario}: exit status {done.returncode}"
