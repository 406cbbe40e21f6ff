"""Processes of a former deployment that hold our ports: seen again, stopped, and told. Never more than was named."""

from __future__ import annotations

import os
import signal
from typing import Callable, Iterable, List, Sequence

from .facts import Port
from .runner import Runner, need

Kill = Callable[[int, int], None]  # pid, signal


def still_there(named: Iterable[Port], listening: Sequence[Port]) -> List[Port]:
    """Return the holders as they are now. A port that another process has taken since is not among them."""
    return [
        now
        for then in named
        for now in listening
        if (now.port, now.pid, now.command, now.since) == (then.port, then.pid, then.command, then.since)
    ]


def words(holder: Port) -> str:
    """Say who holds a port: pid, command, unit and since when."""
    unit = f" of unit {holder.unit}" if holder.unit else ""
    return (
        f"port {holder.port}: process {holder.pid} ({holder.command or 'unknown command'}){unit} since {holder.since}"
    )


def stop(
    holders: Sequence[Port],
    runner: Runner,
    listening: Callable[[], Sequence[Port]],
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
    kill: Kill = os.kill,
    timeout_s: float = 60.0,
) -> List[str]:
    """Stop them, and return what was done, a line each. Raises CommandFailed, or TimeoutError naming who is left.

    A service is stopped and disabled, so that it does not come back at the next boot. Any other process gets
    SIGTERM, and SIGKILL after half of ``timeout_s``.
    """
    done = []
    services = sorted({holder.unit for holder in holders if (holder.unit or "").endswith(".service") and holder.unit})
    for unit in services:
        need(runner, ["systemctl", "disable", "--now", unit])
        done.append(f"systemctl disable --now {unit}")
    others = sorted({holder.pid for holder in holders if holder.unit not in services and holder.pid})
    begin = monotonic()
    for pid in others:
        _signal(kill, pid, signal.SIGTERM)
        done.append(f"kill {pid}")
    killed = False
    while True:
        left = still_there(holders, listening())
        if not left:
            return done
        waited = monotonic() - begin
        if waited >= timeout_s:
            raise TimeoutError("; ".join(words(holder) for holder in left))
        if waited >= timeout_s / 2 and not killed:
            killed = True
            for pid in sorted({holder.pid for holder in left if holder.pid in others and holder.pid}):
                _signal(kill, pid, signal.SIGKILL)
                done.append(f"kill -9 {pid}")
        sleep(0.5)


def _signal(kill: Kill, pid: int, number: int) -> None:
    try:
        kill(pid, number)
    except ProcessLookupError:
        pass  # it has just ended by itself
