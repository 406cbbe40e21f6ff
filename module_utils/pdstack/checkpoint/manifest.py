"""What we placed, as it looked when its bytes were last proven.

A stat is trusted in place of a hash only while size, mtime, ctime, inode and device are those of
the manifest (ctime cannot be set back by utime) and all times are older than the manifest: git's
rule for racily clean entries, https://git-scm.com/docs/racy-git.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
from dataclasses import dataclass, field
from typing import Dict, List, Optional

from .. import codec
from . import pages
from .errors import CheckpointError
from .listing import Listing, RepoFile

MANIFEST_NAME = ".pdstack-manifest.json"
SCHEMA = 1
CHUNK = 1 << 20  # bytes


@dataclass(frozen=True)
class Entry:
    """One placed file. ``verified``: seconds since the epoch when its digest was last computed."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int
    sha256: str
    verified: float


@dataclass(frozen=True)
class Manifest:
    """``listing`` is the whole repository's, ``files`` what was selected and placed.

    ``written_ns`` is the filesystem's own clock when the stats were taken.
    """

    listing: Listing
    files: Dict[str, Entry] = field(default_factory=dict)
    written_ns: int = 0
    schema: int = SCHEMA


def load(path: str) -> Optional[Manifest]:
    """Return the manifest at ``path``; None where it is missing or unreadable (then everything is rehashed)."""
    try:
        with open(path, encoding="utf-8") as stream:
            data = json.load(stream)
        found = codec.load(Manifest, data)
    except (OSError, ValueError):
        return None
    return found if found.schema == SCHEMA else None


def trusted(entry: Entry, stat: os.stat_result, written_ns: int) -> bool:
    """True while the stat alone proves that the file is the one that was hashed."""
    same = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev) == (
        entry.size,
        entry.mtime_ns,
        entry.ctime_ns,
        entry.inode,
        entry.device,
    )
    return same and max(entry.mtime_ns, entry.ctime_ns) < written_ns


def entry_of(stat: os.stat_result, sha256: str, verified: float) -> Entry:
    return Entry(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev, sha256, verified)


class Digests:
    """The running digests of one file: sha256 always, git's blob sha1 where the hub publishes only that."""

    def __init__(self, want: RepoFile) -> None:
        self._want = want
        self._sha256 = hashlib.sha256()
        self._sha1 = None if want.sha256 else hashlib.sha1(b"blob %d\0" % want.size)  # git's format, not a secret

    def update(self, data: memoryview) -> None:
        self._sha256.update(data)
        if self._sha1 is not None:
            self._sha1.update(data)

    def matches(self) -> bool:
        if self._sha1 is not None:
            return self._sha1.hexdigest() == self._want.git_sha1
        return self._sha256.hexdigest() == self._want.sha256

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()


def hash_prefix(fd: int, length: int, digests: Digests) -> int:
    """Feed at most ``length`` bytes from the start of ``fd`` to ``digests``; return how many there were.

    Buffer, offset and length of each read are what a descriptor with O_DIRECT wants.
    """
    buffer = memoryview(mmap.mmap(-1, CHUNK))
    done = 0
    while done < length:
        try:
            got = min(os.preadv(fd, [buffer], done), length - done)
        except OSError as error:
            if error.errno != errno.EINVAL or not pages.bypass(fd, False):
                raise
            continue
        if not got:
            break
        digests.update(buffer[:got])
        done += got
    return done


def verify_file(path: str, want: RepoFile, now: float) -> Optional[Entry]:
    """Hash ``path`` and return its entry, None unless it is a regular file of exactly those bytes.

    The bytes come from the disk: the page cache would hide what has rotted below it, and would lose what a running
    engine has there. The stat is taken before and after: a file that changes under the hash is not verified.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        before = os.fstat(fd)
        if before.st_size != want.size:
            return None
        digests = Digests(want)
        pages.bypass(fd, True)
        try:
            done = hash_prefix(fd, want.size, digests)
        except OSError:  # an unreadable sector is what we look for
            return None
        after = os.fstat(fd)
        moved = (before.st_mtime_ns, before.st_ctime_ns, before.st_size) != (
            after.st_mtime_ns,
            after.st_ctime_ns,
            after.st_size,
        )
        if done != want.size or moved or not digests.matches():
            return None
        return entry_of(after, digests.sha256, now)
    finally:
        os.close(fd)


def oldest_verification(files: Dict[str, Entry]) -> Optional[float]:
    """Return when the least recently hashed file was hashed: the last moment all bytes were proven."""
    times: List[float] = [entry.verified for entry in files.values()]
    return min(times) if times else None


def require(found: Optional[Manifest], directory: str) -> Manifest:
    if found is None:
        raise CheckpointError(
            "not-verified",
            f"{directory} has no manifest",
            "a directory that pd_checkpoint placed",
            "run the module with state=present",
        )
    return found
