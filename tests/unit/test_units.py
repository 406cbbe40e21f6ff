"""The smallest set of systemd actions, from what is and what should be."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from pdstack import units
from pdstack.runner import CommandFailed, Completed

RUNNING = {"load": "loaded", "active": "active", "sub": "running", "enabled": "enabled", "main_pid": 10}
PAIR = [units.WantedUnit("pd-prefill@0.service", "pair-0"), units.WantedUnit("pd-decode@0.service", "pair-0")]
ROUTER = units.WantedUnit("pd-router.service")


def states(wanted: Sequence[units.WantedUnit], **changes: dict[str, object]) -> dict[str, units.UnitState]:
    found = {}
    for unit in wanted:
        fields = {**RUNNING, **changes.get(unit.name.partition("@")[0].replace("-", "_").removesuffix(".service"), {})}
        found[unit.name] = units.UnitState(unit.name, **fields)  # type: ignore[arg-type]
    return found


def test_intact_needs_nothing() -> None:
    assert not units.plan([*PAIR, ROUTER], states([*PAIR, ROUTER]), {}).changed


def test_a_stale_member_restarts_its_whole_set_and_nothing_else() -> None:
    todo = units.plan([*PAIR, ROUTER], states([*PAIR, ROUTER]), {"pd-decode@0.service": "x changed"})
    assert todo.restart == ["pd-prefill@0.service", "pd-decode@0.service"]
    assert todo.why["pd-prefill@0.service"] == "one set with pd-decode@0.service"
    assert not (todo.start)
    assert not (todo.stop)
    assert not (todo.enable)


def test_a_stale_router_restarts_alone() -> None:
    todo = units.plan([*PAIR, ROUTER], states([*PAIR, ROUTER]), {"pd-router.service": "x changed"})
    assert todo.restart == ["pd-router.service"]


@pytest.mark.parametrize("active", ["inactive", "failed"])
def test_a_stopped_unit_is_started_and_its_peer_left_alone(active: str) -> None:
    todo = units.plan(PAIR, states(PAIR, pd_decode={"active": active}), {})
    assert (todo.start, todo.restart) == (["pd-decode@0.service"], [])


def test_a_disabled_unit_is_enabled_without_a_restart() -> None:
    todo = units.plan(PAIR, states(PAIR, pd_decode={"enabled": "disabled"}), {})
    assert (todo.enable, todo.start, todo.restart) == (["pd-decode@0.service"], [], [])


def test_enabled_until_the_next_boot_is_not_enabled() -> None:
    assert units.plan(PAIR, states(PAIR, pd_decode={"enabled": "enabled-runtime"}), {}).enable == [PAIR[1].name]


def test_each_reason_is_told() -> None:
    todo = units.plan(PAIR, states(PAIR, pd_decode={"enabled": "disabled"}), {PAIR[1].name: "x changed"})
    assert todo.why[PAIR[1].name] == "not enabled (disabled); x changed"


def test_a_removed_drop_in_makes_its_unit_stale() -> None:
    unit = units.WantedUnit("a.service", files=["/etc/systemd/system/a.service.d/*"])
    state = units.UnitState("a.service", active="active", started_us=1)
    assert units.stale_reason(unit, state, ["/etc/systemd/system/a.service.d/hand.conf"], 0.0)
    assert units.stale_reason(unit, state, ["/etc/systemd/system/b.service.d/hand.conf"], 0.0) is None


def test_units_that_left_the_plan_stop_and_are_disabled() -> None:
    found = states([*PAIR, ROUTER])
    todo = units.plan(PAIR, found, {}, strays=["pd-router.service"])
    assert (todo.stop, todo.disable) == (["pd-router.service"], ["pd-router.service"])


def test_no_pattern_owns_no_unit() -> None:
    """`systemctl list-units` without a pattern lists every unit of the host, and all of them would be stopped."""

    def every_unit(argv: Sequence[str]) -> Completed:
        return Completed(0, "ssh.service loaded active running ssh\n", "")

    assert units.known(every_unit, []) == []
    assert units.known(every_unit, ["pd-*"]) == ["ssh.service"]


def test_show_reads_what_systemd_prints() -> None:
    text = (
        "Id=a.service\nLoadState=loaded\nActiveState=active\nSubState=running\nResult=success\nUnitFileState=enabled\n"
        "MainPID=42\nNRestarts=3\nNeedDaemonReload=yes\nExecMainStartTimestampMonotonic=1000000\n"
        "ActiveEnterTimestampMonotonic=2000000\n\nId=b.service\nLoadState=not-found\nActiveState=inactive\n"
    )
    found = units.show(lambda argv: Completed(0, text, ""), ["a.service", "b.service"])
    assert found["a.service"] == units.UnitState(
        "a.service", "loaded", "active", "running", "success", "enabled", 42, 3, True, 1000000, 2000000
    )
    assert found["b.service"].load == "not-found"


def test_stale_by_a_file_that_changed_after_the_start(tmp_path: Path) -> None:
    config = tmp_path / "decode-0.yaml"
    config.write_text("x")
    unit = units.WantedUnit("pd-decode@0.service", files=(str(config),))
    offset = time.time() - time.monotonic()

    def started(real: float) -> units.UnitState:
        return units.UnitState("pd-decode@0.service", **RUNNING, started_us=int((real - offset) * 1e6))  # type: ignore[arg-type]

    moment = os.lstat(config).st_mtime
    assert units.stale_reason(unit, started(moment + 1), (), offset) is None
    assert "changed after the process started" in str(units.stale_reason(unit, started(moment - 1), (), offset))


def test_a_glob_names_whatever_matches_now(tmp_path: Path) -> None:
    offset = time.time() - time.monotonic()
    state = units.UnitState("u.service", **RUNNING, started_us=int((time.time() - 60 - offset) * 1e6))  # type: ignore[arg-type]
    unit = units.WantedUnit("u.service", files=(f"{tmp_path}/python3*/RECORD",))
    assert units.stale_reason(unit, state, (), offset) is None
    (tmp_path / "python3.12").mkdir()
    (tmp_path / "python3.12" / "RECORD").write_text("")
    assert units.stale_reason(unit, state, (), offset) is not None


def test_a_moved_link_makes_stale_by_its_own_time(tmp_path: Path) -> None:
    old = tmp_path / "release"
    old.mkdir()
    os.utime(old, (1, 1))
    link = tmp_path / "current"
    link.symlink_to(old)
    unit = units.WantedUnit("u.service", files=(str(link),))
    offset = time.time() - time.monotonic()
    state = units.UnitState("u.service", **RUNNING, started_us=int((time.time() - 60 - offset) * 1e6))  # type: ignore[arg-type]
    assert units.stale_reason(unit, state, (), offset) is not None


def test_stale_by_a_file_that_this_run_wrote_whatever_the_clock_says(tmp_path: Path) -> None:
    unit = units.WantedUnit("u.service", files=("/etc/pdstack/x",))
    state = units.UnitState("u.service", **RUNNING, started_us=1)  # type: ignore[arg-type]
    assert units.stale_reason(unit, state, ["/etc/pdstack/x"], 1e12) == "/etc/pdstack/x changed"
    assert units.stale_reason(unit, state, ["/etc/pdstack/other"], 0) is None


def test_apply_uses_each_verb_once_and_stops_before_it_reloads() -> None:
    calls: list[str] = []

    def runner(argv: Sequence[str]) -> Completed:
        calls.append(" ".join(argv[1:]))
        return Completed(0, "", "")

    todo = units.UnitsPlan(reload=True, enable=["c"], disable=["d"], stop=["d"], start=["c"], restart=["a", "b"])
    units.apply(todo, runner)
    assert calls == [
        "stop d",
        "reset-failed d",
        "disable d",
        "daemon-reload",
        "enable c",
        "reset-failed a b c",
        "restart a b",
        "start c",
    ]


def test_a_verb_that_fails_is_told_with_its_words() -> None:
    def runner(argv: Sequence[str]) -> Completed:
        return Completed(1, "", "Unit x.service is masked.") if "start" in argv else Completed(0, "", "")

    with pytest.raises(CommandFailed, match=r"systemctl start x\.service: exit 1: Unit x\.service is masked"):
        units.apply(units.UnitsPlan(start=["x.service"]), runner)
