"""A repair drains nothing; an engine that may have loaded wrong bytes is named, and only such a one."""

from __future__ import annotations

import mmap
import os
import pathlib

import pytest
from hub.damage import flip
from pdstack import units
from pdstack.checkpoint import repairs, scrub
from pdstack.checkpoint.errors import CheckpointError
from pdstack.checkpoint.repairs import LOADING

NAME = "model-00002-of-00004.safetensors"
HOUR = 3600.0
DAY = 24 * HOUR


@pytest.fixture
def times(site, monkeypatch):
    """The site with a clock that the test sets."""
    now = [1_000_000_000.0]
    monkeypatch.setattr(site.clock, "time", lambda: now[0])
    site.present()
    site.now = now
    return site


def suspect(site, started: float) -> str | None:
    """Ask as pd_units does."""
    state = units.UnitState("pd-decode@0.service", active="active", started_us=int(started * 1e6))
    unit = units.WantedUnit("pd-decode@0.service", checkpoint=str(site.folder))
    return units.stale_reason(unit, state, (), 0.0)


def test_only_an_engine_that_started_in_between_has_to_load_again(times):
    placed = times.now[0]
    times.now[0] += 10 * DAY
    flip(times.folder / NAME)
    result = times.present()

    assert result.repaired == [NAME]
    assert result.suspect_since == "2001-09-09T01:46:40Z"
    assert suspect(times, placed - LOADING - 1) is None, "it loaded good bytes"
    assert NAME in (suspect(times, placed + DAY) or "")
    assert NAME in (suspect(times, placed - 60) or ""), "it may still have been loading"
    assert suspect(times, times.now[0] + 1) is None, "it loaded the replacement"


def test_a_scrub_in_between_clears_those_that_started_before_it(times):
    placed = times.now[0]
    times.now[0] += 10 * DAY
    scrub.run(times.reconciler().store, nights=1, now=times.clock.time)
    times.now[0] += DAY
    flip(times.folder / NAME)
    times.present()

    assert suspect(times, placed + DAY) is None
    assert suspect(times, placed + 10 * DAY + HOUR) is not None


def test_a_repair_that_was_interrupted_is_told_from_its_beginning(times):
    placed = times.now[0]
    times.now[0] += DAY
    flip(times.folder / NAME)
    real, calls = os.replace, []

    def replace(source: str, target: str) -> None:
        real(source, target)
        if str(target).endswith(NAME):
            calls.append(target)
            raise OSError(5, "the host dies here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(CheckpointError):
            times.present()
    assert calls
    assert suspect(times, placed + HOUR) is None, "it cannot load right bytes before the repair has ended"
    times.now[0] += DAY

    times.present()

    assert suspect(times, placed + HOUR) is not None
    times.hub.log.clear()
    assert not times.present().changed


def test_without_a_manifest_nobody_knows_since_when(times):
    (times.folder / ".pdstack-manifest.json").unlink()
    flip(times.folder / NAME)
    times.present()

    assert suspect(times, 1.0) is not None


def test_a_first_placement_and_an_intact_one_leave_no_trace(times):
    assert not pathlib.Path(times.reconciler().store.repairs).exists()
    assert times.present().suspect_since is None


def test_the_list_stays_short_and_forgets_nothing(times):
    store = times.reconciler().store
    for number in range(repairs.KEPT + 5):
        repairs.begin(store, 1000.0 + number * DAY, [f"{number}"])
        repairs.end(store, 2000.0 + number * DAY)

    assert len(repairs.load(store).windows) == repairs.KEPT
    assert suspect(times, 1500.0) is not None


def test_a_mapped_file_keeps_its_bytes_through_a_repair(times):
    """What a running engine has mapped is the old inode, whole and unchanged, until it lets go."""
    flip(times.folder / NAME)
    with (times.folder / NAME).open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    before = bytes(mapped)

    times.present()

    assert bytes(mapped) == before
    assert (times.folder / NAME).read_bytes() != before
    assert times.wrong_files() == []
