"""Variables of the router and of the canary that watches what is behind it (see settings.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict

from .options import option


@dataclass(frozen=True)
class Router:
    """The router's behaviour."""

    implementation: str = option(
        "sglang-router",
        "the program that routes; smg is its successor",
        "the reference's; smg answers within a second when a dead decode meets a stalled prefill",
        choices=("sglang-router", "smg"),
    )
    policy: str = option(
        "cache_aware",
        "how requests are spread over workers",
        "keeps a conversation on the worker that holds its prefix; also the router's default",
        choices=("random", "round_robin", "cache_aware", "power_of_two"),
    )
    scope: str = option(
        "all",
        "workers of each router: all of them, or those of its own host",
        "one address for everything; host is for several hosts without RDMA",
        choices=("all", "host"),
    )
    health_interval_s: int = option(
        5,
        "seconds between health checks of a worker",
        "a dead worker is out within 15 s, one that is back serves within 5; the recipe's 999999 never notices",
        low=1,
        high=600,
    )
    health_timeout_s: int = option(
        5, "seconds until a health check counts as failed", "the router's default", low=1, high=600
    )
    health_failures: int = option(
        3, "failed checks in a row until a worker is taken out", "the router's default", low=1, high=100
    )
    attempts: int = option(
        5,
        "times that a request is tried before its error is the client's",
        "waits of 0.2 to 1.6 s between them bridge the exchange of a pair; the router's default waits 0.4 s in all",
        low=1,
        high=20,
    )
    circuit_failures: int = option(
        10, "failures in a row after which a worker gets no requests", "the router's default", low=1, high=1000
    )
    circuit_open_s: int = option(
        10,
        "seconds until such a worker is tried again",
        "an engine that is back serves within these; the router's default is 60",
        low=1,
        high=3600,
    )
    request_timeout_s: int = option(
        600,
        "longest time of one attempt of a request",
        "8192 tokens at 15 ms take two minutes; a worker that hangs is out long before, so no second attempt waits",
        low=1,
        high=86400,
    )
    startup_timeout_s: int = option(
        1800,
        "seconds that the router waits for workers at its start",
        "loading 146 GB from a slow disk",
        low=10,
        high=86400,
    )
    shutdown_grace_s: int = option(
        180, "seconds for requests in flight when the router stops", "the router's default", low=0, high=3600
    )
    max_concurrent_requests: int = option(
        -1, "requests admitted at once, -1 for no limit", "the engine queues by itself", low=-1, high=1_000_000
    )
    extra_args: Dict[str, Any] = option(
        dict, "router options, long names without dashes", "the plan sets what is needed"
    )


@dataclass(frozen=True)
class Canary:
    """The canary: a completion through each engine and router now and then, and a bounded cure."""

    enabled: bool = option(
        True,
        "ask every engine and router for a completion now and then, and kill what answers but completes nothing",
        "/health makes up its own KV cache: a pair whose transfer hangs looks healthy to everybody else",
    )
    interval_s: int = option(
        60, "seconds between two looks", "a look costs two tokens and about 0.2 s of one CPU", low=1, high=86400
    )
    failures: int = option(
        3,
        "failures in a row until a unit is killed",
        "one can be a burst of load, three minutes are not",
        low=1,
        high=100,
    )
    timeout_s: float = option(
        30.0, "seconds that a completion of two tokens may take", "a full queue delays it, a hang never ends", low=1.0
    )
    cooldown_s: int = option(
        900, "seconds between two kills of a unit", "an engine must have loaded before it is judged again", low=0
    )
    per_day: int = option(
        6, "kills of a unit within a day, then a person must look", "what comes back so often is no accident", low=0
    )
