"""One external download for many hosts: each takes its share from the origin and the rest from the others.

Host i owns the files i, i + N, i + 2N, ... of the listing. It fetches those from the origin and passes their bytes on
while they arrive, so that every link is busy from the first second and the origin sends each byte about once. All bytes
are hashed by whoever receives them: a peer that lies or dies is dropped, and what it owned goes to the next host.

A seed, a host that has everything already, owns nothing and stands in for the origin: each of the others takes its own
share from it. It would else have to send all to all.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import socketserver
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple, cast

from .errors import SourceError
from .fetch import Clock, Flight, Pick
from .listing import Listing, RepoFile
from .sources import Stream, ranged
from .transport import HttpTransport, Transport, get_json

GRACE = 15.0  # seconds that a host may take to start before its share goes to the others
POLL = 0.5  # seconds between looks at a peer that does not answer
NEWS = 3.0  # seconds that a peer holds its answer back while there is nothing new
SILENCE = 8.0  # seconds without an answer after which a peer counts as gone
PEER_ATTEMPTS = 2  # attempts at one peer before the file is put back
GIVE_UP = 3  # failures of peers with one file before it is taken from the origin
BANNED = 3  # failures of one peer before it is asked for nothing more
MOMENT, MOMENTS = 0.02, 100  # seconds between looks for a file that changes its name, and how many
PROVEN = "X-Pdstack-Proven"
SCHEME = "Pdstack"


@dataclass(frozen=True)
class FanOut:
    """The hosts of one run. ``addresses`` in the same order on every host; this one is ``index``.

    ``secret_file`` holds what all of them share for this run. ``seeds``: names of hosts that had everything before it.
    """

    index: int
    names: List[str]
    addresses: List[str]
    port: int
    secret_file: str
    seeds: List[str] = field(default_factory=list)


def signature(secret: bytes, path: str) -> str:
    """Return the proof that the sender of a GET for ``path`` knows the secret."""
    return hmac.new(secret, b"GET " + path.encode(), hashlib.sha256).hexdigest()


@dataclass
class PeerSource:
    """Another host of the run. It is asked by content, and one wrong answer ends the acquaintance."""

    host: str
    base: str
    secret: bytes = field(repr=False)
    transport: Transport
    corrupt_limit: int = 1

    @property
    def name(self) -> str:
        return f"peer {self.host}"

    def listing(self, repo: str, commit: str) -> Optional[Listing]:
        return None  # a peer is not a root of trust

    def open(self, file: RepoFile, offset: int) -> Stream:
        path = f"/file/{file.key}"
        try:
            return ranged(self.transport, self.base + path, self._headers(path), file, offset)
        except SourceError as error:
            # A peer does not say how long this host is to wait, as a hub may.
            raise SourceError(error.kind, str(error)) from None

    def status(self, version: int) -> Any:
        """Return the peer's status document once it differs from ``version``. Raises SourceError."""
        path = f"/status/{version}"
        return get_json(self.transport, self.base + path, self._headers(path))[0]

    def _headers(self, path: str) -> Dict[str, str]:
        return {"Authorization": f"{SCHEME} {signature(self.secret, path)}"}


@dataclass
class View:
    """What is known of one peer. ``since``: monotonic seconds of its last answer, None before the first."""

    have: Set[str] = field(default_factory=set)
    flying: Set[str] = field(default_factory=set)
    done: bool = False
    since: Optional[float] = None


class Swarm:
    """This host's side: serves, watches the others and says which file to fetch next from where."""

    def __init__(self, fan_out: FanOut, secret: bytes, clock: Clock, transport: Optional[Transport] = None) -> None:
        self._fan_out = fan_out
        self._secret = secret
        self._clock = clock
        self._started = clock.monotonic()
        web = transport or HttpTransport(timeout=5.0, proxy="", source_address=fan_out.addresses[fan_out.index])
        self.peers = [
            PeerSource(name, f"http://{address}:{fan_out.port}", secret, web)
            for number, (name, address) in enumerate(zip(fan_out.names, fan_out.addresses))
            if number != fan_out.index
        ]
        self._views = {peer.name: View() for peer in self.peers}
        self._seeds = {f"peer {name}" for name in fan_out.seeds}
        self._order: Dict[str, int] = {}
        self._failures: Dict[str, int] = {}  # by key
        self._blame: Dict[str, int] = {}  # by peer
        self._have: Dict[str, List[str]] = {}
        self._flying: Dict[str, Flight] = {}
        self._done = False
        self._version = 1
        self._lock = threading.Condition()
        self._server = _Server(self, fan_out.addresses[fan_out.index], fan_out.port, set(fan_out.addresses))
        self._closing = threading.Event()
        self.origin_workers = 1

    def __enter__(self) -> Swarm:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        for peer in self.peers:
            threading.Thread(target=self._watch, args=(peer,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    # -- what this host tells the others -----------------------------------------------------

    def share(self, files: Sequence[RepoFile]) -> None:
        """Say which files the run is about, the same on every host."""
        if self._order:
            return
        ordered = sorted({file.key: file for file in files}.values(), key=lambda file: (-file.size, file.path))
        self._order = {file.key: number for number, file in enumerate(ordered)}

    def workers(self, wanted: int) -> int:
        """Return how many files to have under way: each host's share, at this host and at every other."""
        count = len(self._fan_out.names)
        self.origin_workers = max(1, wanted // count)
        return min(64, self.origin_workers * count + 1)

    def offer(self, files: Dict[str, List[str]]) -> None:
        """Serve proven files: key to the places of which the first that exists is read. Others hear of all at once."""
        with self._lock:
            self._have.update(files)
            self._news()

    def take_off(self, key: str, flight: Flight) -> None:
        """Pass on a file while it arrives from the origin."""
        with self._lock:
            self._flying[key] = flight
            self._news()

    def land(self, key: str) -> None:
        with self._lock:
            self._flying.pop(key, None)
            self._news()

    def finish(self) -> None:
        with self._lock:
            self._done = True
            self._news()

    def _news(self) -> None:
        self._version += 1
        self._lock.notify_all()

    def status(self, version: int) -> Dict[str, Any]:
        """Return what this host has, at once where it differs from ``version``."""
        with self._lock:
            self._lock.wait_for(lambda: self._version != version, NEWS)
            has = {"have": sorted(self._have), "flying": sorted(self._flying)}
            return {**has, "done": self._done, "version": self._version}

    def find(self, key: str) -> Tuple[List[str], Optional[Flight]]:
        with self._lock:
            return self._have.get(key, []), self._flying.get(key)

    def authorized(self, header: str, path: str) -> bool:
        return hmac.compare_digest(header, f"{SCHEME} {signature(self._secret, path)}")

    # -- what it learns of the others --------------------------------------------------------

    def _watch(self, peer: PeerSource) -> None:
        view, version = self._views[peer.name], 0
        while not self._closing.is_set():
            try:
                found = peer.status(version)
                have, flying, done = set(found["have"]), set(found["flying"]), bool(found["done"])
                unchanged, version = version, int(found["version"])
            except (SourceError, KeyError, TypeError, ValueError):
                self._closing.wait(POLL)
                continue
            view.have, view.flying, view.done = have, flying, done
            view.since = self._clock.monotonic()
            if version == unchanged:
                self._closing.wait(POLL)  # a peer that does not hold its answers back is not asked in a tight loop

    def _alive(self, name: str) -> bool:
        since, now = self._views[name].since, self._clock.monotonic()
        return now - self._started < GRACE if since is None else now - since < SILENCE

    def _owner(self, key: str, friends: Set[str]) -> str:
        """Return the name of the peer that owns a file, "" for this host: the first living one in turn."""
        count = len(self._fan_out.names)
        for step in range(count):
            number = (self._order.get(key, 0) + step) % count
            name = f"peer {self._fan_out.names[number]}"
            if name in self._seeds:
                continue
            if number == self._fan_out.index:
                return ""
            view = self._views[name]
            # One that is done without the file, such as one that was given up, will never have it.
            if name in friends and self._alive(name) and not (view.done and key not in view.have):
                return name
        return ""

    # -- the order of work (see fetch.Scheduler) ---------------------------------------------

    def next(self, waiting: Sequence[RepoFile], usable: Sequence[str], flying: Dict[str, str]) -> Optional[Pick]:
        """Return the next file and its sources, None where waiting is better."""
        origins = [name for name in usable if name not in self._views]
        friends = {name for name in usable if name in self._views and self._blame.get(name, 0) < BANNED}
        own = sum(1 for key, source in flying.items() if source not in self._views or not self._owner(key, friends))
        seeds = [name for name in self._seeds & friends if self._alive(name)]
        early = self._clock.monotonic() - self._started < GRACE
        expected = early and any(not (self._views[name].have or self._views[name].done) for name in seeds)
        load: Dict[str, int] = {}
        for source in flying.values():
            load[source] = load.get(source, 0) + 1
        from_peer: List[Tuple[int, int, RepoFile, str]] = []
        for file in waiting:
            owner = self._owner(file.key, friends)
            given_up = self._failures.get(file.key, 0) >= GIVE_UP
            # Without an origin this host fails at once: the others wait for its share, and take it over then.
            room = own < self.origin_workers or not origins
            if owner == "" or given_up:
                holding = [name for name in seeds if file.key in self._views[name].have and not given_up]
                if room and (holding or given_up or not expected):
                    return Pick(file, self._spread(holding, file, load)[:1] + origins, from_origin=True)
                continue
            for peer in self.peers:
                view = self._views[peer.name]
                if peer.name not in friends or peer.name in self._seeds or not self._alive(peer.name):
                    continue
                if file.key in view.have or (file.key in view.flying and peer.name == owner):
                    holders = sum(file.key in other.have for other in self._views.values())
                    rank = (holders, load.get(peer.name, 0) - (peer.name == owner))
                    from_peer.append((*rank, file, peer.name))
        if not from_peer:
            return None
        _, _, file, name = min(from_peer, key=lambda item: item[:2])
        return Pick(file, [name], from_origin=False, attempts=PEER_ATTEMPTS)

    def _spread(self, names: List[str], file: RepoFile, load: Dict[str, int]) -> List[str]:
        """Return the names with the least busy first; among equals another one for another file."""
        turn = int(file.key[-4:], 16) % max(1, len(names))
        ordered = sorted(names)
        return sorted(ordered[turn:] + ordered[:turn], key=lambda name: load.get(name, 0))

    def failed(self, pick: Pick) -> bool:
        """Note a failed pick; True where the file is to be put back, since another source may have it."""
        if pick.from_origin and not (pick.sources and self._views.keys() >= set(pick.sources)):
            return False  # an origin was asked too, or there is none left to ask
        self._failures[pick.file.key] = self._failures.get(pick.file.key, 0) + 1
        for name in pick.sources:
            self._blame[name] = self._blame.get(name, 0) + 1
        return True

    def linger(self) -> None:
        """Serve until every other host is done or gone."""
        while any(self._alive(name) and not view.done for name, view in self._views.items()):
            self._clock.sleep(POLL)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Bound to this host's own address; only the addresses of the run are answered at all."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, swarm: Swarm, address: str, port: int, allowed: Set[str]) -> None:
        self.swarm = swarm
        self._allowed = allowed
        super().__init__((address, port), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return client_address[0] in self._allowed

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that goes away is no error of ours."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30.0

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        swarm = cast(_Server, self.server).swarm
        if not swarm.authorized(self.headers.get("Authorization", ""), self.path):
            self._short(403)
            return
        asked = re.fullmatch(r"/status/(\d{1,18})", self.path)
        if asked:
            self._short(200, json.dumps(swarm.status(int(asked.group(1)))).encode())
            return
        match = re.fullmatch(r"/file/((?:sha256|git-sha1)-[0-9a-f]+)", self.path)
        opened = self._open(swarm, match.group(1)) if match else None
        if opened is None:
            self._short(404)
            return
        fd, flight = opened
        try:
            self._send(fd, os.fstat(fd).st_size if flight is None else flight.size, flight)
        finally:
            os.close(fd)

    def _open(self, swarm: Swarm, key: str) -> Optional[Tuple[int, Optional[Flight]]]:
        """Return an open file, with its flight where it is still arriving; None for a file that is not here.

        A file that has just landed or is just being published is between two names for a moment.
        """
        for _ in range(MOMENTS):
            places, flight = swarm.find(key)
            for place in places or ([flight.path] if flight else []):
                try:
                    return os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), None if places else flight
                except OSError:
                    continue
            if not places and flight is None:
                return None
            time.sleep(MOMENT)
        return None

    def _short(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, fd: int, size: int, flight: Optional[Flight]) -> None:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = min(int(match.group(1)), size) if match else 0
        self.send_response(206 if match else 200)
        if match:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.send_header("Content-Length", str(size - start))
        self.send_header(PROVEN, "0" if flight else "1")
        self.end_headers()
        self.wfile.flush()
        with os.fdopen(fd, "rb", closefd=False) as stream:
            while start < size:
                ready = size if flight is None else flight.wait_for(start)
                if ready <= start:
                    self.close_connection = True  # the flight began again or was given up: the peer resumes elsewhere
                    return
                start += self.connection.sendfile(stream, start, min(ready - start, 1 << 20))


def read_secret(path: str) -> bytes:
    """Return the run's secret. Raises OSError, and ValueError for one that is too short to be one."""
    with open(path, "rb") as stream:
        secret = stream.read(1024).strip()
    if len(secret) < 32:
        raise ValueError(f"{path} holds {len(secret)} bytes, a run's secret has 32 or more")
    return secret
