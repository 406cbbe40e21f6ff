"""Running commands on the target, behind one small type so that tests can answer instead."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Callable, Sequence


@dataclass(frozen=True)
class Completed:
    """What a command left: its exit status and its two texts."""

    rc: int
    out: str
    err: str


Runner = Callable[[Sequence[str]], Completed]


class CommandFailed(RuntimeError):
    """A command that had to succeed did not; the message holds the command and its words."""


def run(argv: Sequence[str], timeout_s: float = 300.0) -> Completed:
    """Run a command without a shell. A command that outlasts ``timeout_s`` is killed and has rc 124."""
    try:
        done = subprocess.run(
            list(argv), capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        return Completed(127, "", f"{argv[0]}: command not found")
    except subprocess.TimeoutExpired:
        return Completed(124, "", f"{argv[0]}: no answer within {timeout_s:.0f} s")
    return Completed(done.returncode, done.stdout, done.stderr)


def need(runner: Runner, argv: Sequence[str]) -> str:
    """Run a command that must succeed and return its output. Raises CommandFailed."""
    done = runner(argv)
    if done.rc != 0:
        raise CommandFailed(f"{' '.join(argv)}: exit {done.rc}: {(done.err or done.out).strip()}")
    return done.out
