"""Which systemd unit a process belongs to, as its cgroup says (cgroups(7))."""

from __future__ import annotations

import os
from typing import Optional


def unit_of(proc_root: str, pid: int) -> Optional[str]:
    """Return the systemd unit that a process belongs to, by its control group."""
    try:
        with open(os.path.join(proc_root, str(pid), "cgroup"), encoding="utf-8") as handle:
            lines = handle.read().splitlines()
    except OSError:
        return None
    for line in lines:
        for part in reversed(line.rpartition(":")[2].split("/")):
            if part.endswith((".service", ".scope")):
                return part
    return None
