"""A small load client: threads that send completions one after the other and keep what came of each.

Standard library only. Every request has a bound of its own, so that a client never waits for ever.
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
    key: str = ""
    records: list[Record] = field(default_factory=list)

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
            prompt = f"client {number} request {count}: the quick brown fox jumps"
            self.records.append(self.one(prompt, streamed=number % 2 == 1))
            self._stop.wait(self.pause_s)

    def one(self, prompt: str, streamed: bool = False, tokens: int | None = None) -> Record:
        """Send one completion and read its answer to the end."""
        tokens = tokens or self.tokens
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        begin = time.monotonic()
        status = 0
        connection = http.client.HTTPConnection(self.address, self.port, timeout=self.timeout_s)
        try:
            headers = {"Content-Type": "application/json"}
            if self.key:
                headers["Authorization"] = f"Bearer {self.key}"
            connection.request("POST", "/v1/completions", json.dumps({**body, "stream": streamed}), headers)
            answer = connection.getresponse()
            status = answer.status
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return Record(begin, time.monotonic(), False, status, f"{type(error).__name__}: {error}", streamed)
        finally:
            connection.close()
        problem = _problem(status, text, streamed, tokens)
        return Record(begin, time.monotonic(), not problem, status, problem, streamed)


def _problem(status: int, text: str, streamed: bool, tokens: int) -> str:
    """Say what an answer lacks, "" when it is whole."""
    if status != 200:
        return text[:160]
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


@dataclass(frozen=True)
class Outcome:
    """What the clients saw of a time in which something was broken."""

    sent: int
    failed: int
    longest_s: float  # of all requests, whole or not
    outage_s: float  # from the first failure's start to the end of the last failure, 0 without one
    statuses: dict[str, int]

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
        kind = "cut stream" if record.status == 200 else kind
        kinds[kind] = kinds.get(kind, 0) + 1
    return Outcome(
        len(seen),
        len(bad),
        max((record.seconds for record in seen), default=0.0),
        max(record.end for record in bad) - min(record.begin for record in bad) if bad else 0.0,
        kinds,
    )


def served(records: list[Record], since: float) -> float | None:
    """Return when the first request that began after ``since`` was answered whole, None for never."""
    ends = [record.end for record in records if record.ok and record.begin >= since]
    return min(ends, default=None)


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
