"""Where things lie below the models' root, and the few operations that change names there.

::

    <root>/<organisation>--<name>@<commit>/          published, complete, manifest inside
    <root>/.pdstack/staging/<same name>/             verified files of a checkpoint not yet complete
    <root>/.pdstack/partial/<digest>                 bytes under way, kept between runs
    <root>/.pdstack/quarantine/<same name>/          files that did not belong, moved aside
    <root>/.pdstack/{status,scrub,repairs}/<same name>.json  progress; what the scrub found; what was replaced when
    <root>/.pdstack/lock                             one writer at a time, its owner inside
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat as stats
import time
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional

from .. import codec, space
from . import manifest as manifests
from .errors import CheckpointError
from .listing import RESERVED
from .manifest import MANIFEST_NAME, Entry, Manifest
from .progress import write_json

WORK = ".pdstack"


@dataclass(frozen=True)
class Store:
    """Paths of one checkpoint; ``name`` comes from listing.directory_name."""

    root: str
    name: str

    @property
    def work(self) -> str:
        return os.path.join(self.root, WORK)

    @property
    def final(self) -> str:
        return os.path.join(self.root, self.name)

    @property
    def staging(self) -> str:
        return os.path.join(self.work, "staging", self.name)

    @property
    def partials(self) -> str:
        return os.path.join(self.work, "partial")

    @property
    def quarantine(self) -> str:
        return os.path.join(self.work, "quarantine", self.name)

    @property
    def status(self) -> str:
        return os.path.join(self.work, "status", f"{self.name}.json")

    @property
    def scrub(self) -> str:
        return os.path.join(self.work, "scrub", f"{self.name}.json")

    @property
    def repairs(self) -> str:
        return os.path.join(self.work, "repairs", f"{self.name}.json")

    @property
    def scratch(self) -> str:
        """Of the programs that a source may need; it goes with the run."""
        return os.path.join(self.work, "scratch")

    @property
    def base(self) -> str:
        """The directory that holds the files now: the published one, else the staging one."""
        return self.final if os.path.isdir(self.final) else self.staging

    def prepare(self) -> None:
        """Make the directories that a run writes to."""
        for path in (self.root, self.partials, os.path.dirname(self.status), os.path.dirname(self.scrub)):
            os.makedirs(path, mode=0o755, exist_ok=True)

    def others(self) -> List[Store]:
        """Return the other checkpoints below the root, published ones only."""
        try:
            names = sorted(os.listdir(self.root))
        except OSError:
            return []
        found = [Store(self.root, name) for name in names if "@" in name and name != self.name]
        return [store for store in found if os.path.isfile(os.path.join(store.final, MANIFEST_NAME))]

    @contextlib.contextmanager
    def lock(self, purpose: str) -> Iterator[None]:
        """Hold the root's lock; raises CheckpointError that names the holder. The kernel frees it at any death."""
        os.makedirs(self.work, mode=0o755, exist_ok=True)
        path = os.path.join(self.work, "lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CheckpointError(
                    "locked",
                    f"another run works below {self.root}: {_owner(fd)}",
                    "one run at a time",
                    "wait for it, or stop it; what it fetched is kept",
                ) from None
            mine, named = os.fstat(fd), lstat(path)
            if named is None or named.st_ino != mine.st_ino:
                raise CheckpointError("locked", f"the lock below {self.root} was just removed", "", "run again")
            since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            text = json.dumps({"pid": os.getpid(), "purpose": purpose, "since": since})
            os.ftruncate(fd, 0)
            os.pwrite(fd, text.encode(), 0)
            yield
        finally:
            os.close(fd)


def _owner(fd: int) -> str:
    try:
        owner = json.loads(os.pread(fd, 4096, 0))
        return f"pid {owner['pid']}, {owner['purpose']}, since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "owner unknown"


def lstat(path: str) -> Optional[os.stat_result]:
    """Return the stat of the name itself, None where there is nothing."""
    try:
        return os.lstat(path)
    except OSError:
        return None


def make_parents(base: str, path: str) -> str:
    """Create the directories of ``path`` below ``base``; return the full path.

    Raises CheckpointError where a part is a symbolic link or a file: bytes must not leave ``base``.
    """
    current = base
    for part in path.split("/")[:-1]:
        current = os.path.join(current, part)
        with contextlib.suppress(FileExistsError):
            os.mkdir(current, 0o755)
        if not stats.S_ISDIR(os.lstat(current).st_mode):
            raise CheckpointError(
                "bad-input",
                f"{current} is not a directory of its own (a link or a file)",
                "a plain directory",
                f"remove {current} and run again",
            )
    return os.path.join(base, path)


def require_space(root: str, needed: int, min_free: int, name: str = "") -> None:
    """Raise CheckpointError unless ``needed`` bytes may come to the disk of ``root`` and leave ``min_free`` on it.

    ``name`` is the checkpoint that they are for; the error lists the others, and what earlier downloads left.
    """
    place = root
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    if needed and needed + min_free > free:
        others = space.removable(root, {name, ".pdstack"}) + space.removable(f"{root}/.pdstack/staging", {name})
        raise CheckpointError(
            "no-space",
            f"{place} has {free / 1e9:.2f} GB free",
            f"{needed / 1e9:.2f} GB to fetch and {min_free / 1e9:.2f} GB to stay free (min_free)",
            "free space, choose another dest, or retire a checkpoint that nothing serves any more. Others here: "
            + space.words(others, "none"),
        )


def tree(base: str) -> List[str]:
    """Return the relative paths of everything below ``base`` that is not a directory, our own files left out."""
    found: List[str] = []
    for folder, folders, names in os.walk(base):
        for name in list(folders):
            if os.path.islink(os.path.join(folder, name)):
                folders.remove(name)
                names.append(name)
        found += [os.path.relpath(os.path.join(folder, name), base) for name in names]
    return sorted(path for path in found if not path.startswith(RESERVED))


def sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def clock_after(work: str, entries: Dict[str, Entry]) -> int:
    """Return the filesystem's time in ns, once it is later than every time in ``entries``.

    The filesystem's clock ticks coarsely: a manifest of the same tick would make fresh entries
    racy, and the next run would rehash them for nothing.
    """
    newest = max((max(e.mtime_ns, e.ctime_ns) for e in entries.values()), default=0)
    path = os.path.join(work, "clock")
    now = 0
    for _ in range(50):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.utime(fd)
            now = os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
        if now > newest:
            break
        time.sleep(0.005)
    return now  # where the clock stepped back the entries stay racy and are rehashed, which is safe


def save_manifest(work: str, directory: str, manifest: Manifest) -> Manifest:
    """Write the manifest into ``directory``, by way of ``work``, and return it as written."""
    written = Manifest(manifest.listing, manifest.files, clock_after(work, manifest.files))
    path = os.path.join(directory, MANIFEST_NAME)
    write_json(path, codec.dump(written), temporary=os.path.join(work, "manifest.new"))
    return written


def load_manifest(directory: str) -> Optional[Manifest]:
    return manifests.load(os.path.join(directory, MANIFEST_NAME))
