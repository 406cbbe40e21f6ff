"""A declared set of files and folders: compare with the disk, then make it so, all or nothing.

The role renders what should be; this compares and writes. New contents are staged beside their
targets first and renamed only when all of them lie on disk, so a full disk changes nothing.

A file of which only comments, owner or mode change keeps its time: whoever compares that time with the start of a
process (pd_units) then has no reason to restart it for a reworded explanation or a chmod.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import grp
import os
import pwd
import shutil
import stat
from dataclasses import dataclass, field
from typing import Dict, Iterable, Iterator, List, Optional, Tuple


@dataclass(frozen=True)
class Entry:
    """One file (``content`` is its text) or one folder (``content`` is None)."""

    path: str
    content: Optional[str] = None
    mode: int = 0o644
    owner: str = "root"
    group: str = "root"


@dataclass(frozen=True)
class Change:
    """What differs at one path.

    ``action`` is create, update, comments (only lines that start with #), attributes or remove.
    """

    path: str
    action: str
    before: str = ""
    after: str = ""


@dataclass
class FilesPlan:
    changes: List[Change] = field(default_factory=list)
    entries: Dict[str, Entry] = field(default_factory=dict)


class FilesError(RuntimeError):
    """The declared set cannot be realised; nothing was changed unless the message says so."""


def plan(entries: Iterable[Entry], owned: Iterable[str] = ()) -> FilesPlan:
    """Compare the declared entries with the disk.

    ``owned`` are glob patterns; whatever matches one and is not declared is to be removed.
    """
    result = FilesPlan()
    for entry in entries:
        if not os.path.isabs(entry.path) or os.path.normpath(entry.path) != entry.path:
            raise FilesError(f"{entry.path!r}: a declared path must be absolute and without '..'")
        if entry.path in result.entries:
            raise FilesError(f"{entry.path}: declared twice")
        result.entries[entry.path] = entry
        with _told(entry.path, _NOTHING):
            change = _compare(entry)
        if change:
            result.changes.append(change)
    strays = sorted({match for pattern in owned for match in glob.glob(pattern)} - set(result.entries))
    for path in strays:
        if not any(declared.startswith(path + "/") for declared in result.entries):
            result.changes.append(Change(path, "remove", before=_describe(path)))
    return result


def apply(todo: FilesPlan) -> None:
    """Carry out a plan. Raises FilesError; while contents are staged, what was staged goes and the targets stay."""
    folders = [
        todo.entries[c.path] for c in todo.changes if c.action != "remove" and todo.entries[c.path].content is None
    ]
    files = [
        todo.entries[c.path] for c in todo.changes if c.action != "remove" and todo.entries[c.path].content is not None
    ]
    same = {c.path for c in todo.changes if c.action in ("comments", "attributes")}
    ids = {entry.path: _ids(entry) for entry in folders + files}
    staged: List[Tuple[str, str]] = []
    try:
        for entry in sorted(folders, key=lambda item: item.path):
            with _told(entry.path, _NOTHING):
                if os.path.islink(entry.path) or os.path.isfile(entry.path):
                    raise FilesError(f"{entry.path} is not a folder; move it away, then run again. {_NOTHING}.")
                os.makedirs(entry.path, exist_ok=True)
                os.chmod(entry.path, entry.mode)
                os.chown(entry.path, *ids[entry.path])
        for entry in files:
            with _told(entry.path, _NOTHING):
                staged.append((_stage(entry, ids[entry.path], entry.path in same), entry.path))
        for _, path in staged:
            if os.path.isdir(path) and not os.path.islink(path):
                raise FilesError(f"{path} is a folder where a file belongs; move it away, then run again. {_NOTHING}.")
        for temporary, path in staged:
            with _told(path, _PART):
                os.replace(temporary, path)
    finally:
        for temporary, _ in staged:
            if os.path.lexists(temporary):
                os.unlink(temporary)
    for change in todo.changes:
        if change.action == "remove":
            with _told(change.path, _PART):
                _remove(change.path)


def _stage(entry: Entry, ids: Tuple[int, int], keep_time: bool) -> str:
    """Write a file's new content beside it and return where; nothing is left where that fails."""
    folder, name = os.path.split(entry.path)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".{name}.pdstack-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as handle:
            os.fchmod(handle.fileno(), entry.mode)
            os.fchown(handle.fileno(), *ids)
            handle.write(entry.content or "")
            handle.flush()
            os.fsync(handle.fileno())
        if keep_time:
            kept = os.lstat(entry.path)
            os.utime(temporary, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    except OSError:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        raise
    return temporary


_NOTHING = "No file was changed"
_PART = "Some of the files were changed, and the next run goes on from there"
_REMEDIES = {
    errno.ENOSPC: "free space there (`df -h`, and `df -i` for inodes)",
    errno.EDQUOT: "free space there, or raise the quota",
    errno.EROFS: "mount that file system for writing; `dmesg` says why it is not",
    errno.EIO: "look at the disk: `dmesg` has its errors",
    errno.EPERM: "see `lsattr` for an immutable flag",
    errno.EEXIST: "move away this file, where a folder belongs",
    errno.EBUSY: "unmount what is mounted there",
}


@contextlib.contextmanager
def _told(path: str, state: str) -> Iterator[None]:
    """Make an error of the file system one for the operator: the path, the reason, how far it came, what to do."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "mend that")
        place = error.filename if error.errno == errno.EEXIST else path
        raise FilesError(f"{place}: {error.strerror or error}. {state}; {remedy}, then run again.") from error


def effective(todo: FilesPlan) -> List[str]:
    """Return the paths of which more than comments or attributes differ."""
    return [change.path for change in todo.changes if change.action not in ("comments", "attributes")]


def diff(todo: FilesPlan) -> List[Dict[str, str]]:
    """Return the changes as Ansible shows them."""
    heads = {change.path: f"{change.path} ({change.action})" for change in todo.changes}
    return [
        {
            "before_header": heads[change.path],
            "after_header": heads[change.path],
            "before": change.before,
            "after": change.after,
        }
        for change in todo.changes
    ]


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _ids(entry: Entry) -> Tuple[int, int]:
    try:
        return pwd.getpwnam(entry.owner).pw_uid, grp.getgrnam(entry.group).gr_gid
    except KeyError as error:
        raise FilesError(f"{entry.path}: {error.args[0]}; nothing was changed") from error


def _compare(entry: Entry) -> Optional[Change]:
    if not os.path.lexists(entry.path):
        return Change(entry.path, "create", after=entry.content if entry.content is not None else _wanted(entry))
    found = os.lstat(entry.path)
    if entry.content is not None:
        if not stat.S_ISREG(found.st_mode):
            return Change(entry.path, "update", before=_describe(entry.path), after=entry.content)
        before = _read(entry.path)
        if before != entry.content:
            action = "comments" if _settings(before) == _settings(entry.content) else "update"
            return Change(entry.path, action, before=before, after=entry.content)
    elif not stat.S_ISDIR(found.st_mode):
        return Change(entry.path, "update", before=_describe(entry.path), after=_wanted(entry))
    actual = f"mode {stat.S_IMODE(found.st_mode):04o} {_name(found)}\n"
    if actual != _wanted(entry):
        return Change(entry.path, "attributes", before=actual, after=_wanted(entry))
    return None


def _settings(text: str) -> List[str]:
    return [line for line in text.split("\n") if line and not line.startswith("#")]


def _wanted(entry: Entry) -> str:
    return f"mode {entry.mode:04o} {entry.owner}:{entry.group}\n"


def _name(found: os.stat_result) -> str:
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    try:
        group = grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        group = str(found.st_gid)
    return f"{owner}:{group}"


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace", newline="") as handle:
        return handle.read()


def _describe(path: str) -> str:
    if os.path.islink(path):
        return f"link to {os.readlink(path)}\n"
    if os.path.isdir(path):
        return f"folder with {len(os.listdir(path))} entries\n"
    try:
        return _read(path)
    except OSError as error:
        return f"unreadable: {error.strerror}\n"
