"""The links of a host's releases: which one is ``current``, which was before, and switching between them.

Layout: see venv.py. A link is replaced by one rename, so that ``current`` names a whole release at every moment.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Iterator, List, Mapping, Optional, Sequence

from . import release, turns
from .refusal import Refusal
from .release import ReleaseRefused

#: File of the root that the installation under way holds, with who it is in it.
LOCK = ".installing"


@dataclass(frozen=True)
class Installed:
    """An installed release, as its own manifest and locks tell."""

    id: str
    release: str  # the name, such as sglang-0.5.23; "" where the folder is not a finished release
    python: str
    built: str
    problems: List[str]  # how it differs from its own locks; empty where it is whole


def activate(root: str, identity: str) -> None:
    """Point ``current`` at a release, atomically, and keep the one before as ``previous``."""
    before = linked(root, "current")
    if before and before != identity:
        _link(root, "previous", before)
    _link(root, "current", identity)


def installed(root: str, identity: str, foreign: Mapping[str, Sequence[str]] = {}) -> Optional[Installed]:
    """Return an installed release, compared with its own locks and manifest; None where there is no such folder."""
    path = os.path.join(root, "releases", identity)
    if not identity or not os.path.isdir(path):
        return None
    manifest = release.read_manifest(path)
    if manifest is None:
        return Installed(identity, "", "", "", ["it has no manifest, so it was never proven"])
    problems = []
    for name, recorded in sorted(manifest.environments.items()):
        packages = release.site_packages(os.path.join(path, release.folder_of(name)), manifest.python)
        with open(os.path.join(path, release.lock_of(name)), encoding="utf-8") as stream:
            pins = release.parse_lock(stream.read(), release.lock_of(name))
        found = release.installed_packages(packages)
        drift = release.compare(pins, found, foreign.get(name, ()), recorded.files, release.fingerprints(packages))
        problems += [f"{name}: {line}" for line in drift.lines()]
        if not os.path.exists(os.path.join(path, release.folder_of(name), "bin", "python")):
            problems.append(f"{name}: it has no interpreter")
    return Installed(identity, manifest.release, manifest.python, manifest.built, problems)


def switch(
    root: str,
    identity: str,
    foreign: Mapping[str, Sequence[str]] = {},
    rehearse: bool = False,
    wait_s: float = 0.0,
) -> None:
    """Point ``current`` at an installed release that is whole, under the host's lock. Raises ReleaseRefused."""
    with turn(root, f"switches to {identity}", wait_s):
        found = installed(root, identity, foreign)
        if found is None or found.problems:
            words = "; ".join(found.problems[:5]) if found else "it is not installed"
            remedy = "run playbooks/runtime.yml with pd_release set to it: that repairs or installs it, and switches"
            raise ReleaseRefused([Refusal(f"release {identity}", words, "a whole release on this host", remedy)])
        if not rehearse:
            activate(root, identity)


def linked(root: str, name: str) -> str:
    """Return the id that a link of the root points at, "" where there is none."""
    try:
        return os.path.basename(os.readlink(os.path.join(root, name)))
    except OSError:
        return ""


def _link(root: str, name: str, identity: str) -> None:
    draft = os.path.join(root, f".{name}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(draft)
    os.symlink(os.path.join("releases", identity), draft)
    os.replace(draft, os.path.join(root, name))


@contextlib.contextmanager
def turn(root: str, what: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the root's lock for ``what``. Raises ReleaseRefused with the holder's name where another run keeps it."""
    try:
        with turns.turn(os.path.join(root, LOCK), what, wait_s):
            yield
    except turns.Busy as busy:
        remedy = "wait until it is done, then run the playbook again, or let it wait longer: -e sglang_runtime_wait=900"
        if busy.holder:
            remedy += f"; where it hangs, kill {busy.holder.pid}: the release that serves does not depend on it"
        needed = "one installation at a time on a host"
        raise ReleaseRefused([Refusal(f"installation into {root}", str(busy), needed, remedy)]) from None
