"""Counts of a run, written to a status file that anybody may poll."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

from .. import codec


@dataclass
class Status:
    """A snapshot. Sizes in bytes, times in seconds (``*_at`` since the epoch), ``rate`` in bytes/s."""

    state: str = "starting"  # starting | hashing | fetching | checking | publishing | serving | done | failed
    pid: int = 0
    started_at: float = 0.0
    updated_at: float = 0.0
    files: int = 0  # to fetch in this run
    files_done: int = 0
    bytes: int = 0
    bytes_done: int = 0  # counted once, resumed bytes included
    rate: float = 0.0
    eta: Optional[float] = None
    error: str = ""


class Progress:
    """Thread-safe. ``now`` is seconds since the epoch; ``path`` None keeps the counts in memory."""

    INTERVAL = 1.0  # seconds between writes
    WINDOW = 10.0  # seconds that the rate looks back

    def __init__(self, path: Optional[str], now: Callable[[], float]) -> None:
        self._path = path
        self._now = now
        self._lock = threading.Lock()
        self.status = Status(pid=os.getpid(), started_at=now())
        self.by_source: Dict[str, int] = {}
        self.resumed = 0
        self._written = 0.0
        self._samples: List[tuple[float, int]] = []
        self._received = 0

    def enter(self, state: str, files: Optional[int] = None, size: Optional[int] = None) -> None:
        with self._lock:
            self.status.state = state
            if files is not None:
                self.status.files, self.status.files_done = files, 0
            if size is not None:
                self.status.bytes, self.status.bytes_done = size, 0
            self._write(force=True)

    def resume(self, count: int) -> None:
        """Count bytes of partial files that an earlier run left."""
        with self._lock:
            self.resumed += count
            self.status.bytes_done += count

    def add(self, count: int, source: str = "") -> None:
        with self._lock:
            if source:
                self.by_source[source] = self.by_source.get(source, 0) + count
            self.status.bytes_done += count
            self._received += count
            self._write()

    def undo(self, count: int) -> None:
        """Take back bytes that turned out wrong."""
        with self._lock:
            self.status.bytes_done -= count

    def file_done(self) -> None:
        with self._lock:
            self.status.files_done += 1
            self._write(force=True)

    def finish(self, error: str = "") -> None:
        with self._lock:
            self.status.state = "failed" if error else "done"
            self.status.error = error
            self._write(force=True)

    def _write(self, force: bool = False) -> None:
        now = self._now()
        if not force and now - self._written < self.INTERVAL:
            return
        self._written = now
        self._samples = [item for item in self._samples if now - item[0] <= self.WINDOW] + [(now, self._received)]
        first = self._samples[0]
        span = now - first[0]
        status = self.status
        status.updated_at = now
        status.rate = (self._received - first[1]) / span if span > 0 else 0.0
        left = status.bytes - status.bytes_done
        status.eta = left / status.rate if status.rate > 0 else None
        if self._path is not None:
            try:
                write_json(self._path, codec.dump(status), sync=False)
            except OSError:  # a full disk must fail the run by its own error, not by its progress bar
                pass


def write_json(path: str, data: object, sync: bool = True, temporary: str = "") -> None:
    """Replace ``path`` atomically. ``sync``: the bytes are on the disk before the name changes.

    The temporary name is always the same (there is one writer), so that a kill leaves one at most.
    """
    temporary = temporary or f"{path}.new"
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(data, stream, indent=1, sort_keys=True)
        stream.write("\n")
        stream.flush()
        os.fchmod(stream.fileno(), 0o644)
        if sync:
            os.fsync(stream.fileno())
    os.replace(temporary, path)
