"""Where bytes may come from. No source is believed: every byte is hashed against the listing."""

from __future__ import annotations

import json
import os
import random
import re
import urllib.parse
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Protocol, TypeVar

from . import listing as listings
from .errors import BUSY, MISSING, TRANSIENT, WRONG, CheckpointError, SourceError
from .listing import Listing, RepoFile
from .transport import Body, Response, Transport, get_json, shown

T = TypeVar("T")
HUB_ENDPOINT = "https://huggingface.co"
MAX_PAGES = 200


@dataclass
class Stream:
    """``offset``: the file's byte that the body starts with (0 where a server ignored Range).

    ``proven``: the source has hashed the whole file; one that passes bytes on as they arrive has not.
    """

    offset: int
    body: Body
    proven: bool = True


class Source(Protocol):
    """``name`` is what an operator reads in errors and in the count of bytes by source."""

    @property
    def name(self) -> str: ...

    def listing(self, repo: str, commit: str) -> Optional[Listing]:
        """Return the listing that this source carries, None where it carries none. Raises SourceError."""

    def open(self, file: RepoFile, offset: int) -> Stream:
        """Return the bytes of ``file`` from ``offset`` or from an earlier byte. Raises SourceError."""


class _FileBody:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def readinto(self, buffer: memoryview) -> int:
        try:
            return os.readv(self._fd, [buffer])
        except OSError as error:
            raise SourceError(TRANSIENT, f"read error: {error.strerror}") from None

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class DirSource:
    """A directory of this host or a mount. ``by_key``: files lie flat, named by their content."""

    path: str
    by_key: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or f"dir://{self.path}"

    def listing(self, repo: str, commit: str) -> Optional[Listing]:
        try:
            with open(os.path.join(self.path, listings.LISTING_NAME), encoding="utf-8") as stream:
                text = stream.read()
        except FileNotFoundError:
            return listings.from_hf_download(self.path, repo, commit)
        except OSError as error:
            raise SourceError(MISSING, f"{self.name}: {error.strerror}") from None
        return listings.from_document(parse_json(text, self.name), repo, commit)

    def open(self, file: RepoFile, offset: int) -> Stream:
        # Symbolic links are followed: the hub's cache is made of them, and the bytes get hashed.
        path = os.path.join(self.path, file.key if self.by_key else file.path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(MISSING, f"{path}: {error.strerror}") from None
        size = os.fstat(fd).st_size
        if size != file.size:
            os.close(fd)
            raise SourceError(WRONG, f"{path} has {size} bytes, the listing says {file.size}")
        os.lseek(fd, offset, os.SEEK_SET)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return Stream(offset, _FileBody(fd))


@dataclass
class HttpSource:
    """Files below a base URL: nginx, an object store's public bucket, ``rclone serve http``."""

    base: str
    transport: Transport
    headers: Dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return shown(self.base)

    def listing(self, repo: str, commit: str) -> Optional[Listing]:
        try:
            data, _ = get_json(self.transport, self._url(listings.LISTING_NAME), self.headers)
        except SourceError as error:
            if error.kind == MISSING:
                return None
            raise
        return listings.from_document(data, repo, commit)

    def open(self, file: RepoFile, offset: int) -> Stream:
        return ranged(self.transport, self._url(file.path), self.headers, file, offset)

    def _url(self, path: str) -> str:
        return f"{self.base.rstrip('/')}/{urllib.parse.quote(path)}"


@dataclass
class HubSource:
    """A Hugging Face hub or a server that speaks its protocol."""

    repo: str
    commit: str
    transport: Transport
    endpoint: str = HUB_ENDPOINT
    token: Optional[str] = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return "hub" if self.endpoint == HUB_ENDPOINT else f"hub {shown(self.endpoint)}"

    def listing(self, repo: str, commit: str) -> Optional[Listing]:
        url: Optional[str] = f"{self.endpoint.rstrip('/')}/api/models/{repo}/tree/{commit}?recursive=true"
        entries: List[Any] = []
        for _ in range(MAX_PAGES):
            if url is None:
                return listings.from_tree(repo, commit, entries)
            data, response = get_json(self.transport, url, self.headers())
            if not isinstance(data, list):
                raise SourceError(WRONG, f"{shown(url)}: not a list of files")
            entries.extend(data)
            url = _next_page(response, url)
        raise SourceError(WRONG, f"{self.name}: more than {MAX_PAGES} pages of files")

    def open(self, file: RepoFile, offset: int) -> Stream:
        quoted = urllib.parse.quote(file.path)
        url = f"{self.endpoint.rstrip('/')}/{self.repo}/resolve/{self.commit}/{quoted}"
        return ranged(self.transport, url, self.headers(), file, offset, self.commit)

    def resolve(self, revision: str) -> str:
        """Return the commit of a branch or tag. Raises SourceError."""
        quoted = urllib.parse.quote(revision, safe="")
        url = f"{self.endpoint.rstrip('/')}/api/models/{self.repo}/revision/{quoted}"
        data, _ = get_json(self.transport, url, self.headers())
        commit: Any = data.get("sha") if isinstance(data, dict) else None
        if not isinstance(commit, str) or not listings.is_commit(commit):
            raise SourceError(WRONG, f"{shown(url)}: no commit in the answer")
        return commit

    def headers(self) -> Dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def _next_page(response: Response, url: str) -> Optional[str]:
    """Return the URL of ``Link: <...>; rel="next"``; only on the same host, since the token goes with it."""
    match = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', response.headers.get("link", ""))
    if match is None:
        return None
    target = urllib.parse.urljoin(url, str(match.group(1)))
    here, there = urllib.parse.urlsplit(url), urllib.parse.urlsplit(target)
    if (here.scheme, here.netloc) != (there.scheme, there.netloc):
        raise SourceError(WRONG, f"{shown(url)}: the next page lies on {there.netloc}")
    return target


def ranged(
    transport: Transport, url: str, headers: Dict[str, str], file: RepoFile, offset: int, commit: str = ""
) -> Stream:
    """GET ``file`` from ``offset`` and refuse, before its body, an answer that cannot be that file."""
    sent = dict(headers)
    if offset:
        sent["Range"] = f"bytes={offset}-"
    response = transport.get(url, sent)
    problem = _unfit(response, file, commit)
    start = 0
    if response.status == 206:
        match = re.match(r"bytes (\d+)-(\d+)/(\d+|\*)$", response.headers.get("content-range", "").strip())
        if match is None:
            problem = problem or "a partial answer without Content-Range"
        else:
            start = int(match.group(1))
            total = file.size if match.group(3) == "*" else int(match.group(3))
            if start > offset or total != file.size:
                problem = problem or f"the range starts at {start} of {total}, asked for {offset} of {file.size}"
    if response.length is not None and start + response.length != file.size:
        problem = problem or f"{start + response.length} bytes, the listing says {file.size}"
    if problem:
        response.body.close()
        raise SourceError(WRONG, f"{shown(url)}: {problem}")
    return Stream(start, response.body, response.headers.get("x-pdstack-proven") != "0")


def _unfit(response: Response, file: RepoFile, commit: str) -> str:
    headers = response.headers
    if headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        return f"content-encoding {headers['content-encoding']}"
    if headers.get("content-type", "").lower().startswith("text/html") and not file.path.endswith((".html", ".htm")):
        return "an HTML page in place of the file"
    # After a redirect the storage no longer says which commit it serves: then only the hash speaks.
    if commit and headers.get("x-repo-commit", commit) != commit:
        return f"commit {headers['x-repo-commit']}, asked for {commit}"
    etag = headers.get("x-linked-etag", "").strip().replace("W/", "").strip('"')
    if file.sha256 and len(etag) == 64 and etag != file.sha256:
        return f"sha256 {etag[:12]} announced, the listing says {file.sha256[:12]}"
    return ""


def patiently(
    ask: Callable[[], T], attempts: int, sleep: Callable[[float], None], rng: Callable[[], float] = random.random
) -> T:
    """Return what ``ask`` returns, asking again while a server is busy or ill. Raises its last SourceError."""
    for attempt in range(1, attempts + 1):
        try:
            return ask()
        except SourceError as error:
            if error.kind not in (BUSY, TRANSIENT) or attempt == attempts:
                raise
            pause = min(30.0, 0.5 * 2.0 ** (attempt - 1)) * (0.5 + rng())
            sleep(pause if error.retry_after is None else min(300.0, error.retry_after))
    raise ValueError(f"{attempts} attempts")


def parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CheckpointError("no-listing", f"{where}: {listings.LISTING_NAME} is not JSON ({error})") from None
