"""What may happen to a published checkpoint, and what the next run does about it."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
from hub.damage import empty, flip, grow, replace_by_folder, replace_by_link, truncate
from pdstack.checkpoint import manifest
from pdstack.checkpoint.errors import CheckpointError

NAME = "model-00002-of-00004.safetensors"


DAMAGE = {
    "flipped, mtime restored": flip,
    "truncated, mtime restored": truncate,
    "grown": grow,
    "deleted": pathlib.Path.unlink,
    "emptied": empty,
    "a symbolic link": replace_by_link,
    "a folder": replace_by_folder,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_fetches_only_what_broke(site, name):
    site.present()
    DAMAGE[name](site.folder / NAME)
    site.hub.log.clear()

    result = site.present()

    assert result.changed
    assert result.repaired == [NAME]
    assert site.wrong_files() == []
    assert [seen.path for seen in site.hub.log] == [f"/org/toy/resolve/{site.toy.commit}/{NAME}"]


def test_intact_costs_no_request_and_writes_nothing(site):
    site.present()
    site.hub.log.clear()
    before = sorted((str(p), p.lstat().st_mtime_ns, p.lstat().st_ctime_ns) for p in site.root.rglob("*"))

    result = site.present()

    assert not result.changed
    assert site.hub.log == []
    assert sorted((str(p), p.lstat().st_mtime_ns, p.lstat().st_ctime_ns) for p in site.root.rglob("*")) == before


def test_a_fresh_checkpoint_is_trusted_at_once(site):
    """Entries written in the same tick as the manifest would be rehashed by every run."""
    site.present()

    assert site.present().verified == []


def test_a_racy_entry_is_hashed(site):
    """A file that changed in the very tick in which the manifest was written would look as it did."""
    site.present()
    path = site.folder / ".pdstack-manifest.json"
    document = json.loads(path.read_text())
    document["written_ns"] = document["files"][NAME]["ctime_ns"]
    path.write_text(json.dumps(document))

    assert NAME in site.present().verified
    assert site.present().verified == []


def test_touched_but_right_is_hashed_and_not_fetched(site):
    site.present()
    os.utime(site.folder / NAME)
    site.hub.log.clear()

    result = site.present()

    assert (result.changed, result.verified, site.hub.log) == (False, [NAME], [])
    assert site.present().verified == []


def test_a_lost_manifest_costs_a_hash_and_no_request_for_bytes(site):
    site.present()
    (site.folder / ".pdstack-manifest.json").unlink()
    site.hub.log.clear()

    site.present()

    assert site.wrong_files() == []
    assert [seen.path for seen in site.hub.log] == [f"/api/models/org/toy/tree/{site.toy.commit}?recursive=true"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99}', '{"listing": 1}'])
def test_a_broken_manifest_is_no_proof(site, text):
    site.present()
    flip(site.folder / NAME)
    (site.folder / ".pdstack-manifest.json").write_text(text)

    site.present()

    assert site.wrong_files() == []


@pytest.mark.parametrize("stray", ["model-00005-of-00004.safetensors", "inference/extra.bin", "folder/x"])
def test_what_does_not_belong_is_moved_aside_and_not_deleted(site, stray):
    site.present()
    (site.folder / stray).parent.mkdir(exist_ok=True)
    (site.folder / stray).write_bytes(b"mine")
    site.hub.log.clear()

    result = site.present()

    assert (result.changed, result.quarantined, result.repaired, site.hub.log) == (True, [stray], [], [])
    assert site.wrong_files() == []
    kept = [p for p in (site.root / ".pdstack/quarantine").rglob("*") if p.is_file()]
    assert [p.read_bytes() for p in kept] == [b"mine"]


def test_nothing_good_goes_before_its_replacement_is_proven(site):
    site.present()
    bad = site.folder / NAME
    flip(bad)
    inode = bad.stat().st_ino
    site.hub.__exit__()
    with pytest.raises(CheckpointError):
        site.present(attempts=2)

    assert bad.stat().st_ino == inode
    others = [path for path in site.wrong_files() if path != NAME]
    assert others == []


def test_check_mode_says_what_it_would_fetch_and_touches_nothing(site):
    planned = site.reconciler().present(check=True)
    assert planned.changed
    assert planned.to_fetch_bytes == sum(map(site.toy.size, site.toy.paths()))
    assert planned.fetched == site.toy.paths()
    assert not site.root.exists()
    site.present()
    flip(site.folder / NAME)

    planned = site.reconciler().present(check=True)

    assert planned.fetched == [NAME]
    assert planned.before[NAME] == "wrong bytes"
    assert planned.after[NAME] == f"sha256-{site.toy.digests(NAME)['sha256']}"
    assert site.wrong_files() == [NAME]


def test_verified_changes_nothing_and_names_what_is_broken(site):
    site.present()
    assert site.reconciler(verify="full").verified().verified == site.toy.paths()
    flip(site.folder / NAME)
    site.hub.log.clear()

    with pytest.raises(CheckpointError, match=NAME):
        site.reconciler(verify="full").verified()

    assert site.hub.log == []
    assert site.wrong_files() == [NAME]


def test_status_never_fails(site):
    assert site.reconciler().status().problems == ["not placed"]
    site.present()
    assert site.reconciler().status().problems == []
    truncate(site.folder / NAME)
    assert site.reconciler().status().problems == [f"{NAME}: 65839 of 65840 bytes"]


def test_a_kill_while_everything_is_hashed_forgets_nothing(site, monkeypatch):
    """What was proven before stays proven: the next run does not hash 146 GB again."""
    site.present()
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "verify_file", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            site.present(verify="full")

    assert site.present().verified == []
    assert site.present(verify="full").verified == site.toy.paths()


def test_sample_hashes_some(site):
    site.present()
    reconciler = site.reconciler(verify="sample")
    draws = iter([0.0, 0.9] * 20)
    reconciler._world.rng = lambda: next(draws)

    assert 0 < len(reconciler.present().verified) < len(site.toy.paths())


def test_a_selection_is_placed_and_may_change(site):
    site.present(exclude=["inference/*"])
    assert site.wrong_files() == ["inference/README.md"]
    site.hub.log.clear()

    assert site.present().repaired == ["inference/README.md"]

    assert len(site.hub.log) == 1
    assert site.wrong_files() == []
