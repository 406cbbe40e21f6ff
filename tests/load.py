"""A small load client: threads that send completions one after the other and keep what came of each.

Standard library only. Every request has a bound of its own, so that a client never waits for ever. Answers are greedy,
so that each prompt has one: what comes under a fault is compared with what came before it.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Record:
    """One request. ``ok``: the whole answer came. Times are of time.monotonic()."""

    begin: float
    end: float
    ok: bool
    status: int
    detail: str
    streamed: bool
    wrong: bool = False  # other tokens than the same prompt gave before

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Load:
    """``with Load(address, port) as load: ...`` and then ``load.records``. Every other client streams."""

    address: str
    port: int
    clients: int = 4
    tokens: int = 16
    timeout_s: float = 120.0
    model: str = "tiny"
    pause_s: float = 0.05
    refused_pause_s: float = 0.25  # after a failure, as a client waits that does not want to make it worse
    key: str = ""
    records: list[Record] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)  # the first whole answer to each prompt

    def __enter__(self) -> Load:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(self.timeout_s + 10)

    def _client(self, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            prompt = f"client {number} request {count % 8}: the quick brown fox jumps"
            record = self.one(prompt, streamed=number % 2 == 1)
            self.records.append(record)
            self._stop.wait(self.pause_s if record.ok else self.refused_pause_s)

    def one(self, prompt: str, streamed: bool = False, tokens: int | None = None) -> Record:
        """Send one completion and read its answer to the end."""
        tokens = tokens or self.tokens
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        begin = time.monotonic()
        status = 0
        connection = http.client.HTTPConnection(self.address, self.port, timeout=self.timeout_s)
        text = ""
        try:
            headers = {"Content-Type": "application/json"}
            if self.key:
                headers["Authorization"] = f"Bearer {self.key}"
            connection.request("POST", "/v1/completions", json.dumps({**body, "stream": streamed}), headers)
            answer = connection.getresponse()
            status = answer.status
            while chunk := answer.read1():
                text += chunk.decode(errors="replace")
            problem = _problem(status, text, streamed, tokens)
        except (OSError, http.client.HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        wrong = self._differs(f"{tokens} {prompt}", _text(text, streamed) if status == 200 else "", whole=not problem)
        return Record(
            begin, time.monotonic(), not problem and not wrong, status, problem or wrong, streamed, bool(wrong)
        )

    def _differs(self, asked: str, got: str, whole: bool) -> str:
        """Say how an answer, or the begin of one that was cut, differs from the first whole one; "" for not."""
        known = self.answers.setdefault(asked, got) if whole else self.answers.get(asked, got)
        if known == got or (not whole and known.startswith(got)):
            return ""
        return f"another answer than before: {got[:80]!r}, not {known[:80]!r}"


def _problem(status: int, text: str, streamed: bool, tokens: int) -> str:
    """Say what an answer lacks, "" when it is whole."""
    if status != 200:
        return text[:160] or f"status {status}, and no word"
    if not streamed:
        try:
            got = int(json.loads(text)["usage"]["completion_tokens"])
        except (ValueError, KeyError, TypeError):
            return f"unreadable: {text[:160]}"
        return "" if got == tokens else f"{got} of {tokens} tokens"
    events = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    if not events or events[-1] != "[DONE]":
        return f"the stream was cut after {len(events)} events"
    if any('"error"' in event for event in events[:-1]):
        return f"an error event: {next(event for event in events if 'error' in event)[:120]}"
    return ""


def _text(answer: str, streamed: bool) -> str:
    """Return the words of an answer, as far as it came."""
    events = [line[5:] for line in answer.splitlines() if line.startswith("data:")] if streamed else [answer]
    words = ""
    for event in events:
        try:
            words += "".join(choice["text"] for choice in json.loads(event)["choices"])
        except (ValueError, KeyError, TypeError):
            continue  # [DONE], an error, a line that was cut
    return words


@dataclass(frozen=True)
class Outcome:
    """What the clients saw of a time in which something was broken."""

    sent: int
    failed: int
    longest_s: float  # of all requests, whole or not
    outage_s: float  # from the first failure's start to the end of the last failure, 0 without one
    statuses: dict[str, int]
    wrong: int  # answers, or begins of answers, with other tokens than before

    def words(self) -> str:
        seen = ", ".join(f"{count}x {name}" for name, count in sorted(self.statuses.items()))
        return f"{self.sent} requests, {self.failed} failed ({seen})" if seen else f"{self.sent} requests, none failed"


def summary(records: list[Record], since: float = 0.0) -> Outcome:
    """Sum up the requests that ended after ``since``."""
    seen = [record for record in records if record.end >= since]
    bad = [record for record in seen if not record.ok]
    kinds: dict[str, int] = {}
    for record in bad:
        kind = str(record.status or record.detail.partition(":")[0])
        kind = ("cut stream" if record.streamed else "cut answer") if record.status == 200 else kind
        kind = "wrong answer" if record.wrong else kind
        kinds[kind] = kinds.get(kind, 0) + 1
    return Outcome(
        len(seen),
        len(bad),
        max((record.seconds for record in seen), default=0.0),
        max(record.end for record in bad) - min(record.begin for record in bad) if bad else 0.0,
        kinds,
        sum(record.wrong for record in seen),
    )


def main(argv: list[str]) -> Any:
    """Run for some seconds: ``python -m load ADDRESS PORT SECONDS [CLIENTS]``."""
    with Load(argv[0], int(argv[1]), clients=int(argv[3]) if len(argv) > 3 else 4) as load:
        time.sleep(float(argv[2]))
    print(summary(load.records).words())
    for record in [record for record in load.records if not record.ok][:10]:
        print(f"  {record.status} {record.seconds:.2f} s {record.detail}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
