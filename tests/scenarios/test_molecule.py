"""Molecule's scenarios as tests, so that one runner counts everything: lab hosts boot, playbooks run, machines answer.

`make test PYTEST_ARGS="-k default"` runs one of them; a scenario's own output is shown as it comes.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCENARIOS = sorted(path.parent.name for path in ROOT.glob("molecule/*/molecule.yml"))
# Scenario -> the variable that asks for it: the machine has what it needs, or the time does not matter.
NEEDS = {"gpu": "PDSTACK_GPU", "drift": "PDSTACK_LONG", "measure": "PDSTACK_LONG"}
FAILURE = re.compile(r"fatal: \[|FAILED!|^\W*E  +\S|ERROR")
SHOWN = 40


def test_there_are_scenarios():
    assert "default" in SCENARIOS


def what_failed(output):
    """The lines of a scenario's output around its last failure, else its end; colours removed.

    Molecule takes the host away after a failure, so that the end of the output rarely tells; earlier failures may be
    those that the scenario expects.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in output]
    last = max((at for at, line in enumerate(lines) if FAILURE.search(line)), default=len(lines))
    return "\n".join(lines[max(last - SHOWN // 2, 0) :][:SHOWN])


def test_a_failure_is_found_before_the_destroy_that_follows_it():
    output = [f"line {n}\n" for n in range(100)]
    output[30] = "\x1b[31m  fatal: [lab1]: FAILED! => no space\x1b[0m\n"
    told = what_failed(output).splitlines()
    assert told[SHOWN // 2] == "  fatal: [lab1]: FAILED! => no space"
    assert len(told) == SHOWN
    assert what_failed(["a\n", "b\n"]) == "a\nb"


@pytest.mark.molecule
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario, capfd):
    if scenario in NEEDS and not os.environ.get(NEEDS[scenario]):
        pytest.skip(f"{NEEDS[scenario]} is not set: it needs a machine, or more time, of its own")
    binaries = pathlib.Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"}
    command = [binaries / "molecule", "test", "--scenario-name", scenario]
    output = []
    with (
        capfd.disabled(),
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as run,
    ):
        for line in run.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            output.append(line)
    if run.returncode:
        pytest.fail(f"molecule test -s {scenario}: exit status {run.returncode}\n{what_failed(output)}", pytrace=False)
