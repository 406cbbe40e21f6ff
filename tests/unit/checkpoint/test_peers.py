"""Several hosts on addresses of their own (127.0.0.x), one origin: who sends what to whom, and what a bad peer does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hub import repository
from hub.server import Hub
from pdstack.checkpoint import peers
from pdstack.checkpoint.errors import CheckpointError
from pdstack.checkpoint.fetch import Flight
from pdstack.checkpoint.peers import FanOut, Swarm, signature
from pdstack.checkpoint.reconcile import Reconciler, World

SECRET = b"s" * 64


def free_port(addresses: Iterable[str] = ("127.0.0.2",)) -> int:
    """Return a port that is free on all addresses, below those that outgoing connections take."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for address in addresses:
                probe = probes.enter_context(socket.socket())
                probe.bind((address, port))
            return port


@dataclasses.dataclass
class Host:
    """One of the run's hosts, working in a thread."""

    site: object
    number: int
    thread: threading.Thread | None = None
    result: object = None
    error: Exception | None = None


class Fleet:
    def __init__(self, site, count: int, seeds: tuple[int, ...] = ()) -> None:
        self.site = site
        self.seeds = [f"h{number}" for number in seeds]
        self.names = [f"h{number}" for number in range(count)]
        self.addresses = [f"127.0.0.{2 + number}" for number in range(count)]
        self.port = free_port(self.addresses)
        self.hosts = [
            Host(dataclasses.replace(site, root=site.root / name, clock=time), number)
            for number, name in enumerate(self.names)
        ]

    def fan_out(self, number: int) -> FanOut:
        return FanOut(number, self.names, self.addresses, self.port, "", self.seeds)

    def start(self, number: int) -> None:
        host = self.hosts[number]

        def work() -> None:
            try:
                with Swarm(self.fan_out(number), SECRET, time) as swarm:
                    world = World(clock=time, swarm=swarm)
                    host.result = Reconciler(host.site.request(stall=2.0), world).present()
                    swarm.finish()
                    swarm.linger()
            except Exception as error:
                host.error = error

        host.thread = threading.Thread(target=work)
        host.thread.start()

    def join(self) -> None:
        for host in self.hosts:
            if host.thread is not None:
                host.thread.join(timeout=30)
                assert not host.thread.is_alive(), "a host waits for ever"


@pytest.fixture
def big(site, tmp_path, monkeypatch):
    """Shards that take some tenths of a second each, so that the hosts overlap."""
    monkeypatch.setattr(peers, "GRACE", 1.5)
    monkeypatch.setattr(peers, "POLL", 0.05)
    monkeypatch.setattr(peers, "NEWS", 0.5)
    monkeypatch.setattr(peers, "SILENCE", 2.0)
    toy = repository.make(tmp_path / "big", shards=9, shard_bytes=1 << 18)
    with Hub(toy) as hub:
        site.hub, site.toy, hub.rate = hub, toy, 4e6
        yield site


def origin_share(site) -> float:
    return site.hub.sent / sum(site.toy.size(path) for path in site.toy.paths())


def test_one_download_serves_all(big):
    fleet = Fleet(big, 3)
    for number in range(3):
        fleet.start(number)
    fleet.join()

    for host in fleet.hosts:
        assert host.error is None
        assert host.site.wrong_files() == []
        assert any(name.startswith("peer ") for name in host.result.bytes_by_source)
    assert origin_share(big) <= 1.05


def test_a_host_that_never_comes_is_replaced(big):
    fleet = Fleet(big, 3)
    fleet.start(0)
    fleet.start(1)
    fleet.join()

    for host in fleet.hosts[:2]:
        assert host.error is None
        assert host.site.wrong_files() == []
    assert origin_share(big) <= 1.05


def from_peer(fleet: Fleet, name: str) -> int:
    """Return the bytes that the others say they have from ``name``."""
    return sum(host.result.bytes_by_source.get(f"peer {name}", 0) for host in fleet.hosts if host.result)


def test_hosts_that_have_it_serve_those_that_do_not(big):
    """A host that joins later, or one whose disk was replaced: nothing comes from the origin again."""
    fleet = Fleet(big, 4, seeds=(0, 2))
    for number in (0, 2):
        fleet.hosts[number].site.present()
    big.hub.log.clear()
    big.hub.sent = 0
    for number in range(4):
        fleet.start(number)
    fleet.join()

    for host in fleet.hosts:
        assert host.error is None
        assert host.site.wrong_files() == []
        assert host.result.changed == (host.number in (1, 3))
    assert big.hub.sent == 0
    assert not big.hub.requests("/resolve/")
    size = sum(big.toy.size(path) for path in big.toy.paths())
    assert from_peer(fleet, "h0") > 0
    assert from_peer(fleet, "h2") > 0
    assert from_peer(fleet, "h0") + from_peer(fleet, "h2") <= 1.2 * size, "the seeds sent all to all"


def test_a_seed_that_is_gone_leaves_the_origin(big):
    fleet = Fleet(big, 3, seeds=(2,))
    fleet.start(0)
    fleet.start(1)
    fleet.join()

    for host in fleet.hosts[:2]:
        assert host.error is None
        assert host.site.wrong_files() == []
    assert origin_share(big) <= 1.05


def test_a_seed_that_has_less_than_it_seemed(big):
    """Its disk lost a shard after the look: it fetches that one like everybody else."""
    fleet = Fleet(big, 2, seeds=(1,))
    lost = fleet.hosts[1].site
    lost.present()
    shard = repository.shard_name(3, 9)
    (lost.folder / shard).unlink()
    big.hub.sent = 0
    fleet.start(0)
    fleet.start(1)
    fleet.join()

    for host in fleet.hosts:
        assert host.error is None
        assert host.site.wrong_files() == []
    assert big.hub.sent <= 1.05 * big.toy.size(shard)


class Liar(ThreadingHTTPServer):
    """A host of the run that knows the secret, claims to have everything and serves zeros."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, fleet: Fleet, number: int, mode: str) -> None:
        toy, liar = fleet.site.toy, self
        self.asked: list[tuple[str, str]] = []  # who asked for which file
        digests = {f"sha256-{toy.digests(path)['sha256']}": toy.size(path) for path in toy.paths()}

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                if self.path.startswith("/file/") and mode == "is busy":
                    liar.asked.append((self.client_address[0], self.path))
                    self.send_response(503)
                    self.send_header("Retry-After", "300")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if self.path.startswith("/status/"):
                    body = json.dumps({"have": sorted(digests), "flying": [], "done": False, "version": 1}).encode()
                    if mode == "nonsense":
                        body = b'{"have": 5}'
                elif mode == "dies":
                    liar.asked.append((self.client_address[0], self.path))
                    self.send_response(200)
                    self.send_header("Content-Length", str(digests.get(self.path[6:], 0)))
                    self.end_headers()
                    self.wfile.write(bytes(1000))
                    return
                else:
                    liar.asked.append((self.client_address[0], self.path))
                    body = bytes(digests.get(self.path[6:], 0))
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                if mode == "lies, saying that it cannot know":
                    self.send_header("X-Pdstack-Proven", "0")
                self.end_headers()
                self.wfile.write(body)

        super().__init__((fleet.addresses[number], fleet.port), Handler)


BAD = ("lies", "lies, saying that it cannot know", "dies", "is busy", "nonsense")


@pytest.mark.parametrize(("mode", "seeds"), [*((mode, ()) for mode in BAD), (BAD[1], (2,)), (BAD[2], (2,))])
def test_a_peer_that_lies_or_dies_is_dropped(big, mode, seeds):
    fleet = Fleet(big, 3, seeds)
    with Liar(fleet, 2, mode) as liar:
        threading.Thread(target=liar.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        fleet.start(0)
        fleet.start(1)
        deadline = time.monotonic() + 25
        while time.monotonic() < deadline and not all(host.result or host.error for host in fleet.hosts[:2]):
            time.sleep(0.05)
        liar.shutdown()
    fleet.join()

    assert mode == "nonsense" or liar.asked, "the liar was never asked"
    for host in fleet.hosts[:2]:
        assert host.error is None
        assert host.site.wrong_files() == []
    request = fleet.hosts[0].site.request()
    if seeds:
        # It stands before an origin, which takes the file over: each host may ask it anew for every file, but for none
        # of them more often than for any file.
        assert all(times <= request.attempts for times in Counter(liar.asked).values()), "it was asked again and again"
    else:
        # Per host the failures that are borne, and what the other workers had under way by then.
        most = (peers.BANNED + request.workers - 1) * peers.PEER_ATTEMPTS
        assert all(times <= most for times in Counter(host for host, _ in liar.asked).values()), "it was not banned"


def test_a_host_without_an_origin_fails_and_the_others_do_its_share(big):
    fleet = Fleet(big, 2)
    broken = fleet.hosts[1].site
    request = broken.request
    broken.request = lambda **changes: dataclasses.replace(
        request(**changes), sources=["http://127.0.0.1:9/"], attempts=1, listing=big.toy.listing()
    )
    fleet.start(0)
    fleet.start(1)
    fleet.join()

    assert fleet.hosts[0].error is None
    assert fleet.hosts[0].site.wrong_files() == []
    assert fleet.hosts[1].error is None or isinstance(fleet.hosts[1].error, CheckpointError)


class TestServer:
    @pytest.fixture
    def swarm(self):
        fan_out = FanOut(0, ["a", "b"], ["127.0.0.2", "127.0.0.3"], free_port(), "")
        with Swarm(fan_out, SECRET, time) as swarm:
            swarm.address, swarm.port = "127.0.0.2", fan_out.port
            yield swarm

    def get(self, swarm, path: str, secret: bytes = SECRET, source: str = "127.0.0.3", signed: str = "") -> int:
        """Return the status of the answer, 0 for none."""
        with socket.create_connection((swarm.address, swarm.port), 5, (source, 0)) as connection:
            proof = f"Authorization: Pdstack {signature(secret, signed or path)}\r\n" if secret else ""
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{proof}Connection: close\r\n\r\n".encode())
            with contextlib.suppress(ConnectionError):
                answer = connection.recv(100)
                return int(answer.split()[1]) if answer else 0
        return 0

    def test_answers_the_hosts_of_the_run(self, swarm):
        assert self.get(swarm, "/status/0") == 200

    def test_refuses_other_addresses(self, swarm):
        assert self.get(swarm, "/status/0", source="127.0.0.9") == 0

    @pytest.mark.parametrize("secret", [b"", b"x" * 64])
    def test_refuses_who_does_not_know_the_secret(self, swarm, secret):
        assert self.get(swarm, "/status/0", secret=secret) == 403

    def test_a_proof_is_for_one_path(self, swarm):
        assert self.get(swarm, "/status/0", signed="/file/x") == 403

    @pytest.mark.parametrize("path", ["/file/../../etc/passwd", "/file/sha256-00", "/", "/file/"])
    def test_serves_nothing_but_what_was_offered(self, swarm, path):
        assert self.get(swarm, path) == 404

    def test_a_slow_reader_gets_everything(self, swarm, tmp_path):
        """More than a socket's buffer holds: the server has to wait for the reader, and goes on."""
        key, size = "sha256-" + "0" * 64, 24 << 20
        (tmp_path / "file").write_bytes(bytes(size))
        swarm.offer({key: [str(tmp_path / "file")]})
        path = f"/file/{key}"
        with socket.create_connection((swarm.address, swarm.port), 5, ("127.0.0.3", 0)) as connection:
            proof = f"Authorization: Pdstack {signature(SECRET, path)}"
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{proof}\r\nConnection: close\r\n\r\n".encode())
            time.sleep(0.5)
            received = 0
            while chunk := connection.recv(1 << 20):
                received += len(chunk)

        assert received > size

    def test_passes_on_what_is_still_arriving_and_stops_where_it_began_again(self, swarm, tmp_path):
        key = "sha256-" + "1" * 64
        (tmp_path / "partial").write_bytes(bytes(1 << 20))
        flight = Flight(str(tmp_path / "partial"), 1 << 20)
        swarm.take_off(key, flight)
        flight.move(300_000)
        path = f"/file/{key}"
        with socket.create_connection((swarm.address, swarm.port), 5, ("127.0.0.3", 0)) as connection:
            proof = f"Authorization: Pdstack {signature(SECRET, path)}"
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{proof}\r\n\r\n".encode())
            head, received = b"", 0
            while received < 300_000:
                data = connection.recv(1 << 20)
                if b"\r\n\r\n" not in head:
                    head, _, data = (head + data).partition(b"\r\n\r\n")
                    head += b"\r\n\r\n"
                received += len(data)
            assert b"X-Pdstack-Proven: 0" in head
            flight.move(0)

            assert connection.recv(1 << 20) == b""
