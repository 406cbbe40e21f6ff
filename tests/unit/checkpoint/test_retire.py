"""state=absent removes exactly what was placed."""

from __future__ import annotations

import pytest
from hub.server import Fault
from pdstack.checkpoint.errors import CheckpointError


def test_removes_exactly_what_was_placed(site):
    site.present()
    assert site.reconciler().absent(check=True).changed
    assert site.folder.exists()

    assert site.reconciler().absent().changed

    assert list(site.root.iterdir()) == []
    assert not site.reconciler().absent().changed


def test_leaves_files_of_others_and_names_them(site):
    site.present()
    (site.folder / "notes.txt").write_text("mine")

    result = site.reconciler().absent()

    assert [p.name for p in site.folder.iterdir()] == ["notes.txt"]
    assert "notes.txt is not ours" in result.problems[0]


def test_removes_what_was_placed_and_then_deselected(site):
    """It lies in quarantine, beside what never was ours."""
    site.present()
    (site.folder / "inference/mine.txt").write_text("mine")
    assert site.present(exclude=["inference/*"]).quarantined == ["inference/README.md", "inference/mine.txt"]

    site.reconciler().absent()

    (left,) = [path for path in site.root.rglob("*") if path.is_file() and path.name not in ("lock", "clock")]
    assert left.read_text() == "mine"


def test_leaves_a_folder_that_it_did_not_place(site):
    site.folder.mkdir(parents=True)
    (site.folder / "config.json").write_text("{}")

    result = site.reconciler().absent()

    assert not result.changed
    assert (site.folder / "config.json").exists()


def test_removes_an_unfinished_one(site):
    site.hub.faults = [Fault("00002", "drop", times=99, at=0.4), Fault("00002", "status", status=404, times=99)]
    with pytest.raises(CheckpointError):
        site.present()
    assert any((site.root / ".pdstack/partial").iterdir())

    site.reconciler().absent()

    assert list(site.root.iterdir()) == []
