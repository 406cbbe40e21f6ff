"""What of ours takes up a disk and could go: a list for a person. Nothing is removed here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Collection, List, Set, Tuple

_SHOWN = 6


@dataclass(frozen=True)
class Removable:
    """A folder or file of ours that is not in use. ``size`` in bytes as they lie on the disk."""

    path: str
    size: int


def removable(folder: str, spared: Collection[str]) -> List[Removable]:
    """Return what lies in ``folder`` except the names ``spared``, largest first."""
    try:
        names = [name for name in os.listdir(folder) if name not in spared]
    except OSError:
        return []
    found = [Removable(os.path.join(folder, name), size(os.path.join(folder, name))) for name in names]
    return sorted(found, key=lambda item: (-item.size, item.path))


def size(path: str) -> int:
    """Return the bytes that a file or folder takes on its disk; a file with several names counts once."""
    seen: Set[Tuple[int, int]] = set()
    total = 0
    for place, folders, names in os.walk(path):
        for name in [*folders, *names]:
            total += _blocks(os.path.join(place, name), seen)
    return total + _blocks(path, seen)


def words(items: List[Removable], nothing: str) -> str:
    """Say what could go and how much that is, ``nothing`` where there is none."""
    if not items:
        return nothing
    shown = ", ".join(f"{item.path} ({item.size / 1e9:.2f} GB)" for item in items[:_SHOWN])
    more = f" and {len(items) - _SHOWN} smaller" if len(items) > _SHOWN else ""
    return f"{shown}{more}: {sum(item.size for item in items) / 1e9:.2f} GB in all"


def _blocks(path: str, seen: Set[Tuple[int, int]]) -> int:
    try:
        found = os.lstat(path)
    except OSError:
        return 0
    if (found.st_dev, found.st_ino) in seen:
        return 0
    seen.add((found.st_dev, found.st_ino))
    return found.st_blocks * 512
