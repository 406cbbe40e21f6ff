"""Fetch files into partials named by their content, hash them on the way, survive bad sources.

A partial outlives any kill: the next attempt, in this process or another, rehashes what is there
and asks for the rest by Range. A file leaves this module only after its digest matched.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional, Protocol, Sequence, Set

from . import pages
from .errors import AUTH, BUSY, MISSING, SLOW, TRANSIENT, WRONG, CheckpointError, SourceError
from .listing import RepoFile
from .manifest import CHUNK, Digests, hash_prefix
from .progress import Progress
from .sources import Source

IDLE = 0.05  # seconds between looks for work where all of it is under way or not yet there
PROGRESS = 1 << 20  # bytes that make a failed attempt a success: a byte at a time would never end
PIECE = 256 << 10  # bytes that are passed on at once
PATIENCE = 0.25  # seconds after which less is passed on
DISK_THREADS = 4
WRITEBACK = 16 << 20  # bytes
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Clock(Protocol):
    """``time``: seconds since the epoch. ``monotonic`` and ``sleep`` as in the time module."""

    def time(self) -> float: ...

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True)
class FetchOptions:
    """Times in seconds, ``min_rate`` in bytes/s over ``stall`` seconds for one file."""

    workers: int = 8
    attempts: int = 8  # per file, with less than PROGRESS between them
    min_rate: float = 64 * 1024
    stall: float = 30.0
    backoff: float = 0.5  # doubles with every failure
    backoff_max: float = 30.0
    retry_after_max: float = 300.0
    corrupt_per_file: int = 2  # wrong digests of one file from one source before the next source is asked
    corrupt_per_source: int = 4  # wrong digests in all before a source is dropped for the run


class Flight:
    """A file on its way from the origin, for those who want to read along.

    ``have`` bytes lie in ``path``. They are not proven yet, and a restart takes them back.
    """

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size
        self._have = 0
        self._open = True
        self._changed = threading.Condition()

    def move(self, have: int) -> None:
        with self._changed:
            # Readers are woken for whole pieces: a wake-up for each read of the socket would cost more than the bytes.
            news = have < self._have or have // PIECE != self._have // PIECE or have == self.size
            if have < self._have:
                self._open = False  # began again: what was read along is void
            self._have = have
            if news:
                self._changed.notify_all()

    def land(self) -> None:
        """End well or badly; the readers get what there is."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def wait_for(self, position: int, timeout: float = 30.0) -> int:
        """Return how many bytes there are, soon after there are more than ``position``; no more where it ended."""
        goal = min(self.size, position + PIECE)
        with self._changed:
            for _ in range(max(1, int(timeout / PATIENCE))):
                self._changed.wait_for(lambda: self._have >= goal or not self._open, PATIENCE)
                if self._have > position or not self._open:
                    break
            return self._have


@dataclass(frozen=True)
class Pick:
    """A file, the names of the sources to ask for it in order, and how often (None: as often as the options say)."""

    file: RepoFile
    sources: List[str]
    from_origin: bool = True
    attempts: Optional[int] = None


class Scheduler(Protocol):
    """Decides what comes next; all methods are called under one lock but ``take_off`` and ``land``."""

    def next(self, waiting: Sequence[RepoFile], usable: Sequence[str], flying: Dict[str, str]) -> Optional[Pick]: ...

    def failed(self, pick: Pick) -> bool: ...

    def take_off(self, key: str, flight: Flight) -> None: ...

    def land(self, key: str) -> None: ...


class InOrder:
    """The scheduler of a host by itself: every source may have every file, a failure is final."""

    def next(self, waiting: Sequence[RepoFile], usable: Sequence[str], flying: Dict[str, str]) -> Optional[Pick]:
        return Pick(waiting[0], list(usable))

    def failed(self, pick: Pick) -> bool:
        return False

    def take_off(self, key: str, flight: Flight) -> None:
        pass

    def land(self, key: str) -> None:
        pass


@dataclass
class SourceState:
    """What this run has learnt about a source."""

    source: Source
    dropped: str = ""  # why
    corrupt: int = 0


@dataclass
class _Attempt:
    """One file on its way. ``contributors``: who delivered its bytes so far; None is an earlier run, or hearsay."""

    file: RepoFile
    fd: int
    digests: Digests
    flight: Flight
    allowed: List[str]
    attempts: int
    have: int = 0
    failures: int = 0
    corrupt: Dict[str, int] = field(default_factory=dict)
    excluded: Dict[str, str] = field(default_factory=dict)
    contributors: Set[Optional[str]] = field(default_factory=set)
    pure: bool = False  # no source goes on where another stopped: their mixture was wrong, and nobody knows whose part
    errors: List[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.errors:
            self.errors.append(text)


@dataclass
class _Arrived:
    """A file whose bytes are here."""

    file: RepoFile
    path: str
    fd: int
    flight: Flight
    sha256: str = ""


Place = Callable[[RepoFile, str, str], None]  # file, path of the verified partial, its sha256


class Fetcher:
    """Fetch many files with bounded workers.

    ``rng`` gives jitter in [0, 1); ``write`` stands for os.pwrite, so that a test can fill the disk.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        partials: str,
        options: FetchOptions,
        progress: Progress,
        clock: Clock,
        rng: Callable[[], float] = random.random,
        write: Callable[[int, memoryview, int], int] = os.pwrite,
        scheduler: Optional[Scheduler] = None,
    ) -> None:
        self.states = [SourceState(source) for source in sources]
        self._partials = partials
        self._options = options
        self._progress = progress
        self._clock = clock
        self._rng = rng
        self._write = write
        self._scheduler: Scheduler = scheduler or InOrder()
        self._flying: Dict[str, str] = {}  # key to the first source that is asked
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def fetch_all(self, files: Sequence[RepoFile], place: Place) -> None:
        """Fetch ``files`` (of distinct content) and hand each to ``place``, in a thread of its own.

        Raises CheckpointError after the files in flight have ended; what arrived stays.
        """
        waiting = sorted(files, key=lambda item: (-item.size, item.path))
        failures: List[BaseException] = []

        def work() -> None:
            while True:
                with self._lock:
                    if self._stop.is_set() or not (waiting or self._flying):
                        return
                    pick = self._pick(waiting)
                if pick is None:
                    self._clock.sleep(IDLE)
                    continue
                try:
                    arrived = self._one(pick)
                    room.acquire()
                    disk.submit(self._land, arrived, place, failures).add_done_callback(lambda _: room.release())
                except _Stopped:
                    return
                except BaseException as error:
                    with self._lock:
                        no_bytes = isinstance(error, CheckpointError) and error.code == "fetch-failed"
                        if no_bytes and self._scheduler.failed(pick):
                            waiting.append(pick.file)
                            continue
                        failures.append(error)
                        self._stop.set()  # those in flight give up at their next read, their partials stay
                    return
                finally:
                    with self._lock:
                        self._flying.pop(pick.file.key, None)

        count = max(1, min(self._options.workers, len(waiting)))
        room = threading.Semaphore(count)  # files that wait for the disk; more would let the network run away from it
        with ThreadPoolExecutor(min(DISK_THREADS, count)) as disk, ThreadPoolExecutor(count) as pool:
            try:
                for future in [pool.submit(work) for _ in range(count)]:
                    future.result()
            except BaseException:
                self._stop.set()
                raise
        if failures:
            raise failures[0]

    def _pick(self, waiting: List[RepoFile]) -> Optional[Pick]:
        """Take the next file off the list; None where there is none or where it is better to wait."""
        if not waiting:
            return None
        usable = [state.source.name for state in self.states if not state.dropped]
        pick = self._scheduler.next(waiting, usable, self._flying)
        if pick is not None:
            waiting.remove(pick.file)
            self._flying[pick.file.key] = pick.sources[0] if pick.sources else ""
        return pick

    def _one(self, pick: Pick) -> _Arrived:
        """Bring one file's bytes here and prove them."""
        file = pick.file
        path = os.path.join(self._partials, file.key)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise disk_error(error, path) from None
        arrived = _Arrived(file, path, fd, Flight(path, file.size))
        try:
            if pick.from_origin:
                self._scheduler.take_off(file.key, arrived.flight)
            arrived.sha256 = self._complete(pick, fd, arrived.flight).sha256
        except OSError as error:
            self._let_go(arrived)
            raise disk_error(error, path) from None
        except BaseException:
            self._let_go(arrived)
            raise
        return arrived

    def _land(self, arrived: _Arrived, place: Place, failures: List[BaseException]) -> None:
        """Bring a proven file to the disk and hand it on. The network goes on meanwhile."""
        try:
            os.fchmod(arrived.fd, 0o644)
            os.fsync(arrived.fd)
            place(arrived.file, arrived.path, arrived.sha256)
        except BaseException as error:
            with self._lock:
                failures.append(disk_error(error, arrived.path) if isinstance(error, OSError) else error)
                self._stop.set()
        else:
            self._progress.file_done()
        finally:
            self._let_go(arrived)

    def _let_go(self, arrived: _Arrived) -> None:
        self._scheduler.land(arrived.file.key)
        arrived.flight.land()
        os.close(arrived.fd)

    def _complete(self, pick: Pick, fd: int, flight: Flight) -> Digests:
        """Return the matching digests once ``fd`` holds all bytes of the file."""
        file = pick.file
        tries = self._options.attempts if pick.attempts is None else pick.attempts
        attempt = _Attempt(file, fd, Digests(file), flight, pick.sources, tries)
        size = os.fstat(fd).st_size
        if size > file.size:
            os.ftruncate(fd, 0)
        elif size:
            attempt.have = hash_prefix(fd, size, attempt.digests)
            attempt.contributors.add(None)
            self._progress.resume(attempt.have)
            flight.move(attempt.have)
        turn = 0
        while True:
            if attempt.have == file.size:
                if attempt.digests.matches():
                    return attempt.digests
                self._wrong_digest(attempt)
                turn += 1
            if self._stop.is_set():
                raise _Stopped()
            usable = [state for name in attempt.allowed for state in self.states if self._may_ask(name, state, attempt)]
            if not usable or attempt.failures >= attempt.attempts:
                raise self._given_up(attempt)
            state = usable[turn % len(usable)]
            if attempt.pure and attempt.contributors - {state.source.name}:
                self._start_again(attempt)
            before = attempt.have
            try:
                self._pull(state.source, attempt)
            except SourceError as error:
                attempt.failures = 1 if attempt.have - before >= PROGRESS else attempt.failures + 1
                attempt.note(f"{state.source.name}: {error}")
                if self._judge(state, attempt, error):
                    turn += 1
                    if turn % len(usable) == 0:
                        self._pause(attempt.failures, error.retry_after)

    def _may_ask(self, name: str, state: SourceState, attempt: _Attempt) -> bool:
        return state.source.name == name and not state.dropped and name not in attempt.excluded

    def _pull(self, source: Source, attempt: _Attempt) -> None:
        """Append bytes from ``source`` until the file is complete. Raises SourceError."""
        file, options = attempt.file, self._options
        stream = source.open(file, attempt.have)
        skip = attempt.have - stream.offset  # a server that ignores Range starts again: keep what we have
        buffer = memoryview(bytearray(CHUNK))
        since, received = self._clock.monotonic(), 0
        try:
            while attempt.have < file.size:
                if self._stop.is_set():
                    raise _Stopped()
                got = stream.body.readinto(buffer[: min(CHUNK, skip + file.size - attempt.have)])
                if not got:
                    raise SourceError(TRANSIENT, f"{file.path} ended at {attempt.have - skip} of {file.size} bytes")
                received += got
                dropped = min(skip, got)
                skip -= dropped
                if got > dropped:
                    data = buffer[dropped:got]
                    attempt.digests.update(data)
                    self._write_all(attempt.fd, data, attempt.have)
                    attempt.have += len(data)
                    attempt.contributors.add(source.name if stream.proven else None)
                    attempt.flight.move(attempt.have)
                    self._progress.add(len(data), source.name)
                now = self._clock.monotonic()
                if now - since >= options.stall:
                    rate = received / (now - since)
                    if rate < options.min_rate:
                        raise SourceError(
                            SLOW, f"{file.path}: {rate / 1e3:.1f} kB/s, the floor is {options.min_rate / 1e3:.1f} kB/s"
                        )
                    since, received = now, 0
        finally:
            stream.body.close()

    def _write_all(self, fd: int, data: memoryview, position: int) -> None:
        start = position - position % WRITEBACK
        while len(data):
            count = self._write(fd, data, position)
            data, position = data[count:], position + count
        if position - start >= WRITEBACK:
            # The disk works while the network does, and the final sync finds little left.
            pages.start_writeback(fd, start, WRITEBACK)

    def _wrong_digest(self, attempt: _Attempt) -> None:
        """Start the file again; blame a source only if it alone delivered every byte."""
        who = attempt.contributors
        attempt.failures += 1
        if len(who) == 1 and None not in who:
            (name,) = who
            assert name is not None
            attempt.corrupt[name] = attempt.corrupt.get(name, 0) + 1
            attempt.note(f"{name}: {attempt.file.path} arrived whole with a wrong digest")
            if attempt.corrupt[name] >= self._options.corrupt_per_file:
                attempt.excluded[name] = "wrong digest"
            with self._lock:
                for state in self.states:
                    if state.source.name == name:
                        state.corrupt += 1
                        limit = getattr(state.source, "corrupt_limit", self._options.corrupt_per_source)
                        if state.corrupt >= limit:
                            state.dropped = f"{state.corrupt} files with a wrong digest"
        else:
            attempt.pure = True
        self._start_again(attempt)

    def _start_again(self, attempt: _Attempt) -> None:
        self._progress.undo(attempt.have)
        os.ftruncate(attempt.fd, 0)
        attempt.have, attempt.digests = 0, Digests(attempt.file)
        attempt.contributors = set()
        attempt.flight.move(0)

    def _judge(self, state: SourceState, attempt: _Attempt, error: SourceError) -> bool:
        """Exclude or drop the source where asking again is useless; True where a later attempt may succeed."""
        if error.kind == AUTH:
            with self._lock:
                state.dropped = str(error)
            return False
        if error.kind in (MISSING, WRONG):
            attempt.excluded[state.source.name] = str(error)
            return False
        assert error.kind in (BUSY, TRANSIENT, SLOW)
        return True

    def _pause(self, failures: int, retry_after: Optional[float]) -> None:
        options = self._options
        seconds = min(options.backoff_max, options.backoff * 2.0 ** max(0, failures - 1)) * (0.5 + self._rng())
        if retry_after is not None:
            seconds = min(options.retry_after_max, retry_after) + 0.1 * self._rng()
        end = self._clock.monotonic() + seconds
        while not self._stop.is_set():
            left = end - self._clock.monotonic()
            if left <= 0:
                return
            self._clock.sleep(min(1.0, left))

    def _given_up(self, attempt: _Attempt) -> CheckpointError:
        dropped = [
            f"{s.source.name}: {s.dropped}" for s in self.states if s.dropped and s.source.name in attempt.allowed
        ]
        for text in dropped:
            attempt.note(text)
        said = "; ".join(attempt.errors[-4:]) or "there is no source"
        remedy = "run again: what arrived is kept and resumed"
        if any(" 401 " in text or " 403 " in text for text in attempt.errors):
            remedy = "give a token_file whose account has accepted the model's terms, then run again"
        return CheckpointError("fetch-failed", f"{attempt.file.path}: {said}", "one source that delivers it", remedy)


class _Stopped(Exception):
    """Another file failed; this one was left where it was."""


def disk_error(error: OSError, path: str = "") -> CheckpointError:
    """Return the operator's error for a failed write or rename."""
    where = path or error.filename or "the disk"
    if error.errno in NO_SPACE:
        return CheckpointError(
            "no-space",
            f"{where}: {error.strerror}",
            "space for the checkpoint",
            "free space and run again: what arrived is kept and resumed",
        )
    return CheckpointError("disk", f"{where}: {error.strerror}", "a disk and a folder that can be read and written")
