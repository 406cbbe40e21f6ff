"""What goes when releases are pruned: those beyond the ones to keep, with their wheels and JIT caches.

A JIT cache belongs to a release's name (``<caches>/<name>/<toolkit>``), a release on a host to a name and a hash of its
locks, so that a cache goes with the last release of its name. Caches of other names are somebody else's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from typing import Callable, List, Set, Tuple

from . import release


@dataclass(frozen=True)
class Claim:
    """What the run that prunes is for: a release by name and id, and the ids that stay, linked as it leaves them."""

    name: str
    id: str
    spared: Set[str]


@dataclass(frozen=True)
class _Built:
    built: str  # UTC, ISO 8601
    id: str
    name: str
    house: str  # folder of its wheels


def surplus(
    root: str, caches: str, keep: int, claim: Claim, in_use: Callable[[str], List[str]]
) -> List[Tuple[str, str]]:
    """Return what is to be pruned, with the reason of each: ids of releases, and paths of their JIT caches and wheels.

    What belongs to a release stands before it, so that a run that is killed in between leaves the next one the rest.
    Nothing that ``claim`` spares or a process has mapped (``in_use`` says which names below a folder) is in it; that is
    looked at only where something is beyond ``keep``.
    """
    folder = os.path.join(root, "releases")
    built = sorted((item for item in _installed(folder) if item.id != claim.id), key=lambda item: item.built)
    built.reverse()
    beyond = [item for item in built[max(1, keep) - 1 :] if item.id not in claim.spared]
    if not beyond:
        return []
    busy, hot = set(in_use(folder)), set(in_use(caches))
    gone = [item for item in beyond if item.id not in busy and item.name not in hot]
    left = [item for item in built if item not in gone]
    names = {claim.name, *(item.name for item in left)}
    found: List[Tuple[str, str]] = []
    for item in gone:
        owned = {"JIT cache": os.path.join(caches, item.name), "wheels": os.path.join(root, "wheelhouse", item.house)}
        if item.name not in names:  # the last one of its name
            found += [
                (path, f"{what} of {item.name}, which is pruned") for what, path in owned.items() if os.path.isdir(path)
            ]
        names.add(item.name)
        found.append((item.id, f"{keep} releases are kept and nothing uses it"))
    return found


def remove(root: str, subject: str) -> None:
    """Remove one item of ``surplus``."""
    path = subject if os.path.isabs(subject) else os.path.join(root, "releases", subject)
    shutil.rmtree(path, ignore_errors=True)


def drop_interpreters(root: str) -> None:
    """Remove carried interpreters that no installed release links to."""
    manifests = [release.read_manifest(path) for path in _folders(os.path.join(root, "releases"))]
    used = {manifest.interpreter for manifest in manifests if manifest}
    for path in _folders(os.path.join(root, "python")):
        if not any(interpreter.startswith(path + "/") for interpreter in used):
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # not there, or one is in it
        os.rmdir(os.path.join(root, "python"))


def _installed(folder: str) -> List[_Built]:
    found = []
    for path in _folders(folder):
        manifest = release.read_manifest(path)
        if manifest is not None:
            house = f"{manifest.release}-py{manifest.python.replace('.', '')}"
            found.append(_Built(manifest.built, os.path.basename(path), manifest.release, house))
    return found


def _folders(parent: str) -> List[str]:
    try:
        return [os.path.join(parent, name) for name in os.listdir(parent)]
    except OSError:
        return []
