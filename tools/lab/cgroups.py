"""The control groups that hold a host: made, emptied and removed, and only ever our own folders.

A host is placed in a group of its own in the cgroup2 hierarchy and, on a hybrid machine, in the
named systemd hierarchy too: from the root group systemd-nspawn would fall into a shared one. Where
systemd is this machine's PID 1 it owns the tree, and a delegated scope is asked from it instead.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError
from .process import wait_for

FOLDER = "pdstack-lab"


def hierarchies(mountinfo: str) -> list[Path]:
    """Return the mount points of cgroup2 and of the v1 hierarchy ``name=systemd`` (proc(5), mountinfo)."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split()[-1].split(",")):
            where = Path(before.split()[4])
            if where not in found:
                found.append(where)
    return found


def mounted() -> list[Path]:
    """Return the hierarchies of this machine; LabError when there is none."""
    found = hierarchies(Path("/proc/self/mountinfo").read_text())
    if not any((path / "cgroup.controllers").exists() for path in found):
        raise LabError(
            "no cgroup2 hierarchy is mounted here; systemd hosts need one. "
            "In a container, start it with --privileged and cgroup version 2"
        )
    return found


def unified() -> bool:
    """Whether /sys/fs/cgroup itself is cgroup2, as it is on a machine without version 1."""
    return Path("/sys/fs/cgroup/cgroup.controllers").exists()


def systemd_owned() -> bool:
    """Whether this machine's PID 1 is systemd with a cgroup2 tree, which nobody else may change."""
    return Path("/run/systemd/system").is_dir() and unified()


@dataclass(frozen=True)
class Place:
    """Where a host's processes go."""

    folders: list[Path]  # hold every process of the host, in themselves or below
    enter: str  # what supervise.sh moves itself below: folders with a colon between, empty for the group it is in
    prefix: list[str]  # words before the command that starts the supervisor


def place(lab: str, host: str, machine: str) -> Place:
    """Make the host's folders, or name the scope that systemd will make; LabError when the tree is read-only."""
    if systemd_owned():
        words = ["--scope", "--quiet", "--collect", "--slice=system.slice", "--property=Delegate=yes"]
        prefix = ["systemd-run", *words, f"--unit={machine}.scope"]
        return Place([Path("/sys/fs/cgroup/system.slice", f"{machine}.scope")], "", prefix)
    folders = [where / FOLDER / lab / host for where in mounted()]
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LabError(f"{folder} could not be made ({error.strerror}); a container must be --privileged") from None
    return Place(folders, ":".join(str(folder) for folder in folders), [])


def capabilities() -> int:
    """Return the capabilities that this process may hand on: the bounding set as a bit mask."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("CapBnd:")).split()[1], 16)


def members(folders: list[Path]) -> set[int]:
    """Return every process in the folders and below."""
    found: set[int] = set()
    for folder in folders:
        for listing in folder.rglob("cgroup.procs") if folder.is_dir() else ():
            try:
                found.update(int(pid) for pid in listing.read_text().split() if pid != "0")
            except OSError:
                continue  # the group went away while we looked
    return found


def empty(folders: list[Path], seconds: float = 10) -> None:
    """Kill what is left in the folders; LabError when something stays."""

    def gone() -> bool:
        left = members(folders)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return not left

    if not wait_for(gone, seconds):
        raise LabError(f"processes {sorted(members(folders))} in {folders[0]} do not end; look at their state in /proc")


def remove(folders: list[Path]) -> None:
    """Remove the folders, and the lab's own parents where nothing is left in them."""
    for folder in folders:
        for inner in sorted(folder.rglob("*/"), reverse=True) if folder.is_dir() else ():
            if inner.is_dir():
                _rmdir(inner)
        _rmdir(folder)
        for parent in folder.parents:
            if FOLDER not in parent.parts:
                break
            _rmdir(parent)


def _rmdir(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        pass  # not empty, or gone: what must be empty is checked by who needs it
