"""Waiting for instances to answer, bounded, and saying early and plainly when they will not.

An engine that answers /health is up; it is not proof that the pair serves (pd_verify is).
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence

from . import causes, phases, units
from .http import Access
from .runner import CommandFailed, Runner
from .verify import Reply

_START_SLACK_S = 30.0  # between the start of a unit and the first look at it
_MEND = "mend what the last lines say, then run again"
_REFUSED = (401, 403)  # an answer that no waiting changes

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # a router writes for a terminal, whatever it writes to

HttpGet = Callable[[str, Access], Reply]


@dataclass(frozen=True)
class Target:
    """What to wait for: a unit whose URL must answer 200.

    ``alive_url`` is asked instead of a process that was ready before: an engine's /health generates
    a token and takes a second, every time. ``base``, the key files and ``ca_file`` are how other
    requests reach it, as pdstack.service gives them.
    """

    name: str
    unit: str
    url: str
    alive_url: str = ""
    base: str = ""
    key_file: str = ""
    admin_key_file: str = ""
    ca_file: str = ""

    @property
    def access(self) -> Access:
        """What clients need."""
        return Access(self.key_file, self.ca_file)

    @property
    def admin(self) -> Access:
        """What changes of the server need."""
        return Access(self.admin_key_file, self.ca_file)


@dataclass
class Readiness:
    """How one target fared. ``seconds`` runs from the start of its process; None: not observed."""

    name: str
    unit: str
    ready: bool = False
    state: str = "unknown"
    seconds: Optional[float] = None
    restarts: int = 0
    detail: str = ""
    phase: str = ""  # what its journal says that it does, while it is not ready


@dataclass
class Progress:
    """A wait that goes on in another process of ours: when it began, and how often each unit had restarted then."""

    begin: Optional[float] = None  # seconds of CLOCK_MONOTONIC
    restarts: Dict[str, int] = field(default_factory=dict)
    waited: bool = False


def wait(
    targets: Sequence[Target],
    runner: Runner,
    get: HttpGet,
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
    timeout_s: float,
    marks: str,
    poll_s: float = 0.5,
    progress: Optional[Progress] = None,
    slice_s: Optional[float] = None,
    setting: str = "",
) -> List[Readiness]:
    """Poll until every target answers, one has failed for good, or ``timeout_s`` has passed.

    The time to ready is kept in the folder ``marks`` by unit and process, so that a later run can
    still tell it. A unit that systemd restarts twice while we wait counts as failed, and so does one that cannot be
    asked at all: no key here, or one that it does not take. With ``slice_s`` it returns
    after that time with what is so far, and goes on when it is called again with the same ``progress``.
    ``setting`` names the variable that ``timeout_s`` comes from.
    """
    progress = progress or Progress()
    progress.begin = begin = monotonic() if progress.begin is None else progress.begin
    deadline = begin + timeout_s
    until = None if slice_s is None else monotonic() + slice_s
    while True:
        states = units.show(runner, [target.unit for target in targets])
        results, answers, statuses = [], {}, {}
        for target in targets:
            state = states[target.unit]
            first = progress.restarts.setdefault(target.unit, state.restarts)
            result = Readiness(target.name, target.unit, state=f"{state.active} ({state.sub})", restarts=state.restarts)
            mark = _read_mark(marks, state)
            url = target.alive_url if mark and target.alive_url else target.url
            unreadable = target.access.problem()
            reply = get(url, target.access) if state.active == "active" and not unreadable else Reply(0, unreadable)
            answers[target.name], statuses[target.name] = _answer(url, reply), reply.status
            if reply.status == 200:
                result.ready = True
                if mark is None:
                    # Of a process that ran long before we looked, nobody knows when it first answered.
                    watched = progress.waited and state.started_us / 1e6 > begin - _START_SLACK_S
                    mark = {"seconds": round(monotonic() - state.started_us / 1e6, 1) if watched else None}
                    _write_mark(marks, state, mark)
                result.seconds = mark["seconds"]
            elif state.active in ("failed", "inactive") or state.restarts - first >= 2:
                result.state = f"failed ({state.result})" if state.result != "success" else result.state
                result.detail = _explain(runner, target.unit, _MEND)
            elif unreadable or reply.status in _REFUSED:
                found = f"found: {unreadable or answers[target.name]}\nneeded: the key that it was started with\n"
                result.detail = found + _explain(runner, target.unit, _NEW_KEYS)
            results.append(result)
        failed = any(result.detail for result in results)
        if failed or all(result.ready for result in results):
            return results
        if monotonic() >= deadline:
            for result in results:
                if not result.ready:
                    waited = f" after {timeout_s:.0f} s" if timeout_s else ""
                    found = f"found: {answers[result.name]}{waited}\nneeded: an answer with status 200\n"
                    result.detail = found + _explain(runner, result.unit, _remedy(result.unit, setting))
            return results
        progress.waited = True
        if until is not None and monotonic() >= until:
            for result in results:
                if not result.ready:
                    status = statuses[result.name]
                    result.phase = phases.phase(_journal(runner, states[result.unit])) or result.state
                    result.phase += f", answers {status}" if status else ""
            return results
        sleep(poll_s)


def never_ready(states: Iterable[units.UnitState], marks: str) -> List[str]:
    """Return the units whose present process has not been seen ready, such as those of a run that was interrupted."""
    return [state.name for state in states if state.main_pid and _read_mark(marks, state) is None]


def why_not_running(names: Sequence[str], runner: Runner) -> str:
    """Explain, for a systemctl command that failed, each of these units that does not run; "" where all do."""
    try:
        states = units.show(runner, names)
    except CommandFailed:
        return ""  # systemd itself does not answer, as the first error says
    return "\n\n".join(
        f"{state.name} is {state.active} ({state.sub}).\n{_explain(runner, state.name, _MEND)}"
        for state in states.values()
        if state.active not in ("active", "reloading")
    )


def look(targets: Sequence[Target], runner: Runner, get: HttpGet, marks: str) -> List[Readiness]:
    """Ask every target once."""
    return wait(targets, runner, get, lambda: 0.0, lambda seconds: None, 0.0, marks)


def _read_mark(marks: str, state: units.UnitState) -> Optional[Dict[str, Any]]:
    """Return what is kept of this very process, if it was ready before."""
    try:
        with open(os.path.join(marks, state.name), encoding="utf-8") as handle:
            mark = json.load(handle)
    except (OSError, ValueError):
        return None
    if not isinstance(mark, dict) or mark.get("process") != _process(state):
        return None
    seconds = mark.get("seconds")
    return {"seconds": float(seconds) if isinstance(seconds, (int, float)) else None}


def _write_mark(marks: str, state: units.UnitState, mark: Dict[str, Any]) -> None:
    try:
        os.makedirs(marks, exist_ok=True)
        with open(os.path.join(marks, state.name), "w", encoding="utf-8") as handle:
            json.dump({"process": _process(state), **mark}, handle)
    except OSError:
        pass  # the mark is a convenience of the next report


def _process(state: units.UnitState) -> str:
    return f"{state.main_pid}:{state.started_us}"


def _journal(runner: Runner, state: units.UnitState) -> str:
    """Return the last lines that the unit's present processes have written."""
    mine = f"_SYSTEMD_INVOCATION_ID={state.invocation}" if state.invocation else f"--unit={state.name}"
    return runner(["journalctl", "--no-pager", "-o", "cat", "--all", "-n", "200", mine]).out


_NEW_KEYS = "run playbooks/serve.yml: it writes the keys, and restarts what was started with others"


def _answer(url: str, reply: Reply) -> str:
    """Say what came, in one line."""
    said = " ".join(reply.body.split())[:200]
    return f"{url} answers {reply.status}: {said}" if reply.status else f"{url}: no answer ({said or 'not asked'})"


def _remedy(unit: str, setting: str) -> str:
    more = f"; raise {setting} where they show that it was still at work" if setting else ""
    return (
        f"read the last lines for what it is waiting for, and `ss -ltnp` for whether it listens; "
        f"`systemctl restart {unit}` where it hangs{more}"
    )


def _explain(runner: Runner, unit: str, remedy: str) -> str:
    """Return what to do, after the likely cause where the journal shows one, and the journal's last lines."""
    journal = runner(["journalctl", "--no-pager", "-o", "cat", "-n", "400", "-u", unit]).out
    lines = [_COLOUR.sub("", line)[:500] for line in journal.splitlines() if line.strip()]
    cause = causes.likely(journal)
    text = f"likely cause: {cause.means}; {cause.do}\n" if cause else f"do: {remedy}\n"
    return text + f"last lines of `journalctl -u {unit}`:\n  " + "\n  ".join(lines[-25:] or ["(empty)"])
