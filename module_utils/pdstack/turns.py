"""One at a time on a host: a lock file that its holder signs, and a bounded wait for it.

The kernel drops the lock with its process, so a dead run never blocks the next one. A run that was killed on its
controller may leave a process behind on the host, though, which works on and holds the lock until it is done: whoever
comes next waits a while for it, and is then told who it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass
from typing import Any, Iterator, Optional

from . import codec


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock. ``since`` is in seconds since the epoch."""

    pid: int
    what: str
    since: float

    def words(self, now: float) -> str:
        """Return who it is and since when, for a message."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} ({self.what}) since {since}, {max(0.0, now - self.since):.0f} s"


class Busy(RuntimeError):
    """Somebody else held the lock as long as it was waited for; the message says who."""

    def __init__(self, holder: Optional[Holder], now: float, waited_s: float) -> None:
        self.holder = holder
        who = holder.words(now) if holder else "a process that has not said who it is"
        super().__init__(f"it is held by {who}; waited {waited_s:.0f} s for it")


@contextlib.contextmanager
def turn(path: str, what: str, wait_s: float = 0.0, clock: Any = time, poll_s: float = 0.5) -> Iterator[float]:
    """Hold the lock file ``path`` for ``what``. Raises Busy after ``wait_s``.

    Yields the seconds waited for it, 0 where it was free.
    """
    began, waited = clock.monotonic(), 0.0
    with open(path, "a+", encoding="utf-8") as stream:
        while not _locked(stream.fileno(), fcntl.LOCK_EX):
            if waited >= wait_s:
                raise Busy(codec.kept(Holder, path), clock.time(), waited)
            clock.sleep(min(poll_s, wait_s - waited))
            waited = clock.monotonic() - began
        stream.truncate(0)
        json.dump(codec.dump(Holder(os.getpid(), what, clock.time())), stream)
        stream.flush()
        try:
            yield waited
        finally:
            stream.truncate(0)


def holder(path: str) -> Optional[Holder]:
    """Return who holds the lock now, None where nobody does or nobody has said so."""
    found = codec.kept(Holder, path)
    if found is None:
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            # A shared lock is not to be had where somebody has the other one; it goes when the file is closed.
            return None if _locked(stream.fileno(), fcntl.LOCK_SH) else found
    except OSError:
        return None


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
