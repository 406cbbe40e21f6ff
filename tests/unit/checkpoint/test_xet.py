"""Files that the hub keeps in xet: by the real hf_xet, against the tests' own storage."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import threading
import time

import pytest
from hub import repository
from hub.server import Fault
from pdstack.checkpoint.errors import CheckpointError

SHARD = "model-00002-of-00002.safetensors"
XET = {"xet": True, "xet_python": sys.executable, "stall": 10.0}  # a busy machine takes its time to start Python


@pytest.fixture
def kept(site, tmp_path):
    """Two shards only: each costs a process."""
    site.toy = repository.make(tmp_path / "toy", shards=2)
    site.hub.repositories[site.toy.commit] = site.toy
    site.hub.xet = True
    return site


def by_xet(result) -> int:
    return sum(count for name, count in result.bytes_by_source.items() if name.startswith("xet of "))


def resolved(site) -> list[str]:
    return [seen.path for seen in site.hub.log if "/resolve/" in seen.path and ".safetensors" in seen.path]


def test_shards_come_from_xet_and_the_small_rest_from_the_hub(kept):
    result = kept.present(**XET)

    assert kept.wrong_files() == []
    assert by_xet(result) == sum(kept.toy.size(p) for p in kept.toy.paths() if p.endswith(".safetensors"))
    assert [path for path in resolved(kept) if "index" not in path] == []
    assert len(kept.hub.requests("xet-read-token")) == 1, "one token serves all files"
    assert not (kept.root / ".pdstack/scratch").exists()


@pytest.mark.parametrize("kept_there", [True, False])
def test_off_or_not_kept_there_means_plain_http(site, kept_there):
    site.hub.xet = kept_there

    result = site.present(xet=not kept_there, xet_python=sys.executable)

    assert site.wrong_files() == []
    assert by_xet(result) == 0
    assert not site.hub.requests("/xet/")


def test_a_kill_is_resumed_from_the_byte_where_it_was(kept):
    partial = kept.root / ".pdstack/partial" / f"sha256-{kept.toy.digests(SHARD)['sha256']}"
    partial.parent.mkdir(parents=True)
    partial.write_bytes((kept.toy.folder / SHARD).read_bytes()[:65_700])  # in the second chunk

    result = kept.present(**XET)

    assert kept.wrong_files() == []
    assert result.resumed_bytes == 65_700
    total = sum(kept.toy.size(p) for p in kept.toy.paths() if p.endswith(".safetensors"))
    assert by_xet(result) == total - 65_700


# What goes wrong for ever behind xet: the hub's HTTP has the file all the same.
BROKEN = {
    "no token": Fault("xet-read-token", "status", status=500),
    "token refused": Fault("xet-read-token", "status", status=403),
    "a page in place of the token": Fault("xet-read-token", "status", status=200),
    "storage refuses": Fault("/xet/v1/", "status", status=401),
    "storage does not know it": Fault("/xet/v1/", "status", status=404),
    "storage fails": Fault("/xet/v1/", "status", status=500),
    "block missing": Fault("/xet/xorb/", "status", status=404),
    "block dropped": Fault("/xet/xorb/", "drop"),
    "block cut in its header": Fault("/xet/xorb/", "cut", byte=40),
    "wrong bytes of the right length": Fault("/xet/xorb/", "flip", at=0.7),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_hubs_http_stands_behind_it(kept, name):
    fault = BROKEN[name]
    fault.times = 9999
    kept.hub.faults = [fault]

    kept.present(**XET)

    assert fault.times < 9999, "the fault never struck"
    assert kept.wrong_files() == []
    assert len({path for path in resolved(kept) if "index" not in path}) == 2


def test_without_hf_xet_it_says_what_to_do(kept, tmp_path):
    """A fresh host has no release yet."""
    (tmp_path / "python").write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'hf_xet'\" >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    for python in (tmp_path / "python", "/nowhere/python"):
        with pytest.raises(CheckpointError, match="install the release first") as caught:
            kept.present(xet=True, xet_python=str(python))
        assert caught.value.code == "bad-input"
    assert not kept.folder.exists()


def test_a_storage_that_hangs_is_left_after_the_stall(kept):
    kept.hub.faults = [Fault("/xet/xorb/", "hang", times=99, at=0.5, seconds=4)]

    kept.present(**{**XET, "stall": 2.0}, attempts=2)

    assert kept.wrong_files() == []


def test_the_token_is_in_no_argument(kept, tmp_path):
    """Neither the hub's token nor xet's: other users of the host can read every process's arguments."""
    kept.hub.token = "hf_secret"
    (tmp_path / "token").write_text("hf_secret")
    kept.hub.faults = [Fault("/xet/xorb/", "hang", times=2, at=0.0, seconds=0.5)]
    seen: set[str] = set()
    work = threading.Thread(target=lambda: kept.present(**XET, token_file=str(tmp_path / "token")))
    work.start()
    while work.is_alive():
        seen |= arguments_and_environments()
        time.sleep(0.02)
    work.join()

    assert kept.wrong_files() == []
    helpers = [text for text in seen if "hf_xet" in text]
    assert helpers, "no helper was seen at work"
    assert [text for text in helpers if "hf_secret" in text or "xet_first" in text] == []


def arguments_and_environments() -> set[str]:
    """Return those of this process's children."""
    found: set[str] = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"PPid:\t{os.getpid()}\n" in (process / "status").read_text():
                found.add(
                    " ".join((process / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ"))
                )
    return found
