"""What a repository holds at one commit: the trust root of everything else.

Three documents give a listing: the hub's tree API, ``pdstack-listing.json`` beside the files of a
mirror, and the metadata that ``hf download`` leaves in a local directory. Names come from
outside, so none is used before ``check_path`` has passed it.
"""

from __future__ import annotations

import fnmatch
import os
import re
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Optional, Sequence

from .. import codec
from .errors import CheckpointError

LISTING_NAME = "pdstack-listing.json"
RESERVED = ".pdstack"  # our own names inside a published directory start with this

_HEX = {40: re.compile(r"[0-9a-f]{40}"), 64: re.compile(r"[0-9a-f]{64}")}
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")


@dataclass(frozen=True)
class RepoFile:
    """One file of a repository. ``size`` in bytes.

    The hub publishes a sha256 for LFS and xet files and git's blob sha1 for the small rest; at
    least one of the two is set.
    """

    path: str
    size: int
    sha256: Optional[str] = None
    git_sha1: Optional[str] = None
    xet_hash: Optional[str] = None

    @property
    def key(self) -> str:
        """Name of the content: partial files and peers' addresses are named by it."""
        return f"sha256-{self.sha256}" if self.sha256 else f"git-sha1-{self.git_sha1}"


@dataclass(frozen=True)
class Listing:
    """All files of ``repo`` at ``commit`` (40 hex digits), ascending by path."""

    repo: str
    commit: str
    files: List[RepoFile] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(item.size for item in self.files)


def is_commit(revision: str) -> bool:
    return _HEX[40].fullmatch(revision) is not None


def check_repo(repo: str) -> None:
    """Raise CheckpointError unless ``repo`` is ``organisation/name`` in the hub's alphabet."""
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        raise CheckpointError("bad-input", f"repository {repo!r}", "organisation/name as the hub writes it")


def directory_name(repo: str, commit: str) -> str:
    """Return ``<organisation>--<name>@<commit>``, the name of the published directory."""
    check_repo(repo)
    if not is_commit(commit):
        raise CheckpointError("bad-input", f"revision {commit!r}", "a commit of 40 lower-case hex digits")
    return f"{repo.replace('/', '--')}@{commit}"


def check_path(path: str) -> None:
    """Raise CheckpointError for a name that could leave the directory or confuse a shell or a person."""

    def refuse(why: str) -> None:
        raise CheckpointError(
            "bad-input",
            f"the listing names {path!r}: {why}",
            "plain relative paths",
            "do not use this repository; tell its owner, the name looks hostile",
        )

    if not path or len(path.encode("utf-8", "surrogatepass")) > 1024:
        refuse("empty or longer than 1024 bytes")
    if any(ord(char) < 32 or ord(char) == 127 or 0xD800 <= ord(char) < 0xE000 for char in path) or "\\" in path:
        refuse("control characters, surrogates or backslashes")
    for part in path.split("/"):
        if part in ("", ".", ".."):
            refuse("absolute, or with empty, '.' or '..' parts")
        if len(part.encode("utf-8")) > 255 or part != part.strip():
            refuse("a part longer than 255 bytes, or with spaces at an end")
        if part.startswith(RESERVED):
            refuse(f"{RESERVED}* is reserved")


def make(repo: str, commit: str, files: Iterable[RepoFile]) -> Listing:
    """Return the checked listing; raises CheckpointError for any file that may not be placed."""
    directory_name(repo, commit)
    chosen: Dict[str, RepoFile] = {}
    for item in files:
        check_path(item.path)
        if item.path in chosen:
            raise CheckpointError("bad-input", f"the listing names {item.path!r} twice")
        if item.size < 0:
            raise CheckpointError("bad-input", f"{item.path!r} has size {item.size}")
        digests = ((item.sha256, 64), (item.git_sha1, 40))
        if not any(value for value, _ in digests):
            raise CheckpointError("bad-input", f"{item.path!r} has no digest", "sha256 or git_sha1 for every file")
        for value, length in digests:
            if value is not None and not _HEX[length].fullmatch(value):
                raise CheckpointError("bad-input", f"{item.path!r}: digest {value!r} is not {length} hex digits")
        chosen[item.path] = item
    for path in chosen:
        parent = os.path.dirname(path)
        while parent:
            if parent in chosen:
                raise CheckpointError("bad-input", f"the listing names {parent!r} as a file and as a directory")
            parent = os.path.dirname(parent)
    return Listing(repo, commit, [chosen[path] for path in sorted(chosen)])


def from_document(data: Any, repo: str, commit: str) -> Listing:
    """Return the listing of a ``pdstack-listing.json`` document, which must be for this repo and commit."""
    try:
        found = codec.load(Listing, data)
    except codec.CodecError as error:
        raise CheckpointError("no-listing", f"{LISTING_NAME}: {error}") from None
    if (found.repo, found.commit) != (repo, commit):
        raise CheckpointError(
            "no-listing",
            f"{LISTING_NAME} is for {found.repo}@{found.commit}",
            f"{repo}@{commit}",
            "point the source at a copy of that commit, or change the revision",
        )
    return make(repo, commit, found.files)


def to_document(listing: Listing) -> Any:
    """Return the plain JSON value of ``pdstack-listing.json``."""
    return codec.dump(listing)


def from_tree(repo: str, commit: str, entries: Iterable[Any]) -> Listing:
    """Return the listing of the hub's ``/api/models/REPO/tree/COMMIT?recursive=true`` entries."""
    files: List[RepoFile] = []
    for entry in entries:
        try:
            if entry["type"] != "file":
                continue
            lfs = entry.get("lfs") or {}
            files.append(
                RepoFile(
                    path=str(entry["path"]),
                    size=int(lfs.get("size", entry["size"])),
                    sha256=lfs.get("oid") or lfs.get("sha256"),
                    git_sha1=None if lfs else entry["oid"],
                    xet_hash=entry.get("xetHash"),
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise CheckpointError(
                "no-listing", f"the hub's tree holds {str(entry)[:200]!r}", "type, path, size and oid"
            ) from None
    return make(repo, commit, files)


def from_hf_download(directory: str, repo: str, commit: str) -> Optional[Listing]:
    """Return the listing that ``hf download --local-dir`` left in ``directory``, None where it left none.

    Each ``.cache/huggingface/download/PATH.metadata`` holds the commit, the ETag (sha256 for LFS
    files, git sha1 for others) and a time. Files of another commit are not taken.
    """
    base = os.path.join(directory, ".cache", "huggingface", "download")
    files: List[RepoFile] = []
    for folder, _, names in os.walk(base):
        for name in names:
            if not name.endswith(".metadata"):
                continue
            path = os.path.relpath(os.path.join(folder, name), base)[: -len(".metadata")]
            try:
                with open(os.path.join(folder, name), encoding="utf-8") as stream:
                    found, etag = stream.read(4096).split("\n")[:2]
                size = os.stat(os.path.join(directory, path)).st_size
            except (OSError, ValueError):
                continue
            if found.strip() == commit:
                etag = etag.strip()
                files.append(
                    RepoFile(path, size, sha256=etag) if len(etag) == 64 else RepoFile(path, size, git_sha1=etag)
                )
    return make(repo, commit, files) if files else None


def select(listing: Listing, include: Sequence[str], exclude: Sequence[str]) -> Listing:
    """Return the files that match any of ``include`` (all, where empty) and none of ``exclude`` (shell patterns)."""

    def wanted(path: str) -> bool:
        if include and not any(fnmatch.fnmatchcase(path, pattern) for pattern in include):
            return False
        return not any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude)

    files = [item for item in listing.files if wanted(item.path)]
    if not files:
        raise CheckpointError(
            "bad-input", f"include {list(include)} and exclude {list(exclude)} leave no file of {listing.repo}"
        )
    return Listing(listing.repo, listing.commit, files)
