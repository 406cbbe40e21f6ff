"""What could go from a full disk: listed with sizes, what is in use left out, nothing removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pdstack import space
from pdstack.checkpoint import store
from pdstack.checkpoint.errors import CheckpointError


def fill(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))


def test_the_list_is_by_size_and_spares_what_is_in_use(tmp_path: Path) -> None:
    fill(tmp_path / "old" / "a", 3_000_000)
    fill(tmp_path / "older" / "b", 5_000_000)
    fill(tmp_path / "current" / "c", 9_000_000)
    found = space.removable(str(tmp_path), {"current"})
    assert [os.path.basename(item.path) for item in found] == ["older", "old"]
    assert found[0].size == pytest.approx(5_000_000, rel=0.01)
    assert "0.01 GB in all" in space.words(found, "none")
    assert space.words(space.removable(str(tmp_path / "absent"), set()), "none") == "none"
    assert (tmp_path / "older" / "b").exists()


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    fill(tmp_path / "one" / "a", 4_000_000)
    os.link(tmp_path / "one" / "a", tmp_path / "one" / "b")
    assert space.size(str(tmp_path / "one")) < 5_000_000


def test_a_checkpoint_that_does_not_fit_names_the_others(tmp_path: Path) -> None:
    fill(tmp_path / "former@1" / "model.safetensors", 1_000_000)
    fill(tmp_path / "wanted@2" / "model.safetensors", 1_000_000)
    with pytest.raises(CheckpointError) as error:
        store.require_space(str(tmp_path), 10**18, 0, "wanted@2")
    assert "former@1" in str(error.value)
    assert "wanted@2" not in str(error.value)
