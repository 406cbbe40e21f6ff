"""In which order sets restart, leave and come back; what proves and watches them."""

from __future__ import annotations

from typing import Any

import pytest
from pdstack import canary, codec, rolling, service, settings
from plans import UNIT_TEXTS, pairs


def observed(**changes: Any) -> dict[str, Any]:
    """What pd_units reports of a host."""
    actions = dict.fromkeys(("enable", "disable", "stop", "start", "restart"), ())
    given = {name: changes.pop(name) for name in list(changes) if name in actions}
    pending = bool(given or changes.get("stale_sets"))
    return {"stale_sets": [], "never_ready": [], "pending": pending, **changes, "actions": {**actions, **given}}


def sets_of(batches: list[dict[str, Any]]) -> list[list[str]]:
    return [batch["sets"] for batch in batches]


def test_an_intact_host_has_no_batch() -> None:
    assert rolling.batches(pairs(2), {"a": observed()}) == []


def test_stale_sets_restart_one_after_the_other_and_routers_last() -> None:
    """Each host tells of its own; a pair that spans hosts restarts once."""
    found = rolling.batches(
        pairs(2, "ab"), {"a": observed(stale_sets=["pair-0", "router-0"]), "b": observed(stale_sets=["pair-1"])}
    )
    assert sets_of(found) == [["pair-0"], ["pair-1"], ["router-0"]]
    assert [batch["restarting"] for batch in found] == sets_of(found)
    assert [bool(batch["announcement"]) for batch in found] == [False, False, True]


@pytest.mark.parametrize("key", ["api_key", "admin_key"])
def test_a_changed_key_restarts_all_its_users_at_once_and_drains_nothing(key: str) -> None:
    """A router with the old key would refuse to drain, and its completion would be no proof."""
    why = {"pd-decode@0.service": f"{service.CREDENTIALS}/{key} changed"}
    everything = ["pair-0", "pair-1", "router-0"]
    (batch,) = rolling.batches(pairs(2), {"a": observed(stale_sets=everything, reasons=why)})
    assert (batch["sets"], batch["restarting"], batch["drained"]) == (everything, everything, False)
    other = {"pd-router.service": f"{service.CREDENTIALS}/tls_cert changed"}
    (batch,) = rolling.batches(pairs(2), {"a": observed(stale_sets=["router-0"], reasons=other)})
    assert (batch["sets"], batch["drained"]) == (["router-0"], True)


def test_a_pair_that_is_alone_restarts_in_an_announced_window() -> None:
    (batch,) = rolling.batches(pairs(1), {"a": observed(stale_sets=["pair-0"])})
    assert "answers 503 from here until pair-0 is back" in batch["announcement"]


def test_what_does_not_serve_comes_first_and_disturbs_nobody() -> None:
    found = rolling.batches(pairs(2), {"a": observed(start=["pd-decode@0.service"], stale_sets=["pair-1"])})
    assert sets_of(found) == [["pair-0"], ["pair-1"]]
    assert found[0]["restarting"] == []


def test_a_stale_router_restarts_with_engines_that_it_may_not_know() -> None:
    """A change of the mode that was interrupted leaves a router of the old mode beside engines of the new one."""
    found = rolling.batches(pairs(2), {"a": observed(never_ready=["pd-decode@0.service"], stale_sets=["router-0"])})
    assert sets_of(found) == [["pair-0", "router-0"]]


def test_the_canary_asks_an_engine_with_its_set_and_a_router_with_all() -> None:
    found = service.canary(pairs(2, "ab"), "a")
    names = {item["unit"]: [peer["name"] for peer in item["peers"]] for item in found["watched"]}
    assert names == {
        "pd-prefill@0.service": ["decode-0"],
        "pd-decode@0.service": ["prefill-0"],
        "pd-router.service": ["prefill-0", "decode-0", "prefill-1", "decode-1"],
    }
    assert canary.watched_of(found)[2].endpoint.name == "router-0"


def test_without_the_canary_its_files_and_units_are_not_there() -> None:
    plan = {**pairs(1), "canary": codec.dump(settings.Canary(enabled=False))}
    assert not [item["path"] for item in service.files(plan, "a", UNIT_TEXTS) if "canary" in item["path"]]
    assert "pd-canary.timer" not in {unit["name"] for unit in service.units(plan, "a")}


def test_a_process_that_was_never_ready_is_waited_for() -> None:
    assert sets_of(rolling.batches(pairs(2), {"a": observed(never_ready=["pd-decode@1.service"])})) == [["pair-1"]]


def test_a_stopped_member_of_a_stale_set_starts_with_it() -> None:
    found = rolling.batches(pairs(2), {"a": observed(start=["pd-decode@0.service"], stale_sets=["pair-0"])})
    assert sets_of(found) == [["pair-0"]]


def test_a_changed_layout_restarts_at_once() -> None:
    """What is new may need the GPUs of what is stale, and the old router may be of another mode."""
    gone = rolling.batches(
        pairs(2), {"a": observed(stop=["pd-aggregated@0.service"], stale_sets=["pair-0", "router-0"])}
    )
    assert sets_of(gone) == [["pair-0", "router-0"]]
    fresh = ["pd-decode@1.service", "pd-prefill@1.service"]
    new = rolling.batches(pairs(2), {"a": observed(start=fresh, enable=fresh, stale_sets=["pair-0"])})
    assert sets_of(new) == [["pair-0", "pair-1"]]
    assert new[0]["restarting"] == ["pair-0"]


def test_units_that_left_are_stopped_although_nothing_else_changes() -> None:
    found = rolling.batches(pairs(2), {"a": observed(stop=["pd-aggregated@0.service"])})
    assert sets_of(found) == [[]]


def test_each_decode_proves_every_prefill_of_its_set() -> None:
    found = service.probes(pairs(2), "a", ["pair-1"])
    assert [(item["through"]["name"], item["prefill"]["name"]) for item in found] == [("decode-1", "prefill-1")]
    assert service.probes(pairs(2, "ab"), "a", ["pair-1"]) == []


@pytest.mark.parametrize(("context", "words"), [(256, 32), (8192, 1024), (1_048_576, 2048)])
def test_on_gpus_a_longer_prompt_compiles_before_clients_come(context: int, words: int) -> None:
    plan = {**pairs(1), "profile": "gpu"}
    for item in plan["instances"]:
        item["args"]["context-length"] = context
    short, long = service.probes(plan, "a", ["pair-0"])
    assert "words" not in short
    assert long == {**short, "words": words}
    assert service.probes(plan, "b", ["pair-0"]) == []


def test_a_router_gets_the_workers_of_its_plan() -> None:
    found = service.router_workers(pairs(2, "ab"), "a")
    assert [item["name"] for item in found] == ["prefill-0", "decode-0", "prefill-1", "decode-1"]
    assert {"url": "http://10.0.0.1:30101", "set": "pair-1", "role": "decode"}.items() <= found[3].items()
    assert service.router_workers(pairs(2, "ab"), "b") == []


UNITS = ["pd-prefill@0.service", "pd-decode@0.service"]


@pytest.mark.parametrize(
    ("name", "instances", "routers", "units"),
    [
        ("decode-1", ["decode-1"], [], []),
        ("pair-0", ["prefill-0", "decode-0"], [], UNITS),
        ("b", ["prefill-1", "decode-1"], [], []),
        ("router-0", [], ["router-0"], ["pd-router.service"]),
        (
            "a",
            ["prefill-0", "decode-0"],
            ["router-0"],
            ["pd-prefill@0.service", "pd-decode@0.service", "pd-router.service"],
        ),
    ],
)
def test_a_name_means_an_instance_a_set_a_router_or_a_host(
    name: str, instances: list[str], routers: list[str], units: list[str]
) -> None:
    found = rolling.selection(pairs(2, "ab"), name, "a", "ab")
    assert found["problem"] == ""
    assert (found["instances"], found["routers"], found["units"]) == (instances, routers, units)


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    problem = rolling.selection(pairs(2), "decod-1", "a", "ab")["problem"]
    assert "did you mean decode-1?" in problem
    assert "pair-1" in problem
    assert "no host has in a shape that can be read" in rolling.selection({}, "x", "a", "ab")["problem"]


@pytest.mark.parametrize("name", ["pair-1", "b", "decode-1"])
def test_what_runs_on_a_host_beyond_this_run_is_refused(name: str) -> None:
    """With --limit, or out of the inventory: it would be called out, or back, and run on, or stay down."""
    problem = rolling.selection(pairs(2, "ab"), name, "a", ["a"])["problem"]
    assert "of which this run does not reach" in problem
    assert "decode-1 on b" in problem
    assert "run without --limit" in problem
    assert rolling.selection(pairs(2, "ab"), "pair-0", "a", ["a"])["problem"] == ""


def test_what_would_be_missing_is_told() -> None:
    plan = pairs(2, "ab")
    one = rolling.selection(plan, "decode-1", "a", "ab")
    assert rolling.outage(plan, one, {"router-0": {"prefill": 2, "decode": 1}}) == ""
    assert "no healthy decode would be left" in rolling.outage(plan, one, {"router-0": {"prefill": 2, "decode": 0}})
    assert "router-0 did not answer" in rolling.outage(plan, one, {})
    assert "no router" in rolling.outage(plan, rolling.selection(plan, "a", "a", "ab"), {})
