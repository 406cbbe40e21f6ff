"""A toy checkpoint, a hub that serves it, and a reconciler whose waits cost nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hub import repository
from hub.repository import Repository
from hub.server import Hub
from pdstack.checkpoint.reconcile import Reconciler, World
from pdstack.checkpoint.request import Request


class FastClock:
    """Real time, except that sleeping takes no time at all and is written down.

    Each thread is ahead by what it slept itself: else one that waits would make another's transfer look slow.
    """

    def __init__(self) -> None:
        self.slept: list[float] = []
        self._own = threading.local()

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic() + getattr(self._own, "ahead", 0.0)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._own.ahead = getattr(self._own, "ahead", 0.0) + seconds


@dataclasses.dataclass
class Site:
    """One host's folder beside one hub."""

    hub: Hub
    toy: Repository
    root: pathlib.Path
    clock: FastClock = dataclasses.field(default_factory=FastClock)

    @property
    def folder(self) -> pathlib.Path:
        return self.root / f"org--toy@{self.toy.commit}"

    def request(self, **changes: object) -> Request:
        values: dict[str, object] = {
            "repo": "org/toy",
            "commit": self.toy.commit,
            "root": str(self.root),
            "sources": ["hub"],
            "endpoint": self.hub.url,
            "workers": 4,
            "stall": 1.0,
            "attempts": 4,
        }
        return Request(**{**values, **changes})  # type: ignore[arg-type]

    def reconciler(self, **changes: object) -> Reconciler:
        return Reconciler(self.request(**changes), World(clock=self.clock, rng=lambda: 0.5))

    def present(self, **changes: object):
        return self.reconciler(**changes).present()

    def wrong_files(self) -> list[str]:
        """Return what is not byte for byte the repository's; empty only for a complete, clean folder."""
        here = {p.relative_to(self.folder).as_posix(): p for p in self.folder.rglob("*") if p.is_file()}
        here.pop(".pdstack-manifest.json", None)
        wrong = sorted(set(here) ^ set(self.toy.paths()))
        for path in set(here) & set(self.toy.paths()):
            if hashlib.sha256(here[path].read_bytes()).hexdigest() != self.toy.digests(path)["sha256"]:
                wrong.append(path)
        return wrong


@pytest.fixture
def tmp_path() -> Iterator[pathlib.Path]:
    """Memory in place of a disk where there is some: every published file is synced, and CI disks are slow."""
    shared = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield pathlib.Path(folder)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return repository.make(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def hub(toy: Repository) -> Iterator[Hub]:
    with Hub(toy) as server:
        yield server


@dataclasses.dataclass
class Tls:
    """``server``: PEM file with a key and a certificate for 127.0.0.1 and hub.invalid; ``ca``: who vouches for it."""

    server: str
    ca: str


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """An authority that nobody else trusts."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        subprocess.run(["openssl", "req", "-x509", *key, *words], cwd=folder, check=True, capture_output=True)

    usage = ["-addext", "keyUsage=critical,keyCertSign"]
    openssl("-subj", "/CN=tests' authority", *usage, "-keyout", "ca.key", "-out", "ca.pem")
    names = "subjectAltName=IP:127.0.0.1,DNS:hub.invalid"
    leaf = ["-addext", names, "-addext", "basicConstraints=critical,CA:FALSE", "-CA", "ca.pem", "-CAkey", "ca.key"]
    openssl("-subj", "/CN=tests", *leaf, "-keyout", "server.key", "-out", "server.crt")
    server = folder / "server.pem"
    server.write_text((folder / "server.key").read_text() + (folder / "server.crt").read_text())
    return Tls(str(server), str(folder / "ca.pem"))


@pytest.fixture
def clock() -> FastClock:
    return FastClock()


@pytest.fixture
def site(hub: Hub, toy: Repository, tmp_path: pathlib.Path) -> Site:
    return Site(hub, toy, tmp_path / "models")


@pytest.fixture
def shard() -> Callable[[int], str]:
    return lambda number: repository.shard_name(number, 4)
