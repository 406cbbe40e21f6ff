"""A completion through exactly the engines named: both sides get one room, decode's answer counts."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from pdstack import completion
from pdstack.verify import Reply

PREFILL = completion.Endpoint("prefill-0", "http://a:1", bootstrap_host="10.0.0.1", bootstrap_port=8998)
DECODE = completion.Endpoint("decode-0", "http://b:2", key_file="/k")
GOOD = Reply(200, json.dumps({"usage": {"completion_tokens": completion.TOKENS}}))


def test_a_pair_is_asked_with_one_room_and_decode_answers() -> None:
    seen: dict[str, dict[str, Any]] = {}

    def send(endpoint: completion.Endpoint, body: dict[str, Any], timeout_s: float) -> Reply:
        seen[endpoint.name] = body
        return GOOD if endpoint is DECODE else Reply(500, "decode's answer counts")

    assert completion.pair(PREFILL, DECODE, "tiny", 5, send).ok
    assert seen["prefill-0"] == seen["decode-0"]
    assert (seen["decode-0"]["bootstrap_host"], seen["decode-0"]["bootstrap_port"]) == ("10.0.0.1", 8998)


@pytest.mark.parametrize("words", [0, 3, 1024])
def test_a_prompt_is_as_long_as_it_was_asked_for(words: int) -> None:
    seen: list[str] = []

    def send(endpoint: completion.Endpoint, body: dict[str, Any], timeout_s: float) -> Reply:
        seen.append(body["prompt"])
        return GOOD

    assert completion.pair(PREFILL, DECODE, "tiny", 5, send, words).ok
    assert completion.through(DECODE, "tiny", 5, send, words).ok
    assert {len(prompt.split()) for prompt in seen} == {words or 4}
    assert all(len(prompt) <= 5 * len(prompt.split()) for prompt in seen), "what service.probes counts with"


def test_a_failure_tells_what_each_side_said() -> None:
    def send(endpoint: completion.Endpoint, body: dict[str, Any], timeout_s: float) -> Reply:
        return Reply(500, "kv transfer failed") if endpoint is DECODE else Reply(0, "refused")

    outcome = completion.pair(PREFILL, DECODE, "tiny", 5, send)
    assert not outcome.ok
    assert "decode-0: status 500: kv transfer failed; prefill-0: no answer refused" in outcome.detail


def test_prefill_is_not_waited_for_when_decode_has_failed() -> None:
    def send(endpoint: completion.Endpoint, body: dict[str, Any], timeout_s: float) -> Reply:
        if endpoint is PREFILL:
            time.sleep(5)
        return Reply(503, "x")

    begin = time.monotonic()
    assert "prefill-0: not answered yet" in completion.pair(PREFILL, DECODE, "tiny", 5, send).detail
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(200, "{}"), "cannot be read"),
        (Reply(200, json.dumps({"usage": {"completion_tokens": 1}})), "1 of 2 tokens"),
        (Reply(0, "URLError: timed out"), "status none: URLError: timed out"),
    ],
)
def test_what_is_no_completion_is_told(reply: Reply, words: str) -> None:
    outcome = completion.through(DECODE, "tiny", 5, lambda endpoint, body, timeout_s: reply)
    assert not outcome.ok
    assert words in outcome.detail
