"""The canary of a host: small completions through its routers and through each of its engines, and a bounded cure.

An engine can answer /health, which makes up its own KV cache, and complete nothing. systemd sees a process that runs.
So a timer runs this on every host: each engine is asked together with the engines of its set, as a router asks them.
What fails several times in a row, and is to blame by what the host itself can see, is killed; systemd starts it again.

Each host judges its own units only. A process that has not answered yet is starting, and is left alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from . import completion, http, runner
from .completion import Endpoint, Outcome

CONFIG = "/etc/pdstack/canary.json"
STATE = "/run/pdstack/canary.json"
LOCK = "/run/pdstack/deploy.lock"  # of a deployment that runs
DAY_S = 86400.0
LOCK_S = 2 * 3600.0  # a run that was killed leaves its lock
AGAIN_S = 5.0  # until the next look at what says nothing at all
AGAIN_LIMIT_S = 300.0  # of one run, half of its unit's TimeoutStartSec


@dataclass(frozen=True)
class Watched:
    """A unit of this host. ``peers`` are what its KV cache comes from or goes to; empty where it serves alone."""

    unit: str
    role: str  # prefill | decode | aggregated | router
    endpoint: Endpoint
    peers: Sequence[Endpoint] = ()


@dataclass(frozen=True)
class Limits:
    """When and how often a unit is killed."""

    failures: int = 3
    timeout_s: float = 30.0
    cooldown_s: float = 900.0
    per_day: int = 6


@dataclass(frozen=True)
class State:
    """A unit as systemd has it. ``process`` is another text for another process, "" for none."""

    active: str
    process: str = ""


@dataclass
class Memory:
    """What is remembered of a unit from one run to the next. Times are seconds of CLOCK_MONOTONIC."""

    process: str = ""
    answered: bool = False
    failures: int = 0
    kills: List[float] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """How a unit was found: ok, stopped, starting, busy, blameless, failing, or (between these) silent.

    ``mute``: not even an error came by HTTP, so that its main process hangs, not what computes behind it.
    """

    unit: str
    state: str
    seconds: Optional[float] = None
    detail: str = ""
    mute: bool = False


class World:
    """What the canary sees and does; tests put their own in its place."""

    def completion(self, through: Endpoint, prefill: Optional[Endpoint], model: str, timeout_s: float) -> Outcome:
        """Ask for a completion, through a pair where ``prefill`` is given."""
        if prefill is None:
            return completion.through(through, model, timeout_s)
        return completion.pair(prefill, through, model, timeout_s)

    def healthy(self, endpoint: Endpoint, timeout_s: float) -> bool:
        """Whether an engine generates a token by itself; of a router, whether it answers at all."""
        return bool(self._get(endpoint, "/health", timeout_s).status == 200)

    def mute(self, endpoint: Endpoint) -> bool:
        """Whether an HTTP server gives no answer at all to what costs it nothing."""
        return bool(self._get(endpoint, "/v1/models", 5.0).status == 0)

    def generating(self, endpoint: Endpoint) -> bool:
        """Whether an engine is generating at this moment: then it is busy, not hung."""
        try:
            loads = json.loads(self._get(endpoint, "/v1/loads", 5.0).body)["loads"]
            return any(load["num_running_reqs"] > 0 and load["gen_throughput"] > 0 for load in loads)
        except (ValueError, KeyError, TypeError):
            return False

    def _get(self, endpoint: Endpoint, path: str, timeout_s: float) -> Any:
        access = http.Access(endpoint.key_file, endpoint.ca_file)
        return http.request("GET", endpoint.base + path, None, timeout_s, access)

    def states(self, names: Sequence[str]) -> Mapping[str, State]:
        """Read the units' states."""
        properties = "ActiveState,MainPID,ExecMainStartTimestampMonotonic"
        text = runner.need(runner.run, ["systemctl", "show", "--no-pager", "-p", properties, *names])
        found = {}
        for name, block in zip(names, text.strip("\n").split("\n\n")):
            value = dict(line.partition("=")[::2] for line in block.splitlines())
            pid = value.get("MainPID", "0")
            process = "" if pid == "0" else f"{pid}:{value.get('ExecMainStartTimestampMonotonic', '')}"
            found[name] = State(value.get("ActiveState", "unknown"), process)
        return found

    def kill(self, unit: str) -> None:
        """SIGKILL to every process: a hung one does not heed SIGTERM, and a stopped one would not see it."""
        runner.need(runner.run, ["systemctl", "kill", "--signal=KILL", "--kill-whom=all", unit])

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def deploying(self) -> bool:
        lock = _read(LOCK)
        return bool(lock) and self.monotonic() - float(lock.get("monotonic", 0.0)) < LOCK_S


def look(watched: Watched, model: str, limits: Limits, world: World) -> Finding:
    """Ask a unit, and say whether it is to blame when nothing comes. One that says nothing at all is silent."""
    details: List[str] = []
    for prefill, through in _ways(watched):
        outcome = world.completion(through, prefill, model, limits.timeout_s)
        if outcome.ok:
            return Finding(watched.unit, "ok", outcome.seconds)
        details.append(outcome.detail)
    detail = "; ".join(details)
    if watched.role == "router":
        return _look_at_router(watched, model, limits, world, detail)
    if not world.healthy(watched.endpoint, limits.timeout_s):
        detail = f"its own /health does not answer; {detail}"
        return Finding(watched.unit, "silent", None, detail, world.mute(watched.endpoint))
    if watched.peers and not any(world.healthy(peer, limits.timeout_s) for peer in watched.peers):
        return Finding(watched.unit, "blameless", None, f"answers /health, its peers do not; {detail}")
    if world.generating(watched.endpoint):
        return Finding(watched.unit, "busy", None, f"generates, the canary waits in its queue; {detail}")
    return Finding(watched.unit, "failing", None, f"answers /health and completes nothing; {detail}")


def _look_at_router(watched: Watched, model: str, limits: Limits, world: World, detail: str) -> Finding:
    """A router is to blame when it says nothing, or nothing good while a pair behind it completes."""
    if not world.healthy(watched.endpoint, limits.timeout_s):
        return Finding(watched.unit, "silent", None, f"does not answer; {detail}", world.mute(watched.endpoint))
    prefills = {peer.set: peer for peer in watched.peers if peer.bootstrap_port}
    for peer in watched.peers:
        if not peer.bootstrap_port and world.completion(peer, prefills.get(peer.set), model, limits.timeout_s).ok:
            return Finding(watched.unit, "failing", None, f"fails although {peer.name} completes; {detail}")
    return Finding(watched.unit, "blameless", None, f"answers, the engines behind it complete nothing; {detail}")


def _ways(watched: Watched) -> List[Tuple[Optional[Endpoint], Endpoint]]:
    """Return whom to ask, prefill first: one that completes is enough."""
    if watched.role == "decode":
        return [(peer, watched.endpoint) for peer in watched.peers]
    if watched.role == "prefill":
        return [(watched.endpoint, peer) for peer in watched.peers]
    return [(None, watched.endpoint)]


def run(
    watched: Sequence[Watched], model: str, limits: Limits, memory: Dict[str, Memory], world: World
) -> Tuple[List[Finding], List[str]]:
    """Look at every unit once, kill what has failed often enough, and say so in words. ``memory`` is updated."""
    states = world.states([item.unit for item in watched])
    running = [item for item in watched if states[item.unit].active == "active" and states[item.unit].process]
    with ThreadPoolExecutor(max_workers=max(len(running), 1)) as pool:  # a hang must not lengthen the look at others
        looks = dict(zip([item.unit for item in running], pool.map(lambda it: look(it, model, limits, world), running)))
    findings, said = [], []
    for item in watched:
        state, known = states[item.unit], memory.setdefault(item.unit, Memory())
        if known.process != state.process:
            known.process, known.answered, known.failures = state.process, False, 0
        if item.unit not in looks:
            findings.append(Finding(item.unit, "stopped", None, state.active))
            continue
        found = looks[item.unit]
        if found.state == "silent":  # a process that has answered before hangs, another one is still loading
            found = replace(found, state="failing" if known.answered else "starting")
        else:
            known.answered = True
        if found.state == "ok":
            known.failures = 0
        elif found.state == "failing":
            known.failures += 1
        findings.append(found)
    for found in findings:  # after all looks: a pair that hangs goes as a whole
        known = memory[found.unit]
        if found.state == "failing":
            said.append(f"{found.unit}: failure {known.failures} of {limits.failures}: {found.detail}")
            if known.failures >= limits.failures:
                said.append(_cure(found.unit, known, limits, world))
    return findings, said


def _cure(unit: str, known: Memory, limits: Limits, world: World) -> str:
    """Kill a unit unless that is forbidden now, and say which."""
    now = world.monotonic()
    known.kills = [moment for moment in known.kills if now - moment < DAY_S]
    if world.deploying():
        return f"{unit}: not killed, a deployment runs"
    if known.kills and now - known.kills[-1] < limits.cooldown_s:
        return f"{unit}: not killed, {now - known.kills[-1]:.0f} s after the last time (pd_canary.cooldown_s)"
    if len(known.kills) >= limits.per_day:
        return f"{unit}: not killed, {len(known.kills)} times within a day (pd_canary.per_day): a person must look"
    world.kill(unit)
    known.kills.append(now)
    known.failures = 0
    return f"{unit}: killed after {limits.failures} failures in a row; systemd starts it again"


def watched_of(document: Mapping[str, Any]) -> List[Watched]:
    """Return what the configuration of a host names."""
    return [
        Watched(
            unit=str(item["unit"]),
            role=str(item["role"]),
            endpoint=Endpoint(**item["endpoint"]),
            peers=[Endpoint(**peer) for peer in item["peers"]],
        )
        for item in document["watched"]
    ]


def remembered(document: Mapping[str, Any]) -> Dict[str, Memory]:
    """Return what an earlier run wrote down; whatever cannot be read is forgotten."""
    try:
        return {str(unit): Memory(**known) for unit, known in document["memory"].items()}
    except (KeyError, TypeError, AttributeError):
        return {}


def main(config: str = CONFIG, state: str = STATE, world: Optional[World] = None) -> int:
    """Run once, and leave what was found in ``state``.

    A process that is mute is looked at again at once instead of an interval later: no queue, no long prompt and no
    compilation makes the HTTP server silent, and it takes looks of up to a minute each to be killed for it.
    """
    world = world or World()
    document = _read(config)
    limits, watched, memory = Limits(**document["limits"]), watched_of(document), remembered(_read(state))
    findings: Dict[str, Finding] = {}
    begin = world.monotonic()
    for number in range(limits.failures):
        if number:
            world.sleep(AGAIN_S)
        found, said = run(watched, str(document["model"]), limits, memory, world)
        for line in said:
            print(line, flush=True)
        findings.update((item.unit, item) for item in found)
        _write(
            state,
            {
                "schema": 1,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "ok": all(item.state in ("ok", "busy") for item in findings.values()),
                "units": {unit: {**item.__dict__, "kills": len(memory[unit].kills)} for unit, item in findings.items()},
                "memory": {unit: memory[unit].__dict__ for unit in findings},
            },
        )
        mute = {item.unit for item in found if item.mute and item.state == "failing"}
        watched = [item for item in watched if item.unit in mute]
        if not watched or world.monotonic() - begin > AGAIN_LIMIT_S:
            break
    return 0


def _read(path: str) -> Dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as handle:
            found = json.load(handle)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: str, document: Mapping[str, Any]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = f"{path}.new"
    with open(partial, "w", encoding="utf-8") as handle:
        json.dump(document, handle, indent=2, sort_keys=True)
        handle.write("\n")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
