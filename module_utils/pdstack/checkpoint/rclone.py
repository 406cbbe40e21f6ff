"""Bytes by the rclone program: S3 and all the other stores that it knows, with its own configuration file.

The file names the remotes and holds their keys; no key is an argument. ``rclone cat`` gives a file from any byte.
https://rclone.org/commands/rclone_cat/, exit status: https://rclone.org/docs/#exit-code
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from typing import Optional

from . import listing as listings
from .command import CommandBody, environment
from .errors import AUTH, MISSING, TRANSIENT, CheckpointError, SourceError
from .listing import Listing, RepoFile
from .sources import Stream, parse_json

MAX_LISTING = 64 << 20  # bytes
NOT_FOUND = (0, 3, 4)  # rclone's exit status: nothing matched, no such folder, no such file
_ADDRESS = re.compile(r"([A-Za-z0-9_][\w.+@ -]*):(.*)")
_REFUSED = re.compile(r"\b(401|403)\b|AccessDenied|Forbidden|InvalidAccessKeyId|SignatureDoesNotMatch|Unauthorized")


@dataclass
class RcloneSource:
    """A folder ``remote:path`` of rclone's. ``config``: path of its configuration; ``timeout`` in seconds."""

    remote: str
    config: str
    timeout: float = 30.0
    proxy: Optional[str] = None
    ca_file: Optional[str] = None
    program: str = "rclone"

    @property
    def name(self) -> str:
        return f"rclone:{self.remote}"

    def listing(self, repo: str, commit: str) -> Optional[Listing]:
        body = self._cat(listings.LISTING_NAME, 0)
        text, buffer = bytearray(), memoryview(bytearray(1 << 16))
        try:
            while True:
                got = body.readinto(buffer)
                if not got:
                    break
                text += buffer[:got]
                if len(text) > MAX_LISTING:
                    raise SourceError(MISSING, f"{self.name}: a listing of more than {MAX_LISTING} bytes")
        except SourceError as error:
            if error.kind == MISSING:
                return None
            raise
        finally:
            body.close()
        return listings.from_document(parse_json(text.decode(errors="replace"), self.name), repo, commit)

    def open(self, file: RepoFile, offset: int) -> Stream:
        return Stream(offset, self._cat(file.path, offset))

    def _cat(self, path: str, offset: int) -> CommandBody:
        seconds = f"{max(1, round(self.timeout))}s"
        argv = [self.program, "cat", "--config", self.config, "--ask-password=false", "--log-level", "ERROR"]
        argv += ["--retries", "1", "--low-level-retries", "1", "--contimeout", seconds, "--timeout", seconds]
        if self.ca_file:
            argv += ["--ca-cert", self.ca_file]
        # A list of one name: that file is asked for as it is called, and no folder is listed to find it.
        argv += ["--offset", str(offset), "--files-from-raw", "-", "--no-traverse", "--", self.remote]
        env = environment(self.proxy, None, HOME="/nonexistent")
        return CommandBody(argv, f"{path}\n".encode(), env, 2 * self.timeout, self._explain)

    def _explain(self, status: int, said: str) -> SourceError:
        if status in NOT_FOUND:
            return SourceError(MISSING, f"{self.name}: {said or 'no such file'}")
        return SourceError(AUTH if _REFUSED.search(said) else TRANSIENT, f"{self.name}: {said}")


def parse(text: str, config: Optional[str]) -> RcloneSource:
    """Return the source that ``rclone:REMOTE:PATH`` names. Raises CheckpointError."""
    address = text.partition(":")[2]
    if not _ADDRESS.fullmatch(address) or any(ord(char) < 32 for char in address):
        raise CheckpointError(
            "bad-input",
            f"source {text!r}",
            "rclone:REMOTE:PATH, the remote being one of the configuration file",
            "keys belong into that file (rclone_config), not into the address",
        )
    if config is None:
        raise CheckpointError(
            "bad-input", f"source {text!r} and no rclone_config", "the path of rclone's configuration file on the host"
        )
    if shutil.which("rclone") is None:
        raise CheckpointError(
            "bad-input", f"source {text!r} and no rclone on the host", "rclone", "apt-get install rclone"
        )
    return RcloneSource(address, config)
