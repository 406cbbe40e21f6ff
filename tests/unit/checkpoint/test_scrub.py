"""Bit rot changes bytes and no stat, so only a hash can see it."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess

import pytest
from hub.damage import flip
from pdstack.checkpoint import manifest, scrub
from pdstack.checkpoint.listing import RepoFile
from pdstack.checkpoint.store import load_manifest, save_manifest

NAME = "model-00002-of-00004.safetensors"


@pytest.fixture
def rotten(site, monkeypatch):
    """A checkpoint with a flipped bit that no stat shows: the manifest is told that nothing moved."""
    site.present()
    flip(site.folder / NAME)
    store = site.reconciler().store
    found = load_manifest(store.final)
    entry = manifest.entry_of(os.stat(site.folder / NAME), found.files[NAME].sha256, found.files[NAME].verified)
    save_manifest(store.work, store.final, manifest.Manifest(found.listing, {**found.files, NAME: entry}))
    return site


def test_the_stat_cannot_see_it(rotten):
    assert not rotten.present().changed


def test_the_scrub_finds_it_and_the_next_run_repairs_it(rotten):
    store = rotten.reconciler().store
    results = scrub.run(store, nights=1, now=rotten.clock.time)
    assert [path for path, words in results.items() if words] == [NAME]
    rotten.hub.log.clear()

    result = rotten.present()

    assert (result.repaired, rotten.wrong_files()) == ([NAME], [])
    assert len(rotten.hub.log) == 1
    assert not rotten.present().changed


def test_some_nights_cover_everything_once(site):
    site.present()
    store = site.reconciler().store
    seen = [path for _ in range(4) for path in scrub.run(store, nights=4, now=site.clock.time)]

    everything = site.toy.paths()
    assert sorted(seen[: len(everything)]) == everything, "a file came twice before another came once"


def test_full_verification_moves_the_date(site, monkeypatch):
    monkeypatch.setattr(site.clock, "time", lambda: 1_000_000_000.0)
    assert site.present().last_full_verify == "2001-09-09T01:46:40Z"
    monkeypatch.setattr(site.clock, "time", lambda: 1_000_086_400.0)
    scrub.run(site.reconciler().store, nights=1, now=site.clock.time)

    assert site.present().last_full_verify == "2001-09-10T01:46:40Z"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a filesystem of its own")
def test_the_page_cache_does_not_hide_what_rots_on_the_disk(tmp_path):
    """The bytes in memory stay right, those on the disk below do not: whoever reads the cache proves nothing."""
    image, root = tmp_path / "image", tmp_path / "mounted"
    root.mkdir()
    with image.open("wb") as stream:
        stream.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, root], check=True)
    try:
        content = random.Random(0).randbytes((1 << 20) + 12345)
        path = root / "file"
        path.write_bytes(content)
        subprocess.run(["sync", "-f", root], check=True)
        want = RepoFile("file", len(content), sha256=hashlib.sha256(content).hexdigest())
        assert manifest.verify_file(str(path), want, 0.0) is not None

        flip(image, image.read_bytes().index(content[4096:8192]))

        assert path.read_bytes() == content, "the cache forgot it, so this shows nothing"
        assert manifest.verify_file(str(path), want, 0.0) is None
    finally:
        subprocess.run(["umount", root], check=True)
