"""What to do with each file: a pure function of the listing, the manifest and the stats."""

from __future__ import annotations

import os
import stat as stats
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

from .listing import Listing, RepoFile
from .manifest import Manifest, trusted

KEEP = "keep"  # the stat proves it
HASH = "hash"  # only its bytes can tell
FETCH = "fetch"


@dataclass(frozen=True)
class Step:
    """``reason`` is for the operator: missing, size 10 of 20, changed since ..., found corrupt by the scrub."""

    file: RepoFile
    action: str
    reason: str


@dataclass(frozen=True)
class Plan:
    steps: List[Step] = field(default_factory=list)
    strays: List[str] = field(default_factory=list)  # files that the listing does not have

    def of(self, action: str) -> List[Step]:
        return [step for step in self.steps if step.action == action]


def decide(
    listing: Listing,
    manifest: Optional[Manifest],
    lookup: Callable[[str], Optional[os.stat_result]],
    present: List[str],
    corrupt: Dict[str, str],
    rehash: Callable[[RepoFile], bool],
) -> Plan:
    """Return the plan.

    ``lookup`` gives the lstat of a path, ``present`` all paths on disk, ``corrupt`` what the scrub
    found (path to words), ``rehash`` says whether a file with a good stat is to be hashed anyway.
    """
    steps: List[Step] = []
    for file in listing.files:
        steps.append(Step(file, *_one(file, manifest, lookup(file.path), corrupt.get(file.path), rehash)))
    known = {file.path for file in listing.files}
    return Plan(steps, [path for path in present if path not in known])


def _one(
    file: RepoFile,
    manifest: Optional[Manifest],
    stat: Optional[os.stat_result],
    corrupt: Optional[str],
    rehash: Callable[[RepoFile], bool],
) -> tuple[str, str]:
    if stat is None:
        return FETCH, "missing"
    if not stats.S_ISREG(stat.st_mode):
        return FETCH, "not a regular file"
    if stat.st_size != file.size:
        return FETCH, f"{stat.st_size} of {file.size} bytes"
    if corrupt is not None:
        return FETCH, corrupt
    entry = manifest.files.get(file.path) if manifest is not None else None
    if manifest is None or entry is None:
        return HASH, "not in the manifest"
    if file.sha256 is not None and entry.sha256 != file.sha256:
        return HASH, "placed with another digest"
    if not trusted(entry, stat, manifest.written_ns):
        return HASH, "touched since it was verified"
    if rehash(file):
        return HASH, "asked for"
    return KEEP, "intact"
