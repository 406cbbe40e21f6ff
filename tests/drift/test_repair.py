"""Each kind of drift is seen, a deployment repairs it, only what it touches restarts, and then nothing differs.

The rows of breakages.py are broken together, group by group of those whose repair restarts the same; each group's first
deployment is killed at a random moment. PDSTACK_LONG=1 also kills thirty deployments, PDSTACK_ALONE=1 breaks each row
alone. PDSTACK_RECORD names a file for what was broken, seen and restarted, and how long it took (JSON lines).
"""

from __future__ import annotations

import fnmatch
import json
import os
import random
import re
import signal
import subprocess
import time
from typing import Any

import pytest
import scenario
from drift import breakages
from drift.breakages import Breakage
from drift.conftest import UNITS

TOGETHER = {
    "nothing restarts": breakages.QUIET,
    "router and decode": breakages.ROUTER_AND_DECODE,
    "the pair": breakages.PAIR,
    "everything": breakages.EVERYTHING,
}
ROWS = [row for rows in TOGETHER.values() for row in rows]
ALONE = bool(os.environ.get("PDSTACK_ALONE"))
GROUPS = {row.name: [row] for row in ROWS} if ALONE else TOGETHER
KILLS = 30
SEED = int(os.environ.get("PDSTACK_SEED", "0")) or random.SystemRandom().randrange(10**6)


def test_an_intact_host_is_told_in_time(deployment: Any) -> None:
    begin = time.monotonic()
    code, report = deployment.look()
    seconds = time.monotonic() - begin
    assert (code, report["items"], report["failures"]) == (0, [], [])
    print(f"drift.yml on one intact host: {seconds:.1f} s")
    record("look", seconds=seconds)
    assert seconds < 10 * float(os.environ.get("PDSTACK_SLOW", "6")), "10 s on a machine that has nothing else to do"


def test_every_managed_item_is_broken_here(deployment: Any) -> None:
    (managed,) = deployment.look()[1]["managed"].values()
    assert len(managed) > 20
    covers = [row.covers for row in ROWS if row.covers]
    assert [name for name in managed if not any(fnmatch.fnmatch(name, pattern) for pattern in covers)] == []
    assert [pattern for pattern in covers if not any(fnmatch.fnmatch(name, pattern) for name in managed)] == []
    print(f"{len(managed)} managed items, {len(ROWS)} breakages: {', '.join(managed)}")
    covered = {name: [row.name for row in ROWS if row.covers and fnmatch.fnmatch(name, row.covers)] for name in managed}
    record("managed", items=covered, breakages=len(ROWS))


@pytest.mark.parametrize("rows", GROUPS.values(), ids=GROUPS)
def test_drift_is_seen_and_repaired_and_nothing_else_restarts(deployment: Any, rows: list[Breakage]) -> None:
    before = deployment.processes()
    deployment.run("\n".join(["set -e", *(row.command for row in rows)]))
    code, report = deployment.look()
    assert code == 2, report
    said = [f"{item['kind']} {item['item']}: {item['found']} {item['why']}" for item in report["items"]]
    seen = "\n".join(said)
    assert [(row.name, words) for row in rows for words in row.sees if words not in seen] == [], seen
    stopped = {unit for row in rows for unit in breakages.STOPPED.get(row.name, ())}
    now = deployment.processes()
    assert {unit for unit in before if now[unit] != before[unit]} == stopped, "a look touches nothing"
    killed = {} if ALONE else interrupted(random.Random(f"{SEED} {rows[0].name}"), 20.0)
    begin = time.monotonic()
    deployment.converge()
    seconds = time.monotonic() - begin
    after = deployment.processes()
    restarted = {unit for unit in before if after[unit] != before[unit]}
    assert restarted == {unit for row in rows for unit in row.restarts}
    code, report = deployment.look()
    assert (code, report["items"]) == (0, []), "what was repaired differs still"
    assert scenario.changed(deployment.converge()) == 0, "the run after the one that repaired"
    for row in rows:
        lines = [next(line for line in said if words in line) for words in row.sees]
        record("breakage", name=row.name, command=row.command, said=lines)
    record("group", rows=[row.name for row in rows], restarted=sorted(restarted), seconds=seconds, **killed)


def record(kind: str, **what: Any) -> None:
    """Add a line to the file that PDSTACK_RECORD names, if any."""
    if path := os.environ.get("PDSTACK_RECORD"):
        with open(path, "a") as stream:
            stream.write(json.dumps({"kind": kind, **what}) + "\n")


def interrupted(chance: random.Random, within: float) -> dict[str, Any]:
    """Start a deployment and kill it, with all its children, somewhere between its first connection and its end."""
    moment = chance.uniform(1.0, within)
    run = subprocess.Popen(
        scenario.command("deploy_pd.yml"),
        cwd=scenario.ROOT,
        env=scenario.env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        output, _ = run.communicate(timeout=moment)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        output, _ = run.communicate()
    tasks = re.findall(r"^TASK \[(.*)\] \*", output, re.MULTILINE)
    found = {"killed": run.returncode < 0, "after_s": round(moment, 1), "in_task": tasks[-1] if tasks else ""}
    print(f"seed {SEED}: {found}")
    return found


# How long a deployment takes that repairs what restarts nothing, or an engine too: kills fall within what the one
# before took, seconds.
LASTS = {"short": 20.0, "long": 45.0}


def in_turn(number: int) -> tuple[list[Breakage], str]:
    """What to break before kill ``number``, and how long its repair is: a long one each third time."""
    chance = random.Random(SEED + number)
    if number % 3 == 2:
        others = [row for rows in list(TOGETHER.values())[1:] for row in rows]
        return [*chance.sample(breakages.QUIET, 2), others[(SEED + number) // 3 % len(others)]], "long"
    return chance.sample(breakages.QUIET, 4), "short"


@pytest.mark.skipif(
    not os.environ.get("PDSTACK_LONG"), reason="PDSTACK_LONG is not set: each group is interrupted once"
)
@pytest.mark.parametrize("number", range(KILLS))
def test_a_deployment_killed_at_any_moment_is_finished_by_the_next(deployment: Any, number: int) -> None:
    rows, length = in_turn(number)
    deployment.run("\n".join(row.command for row in rows) + "\ntrue")
    killed = interrupted(random.Random(SEED + number), LASTS[length])
    begin = time.monotonic()
    deployment.converge()  # proven by completions
    LASTS[length] = seconds = time.monotonic() - begin
    assert {unit for unit in UNITS if deployment.host.run(f"systemctl is-active {unit}").rc} == set()
    if number % 5 == 4:
        code, report = deployment.look()
        assert (code, report["items"]) == (0, [])
    if number == KILLS - 1:
        assert scenario.changed(deployment.converge()) == 0
    record("kill", number=number, seed=SEED, rows=[row.name for row in rows], seconds=seconds, **killed)
