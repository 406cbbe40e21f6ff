"""Take away exactly what was placed."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat as stats
from dataclasses import dataclass, field
from typing import Dict, List, Optional

from . import links, manifest as manifests
from .listing import Listing
from .manifest import MANIFEST_NAME
from .store import Store, load_manifest, lstat, tree


@dataclass(frozen=True)
class Retirement:
    """``places``: folders with a manifest of ours, ``files``: what else is ours, ``foreign``: a folder that is not."""

    places: List[str] = field(default_factory=list)
    files: List[str] = field(default_factory=list)
    before: Dict[str, str] = field(default_factory=dict)
    foreign: Optional[str] = None

    @property
    def needed(self) -> bool:
        return bool(self.places or self.files)


def plan(store: Store) -> Retirement:
    """Return what there is to take away."""
    places = [base for base in (store.final, store.staging) if load_manifest(base) is not None]
    listing = _listing(places)
    files = [store.status, store.scrub, store.repairs]
    if listing is not None:
        names = [file.key + suffix for file in listing.files for suffix in ("", ".link", ".twin")]
        files += [os.path.join(store.partials, name) for name in names]
        files += _set_aside(store, listing)
    foreign = store.final if store.final not in places and lstat(store.final) is not None else None
    before = {} if listing is None else {file.path: file.key for file in listing.files}
    return Retirement(places, [path for path in files if lstat(path) is not None], before, foreign)


def _set_aside(store: Store, listing: Listing) -> List[str]:
    """Return what lies in quarantine and is a file of the listing all the same: one that was deselected."""
    wanted = {file.path: file for file in listing.files}
    found: List[str] = []
    for path in tree(store.quarantine):
        file, full = wanted.get(path.rpartition(".")[0]), os.path.join(store.quarantine, path)
        if file is not None and manifests.verify_file(full, file, 0.0) is not None:
            found.append(full)
    return found


def _listing(places: List[str]) -> Optional[Listing]:
    for base in places:
        found = load_manifest(base)
        if found is not None:
            return found.listing
    return None


def carry_out(store: Store, retirement: Retirement) -> List[str]:
    """Remove it; return what stays in the folder because it is not ours. The manifest goes last."""
    stay: List[str] = []
    for base in retirement.places:
        stay += _remove(store, base)
    for path in retirement.files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    _remove_empty(store)
    return stay


def _remove(store: Store, base: str) -> List[str]:
    found = load_manifest(base)
    for path in [] if found is None else [file.path for file in found.listing.files]:
        full = os.path.join(base, path)
        before = lstat(full)
        if before is None or stats.S_ISDIR(before.st_mode):
            continue
        others = store.others() if before.st_nlink > 1 else []
        twin = links.same_inode(others, before)
        os.unlink(full)
        if twin is not None:
            links.follow(others, before, os.lstat(twin))
    os.unlink(os.path.join(base, MANIFEST_NAME))
    _remove_folders(base)
    return [os.path.join(base, path) for path in (tree(base) if os.path.isdir(base) else [])]


def _remove_folders(base: str) -> None:
    """Take away the folders below ``base``, and itself, that hold no file."""
    for folder, _, _ in os.walk(base, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _remove_empty(store: Store) -> None:
    """Take away our empty work folders, and the lock where nothing is left to protect."""
    _remove_folders(store.quarantine)
    shutil.rmtree(store.scratch, ignore_errors=True)  # of a run that was killed
    for name in ("staging", "partial", "status", "scrub", "repairs", "quarantine"):
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(store.work, name))
    left = set(os.listdir(store.work))
    if left <= {"lock", "clock", "manifest.new"}:
        for name in sorted(left, key=lambda item: item == "lock"):
            os.unlink(os.path.join(store.work, name))
        os.rmdir(store.work)
