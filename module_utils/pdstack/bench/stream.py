"""A streamed completion over HTTP/1.1, with the time of each token event. asyncio, standard library.

A protocol instead of asyncio's streams: the time is taken as bytes arrive, and an event costs microseconds, so that
the client is not what is measured.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional
from urllib.parse import urlsplit

from ..http import Access, read_key, trust

OPEN = Access()  # no key, and the system's trust
Clock = Callable[[], float]


@dataclass
class Sample:
    """What became of one request. Times are seconds of one clock; ``error`` is empty for a complete answer."""

    sent: float = 0.0
    first: float = 0.0  # the first event that carries a token
    last: float = 0.0  # the last one
    end: float = 0.0
    status: int = 0
    input_tokens: int = 0  # of ``usage``, as all counts
    output_tokens: int = 0
    cached_tokens: Optional[int] = None
    gaps: List[float] = field(default_factory=list)  # between events that carry tokens
    text: str = ""  # kept only where asked for
    error: str = ""


@dataclass(frozen=True)
class Server:
    """Where to send: scheme, host, port, prefix of the path, and what goes with each request."""

    host: str
    port: int
    path: str = ""
    tls: Optional[ssl.SSLContext] = None
    headers: Mapping[str, str] = field(default_factory=dict)


def server(url: str, access: Access = OPEN) -> Server:
    """Return the server of a base URL. Without a ``ca_file``, https trusts what the system trusts.

    Raises ValueError for what is no address, OSError for a key or certificate that cannot be read.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no address; needed: http://HOST:PORT or https://HOST:PORT")
    tls = None
    if parts.scheme == "https":
        tls = trust(access.ca_file) if access.ca_file else ssl.create_default_context()
    headers = {"Authorization": f"Bearer {read_key(access.key_file)}"} if access.key_file else {}
    return Server(parts.hostname, parts.port or (443 if tls else 80), parts.path.rstrip("/"), tls, headers)


class Exchange(asyncio.Protocol):
    """One request and its answer on one connection; the connection is used again for the next."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.transport: Optional[asyncio.Transport] = None
        self.closed = False
        self._done: Optional[asyncio.Future[None]] = None
        self._reset(Sample(), False)

    def _reset(self, sample: Sample, keep_text: bool) -> None:
        self.sample, self._keep_text = sample, keep_text
        self._buffer = bytearray()
        self._body = bytearray()
        self._head: Optional[Dict[str, str]] = None
        self._left: Optional[int] = None  # bytes of the body still to come, where its length is known
        self._finished = False  # the body is whole
        self._told_end = False  # data: [DONE]
        self._role_at = 0.0
        self.answered = False

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        now = self.clock()
        self.answered = True
        self._buffer += data
        try:
            self._read(now)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            self._fail(f"an answer that cannot be read: {type(error).__name__} {error}")

    def connection_lost(self, exc: Optional[Exception]) -> None:
        self.closed = True
        if self._done is None or self._done.done():
            return
        if self._head is not None and self._left is None and self._head.get("transfer-encoding") != "chunked":
            self._finish()  # a body that ends with its connection
        else:
            self._fail("the connection was closed before the answer was whole" if exc is None else str(exc))

    # --- the caller's side

    async def send(
        self, target: Server, path: str, document: Optional[Mapping[str, Any]], keep_text: bool = False
    ) -> Sample:
        """Send one POST (GET without a document) and wait for its end. Never raises for what a server does."""
        assert self.transport is not None
        self._reset(Sample(), keep_text)
        self._done = asyncio.get_running_loop().create_future()
        payload = b"" if document is None else json.dumps(document).encode()
        head = [f"{'GET' if document is None else 'POST'} {target.path}{path} HTTP/1.1", f"Host: {target.host}"]
        head += ["Accept: text/event-stream, application/json", f"Content-Length: {len(payload)}"]
        head += ["Content-Type: application/json"] if payload else []
        head += [f"{name}: {value}" for name, value in target.headers.items()]
        self.sample.sent = self.clock()
        self.transport.write("\r\n".join([*head, "", ""]).encode() + payload)
        await self._done
        return self.sample

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    # --- HTTP

    def _read(self, now: float) -> None:
        if self._head is None and not self._read_head():
            return
        assert self._head is not None
        if self._head.get("transfer-encoding") == "chunked":
            self._read_chunks()
        else:
            taken = bytes(self._buffer if self._left is None else self._buffer[: self._left])
            del self._buffer[: len(taken)]
            self._body += taken
            if self._left is not None:
                self._left -= len(taken)
                self._finished = self._left == 0
        if self.sample.status == 200 and self._streams():
            self._read_events(now)
        if self._finished:
            self._finish()

    def _streams(self) -> bool:
        return "text/event-stream" in (self._head or {}).get("content-type", "")

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        self.sample.status = int(lines[0].split(" ", 2)[1])
        pairs = (line.partition(":") for line in lines[1:])
        self._head = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if "content-length" in self._head:
            self._left = int(self._head["content-length"])
            self._finished = self._left == 0
        return True

    def _read_chunks(self) -> None:
        while not self._finished:
            end = self._buffer.find(b"\r\n")
            if end < 0:
                return
            size = int(bytes(self._buffer[:end]).partition(b";")[0], 16)
            if len(self._buffer) < end + 2 + size + 2:
                return
            self._body += self._buffer[end + 2 : end + 2 + size]
            del self._buffer[: end + 2 + size + 2]
            self._finished = size == 0

    # --- events

    def _read_events(self, now: float) -> None:
        end = self._body.rfind(b"\n")
        if end < 0:
            return
        lines = bytes(self._body[:end]).split(b"\n")
        del self._body[: end + 1]
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._told_end = True
            return
        event = json.loads(data)
        if "error" in event and not event.get("choices"):
            self.sample.error = f"an error in the stream: {str(event['error'])[:300]}"
        usage = event.get("usage")
        if usage:
            _count(self.sample, usage)
        if event.get("choices"):
            self._choice(event["choices"][0], now)

    def _choice(self, choice: Mapping[str, Any], now: float) -> None:
        """A completion's event is a token (its text may be empty: half a character). A chat opens with a bare role."""
        text = choice.get("text")
        if text is None:
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or ""
            if not text and not delta.get("tool_calls"):
                self._role_at = self._role_at or now
                return
        elif not text and choice.get("finish_reason") and self.sample.first:
            return  # only says why the answer ended
        if self._keep_text:
            self.sample.text += text
        if not self.sample.first:
            self.sample.first = now
        else:
            self.sample.gaps.append(now - self.sample.last)
        self.sample.last = now

    # --- ends

    def _finish(self) -> None:
        sample = self.sample
        if sample.status != 200:
            sample.error = sample.error or f"status {sample.status}: {self._body[:300].decode(errors='replace')}"
        elif self._streams():
            if not sample.first and self._role_at:  # an answer without a visible character
                sample.first = sample.last = self._role_at
            if not self._told_end:
                sample.error = sample.error or "the stream was cut: no [DONE]"
            elif not sample.output_tokens:
                sample.error = sample.error or "no usage with a token in the stream: tokens cannot be counted"
        else:
            sample.text = self._body.decode(errors="replace")
        if (self._head or {}).get("connection", "").lower() == "close":
            self.close()
        self._end()

    def _fail(self, why: str) -> None:
        self.sample.error = self.sample.error or why
        self.close()
        self._end()

    def _end(self) -> None:
        self.sample.end = self.clock()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def _count(sample: Sample, usage: Mapping[str, Any]) -> None:
    sample.input_tokens = int(usage.get("prompt_tokens") or 0)
    sample.output_tokens = int(usage.get("completion_tokens") or 0)
    details = usage.get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is not None:
        sample.cached_tokens = int(details["cached_tokens"])


class Pool:
    """Connections to one server, kept between requests as real clients keep them."""

    def __init__(self, target: Server, timeout_s: float = 600.0, clock: Clock = time.perf_counter) -> None:
        self.target, self.timeout_s, self.clock = target, timeout_s, clock
        self._idle: List[Exchange] = []

    async def ask(self, path: str, document: Optional[Mapping[str, Any]], keep_text: bool = False) -> Sample:
        """Send one request; errors are in the sample. A kept connection that proves dead is replaced once."""
        began = self.clock()
        try:
            return await asyncio.wait_for(self._ask(path, document, keep_text), self.timeout_s)
        except asyncio.TimeoutError:
            return Sample(sent=began, end=self.clock(), error=f"no end within {self.timeout_s:.0f} s")
        except (OSError, ssl.SSLError) as error:
            return Sample(sent=began, end=self.clock(), error=f"{type(error).__name__}: {error}")

    async def _ask(self, path: str, document: Optional[Mapping[str, Any]], keep_text: bool) -> Sample:
        while self._idle:
            kept = self._idle.pop()
            if kept.closed:
                continue
            sample = await self._on(kept, path, document, keep_text)
            if not (sample.error and not kept.answered):
                return sample
            break  # closed by the server while it lay idle
        loop = asyncio.get_running_loop()
        _, fresh = await loop.create_connection(
            lambda: Exchange(self.clock), self.target.host, self.target.port, ssl=self.target.tls
        )
        return await self._on(fresh, path, document, keep_text)

    async def _on(
        self, exchange: Exchange, path: str, document: Optional[Mapping[str, Any]], keep_text: bool
    ) -> Sample:
        try:
            sample = await exchange.send(self.target, path, document, keep_text)
        except asyncio.CancelledError:
            exchange.close()
            raise
        if not exchange.closed:
            self._idle.append(exchange)
        return sample

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()
