"""A router's workers: who goes in, who comes out, and that two kinds are never paired."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pdstack import router
from pdstack.verify import Reply

PAIRS = [
    router.Worker(f"{role}-{i}", f"pair-{i}", role, f"http://h:{base + i}", 8998 + i if role == "prefill" else 0)
    for i in range(4)
    for role, base in (("prefill", 30000), ("decode", 30100))
]
REPLICAS = [router.Worker(f"aggregated-{i}", f"replica-{i}", "aggregated", f"http://h:{30200 + i}") for i in range(2)]


def members(workers: list[router.Worker]) -> list[router.Member]:
    return [router.Member(f"id-{worker.name}", worker.url, True) for worker in workers]


def signatures(workers: list[router.Worker], new: set[str] = frozenset()) -> dict[str, str | None]:  # type: ignore[assignment]
    return {worker.name: "new" if worker.set in new else "old" for worker in workers}


def names(workers: list[Any]) -> set[str]:
    return {item.url for item in workers}


def test_an_intact_router_needs_nothing() -> None:
    assert not router.changes(members(PAIRS), PAIRS, [], signatures(PAIRS)).changed


def test_a_set_that_is_taken_out_is_removed_and_brought_back() -> None:
    todo = router.changes(members(PAIRS), PAIRS, ["pair-1"], signatures(PAIRS))
    assert names(todo.remove) == {"http://h:30001", "http://h:30101"}
    assert not todo.add
    rest = members([worker for worker in PAIRS if worker.set != "pair-1"])
    back = router.changes(rest, PAIRS, [], signatures(PAIRS))
    assert names(back.add) == {"http://h:30001", "http://h:30101"}
    assert not back.remove


def test_what_is_left_counts_healthy_workers_of_each_role() -> None:
    present = [router.Member("d", PAIRS[1].url, False), *members(PAIRS[2:4])]
    todo = router.changes(present, PAIRS[:4], ["decode-1"], signatures(PAIRS))
    assert router.left(present, PAIRS[:4], todo) == {"prefill": 2, "decode": 0}


def test_one_instance_can_be_taken_out() -> None:
    assert names(router.changes(members(PAIRS), PAIRS, ["decode-2"], signatures(PAIRS)).remove) == {"http://h:30102"}


def test_a_late_worker_is_added_once_it_answers() -> None:
    late = {**signatures(PAIRS), "decode-3": None}
    present = members([worker for worker in PAIRS if worker.name != "decode-3"])
    todo = router.changes(present, PAIRS, [], late)
    assert not todo.changed
    assert [worker.name for worker in todo.absent] == ["decode-3"]
    assert names(router.changes(present, PAIRS, [], signatures(PAIRS)).add) == {"http://h:30103"}


def test_a_dead_member_is_left_to_the_routers_health_check() -> None:
    assert not router.changes(members(PAIRS), PAIRS, [], {**signatures(PAIRS), "decode-0": None}).changed


def test_a_worker_that_nobody_planned_is_removed() -> None:
    stray = router.Member("x", "http://elsewhere:1", True)
    assert router.changes([*members(PAIRS), stray], PAIRS, [], signatures(PAIRS)).remove == [stray]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_an_update_never_mixes_signatures_and_never_empties_the_router(count: int) -> None:
    """Sets restart one after the other; at each moment the router holds one signature, and at least half the sets."""
    workers = PAIRS[: 2 * count]
    present, new = members(workers), set()
    for i in range(count):
        for out, fresh in (([f"pair-{i}"], []), ([], [f"pair-{i}"])):
            new |= set(fresh)
            found = signatures(workers, new)
            todo = router.changes(present, workers, out, found, fresh)
            kept = {member.url for member in present} - names(todo.remove) | names(todo.add)
            serving = [worker for worker in workers if worker.url in kept]
            assert len({found[worker.name] for worker in serving}) == 1
            assert len({worker.set for worker in serving}) >= count // 2
            assert {worker.role for worker in serving} == {"prefill", "decode"}
            present = members(serving)
    assert {member.url for member in present} == {worker.url for worker in workers}


def test_replicas_need_not_agree() -> None:
    found = {"aggregated-0": "old", "aggregated-1": "new"}
    assert not router.changes(members(REPLICAS), REPLICAS, [], found).changed


def test_the_signature_is_what_a_pair_must_have_in_common() -> None:
    info = {"version": "0.5.23", "context_length": 4096, "page_size": 1, "port": 1}
    one = router.signature(Reply(200, json.dumps(info)))
    assert one == router.signature(Reply(200, json.dumps({**info, "port": 2})))
    assert one != router.signature(Reply(200, json.dumps({**info, "context_length": 8192})))
    assert router.signature(Reply(0, "refused")) is None
    assert router.signature(Reply(200, "<html>")) is None


LOADS = {
    "loads": [
        {
            "num_running_reqs": 1,
            "num_waiting_reqs": 2,
            "disaggregation": {"mode": "decode", "decode_transfer_queue_reqs": 4, "kv_transfer_speed_gb_s": 9.0},
        },
        {"num_running_reqs": 8, "num_waiting_reqs": 0},
    ]
}


def test_requests_in_flight_are_those_of_every_queue_and_rank() -> None:
    assert router.in_flight(Reply(200, json.dumps(LOADS))) == 15
    assert router.in_flight(Reply(404, "")) is None
    assert router.in_flight(Reply(200, "[]")) is None


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_draining_ends_when_nothing_is_left_twice() -> None:
    clock, answers = Clock(), iter([3, 0, 1, 0, 0])
    assert router.drain(lambda: {"decode-0": next(answers)}, 100, clock, clock.sleep) == {}
    assert next(answers, "used up") == "used up"


def test_draining_is_bounded_and_says_what_is_left() -> None:
    clock = Clock()
    assert router.drain(lambda: {"decode-0": 2, "prefill-0": None}, 30, clock, clock.sleep) == {"decode-0": 2}
    assert clock.now <= 31


class FakeRouter:
    """Takes and drops workers some looks later, as the real one does in the background."""

    def __init__(self, delay: int = 2) -> None:
        self.workers: dict[str, dict[str, Any]] = {}
        self.pending: list[tuple[int, str, dict[str, Any]]] = []
        self.delay, self.looks = delay, 0
        self.bodies: list[dict[str, Any]] = []

    def ask(self, method: str, path: str, body: dict[str, Any] | None) -> Reply:
        if method == "GET":
            self.looks += 1
            for item in [item for item in self.pending if item[0] <= self.looks]:
                self.pending.remove(item)
                if item[1] == "add":
                    self.workers[item[2]["id"]] = item[2]
                else:
                    self.workers.pop(item[2]["id"])
            return Reply(200, json.dumps({"workers": list(self.workers.values())}))
        if method == "POST":
            assert body is not None
            self.bodies.append(body)
            new = {"id": f"id-{body['url']}", "url": body["url"], "is_healthy": True}
            self.pending.append((self.looks + self.delay, "add", new))
        else:
            self.pending.append((self.looks + self.delay, "remove", {"id": path.rpartition("/workers/")[2]}))
        return Reply(202, "{}")


def test_adding_and_removing_wait_until_the_router_has_done_it() -> None:
    fake, clock = FakeRouter(), Clock()
    router.add(fake.ask, PAIRS[:2], lambda path: "never", clock, clock.sleep)
    assert {member.url for member in router.members(fake.ask)} == names(PAIRS[:2])
    assert fake.bodies[0] == {"url": "http://h:30000", "worker_type": "prefill", "bootstrap_port": 8998}
    router.remove(fake.ask, router.members(fake.ask), clock, clock.sleep)
    assert router.members(fake.ask) == []


def test_a_worker_that_wants_a_key_is_added_with_it() -> None:
    fake, clock = FakeRouter(), Clock()
    worker = router.Worker("aggregated-0", "replica-0", "aggregated", "http://h:1", key_file="/etc/key")
    router.add(fake.ask, [worker], lambda path: f"key of {path}", clock, clock.sleep)
    assert fake.bodies == [{"url": "http://h:1", "api_key": "key of /etc/key"}]


def test_a_router_that_does_not_follow_is_an_error_after_a_bound() -> None:
    fake, clock = FakeRouter(delay=10**9), Clock()
    with pytest.raises(router.RouterError, match="has not taken"):
        router.add(fake.ask, PAIRS[:1], lambda path: "", clock, clock.sleep)
    with pytest.raises(router.RouterError, match="GET /workers: 401"):
        router.members(lambda method, path, body: Reply(401, "no"))
