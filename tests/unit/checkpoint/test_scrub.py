"""Bit rot changes bytes and no stat, so only a hash can see it."""

from __future__ import annotations

import os

import pytest
from hub.damage import flip
from pdstack.checkpoint import manifest, scrub
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
