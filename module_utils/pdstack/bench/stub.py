"""A worker that answers from thin air, to find the client's own ceiling and to test the client.

    python3 -m pdstack.bench.stub --port 9000 --token-s 0.01

It speaks as much of the engine's HTTP as the client uses. It is no engine, and no figure of it is one of a service.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

MODEL = "stub"


@dataclass(frozen=True)
class Manners:
    """How the stub behaves."""

    first_s: float = 0.0  # until the first token
    token_s: float = 0.0  # between tokens; 0 sends a whole answer at once
    fault: str = ""  # "" | empty-first | cut | no-usage | status | close | error-event
    fault_every: int = 1  # each n-th request has the fault
    key: str = ""  # wanted as a bearer token


class Stub(asyncio.Protocol):
    """One connection. Requests on it are answered one after the other."""

    served = 0  # requests, over all connections of the process

    def __init__(self, manners: Manners) -> None:
        self.manners = manners
        self._buffer = b""
        self._transport: Optional[asyncio.Transport] = None
        self._task: Optional[asyncio.Task[None]] = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(headers.get("content-length", "0"))
        if len(self._buffer) < end + 4 + length:
            return
        body = self._buffer[end + 4 : end + 4 + length]
        self._buffer = self._buffer[end + 4 + length :]
        path = lines[0].split(" ")[1]
        if self.manners.key and headers.get("authorization") != f"Bearer {self.manners.key}":
            self._plain(401, {"error": {"message": "no valid key"}})
        elif path == "/v1/models":
            self._plain(200, {"data": [{"id": MODEL}]})
        elif not body:
            self._plain(200, {})  # whatever else a client looks at first, such as /server_info
        else:
            Stub.served += 1
            self._complete(json.loads(body), "chat" in path)

    def _plain(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._write(head.encode() + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _complete(self, asked: Dict[str, Any], chat: bool) -> None:
        usage = self._usage(asked)
        fault = self.manners.fault if Stub.served % self.manners.fault_every == 0 else ""
        if fault == "status":
            self._plain(503, {"error": {"message": "server_selection_failed"}})
        elif not asked.get("stream"):
            self._plain(200, {"choices": [{"text": "x", "message": {"content": "x"}}], "usage": usage})
        else:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            wanted = (asked.get("stream_options") or {}).get("include_usage")
            events = self._events(_length(asked), usage if wanted else {}, chat, fault)
            if not (self.manners.first_s or self.manners.token_s):
                self._write(head + b"".join(events))
                self._last(fault)
            else:
                self._write(head)
                self._task = asyncio.ensure_future(self._slowly(events, fault))

    @staticmethod
    def _usage(asked: Dict[str, Any]) -> Dict[str, int]:
        text = asked.get("prompt") or " ".join(item["content"] for item in asked["messages"])
        # one token a word, and one for the beginning of the text
        return {"prompt_tokens": 1 + len(text.split()), "completion_tokens": _length(asked)}

    async def _slowly(self, events: List[bytes], fault: str) -> None:
        await asyncio.sleep(self.manners.first_s)
        for event in events:
            self._write(event)
            await asyncio.sleep(self.manners.token_s)
        self._last(fault)

    def _last(self, fault: str) -> None:
        if fault == "cut" and self._transport is not None:
            self._transport.close()
            return
        self._write(b"0\r\n\r\n")
        if fault == "close" and self._transport is not None:
            self._transport.close()

    @staticmethod
    def _events(count: int, usage: Dict[str, int], chat: bool, fault: str) -> List[bytes]:
        texts = ["" if fault == "empty-first" and index == 0 else f"w{index} " for index in range(count)]
        found = [_chunk({"choices": [{"delta": {"role": "assistant", "content": ""}}]})] if chat else []
        found += [_chunk({"choices": [{"delta": {"content": text}} if chat else {"text": text}]}) for text in texts]
        if fault == "error-event":
            return [*found[: count // 2], _chunk({"error": {"message": "decode went away"}}), _chunk("[DONE]")]
        if fault == "cut":
            return found[: count // 2]
        if usage and fault != "no-usage":
            found.append(_chunk({"choices": [], "usage": usage}))
        return [*found, _chunk("[DONE]")]


def _length(asked: Dict[str, Any]) -> int:
    return int(asked.get("max_completion_tokens") or asked["max_tokens"])


def _chunk(event: Any) -> bytes:
    data = b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def start(manners: Manners, port: int = 0, tls: Any = None) -> Tuple[asyncio.AbstractServer, int]:
    """Listen on loopback; returns the server and its port."""
    server = await asyncio.get_running_loop().create_server(lambda: Stub(manners), "127.0.0.1", port, ssl=tls)
    return server, int(server.sockets[0].getsockname()[1])


async def _serve(manners: Manners, port: int) -> None:
    server, bound = await start(manners, port)
    print(bound, flush=True)
    async with server:
        await server.serve_forever()


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Serve until killed; prints the port."""
    parser = argparse.ArgumentParser(prog="python3 -m pdstack.bench.stub", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    given = parser.parse_args(arguments)
    asyncio.run(_serve(Manners(given.first_s, given.token_s), given.port))


if __name__ == "__main__":
    main()
