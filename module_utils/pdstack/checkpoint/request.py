"""What is asked for, what is answered, and the sources that a request names."""

from __future__ import annotations

import os
import urllib.parse
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from .. import codec
from . import rclone, xet
from .errors import CheckpointError
from .sources import HUB_ENDPOINT, DirSource, HttpSource, HubSource, Source
from .transport import HttpTransport, Transport, shown

XET_PYTHON = "/opt/pdstack/current/venv/bin/python"  # of the engine's release, which has hf_xet
VERIFY = ("stat", "sample", "full")


@dataclass(frozen=True)
class Request:
    """What the operator asks for. Sizes in bytes, times in seconds.

    ``sources`` in order of preference: ``hub``, ``dir:///path``, ``http(s)://base``, ``rclone:remote:path``, and
    ``keyed:///path``, a directory whose files are named by their content. ``listing`` is a
    listing document; without one it comes from the hub if that is a source, else from the first
    source that carries one. ``xet``: ask the hub's xet storage first, by hf_xet in ``xet_python``.
    """

    repo: str
    commit: str
    root: str
    sources: List[str] = field(default_factory=list)
    listing: Any = None
    include: List[str] = field(default_factory=list)
    exclude: List[str] = field(default_factory=list)
    workers: int = 8
    verify: str = "stat"
    min_free: int = 0
    shards: Optional[int] = None
    expert_dtype: Optional[str] = None
    endpoint: str = HUB_ENDPOINT
    proxy: Optional[str] = None
    token_file: Optional[str] = None
    ca_file: Optional[str] = None
    rclone_config: Optional[str] = None
    xet: bool = False
    xet_python: str = XET_PYTHON
    min_rate: float = 64 * 1024
    stall: float = 30.0
    attempts: int = 8


@dataclass
class Result:
    """What happened. Paths are relative to ``directory``; ``before`` and ``after`` map each path to its digest."""

    changed: bool = False
    repo: str = ""
    commit: str = ""
    directory: str = ""
    files: int = 0
    bytes: int = 0
    fetched: List[str] = field(default_factory=list)
    verified: List[str] = field(default_factory=list)  # hashed on the disk in this run
    repaired: List[str] = field(default_factory=list)  # replaced inside the published directory
    suspect_since: Optional[str] = (
        None  # when those were last proven: an engine that started later may hold wrong bytes
    )
    linked: List[str] = field(default_factory=list)
    quarantined: List[str] = field(default_factory=list)
    bytes_by_source: Dict[str, int] = field(default_factory=dict)
    resumed_bytes: int = 0
    to_fetch_bytes: int = 0  # check mode: what a run would fetch
    seconds: float = 0.0
    last_full_verify: Optional[str] = None
    problems: List[str] = field(default_factory=list)
    before: Dict[str, str] = field(default_factory=dict)
    after: Dict[str, str] = field(default_factory=dict)


def report(result: Result) -> Dict[str, Any]:
    """Return what the module returns: the result's fields, and the diff in place of before and after."""
    values: Dict[str, Any] = codec.dump(result)
    before, after = values.pop("before"), values.pop("after")

    def text(files: Dict[str, str]) -> str:
        return "".join(f"{path}: {files[path]}\n" for path in sorted(files))

    if result.changed:
        values["diff"] = {
            "before_header": result.directory,
            "after_header": result.directory,
            "before": text(before),
            "after": text(after),
        }
    return values


def check_files(request: Request) -> None:
    """Raise CheckpointError for a file of the request that is not there."""
    named = {"token_file": request.token_file, "ca_file": request.ca_file, "rclone_config": request.rclone_config}
    for name, path in named.items():
        if path is not None and not os.path.isfile(path):
            raise CheckpointError("bad-input", f"{name} {path} is missing", "a file on this host")


def check_addresses(request: Request) -> None:
    """Raise CheckpointError for an address that carries a secret: addresses are shown and stored."""
    for text in (*request.sources, request.endpoint, request.proxy or ""):
        parts = urllib.parse.urlsplit(text)
        if parts.scheme in ("http", "https") and text != shown(text):
            raise CheckpointError(
                "bad-input",
                f"address {shown(text)} with a user, a password or a query",
                "an address that may be shown",
                "for a store that wants keys use rclone and its configuration file; for a proxy that wants a password, "
                "run=inline with the environment's proxy",
            )


def open_sources(request: Request, scratch: str, transport: Optional[Transport] = None) -> List[Source]:
    """Return the request's sources in order. Raises CheckpointError for one that cannot be understood or used.

    ``scratch``: a folder for what programs need while they fetch.
    """
    web: Transport = transport or HttpTransport(timeout=request.stall, proxy=request.proxy, ca_file=request.ca_file)
    found: List[Source] = []
    for text in request.sources:
        parts = urllib.parse.urlsplit(text)
        if text == "hub":
            hub = HubSource(request.repo, request.commit, web, request.endpoint, read_token(request.token_file))
            if request.xet:
                xet.require(request.xet_python)
                found.append(
                    xet.XetSource(hub, request.xet_python, scratch, request.stall, request.proxy, request.ca_file)
                )
            found.append(hub)
        elif parts.scheme in ("dir", "keyed") and not parts.netloc and os.path.isabs(parts.path):
            path = urllib.parse.unquote(parts.path)
            found.append(DirSource(path, parts.scheme == "keyed", "controller" if parts.scheme == "keyed" else ""))
        elif parts.scheme in ("http", "https") and parts.netloc:
            found.append(HttpSource(text, web))
        elif parts.scheme == "rclone":
            source = rclone.parse(text, request.rclone_config)
            source.timeout, source.proxy, source.ca_file = request.stall, request.proxy, request.ca_file
            found.append(source)
        else:
            raise CheckpointError(
                "bad-input", f"source {text!r}", "hub, dir:///absolute/path, http(s)://base or rclone:remote:path"
            )
    return found


def read_token(path: Optional[str]) -> Optional[str]:
    """Return the token in ``path``, None without one. Raises CheckpointError, never naming the token."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            token = stream.read(4096).strip()
    except OSError as error:
        raise CheckpointError("bad-input", f"token_file {path}: {error.strerror}") from None
    if not token or any(char.isspace() or ord(char) > 126 for char in token):
        raise CheckpointError("bad-input", f"token_file {path} does not hold one token on one line")
    return token
