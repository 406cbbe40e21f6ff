"""Kills, full disks and second runs: nothing wrong is ever published, and what arrived is used."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from hub import repository
from hub.server import Fault, Hub
from pdstack import codec
from pdstack.checkpoint.agent import Job
from pdstack.checkpoint.errors import CheckpointError
from pdstack.checkpoint.reconcile import Reconciler, World

MODULE_UTILS = pathlib.Path(__file__).resolve().parents[3] / "module_utils"
LONG = bool(os.environ.get("PDSTACK_LONG"))
KILLS = 50 if LONG else 14
WORKERS = 4


def agent(state_dir: pathlib.Path, name: str) -> subprocess.Popen[bytes]:
    """Start the program that the unit runs."""
    command = [sys.executable, "-c", "import sys; from pdstack.checkpoint.agent import main; sys.exit(main())"]
    command += ["--state-dir", str(state_dir), "run", name]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(MODULE_UTILS)}, stderr=subprocess.PIPE)


@pytest.mark.parametrize("xet", [False, True] if LONG else [False])
def test_kills_at_random_moments(site, tmp_path, xet):
    """SIGKILL the agent again and again; each resumed run builds on the last."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")  # shown where the test fails
    rng = random.Random(seed)
    big = repository.make(tmp_path / "big", shards=6, shard_bytes=1 << 20)
    total = sum(big.size(path) for path in big.paths())
    kills = 0
    changes = {"workers": WORKERS, "stall": 5.0, "xet": xet, "xet_python": sys.executable}
    lost = 300_000 if not xet else max(map(big.size, big.paths()))  # of a file under way; hf_xet reads far ahead
    with Hub(big) as hub:
        hub.rate, hub.xet = 3e6, xet
        site.hub, site.toy = hub, big
        name = site.folder.name
        job = tmp_path / "state/jobs" / f"{name}.json"
        job.parent.mkdir(parents=True)
        while kills < KILLS:
            shutil.rmtree(site.root, ignore_errors=True)
            hub.sent = killed = 0
            while not site.folder.exists() or job.exists():
                hub.log.clear()
                job.write_text(json.dumps(codec.dump(Job(site.request(**changes)))))
                with agent(tmp_path / "state", name) as process:
                    while process.poll() is None and not hub.log:
                        time.sleep(0.01)  # the interpreter's start is no interesting moment
                    try:
                        process.wait(timeout=rng.random() * 0.4 if kills < KILLS else 60)
                    except subprocess.TimeoutExpired:
                        process.send_signal(signal.SIGKILL)
                        kills, killed = kills + 1, killed + 1
                assert not site.folder.exists() or site.wrong_files() == []
                assert job.exists() or site.folder.exists(), "a killed job was forgotten"
            assert hub.sent <= total + killed * WORKERS * lost, "kills cost more than what was on the wire"
            assert not site.present().changed
            assert site.wrong_files() == []


def test_resumed_bytes_are_counted_and_not_fetched(site, tmp_path):
    site.hub.faults = [Fault("00002", "drop", at=0.5, times=1), Fault("00002", "status", times=99)]
    with pytest.raises(CheckpointError):
        site.present()
    site.hub.faults.clear()

    result = site.present()

    assert result.resumed_bytes > 30_000
    assert site.wrong_files() == []


def test_a_rotten_partial_is_fetched_again(site):
    """A crash of the machine may leave zeros in a partial: no source is blamed, the shard comes again."""
    name = "model-00002-of-00004.safetensors"
    partial = site.root / ".pdstack/partial" / f"sha256-{site.toy.digests(name)['sha256']}"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(40_000))

    site.present()

    assert site.wrong_files() == []
    assert len(site.hub.requests("00002-of-00004")) == 2


def test_an_oversized_partial_is_fetched_again(site):
    name = "model-00002-of-00004.safetensors"
    partial = site.root / ".pdstack/partial" / f"sha256-{site.toy.digests(name)['sha256']}"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(site.toy.size(name) + 1))

    site.present()

    assert site.wrong_files() == []


def test_a_link_in_place_of_a_partial_is_not_followed(site, tmp_path):
    name = "model-00002-of-00004.safetensors"
    partial = site.root / ".pdstack/partial" / f"sha256-{site.toy.digests(name)['sha256']}"
    partial.parent.mkdir(parents=True)
    (tmp_path / "victim").write_text("mine")
    partial.symlink_to(tmp_path / "victim")

    with pytest.raises(CheckpointError):
        site.present()

    assert (tmp_path / "victim").read_text() == "mine"


def test_a_second_run_says_who_works(site):
    site.hub.faults = [Fault("00002", "hang", at=0.5, seconds=3)]
    first = threading.Thread(target=lambda: site.present(stall=2.0))
    first.start()
    try:
        deadline = time.monotonic() + 5
        while not site.hub.requests("00002") and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(CheckpointError) as caught:
            site.reconciler().present()
        assert caught.value.code == "locked"
        assert f"pid {os.getpid()}" in str(caught.value)
        assert "pd_checkpoint present org--toy@" in str(caught.value)
    finally:
        first.join()
    assert site.wrong_files() == []
    assert not site.present().changed


def full_after(calls: int):
    """Stand for os.pwrite on a disk that fills at the given write."""
    seen = [0]

    def write(fd: int, data: memoryview, position: int) -> int:
        seen[0] += 1
        if seen[0] > calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(fd, data, position)

    return write


@pytest.mark.parametrize("calls", [0, 1, 3, 6])
def test_a_disk_that_fills_while_it_writes(site, calls):
    world = World(clock=site.clock, rng=lambda: 0.5, write=full_after(calls))
    with pytest.raises(CheckpointError) as caught:
        Reconciler(site.request(), world).present()
    assert caught.value.code == "no-space"
    assert not site.folder.exists()

    result = site.present()

    assert site.wrong_files() == []
    total = sum(site.toy.size(path) for path in site.toy.paths())
    assert sum(result.bytes_by_source.values()) + result.resumed_bytes <= total


def test_too_little_space_is_refused_before_a_byte_is_fetched(site, monkeypatch):
    free = 100_000
    monkeypatch.setattr(os, "statvfs", lambda path: dataclasses.make_dataclass("V", ["f_bavail", "f_frsize"])(free, 1))

    with pytest.raises(CheckpointError) as caught:
        site.present()

    assert caught.value.code == "no-space"
    assert not [seen for seen in site.hub.log if "/resolve/" in seen.path]


def test_the_space_needed_counts_partials_and_what_is_there(site, monkeypatch):
    site.present()
    (site.folder / "tokenizer.json").unlink()
    total = sum(site.toy.size(path) for path in site.toy.paths())
    monkeypatch.setattr(
        os, "statvfs", lambda path: dataclasses.make_dataclass("V", ["f_bavail", "f_frsize"])(total // 2, 1)
    )

    assert site.present().repaired == ["tokenizer.json"]


def free_space(monkeypatch, count: int) -> None:
    """Pretend that the disk has ``count`` bytes left."""
    found = dataclasses.make_dataclass("V", ["f_bavail", "f_frsize"])(count, 1)
    monkeypatch.setattr(os, "statvfs", lambda path: found)


@pytest.mark.parametrize(("spare", "enough"), [(0, True), (-1, False)])
def test_the_space_needed_is_what_is_still_to_come_to_the_byte(site, monkeypatch, spare, enough):
    """Partials that are here count for what they hold."""
    name = "model-00002-of-00004.safetensors"
    partial = site.root / ".pdstack/partial" / f"sha256-{site.toy.digests(name)['sha256']}"
    partial.parent.mkdir(parents=True)
    partial.write_bytes((site.toy.folder / name).read_bytes()[:50_000])
    total = sum(site.toy.size(path) for path in site.toy.paths())
    free_space(monkeypatch, total - 50_000 + 1000 + spare)

    if enough:
        site.present(min_free=1000)
        assert site.wrong_files() == []
    else:
        with pytest.raises(CheckpointError, match="min_free"):
            site.present(min_free=1000)


def test_min_free_is_kept_free(site):
    with pytest.raises(CheckpointError, match="min_free"):
        site.present(min_free=1 << 60)
