"""Revisions below one root share unchanged files as hard links, and each keeps its own proof of them."""

from __future__ import annotations

import os
import stat as stats
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Set

from . import manifest as manifests, scrub
from .manifest import Entry, Manifest
from .store import Store, load_manifest, lstat, save_manifest


@dataclass(frozen=True)
class Twin:
    """A proven file of another checkpoint."""

    path: str
    entry: Entry


def intact(stores: Sequence[Store], wanted: Set[str]) -> Dict[str, Twin]:
    """Return by sha256 what ``stores`` have of ``wanted`` and what their stats still prove."""
    have: Dict[str, Twin] = {}
    for store in stores if wanted else []:
        found = load_manifest(store.final)
        corrupt = scrub.findings(store)
        for path, entry in {} if found is None else found.files.items():
            full = os.path.join(store.final, path)
            stat = lstat(full)
            if (
                found is not None
                and entry.sha256 in wanted
                and path not in corrupt
                and stat is not None
                and stats.S_ISREG(stat.st_mode)
                and manifests.trusted(entry, stat, found.written_ns)
            ):
                have[entry.sha256] = Twin(full, entry)
    return have


def same_inode(stores: Sequence[Store], stat: os.stat_result) -> Optional[str]:
    """Return the path of another name of the inode that ``stores`` know, None where they know none."""
    for store in stores:
        found = load_manifest(store.final)
        for path, entry in {} if found is None else found.files.items():
            if entry.inode == stat.st_ino and entry.device == stat.st_dev:
                return os.path.join(store.final, path)
    return None


def follow(stores: List[Store], before: os.stat_result, after: os.stat_result) -> None:
    """Tell the other checkpoints that an inode they share got a new ctime because a link came or went.

    Only an entry that was trusted by its whole stat before is moved on; all else stays suspect.
    """
    for store in stores:
        found = load_manifest(store.final)
        if found is None:
            continue
        files = dict(found.files)
        for path, entry in found.files.items():
            if entry.inode == before.st_ino and manifests.trusted(entry, before, found.written_ns):
                files[path] = manifests.entry_of(after, entry.sha256, entry.verified)
        if files != found.files:
            save_manifest(store.work, store.final, Manifest(found.listing, files))
