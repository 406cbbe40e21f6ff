"""One small completion, bounded: through a router, or through exactly the engines named.

A pair is asked as a router asks it: the same request goes to prefill and to decode at once, both told the same
room, and decode answers. So the KV cache must travel, which neither side's /health shows.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional

from . import http
from .http import Access
from .verify import Reply

PROMPT = "The quick brown fox"
TOKENS = 2  # one from prefill, one from decode


@dataclass(frozen=True)
class Endpoint:
    """A server and how to be let in. ``bootstrap_*`` where it is a prefill server, ``set`` where it is an engine."""

    name: str
    base: str
    set: str = ""
    key_file: str = ""
    ca_file: str = ""
    bootstrap_host: str = ""
    bootstrap_port: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a completion went. ``detail`` says what came instead of one."""

    ok: bool
    seconds: float
    detail: str = ""


Post = Callable[[Endpoint, Dict[str, Any], float], Reply]


def post(endpoint: Endpoint, body: Dict[str, Any], timeout_s: float) -> Reply:
    """Send a completion request over HTTP."""
    access = Access(endpoint.key_file, endpoint.ca_file)
    return http.request("POST", endpoint.base + "/v1/completions", body, timeout_s, access)


def through(endpoint: Endpoint, model: str, timeout_s: float, send: Post = post, words: int = 0) -> Outcome:
    """Ask a router, or an engine that serves alone, with a prompt of so many words (0: of a few)."""
    begin = time.monotonic()
    return _judge(send(endpoint, _body(model, words), timeout_s), begin)


def pair(
    prefill: Endpoint, decode: Endpoint, model: str, timeout_s: float, send: Post = post, words: int = 0
) -> Outcome:
    """Ask exactly this prefill and this decode, with a prompt of so many words (0: of a few)."""
    begin = time.monotonic()
    room = {
        "bootstrap_host": prefill.bootstrap_host,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": random.getrandbits(62),
    }
    replies: Dict[str, Reply] = {}

    def ask(side: str, endpoint: Endpoint) -> None:
        replies[side] = send(endpoint, {**_body(model, words), **room}, timeout_s)

    # A daemon: when decode has failed at once, nobody waits for prefill to run into its own time limit.
    first = threading.Thread(target=ask, args=("prefill", prefill), daemon=True)
    first.start()
    ask("decode", decode)
    outcome = _judge(replies["decode"], begin)
    if outcome.ok:
        return outcome
    first.join(1.0)
    other: Optional[Reply] = replies.get("prefill")
    told = f"{other.status or 'no answer'} {other.body[:120]}" if other else "not answered yet"
    return Outcome(False, outcome.seconds, f"{decode.name}: {outcome.detail}; {prefill.name}: {told}")


def _body(model: str, words: int) -> Dict[str, Any]:
    prompt = " ".join(itertools.islice(itertools.cycle(PROMPT.split()), words)) or PROMPT
    return {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def _judge(reply: Reply, begin: float) -> Outcome:
    seconds = round(time.monotonic() - begin, 2)
    if reply.status != 200:
        return Outcome(False, seconds, f"status {reply.status or 'none'}: {reply.body[:200]}")
    try:
        tokens = int(json.loads(reply.body)["usage"]["completion_tokens"])
    except (ValueError, KeyError, TypeError):
        return Outcome(False, seconds, f"an answer that cannot be read: {reply.body[:200]!r}")
    return Outcome(tokens == TOKENS, seconds, "" if tokens == TOKENS else f"{tokens} of {TOKENS} tokens")
