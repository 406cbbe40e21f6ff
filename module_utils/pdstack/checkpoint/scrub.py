"""Find bit rot: rehash some files a night, remember what was proven and what was found corrupt.

The scrub only reads the checkpoint and writes its own document, so it needs no lock and no engine
has to stop. The next run of state=present fetches what it found.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

from .. import codec
from . import manifest as manifests
from .manifest import Entry, Manifest
from .progress import write_json
from .store import Store, load_manifest, lstat

CORRUPT = "found corrupt by the scrub"


@dataclass(frozen=True)
class Finding:
    """Holds while the file's inode and ctime are these. ``verified``: seconds since the epoch, of good bytes."""

    inode: int
    ctime_ns: int
    verified: float = 0.0
    corrupt: bool = False


@dataclass(frozen=True)
class Document:
    files: Dict[str, Finding] = field(default_factory=dict)


def load(store: Store) -> Document:
    return codec.kept(Document, store.scrub) or Document()


def _current(store: Store) -> Dict[str, Finding]:
    found: Dict[str, Finding] = {}
    for path, finding in load(store).files.items():
        stat = lstat(os.path.join(store.final, path))
        if stat is not None and (stat.st_ino, stat.st_ctime_ns) == (finding.inode, finding.ctime_ns):
            found[path] = finding
    return found


def findings(store: Store) -> Dict[str, str]:
    """Return path to words for each file that the scrub found corrupt and that has not been replaced since."""
    return {path: CORRUPT for path, finding in _current(store).items() if finding.corrupt}


def merge(entries: Dict[str, Entry], store: Store) -> Dict[str, Entry]:
    """Return the entries with the later of the two times at which each was proven."""
    merged = dict(entries)
    for path, finding in _current(store).items():
        entry = merged.get(path)
        if entry is not None and not finding.corrupt and finding.verified > entry.verified:
            merged[path] = Entry(**{**entry.__dict__, "verified": finding.verified})
    return merged


def proven(path: str, entries: Dict[str, Entry], store: Store) -> float:
    """Return when a file was last proven, whatever became of it since, in seconds since the epoch; 0 for unknown."""
    entry, finding = entries.get(path), load(store).files.get(path)
    return max(entry.verified if entry is not None else 0.0, finding.verified if finding is not None else 0.0)


def due(manifest: Manifest, store: Store, nights: int) -> List[str]:
    """Return the paths for tonight: those proven longest ago, enough that ``nights`` runs cover all bytes."""
    merged = merge(manifest.files, store)
    goal = math.ceil(sum(entry.size for entry in merged.values()) / max(1, nights))
    chosen: List[str] = []
    for path in sorted(merged, key=lambda item: (merged[item].verified, item)):
        if goal <= 0:
            break
        chosen.append(path)
        goal -= merged[path].size
    return chosen


def run(store: Store, nights: int, now: Callable[[], float], full: bool = False) -> Dict[str, Optional[str]]:
    """Scrub one checkpoint; return path to None for good files and to words for bad ones."""
    manifest = load_manifest(store.final)
    if manifest is None:
        return {}
    by_path = {file.path: file for file in manifest.listing.files}
    results: Dict[str, Optional[str]] = {}
    for path in sorted(manifest.files) if full else due(manifest, store, nights):
        full_path = os.path.join(store.final, path)
        before = lstat(full_path)
        if before is None or path not in by_path:
            results[path] = "missing"
            continue
        entry = manifests.verify_file(full_path, by_path[path], now())
        results[path] = None if entry is not None else CORRUPT
        after = lstat(full_path)
        if after is None or after.st_ctime_ns != before.st_ctime_ns or after.st_ino != before.st_ino:
            continue  # replaced meanwhile
        files = dict(load(store).files)
        old = files.get(path)
        proven = entry.verified if entry is not None else (old.verified if old is not None else 0.0)
        files[path] = Finding(before.st_ino, before.st_ctime_ns, proven, entry is None)
        os.makedirs(os.path.dirname(store.scrub), mode=0o755, exist_ok=True)
        write_json(store.scrub, codec.dump(Document(files)))
    return results
