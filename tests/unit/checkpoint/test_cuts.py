"""A connection ends at any byte of an answer, header included, by FIN or RST: the file arrives whole all the same."""

from __future__ import annotations

import hashlib
import pathlib
import random
import shutil
import time

import pytest
from hub import repository
from hub.server import Fault, Hub
from pdstack.checkpoint.fetch import Fetcher, FetchOptions
from pdstack.checkpoint.listing import RepoFile
from pdstack.checkpoint.progress import Progress
from pdstack.checkpoint.sources import HttpSource, HubSource
from pdstack.checkpoint.transport import HttpTransport

SEED = random.SystemRandom().randrange(1 << 30)
SHARD = "model-00001-of-00001.safetensors"
BORDERS = (1 << 16, 1 << 18, 1 << 20, 2 << 20)  # of buffers, pieces and chunks


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A hub with one shard of 2.3 MB."""
    toy = repository.make(tmp_path_factory.mktemp("cuts"), shards=1, shard_bytes=2_300_000 // 64 * 64)
    with Hub(toy) as hub:
        yield hub


def fetch(hub: Hub, source, file: RepoFile, folder: pathlib.Path, clock) -> bytes:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    found: list[bytes] = []
    options = FetchOptions(workers=1, attempts=4, stall=5.0)
    fetcher = Fetcher([source], str(folder), options, Progress(None, clock.time), clock)
    fetcher.fetch_all([file], lambda file, partial, sha256: found.append(pathlib.Path(partial).read_bytes()))
    return found[0]


def positions(header: int, size: int, rng: random.Random) -> list[int]:
    """Return bytes of an answer: all of its header, the body's ends, borders of buffers, and some at random."""
    body = {0, 1, 2, 7, 8, 9, size - 9, size - 2, size - 1, *(rng.randrange(size) for _ in range(24))}
    body |= {border + step for border in BORDERS for step in (-1, 0, 1) if border < size}
    return sorted({*range(0, header + 1, 3), header - 1, header, *(header + at for at in body)})


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("kind", ["hub", "mirror"])
def test_a_connection_that_ends_at_any_byte(big, tmp_path, clock, kind, reset):
    print(f"seed {SEED}")
    web = HttpTransport(timeout=5.0)
    toy = big.repositories["a" * 40]
    source = HubSource("org/toy", toy.commit, web, big.url) if kind == "hub" else HttpSource(big.mirror, web)
    file = RepoFile(SHARD, toy.size(SHARD), sha256=toy.digests(SHARD)["sha256"])
    header = answer_header(big, source, file)
    whole = (toy.folder / SHARD).read_bytes()
    for at in positions(header, file.size, random.Random(SEED)):
        big.log.clear()
        big.faults = [Fault(SHARD, "cut", byte=at, reset=reset)]

        assert hashlib.sha256(fetch(big, source, file, tmp_path / "partial", clock)).hexdigest() == file.sha256

        assert [big.faults[0].times, len(big.log)] == [0, 2], f"byte {at}"
        assert big.log[0].range is None
        came = max(0, at - header)
        if not reset:  # an RST may overtake bytes that were sent before it
            assert big.log[1].range == (f"bytes={came}-" if came else None), f"byte {at}"
    assert len(whole) == file.size


def answer_header(hub: Hub, source, file: RepoFile) -> int:
    """Return the length of an answer's header, as the server writes it."""
    hub.faults = [Fault(SHARD, "cut", byte=1 << 40)]
    hub.wrote = 0
    stream = source.open(file, 0)
    buffer = memoryview(bytearray(1 << 20))
    count = 0
    while got := stream.body.readinto(buffer):
        count += got
    stream.body.close()
    for _ in range(5000):  # the server's thread says so after its last byte, whenever it gets a core
        if hub.wrote:
            return hub.wrote - count
        time.sleep(0.001)
    raise AssertionError("the server did not say what it wrote")


def test_a_listing_that_ends_at_any_byte(site):
    """The tree has no digest of its own: a short one must not pass for a repository of fewer files."""
    whole = site.reconciler().present(check=True)
    rng = random.Random(SEED)
    for at in sorted({*range(0, 160, 3), *(rng.randrange(160, 1400) for _ in range(60)), 1500, 1600}):
        for reset in (False, True):
            site.hub.faults = [Fault("/tree/", "cut", byte=at, reset=reset)]

            again = site.reconciler().present(check=True)

            assert (again.fetched, again.to_fetch_bytes) == (whole.fetched, whole.to_fetch_bytes)
