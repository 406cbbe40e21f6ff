"""systemd units: what is, what should be, and the smallest set of actions between the two.

A unit is stale when its process started before one of its files last changed. That holds for a
run that was killed between writing a file and restarting, too, so the next run finishes the work.
Units of one set (a prefill-decode pair) restart together: their KV layouts must agree.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Mapping, Optional, Sequence

from .runner import Runner, need

_PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "UnitFileState",
    "MainPID",
    "NRestarts",
    "NeedDaemonReload",
    "ExecMainStartTimestampMonotonic",
    "ActiveEnterTimestampMonotonic",
    "InvocationID",
    "ExecStart",
)


@dataclass(frozen=True)
class UnitState:
    """One unit as ``systemctl show`` has it. Times are microseconds of CLOCK_MONOTONIC, 0 for never."""

    name: str
    load: str = "not-found"
    active: str = "inactive"
    sub: str = "dead"
    result: str = "success"
    enabled: str = ""
    main_pid: int = 0
    restarts: int = 0
    needs_reload: bool = False
    started_us: int = 0
    active_since_us: int = 0
    command: str = ""  # of ExecStart, as systemd has read it
    invocation: str = ""  # of the present run, as the journal names it


@dataclass(frozen=True)
class WantedUnit:
    """A unit that should be enabled and running. ``set`` names those that restart together."""

    name: str
    set: str = ""
    files: Sequence[str] = ()  # paths or globs whose change makes the process stale; links by their own time
    checkpoint: str = ""  # the folder that the process loads: see checkpoint/repairs.py


@dataclass
class UnitsPlan:
    reload: bool = False
    enable: List[str] = field(default_factory=list)
    disable: List[str] = field(default_factory=list)
    stop: List[str] = field(default_factory=list)
    start: List[str] = field(default_factory=list)
    restart: List[str] = field(default_factory=list)
    why: Dict[str, str] = field(default_factory=dict)

    @property
    def actions(self) -> Dict[str, object]:
        """The units by verb, and whether systemd reads its files again."""
        verbs = ("enable", "disable", "stop", "start", "restart")
        return {"reload": self.reload, **{verb: getattr(self, verb) for verb in verbs}}

    @property
    def changed(self) -> bool:
        return bool(self.reload or self.enable or self.disable or self.stop or self.start or self.restart)


def show(runner: Runner, names: Sequence[str]) -> Dict[str, UnitState]:
    """Read the state of the named units, in one call."""
    if not names:
        return {}
    text = need(runner, ["systemctl", "show", "--no-pager", "-p", ",".join(_PROPERTIES), *names])
    states = {}
    for name, block in zip(names, text.strip("\n").split("\n\n")):
        values = dict(line.partition("=")[::2] for line in block.splitlines())
        states[name] = UnitState(
            name=name,
            load=values.get("LoadState", ""),
            active=values.get("ActiveState", ""),
            sub=values.get("SubState", ""),
            result=values.get("Result", ""),
            enabled=values.get("UnitFileState", ""),
            main_pid=_number(values.get("MainPID")),
            restarts=_number(values.get("NRestarts")),
            needs_reload=values.get("NeedDaemonReload") == "yes",
            started_us=_number(values.get("ExecMainStartTimestampMonotonic")),
            active_since_us=_number(values.get("ActiveEnterTimestampMonotonic")),
            invocation=values.get("InvocationID", ""),
            command=values.get("ExecStart", "").partition("argv[]=")[2].partition(" ; ")[0],
        )
    return states


def known(runner: Runner, patterns: Sequence[str]) -> List[str]:
    """Return the instances that match the patterns and are loaded, enabled or running; none for no pattern."""
    found = set()
    if not patterns:  # systemctl would list every unit of the host
        return []
    for command in ("list-units", "list-unit-files"):
        argv = ["systemctl", command, "--all", "--no-legend", "--no-pager", "--plain", *patterns]
        if command == "list-unit-files":
            argv.remove("--all")
        for line in runner(argv).out.splitlines():
            words = line.split()
            if words and not words[0].endswith("@.service"):
                found.add(words[0])
    return sorted(found)


def changed_at(path: str) -> Optional[float]:
    """When a file, folder or link was last changed (a link by its own time); None if it is absent."""
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return None


def stale_reason(unit: WantedUnit, state: UnitState, changed: Iterable[str], clock_offset_s: float) -> Optional[str]:
    """Say why a running unit no longer runs what its files say; None if it does.

    ``changed`` are paths that this run has written. ``clock_offset_s`` is real time minus
    CLOCK_MONOTONIC now, in seconds.
    """
    if state.active not in ("active", "activating", "reloading"):
        return None
    written = sorted(path for path in changed if any(fnmatch.fnmatch(path, pattern) for pattern in unit.files))
    if written:
        return f"{written[0]} changed"
    started = state.started_us / 1e6 + clock_offset_s
    for path in [match for pattern in unit.files for match in sorted(glob.glob(pattern))]:
        moment = changed_at(path)
        if moment is not None and state.started_us and moment > started:
            return f"{path} changed after the process started"
    if not unit.checkpoint or not state.started_us:
        return None
    # Here and not above: half of the checkpoint's package comes with it, which who only waits for a unit never asks.
    from .checkpoint import repairs

    return repairs.suspect(unit.checkpoint, started)


def plan(
    wanted: Sequence[WantedUnit],
    states: Mapping[str, UnitState],
    stale: Mapping[str, str],
    strays: Sequence[str] = (),
) -> UnitsPlan:
    """Return the smallest set of actions.

    ``stale`` maps units to the reason why they must restart; their whole set follows. ``strays``
    are units of ours that the plan no longer names.
    """
    todo = UnitsPlan()
    sets: Dict[str, str] = {}
    for unit in wanted:
        if unit.name in stale and unit.set:
            sets.setdefault(unit.set, unit.name)
    for unit in wanted:
        state = states[unit.name]
        if state.needs_reload or state.load in ("not-found", "masked"):
            todo.reload = True
        reasons: List[str] = []
        if state.enabled not in ("enabled", "static", "alias"):
            todo.enable.append(unit.name)
            reasons.append(f"not enabled ({state.enabled or 'unknown'})")
        if state.active not in ("active", "activating", "reloading"):
            todo.start.append(unit.name)
            reasons.append(f"{state.active} ({state.result})")
        elif unit.name in stale:
            todo.restart.append(unit.name)
            reasons.append(stale[unit.name])
        elif unit.set in sets:
            todo.restart.append(unit.name)
            reasons.append(f"one set with {sets[unit.set]}")
        if reasons:
            todo.why[unit.name] = "; ".join(reasons)
    for name in strays:
        state = states[name]
        if state.active not in ("inactive", "failed"):
            todo.stop.append(name)
            todo.why[name] = "no longer in the plan"
        if state.enabled.startswith("enabled"):
            todo.disable.append(name)
            todo.why[name] = "no longer in the plan"
    return todo


def apply(todo: UnitsPlan, runner: Runner) -> None:
    """Carry out the actions: each verb once, so that systemd works on the units in parallel.

    What leaves stops before systemd reads the files again: its own are gone from the disk, and with
    them would go how it must be stopped and what counts as success.
    """
    if todo.stop:
        need(runner, ["systemctl", "stop", *todo.stop])
        runner(["systemctl", "reset-failed", *todo.stop])
    if todo.disable:
        need(runner, ["systemctl", "disable", *todo.disable])
    if todo.reload:
        need(runner, ["systemctl", "daemon-reload"])
    if todo.enable:
        need(runner, ["systemctl", "enable", *todo.enable])
    fresh = todo.restart + todo.start
    if fresh:
        runner(["systemctl", "reset-failed", *fresh])  # a start limit that was hit must not refuse the repair
    if todo.restart:
        need(runner, ["systemctl", "restart", *todo.restart])
    if todo.start:
        need(runner, ["systemctl", "start", *todo.start])


def _number(text: Optional[str]) -> int:
    return int(text) if text and text.isdigit() else 0
