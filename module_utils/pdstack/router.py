"""Which workers a router should have, and the few requests that make it so. sglang-router 0.3 and smg speak alike.

A router pairs any prefill with any decode that it knows. Two sides that differ in what a pair must have in common
give a hang or garbage, so a router holds workers of one signature only, whatever the order in which sets restart.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from .verify import Reply

Ask = Callable[[str, str, Optional[Dict[str, Any]]], Reply]  # method, path, JSON body

# What both sides of a pair must agree on, by the names under which an engine reports it.
SIGNATURE = (
    "version",
    "model_path",
    "revision",
    "context_length",
    "page_size",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "disaggregation_transfer_backend",
)


class RouterError(RuntimeError):
    """A router that does not answer as it should; the message says what was asked and what came."""


@dataclass(frozen=True)
class Worker:
    """An engine as a router should know it. ``set`` names the engines that restart together."""

    name: str
    set: str
    role: str  # prefill | decode | aggregated
    url: str
    bootstrap_port: int = 0
    key_file: str = ""


@dataclass(frozen=True)
class Member:
    """A worker as a router has it."""

    id: str
    url: str
    healthy: bool


@dataclass
class Changes:
    """What to do at one router. ``why`` is by URL; ``absent`` are planned workers that cannot be added yet."""

    add: List[Worker] = field(default_factory=list)
    remove: List[Member] = field(default_factory=list)
    why: Dict[str, str] = field(default_factory=dict)
    absent: List[Worker] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        return bool(self.add or self.remove)


def members(ask: Ask) -> List[Member]:
    """Return the workers of a router. Raises RouterError."""
    reply = ask("GET", "/workers", None)
    if reply.status != 200:
        raise RouterError(f"GET /workers: {reply.status or 'no answer'} {reply.body[:200]}")
    try:
        return [
            Member(str(item["id"]), str(item["url"]).rstrip("/"), bool(item.get("is_healthy")))
            for item in json.loads(reply.body)["workers"]
        ]
    except (ValueError, KeyError, TypeError):
        raise RouterError(f"GET /workers: an answer that cannot be read: {reply.body[:200]!r}") from None


def signature(reply: Reply) -> Optional[str]:
    """Return what an engine has in common with those that it may be paired with; None when it does not answer."""
    if reply.status != 200:
        return None
    try:
        info = json.loads(reply.body)
    except ValueError:
        return None
    return json.dumps([info.get(name) for name in SIGNATURE]) if isinstance(info, dict) else None


def changes(
    present: Sequence[Member],
    workers: Sequence[Worker],
    out: Sequence[str],
    signatures: Mapping[str, Optional[str]],
    prefer: Sequence[str] = (),
) -> Changes:
    """Compare a router's workers with those that it should have.

    ``out`` names instances or sets that get no requests. ``signatures`` is by instance, None for one that does
    not answer: it is not added, and the router's own health check deals with it where it is a member. Of several
    signatures the one with the most sets serves; ``prefer`` names the sets that win a tie, those just restarted.
    """
    todo = Changes()
    by_url = {worker.url: worker for worker in workers}
    there = {member.url for member in present}
    serving = _serving([w for w in workers if not {w.name, w.set} & set(out)], signatures, prefer)
    for member in present:
        worker = by_url.get(member.url)
        if worker is None:
            todo.remove.append(member)
            todo.why[member.url] = "not in the plan"
        elif {worker.name, worker.set} & set(out):
            todo.remove.append(member)
            todo.why[member.url] = f"{worker.name} is taken out"
        elif signatures.get(worker.name) and signatures[worker.name] not in serving:
            todo.remove.append(member)
            todo.why[member.url] = f"{worker.name} cannot be paired with those that serve"
    for worker in workers:
        if worker.url in there or {worker.name, worker.set} & set(out):
            continue
        if not signatures.get(worker.name):
            todo.absent.append(worker)
        elif signatures[worker.name] in serving:
            todo.add.append(worker)
            todo.why[worker.url] = f"{worker.name} answers and the router does not have it"
    return todo


def left(present: Sequence[Member], workers: Sequence[Worker], todo: Changes) -> Dict[str, int]:
    """Return how many workers of each role serve after the changes: healthy ones that stay, and those added."""
    urls = {member.url for member in present if member.healthy} - {member.url for member in todo.remove}
    urls |= {worker.url for worker in todo.add}
    return {role: sum(w.role == role and w.url in urls for w in workers) for role in {w.role for w in workers}}


def _serving(
    workers: Sequence[Worker], signatures: Mapping[str, Optional[str]], prefer: Sequence[str]
) -> List[Optional[str]]:
    """Return the signatures that may serve together: all of them without pairs, one with pairs."""
    groups: Dict[str, List[Worker]] = {}
    for worker in workers:
        found = signatures.get(worker.name)
        if found:
            groups.setdefault(found, []).append(worker)
    if all(worker.role == "aggregated" for worker in workers):
        return list(groups)

    def weight(found: str) -> Any:
        group = groups[found]
        whole = {"prefill", "decode"} <= {worker.role for worker in group}
        sets = {worker.set for worker in group}
        return whole, len(sets), len(sets & set(prefer)), found

    return [max(groups, key=weight)] if groups else []


def remove(ask: Ask, gone: Sequence[Member], monotonic: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """Take workers out and wait until the router no longer has them. What is in flight there goes on."""
    for member in gone:
        reply = ask("DELETE", f"/workers/{member.id}", None)
        if reply.status not in (200, 202, 204, 404):
            raise RouterError(f"DELETE /workers/{member.id} ({member.url}): {reply.status} {reply.body[:200]}")
    _until(
        lambda: not {member.url for member in gone} & {member.url for member in members(ask)},
        f"still has {', '.join(member.url for member in gone)}",
        monotonic,
        sleep,
    )


def add(
    ask: Ask,
    new: Sequence[Worker],
    read_key: Callable[[str], str],
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Add workers and wait until the router has seen each of them healthy."""
    for worker in new:
        body: Dict[str, Any] = {"url": worker.url}
        if worker.role != "aggregated":
            body["worker_type"] = worker.role
        if worker.bootstrap_port:
            body["bootstrap_port"] = worker.bootstrap_port
        if worker.key_file:
            body["api_key"] = read_key(worker.key_file)
        reply = ask("POST", "/workers", body)
        if reply.status not in (200, 201, 202, 409):
            raise RouterError(f"POST /workers {worker.url}: {reply.status or 'no answer'} {reply.body[:200]}")
    _until(
        lambda: {worker.url for worker in new} <= {member.url for member in members(ask) if member.healthy},
        f"has not taken {', '.join(worker.url for worker in new)} for healthy",
        monotonic,
        sleep,
    )


def in_flight(reply: Reply) -> Optional[int]:
    """Return how many requests an engine holds, by its /v1/loads; None when it does not tell."""
    if reply.status != 200:
        return None
    try:
        loads = json.loads(reply.body)["loads"]
        total = 0
        for load in loads:
            total += int(load.get("num_running_reqs") or 0) + int(load.get("num_waiting_reqs") or 0)
            queues = load.get("disaggregation") or {}
            total += sum(int(value or 0) for name, value in queues.items() if name.endswith("_queue_reqs"))
        return total
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def drain(
    loads: Callable[[], Mapping[str, Optional[int]]],
    timeout_s: float,
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
) -> Dict[str, int]:
    """Wait until no engine holds a request, and return what is left after ``timeout_s``.

    Two looks in a row must find nothing: a request may be between the router and the engine's scheduler.
    An engine that does not tell (None) is not waited for.
    """
    deadline = monotonic() + timeout_s
    quiet = 0
    while True:
        left = {name: count for name, count in loads().items() if count}
        quiet = 0 if left else quiet + 1
        if quiet >= 2 or (left and monotonic() >= deadline):
            return left
        sleep(0.5)


_SETTLE_S = 60.0  # a router takes and drops workers in the background, within a second when nothing is wrong


def _until(
    done: Callable[[], bool], problem: str, monotonic: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    deadline = monotonic() + _SETTLE_S
    while not done():
        if monotonic() >= deadline:
            raise RouterError(f"{problem} after {_SETTLE_S:.0f} s")
        sleep(0.2)
