"""Processes: run one, name one for good, end one that is ours."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Sequence

from .errors import LabError


def run(argv: Sequence[str], stdin: str | None = None, timeout: float = 60) -> str:
    """Run a command and return its output; LabError with its words when it fails."""
    done = attempt(argv, stdin, timeout)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LabError(f"`{' '.join(argv)}` failed with status {done.returncode}: {said}")
    return done.stdout


def attempt(argv: Sequence[str], stdin: str | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a command and return what came of it; LabError only when it cannot be run or hangs."""
    try:
        return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise LabError(f"`{' '.join(argv)}` did not end within {timeout:g} s") from None
    except OSError as error:
        raise LabError(f"`{argv[0]}` could not be run: {error}") from None


def wait_for(ready: Callable[[], bool], seconds: float, step: float = 0.02) -> bool:
    """Ask until the answer is yes or the time is over."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(step)
    return True


@dataclass(frozen=True)
class Process:
    """A process named for good: a pid is used again, a pid with its start time is not."""

    pid: int
    start: int  # clock ticks since boot, field 22 of /proc/PID/stat
    boot: str  # the machine's boot id

    @staticmethod
    def of(pid: int) -> Process:
        return Process(pid, _start(pid) or 0, boot_id())

    def alive(self) -> bool:
        return self.boot == boot_id() and self.start != 0 and _start(self.pid) == self.start

    def end(self, number: signal.Signals, seconds: float) -> bool:
        """Send a signal if the process is still the one that was named; True when it is gone."""
        if self.alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return True
        return wait_for(lambda: not self.alive(), seconds)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start(pid: int) -> int | None:
    """The start time of a live process; None for one that is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def children(pid: int) -> list[int]:
    """The direct children of a process."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
