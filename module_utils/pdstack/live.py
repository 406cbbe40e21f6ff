"""Whether a running process is the one that its unit and the plan describe, read from /proc.

Times of files say nothing where a file was changed, its unit restarted and the file put back with its
old time, or where somebody moved a process to other CPUs by hand.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Dict, List, Optional

from . import verify

RELEASES = "/opt/pdstack/releases"


@dataclass(frozen=True)
class Intended:
    """What the plan says of a unit's process. Empty lists of CPUs or memory nodes bind nothing."""

    unit: str
    cpus: str = ""
    memory_nodes: str = ""
    env: Dict[str, str] = field(default_factory=dict)


def reason(
    wanted: Intended, pid: int, command: str, current: str = "/opt/pdstack/current", proc_root: str = "/proc"
) -> Optional[str]:
    """Say how a process differs from its unit; None where it does not, or where it cannot be told.

    ``command`` is the command line of the unit as systemd has it. A process that shows a title of its
    own, as the router does, has overwritten its arguments and environment: those are not compared.
    """
    return (
        _release(pid, os.path.realpath(current), proc_root)
        or _command(pid, command, proc_root)
        or _environment(pid, wanted.env, proc_root)
        or _pinning(wanted, proc_root)
    )


def _release(pid: int, current: str, proc_root: str) -> Optional[str]:
    mapped = set(re.findall(re.escape(RELEASES) + r"/[^/\n]+", _read(proc_root, pid, "maps")))
    others = sorted(mapped - {current})
    if mapped and current not in mapped and others:
        return f"the process runs {os.path.basename(others[0])}, current is {os.path.basename(current)}"
    return None


def _command(pid: int, command: str, proc_root: str) -> Optional[str]:
    words = [word for word in _read(proc_root, pid, "cmdline").split("\0") if word]
    if not command or not words or not words[0].startswith("/") or " ".join(words) == command:
        return None
    return f"the process was started as {' '.join(words)[:300]!r}, the unit says {command[:300]!r}"


def _environment(pid: int, wanted: Dict[str, str], proc_root: str) -> Optional[str]:
    pairs = [entry.partition("=") for entry in _read(proc_root, pid, "environ").split("\0")]
    found = {name: value for name, equals, value in pairs if equals}
    if "INVOCATION_ID" not in found:  # systemd sets it: without it this is not what systemd handed over
        return None
    wrong: List[str] = sorted(name for name, value in wanted.items() if found.get(name) != str(value))
    if not wrong:
        return None
    name = wrong[0]
    return f"the process has {name}={found.get(name, '(unset)')}, the unit says {wanted[name]}"


def _pinning(wanted: Intended, proc_root: str) -> Optional[str]:
    for check in verify.check_pinning(wanted.unit, wanted.cpus, wanted.memory_nodes, proc_root):
        if not check.ok:
            return f"{check.subject}: {check.found}, planned {check.wanted}"
    return None


def _read(proc_root: str, pid: int, name: str) -> str:
    try:
        with open(os.path.join(proc_root, str(pid), name), encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return ""  # it ended while we looked
