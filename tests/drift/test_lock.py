"""Two operators at once: the second is told who was first; what a dead run left does not stand in the way."""

from __future__ import annotations

import getpass
import json
import re
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import scenario

LOCK = "/run/pdstack/deploy.lock"


@pytest.fixture(autouse=True)
def no_lock(deployment: Any) -> None:
    deployment.run(f"rm -f {LOCK}")


def held_by(deployment: Any, **changes: Any) -> dict[str, Any]:
    """Put a lock on the host, as a live process of this controller would have it, but for the changes."""
    program = (
        "import json, os, sys; sys.path.insert(0, 'module_utils'); from pdstack import codec, runlock;"
        f"print(json.dumps(codec.dump(runlock.myself({changes.pop('process')}, 'alice@ctl1', 'inventory x'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=scenario.ROOT, capture_output=True, text=True, check=True
    )
    document = {**json.loads(done.stdout), "since": time.time() - 720, **changes}
    deployment.run(f"mkdir -p /run/pdstack; cat > {LOCK} <<'END'\n{json.dumps(document)}\nEND")
    return document


def test_while_one_deploys_the_second_is_told(deployment: Any) -> None:
    first = subprocess.Popen(
        scenario.command("deploy_pd.yml"), cwd=scenario.ROOT, env=scenario.env(), stdout=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while deployment.host.run(f"test -e {LOCK}").rc and time.monotonic() < end:
        time.sleep(0.2)
    second = scenario.playbook("deploy_pd.yml")
    output, _ = first.communicate(timeout=300)
    assert first.returncode == 0, output
    assert second.returncode == 2
    words = " ".join(second.stdout.split())
    assert f"is held by {getpass.getuser()}@{socket.gethostname()}, process {first.pid}" in words
    assert "it runs on this controller" in words
    assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC, 0 min", words)
    assert scenario.changed(second) == 0
    assert deployment.host.run(f"test -e {LOCK}").rc == 1, "the first has given it back"


def test_a_look_during_a_deployment_says_so_instead_of_its_half_done_work(deployment: Any) -> None:
    """A real one, which has the unit to write again and both engines to restart."""
    drop_in = "/etc/systemd/system/pd-decode@0.service.d/by-hand.conf"
    deployment.run(f"printf '[Service]\\nEnvironment=BY_HAND=1\\n' > {drop_in}")
    assert deployment.look()[0] == 2
    run = subprocess.Popen(
        scenario.command("deploy_pd.yml"), cwd=scenario.ROOT, env=scenario.env(), stdout=subprocess.PIPE, text=True
    )
    codes = []
    while run.poll() is None:
        held = deployment.host.run(f"test -e {LOCK}").rc == 0
        code, report = deployment.look()
        if held and run.poll() is None:
            codes.append(code)
            assert (report["result"], report["items"], report["failures"]) == ("under way", [], [])
            (one,) = report["deploying"]
            assert (one["pid"], one["alive"]) == (run.pid, True)
            assert one["who"] == f"{getpass.getuser()}@{socket.gethostname()}"
    output, _ = run.communicate()
    assert run.returncode == 0, output
    assert len(codes) > 1
    assert set(codes) == {3}
    assert deployment.look()[0] == 0


def test_a_deployment_that_begins_during_a_look_is_seen_at_its_end(deployment: Any) -> None:
    """Where something differs; see tests/unit/test_drift_playbook.py for where nothing does."""
    mode = deployment.run("stat -c %a /etc/pdstack/plan.json")
    deployment.run("chmod 600 /etc/pdstack/plan.json")
    command = scenario.command("drift.yml", "-e", "pd_drift_report=-")
    with (
        subprocess.Popen(["sleep", "300"]) as alive,
        subprocess.Popen(command, cwd=scenario.ROOT, env=scenario.env(), stdout=subprocess.PIPE, text=True) as look,
    ):
        assert look.stdout
        said = ""
        for line in look.stdout:
            said += line
            if "Compare the release with its locks" in line:
                held_by(deployment, process=alive.pid)
        look.wait()
        alive.kill()
    deployment.run(f"chmod {mode} /etc/pdstack/plan.json")
    assert look.returncode == 3, said
    assert '"result": "under way"' in said


def test_a_look_needs_no_lock_and_rehearsing_neither(deployment: Any) -> None:
    with subprocess.Popen(["sleep", "300"]) as alive:
        held_by(deployment, process=alive.pid)
        try:
            code, report = deployment.look()
            assert (code, report["result"], report["deploying"][0]["who"]) == (3, "under way", "alice@ctl1")
            assert scenario.playbook("lock.yml", "--check").returncode == 0
            assert scenario.playbook("lock.yml").returncode == 2
        finally:
            alive.kill()
    # Its process is dead now, and this is its controller.
    code, report = deployment.look()
    assert (code, report["deploying"]) == (0, [])
    done = scenario.playbook("lock.yml")
    assert done.returncode == 0, done.stdout
    assert "alice@ctl1's run" in done.stdout


def test_whether_another_controllers_run_lives_is_for_its_operator_to_say(deployment: Any) -> None:
    held_by(deployment, process=1, place="another machine")
    code, report = deployment.look()
    assert (code, report["result"], report["deploying"][0]["alive"]) == (0, "none", None)
    mode = deployment.run("stat -c %a /etc/pdstack/plan.json")
    deployment.run("chmod 600 /etc/pdstack/plan.json")
    code, report = deployment.look()
    assert (code, [item["item"] for item in report["items"]]) == (3, ["/etc/pdstack/plan.json"])
    deployment.run(f"chmod {mode} /etc/pdstack/plan.json")
    done = scenario.playbook("lock.yml")
    words = " ".join(done.stdout.split())
    assert done.returncode == 2
    assert "is held by alice@ctl1, process 1 (inventory x)" in words
    assert "12 min; whether it still runs cannot be seen from this controller" in words
    assert scenario.playbook("lock.yml", "-e", "pd_lock_break=true").returncode == 0
