"""Two commits below one root share what they have in common."""

from __future__ import annotations

import dataclasses
import os
import random

import pytest
from hub import repository
from hub.damage import flip
from pdstack.checkpoint.errors import CheckpointError

NAME = "model-00002-of-00004.safetensors"


@pytest.fixture
def second(site, tmp_path):
    other = repository.make(tmp_path / "second")
    other.commit = "b" * 40
    repository.write_shard(
        other.folder / NAME,
        {
            "layers.2.experts.0.w1.weight": ("I8", [32768], 32768),
            "layers.2.experts.0.w1.scale": ("F8_E8M0", [16384], 16384),
            "layers.2.attention.weight": ("BF16", [8192], 16384),
        },
        random.Random(7),
    )
    site.hub.repositories[other.commit] = other
    return other


def test_unchanged_shards_are_linked(site, second):
    site.present()
    first = site.folder
    site.hub.log.clear()

    site.toy = second
    result = site.present()

    assert site.wrong_files() == []
    shards = [repository.shard_name(number, 4) for number in (1, 3, 4)]
    assert result.linked == shards
    assert [s.path.rsplit("/", 1)[1] for s in site.hub.log if ".safetensors" in s.path and "index" not in s.path] == [
        NAME
    ]
    assert (first / shards[0]).stat().st_ino == (site.folder / shards[0]).stat().st_ino


def test_links_do_not_make_the_other_revision_suspect(site, second):
    first = site.toy
    site.present()
    site.toy = second
    site.present()
    for toy in (first, second):
        site.toy = toy
        result = site.present()
        assert (result.changed, result.verified) == (False, [])

    site.toy = first
    site.reconciler().absent()
    site.toy = second
    result = site.present()

    assert (result.changed, result.verified, site.wrong_files()) == (False, [], [])


def test_a_broken_shard_is_not_linked(site, second):
    site.present()
    flip(site.folder / repository.shard_name(1, 4))
    site.toy = second

    result = site.present()

    assert result.linked == [repository.shard_name(3, 4), repository.shard_name(4, 4)]
    assert site.wrong_files() == []


def test_what_another_revision_has_needs_no_space(site, second, monkeypatch):
    site.present()
    site.toy = second
    new = sum(second.size(path) for path in second.paths() if not path.endswith(".safetensors")) + second.size(NAME)
    disk = dataclasses.make_dataclass("V", ["f_bavail", "f_frsize"])
    monkeypatch.setattr(os, "statvfs", lambda path: disk(new - 1, 1))
    with pytest.raises(CheckpointError, match="free"):
        site.reconciler().present(check=True)
    monkeypatch.setattr(os, "statvfs", lambda path: disk(new, 1))

    assert site.reconciler().present(check=True).to_fetch_bytes == new
    assert site.present().changed
    assert site.wrong_files() == []
