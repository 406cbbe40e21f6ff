"""Bytes of a file that the hub keeps in xet, by hf_xet in a Python that has it. The hub's HTTP stays behind it.

The hub says by ``xetHash`` in its tree which files lie there, and gives a token and the storage's address for an hour.
https://huggingface.co/docs/xet/auth, https://huggingface.co/docs/xet/download-protocol
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Optional

from . import xet_stream
from .command import CommandBody, environment
from .errors import AUTH, MISSING, TRANSIENT, WRONG, CheckpointError, SourceError
from .listing import Listing, RepoFile
from .sources import HubSource, Stream
from .transport import get_json, shown

SAFETY = 60.0  # seconds before its end from which a token is not used any more
_HASH = re.compile(r"[0-9a-f]{64}")


def program() -> str:
    """Return the source of ``xet_stream``: from the loader, since a module runs out of ansible's zip."""
    loader = xet_stream.__spec__.loader if xet_stream.__spec__ is not None else None
    text: Optional[str] = getattr(loader, "get_source", lambda name: None)(xet_stream.__name__)
    if text is None:
        raise CheckpointError("bad-input", "the source of xet_stream is not at hand")
    return text


def require(python: str) -> None:
    """Raise CheckpointError unless ``python`` has hf_xet."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", "import hf_xet"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        said = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        said = str(error)
    if said:
        raise CheckpointError(
            "bad-input",
            f"xet is on and {python} cannot import hf_xet ({said})",
            "a Python with hf_xet, such as that of an engine release",
            "install the release first (playbooks/runtime.yml), name another xet_python, or set xet to false",
        )


@dataclass
class XetSource:
    """The xet storage behind ``hub``. ``scratch``: a folder for hf_xet's own files. ``timeout`` in seconds."""

    hub: HubSource
    python: str
    scratch: str
    timeout: float = 30.0
    proxy: Optional[str] = None
    ca_file: Optional[str] = None
    now: Callable[[], float] = time.time
    _token: Dict[str, Any] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def name(self) -> str:
        return f"xet of {self.hub.name}"

    def listing(self, repo: str, commit: str) -> Optional[Listing]:
        return None  # the hub itself has it

    def open(self, file: RepoFile, offset: int) -> Stream:
        if not file.xet_hash or not _HASH.fullmatch(file.xet_hash) or not file.size:
            raise SourceError(MISSING, f"{file.path} is not kept in xet")
        asked = {**self._connection(), "hash": file.xet_hash, "size": file.size, "start": offset}
        asked["timeout"] = max(1, round(self.timeout))
        os.makedirs(self.scratch, mode=0o700, exist_ok=True)
        env = environment(self.proxy, self.ca_file, HF_XET_CACHE=self.scratch, HF_XET_LOG_LEVEL="error")
        argv = [self.python, "-I", "-c", program()]
        return Stream(offset, CommandBody(argv, json.dumps(asked).encode(), env, self.timeout, self._explain))

    def _connection(self) -> Dict[str, Any]:
        """Return address, token and its end, from the hub where the last answer is about to end."""
        with self._lock:
            if not self._token or self._token["expires"] - SAFETY < self.now():
                url = f"{self.hub.endpoint.rstrip('/')}/api/models/{self.hub.repo}/xet-read-token/{self.hub.commit}"
                data, _ = get_json(self.hub.transport, url, self.hub.headers())
                try:
                    found = {"endpoint": str(data["casUrl"]), "token": str(data["accessToken"])}
                    found_until = int(data["exp"])
                except (KeyError, TypeError, ValueError):
                    raise SourceError(WRONG, f"{shown(url)}: no casUrl, accessToken and exp") from None
                here, there = (urllib.parse.urlsplit(text).scheme for text in (url, found["endpoint"]))
                if there not in ("http", "https") or (here == "https" and there != "https"):
                    raise SourceError(WRONG, f"{shown(url)}: xet at {there}://, which is not asked")
                self._token = {**found, "expires": found_until}
            return dict(self._token)

    def _explain(self, status: int, said: str) -> SourceError:
        with self._lock:
            self._token = {}  # it may be what was wrong
        kind = {xet_stream.REFUSED: AUTH, xet_stream.UNKNOWN: MISSING}.get(status, TRANSIENT)
        return SourceError(kind, f"hf_xet: {said}")
