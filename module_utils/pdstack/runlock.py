"""One deployment at a time: a lock on each host with its owner and since when.

It lies on the hosts, so that two controllers see one another. It is a file and no held descriptor, since
no process on a host lives as long as the run; whether the owner still lives is asked on its controller.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass, field
from typing import Iterator, Optional

from . import codec

PATH = "/run/pdstack/deploy.lock"  # gone with a reboot, as every run is


@dataclass(frozen=True)
class Owner:
    """The run that holds a lock. ``place`` is the controller's kernel and process namespace, where ``pid`` counts."""

    who: str  # user@controller
    place: str
    pid: int
    started: int  # of the process, in clock ticks since boot: process ids come again
    what: str  # playbook and inventory, for people
    since: float = 0.0  # seconds since the epoch, by the host's clock, for people
    # The same moment by the host's CLOCK_MONOTONIC, for the canary.
    monotonic: float = field(default=0.0, compare=False)

    def same_run(self, other: Owner) -> bool:
        return (self.place, self.pid, self.started) == (other.place, other.pid, other.started)


@dataclass(frozen=True)
class Outcome:
    """``held``: by us. ``holder``: who else, or whose lock was taken over."""

    held: bool
    holder: Optional[Owner] = None
    now: float = 0.0


def take(path: str, me: Owner, now: float, instead_of: Optional[Owner] = None) -> Outcome:
    """Take the lock where it is free or held by ``me`` or by ``instead_of``; else say who holds it."""
    with _alone(path):
        holder = read(path)
        if holder is not None and holder.same_run(me):
            return Outcome(True, None, now)
        if holder is not None and not (instead_of is not None and holder.same_run(instead_of)):
            return Outcome(False, holder, now)
        draft = f"{path}.{os.getpid()}"
        with open(draft, "w", encoding="utf-8") as stream:
            json.dump({**codec.dump(me), "since": now, "monotonic": time.monotonic()}, stream)
        os.replace(draft, path)
        return Outcome(True, holder, now)


def release(path: str, me: Owner) -> bool:
    """Give the lock back where it is ours; True where it was."""
    if not os.path.exists(path):
        return False
    with _alone(path):
        holder = read(path)
        if holder is None or not holder.same_run(me):
            return False
        os.unlink(path)
        return True


def read(path: str) -> Optional[Owner]:
    """Return who holds the lock; None where nobody does, and where the file was cut short."""
    return codec.kept(Owner, path)


@contextlib.contextmanager
def _alone(path: str) -> Iterator[None]:
    """Hold off whoever else reads and writes the lock at this moment."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    with open(f"{path}.guard", "a", encoding="utf-8") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield


def myself(pid: int, who: str, what: str, proc_root: str = "/proc") -> Owner:
    """Return the owner that process ``pid`` of this machine is."""
    try:
        with open(f"{proc_root}/sys/kernel/random/boot_id", encoding="ascii") as stream:
            kernel = stream.read().strip()
        place = f"{kernel} {os.readlink(f'{proc_root}/self/ns/pid')}"
    except OSError:  # no Linux
        place = os.uname().nodename
    return Owner(who, place, pid, _started(pid, proc_root), what)


def lives(owner: Owner, here: Owner, proc_root: str = "/proc") -> Optional[bool]:
    """Return whether the owner's process lives; None where it belongs to another machine and cannot be seen."""
    if owner.place != here.place:
        return None
    if os.path.isdir(f"{proc_root}/{os.getpid()}"):
        return _started(owner.pid, proc_root) == owner.started != 0
    try:
        os.kill(owner.pid, 0)
    except OSError:
        return False
    return True


def _started(pid: int, proc_root: str) -> int:
    try:
        with open(f"{proc_root}/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return int(stream.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def told(host: str, outcome: Outcome, alive: Optional[bool]) -> str:
    """Return who holds a host, from where and since when; "" where nobody does."""
    holder = outcome.holder
    if holder is None:
        return ""
    minutes = max(0.0, outcome.now - holder.since) / 60
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder.since))
    state = "it runs on this controller" if alive else "whether it still runs cannot be seen from this controller"
    who = f"{holder.who}, process {holder.pid} ({holder.what})"
    return f"{host} is held by {who}, since {since}, {minutes:.0f} min; {state}"


def refusal(host: str, outcome: Outcome, alive: Optional[bool]) -> str:
    """Return what an operator is told who comes second."""
    if outcome.holder is None:
        return ""
    return (
        f"{told(host, outcome, alive)}. Needed: one deployment at a time. Nothing was changed. Do: wait for it, or "
        "ask; where that run is known to be dead, add -e pd_lock_break=true."
    )
