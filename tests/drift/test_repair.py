"""Each kind of drift is seen, a deployment repairs it, only what it touches restarts, and then nothing differs.

In CI the rows of breakages.py are broken together, those whose repair restarts nothing and the others, and each group's
first deployment is killed at a random moment. PDSTACK_LONG=1 breaks each row alone, and kills thirty deployments.
"""

from __future__ import annotations

import fnmatch
import os
import random
import signal
import subprocess
import time
from typing import Any

import pytest
import scenario
from drift import breakages
from drift.breakages import Breakage

LONG = bool(os.environ.get("PDSTACK_LONG"))
ROWS = [*breakages.QUIET, *breakages.ROUTER_AND_DECODE, *breakages.PAIR, *breakages.EVERYTHING]
TOGETHER = {
    "nothing restarts": breakages.QUIET,
    "everything restarts": [*breakages.ROUTER_AND_DECODE, *breakages.PAIR, *breakages.EVERYTHING],
}
GROUPS = {row.name: [row] for row in ROWS} if LONG else TOGETHER
SEED = int(os.environ.get("PDSTACK_SEED", "0")) or random.SystemRandom().randrange(10**6)


def test_an_intact_host_is_told_in_time(deployment: Any) -> None:
    begin = time.monotonic()
    code, report = deployment.look()
    seconds = time.monotonic() - begin
    assert (code, report["items"], report["failures"]) == (0, [], [])
    print(f"drift.yml on one intact host: {seconds:.1f} s")
    assert seconds < 10 * float(os.environ.get("PDSTACK_SLOW", "6")), "10 s on a machine that has nothing else to do"


def test_every_managed_item_is_broken_here(deployment: Any) -> None:
    (managed,) = deployment.look()[1]["managed"].values()
    assert len(managed) > 20
    covers = [row.covers for row in ROWS if row.covers]
    assert [name for name in managed if not any(fnmatch.fnmatch(name, pattern) for pattern in covers)] == []
    assert [pattern for pattern in covers if not any(fnmatch.fnmatch(name, pattern) for name in managed)] == []
    print(f"{len(managed)} managed items, {len(ROWS)} breakages: {', '.join(managed)}")


@pytest.mark.parametrize("rows", GROUPS.values(), ids=GROUPS)
def test_drift_is_seen_and_repaired_and_nothing_else_restarts(deployment: Any, rows: list[Breakage]) -> None:
    before = deployment.processes()
    deployment.run("\n".join(["set -e", *(row.command for row in rows)]))
    code, report = deployment.look()
    assert code == 2, report
    seen = "\n".join(f"{item['item']} {item['found']} {item['why']}" for item in report["items"])
    assert [(row.name, words) for row in rows for words in row.sees if words not in seen] == [], seen
    stopped = {unit for row in rows for unit in breakages.STOPPED.get(row.name, ())}
    now = deployment.processes()
    assert {unit for unit in before if now[unit] != before[unit]} == stopped, "a look touches nothing"
    if not LONG:
        interrupted(random.Random(SEED))
    deployment.converge()
    after = deployment.processes()
    restarted = {unit for unit in before if after[unit] != before[unit]}
    assert restarted == {unit for row in rows for unit in row.restarts}
    code, report = deployment.look()
    assert (code, report["items"]) == (0, []), "what was repaired differs still"


def test_a_run_that_repaired_is_followed_by_one_that_changes_nothing(deployment: Any) -> None:
    assert scenario.changed(deployment.converge()) == 0


def interrupted(chance: random.Random) -> None:
    """Start a deployment and kill it, with all its children, somewhere between its first connection and its end."""
    moment = chance.uniform(1.0, float(os.environ.get("PDSTACK_KILL_WITHIN", "20")))
    run = subprocess.Popen(
        scenario.command("deploy_pd.yml"),
        cwd=scenario.ROOT,
        env=scenario.env(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        run.wait(moment)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
    print(f"seed {SEED}: killed after {moment:.1f} s" if run.wait() < 0 else f"it ended within {moment:.1f} s")


@pytest.mark.skipif(not LONG, reason="PDSTACK_LONG is not set: the groups above are interrupted once each")
@pytest.mark.parametrize("number", range(30))
def test_a_deployment_killed_at_any_moment_is_finished_by_the_next(deployment: Any, number: int) -> None:
    chance = random.Random(SEED + number)
    rows = chance.sample(ROWS, 4)
    print(f"seed {SEED + number}: {[row.name for row in rows]}")
    deployment.run("\n".join(row.command for row in rows) + "\ntrue")
    interrupted(chance)
    deployment.converge()
    code, report = deployment.look()
    assert (code, report["items"]) == (0, [])
