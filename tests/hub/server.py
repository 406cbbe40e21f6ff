"""The server: hub API, resolve with Range, a plain mirror, faults by request.

Run it by itself with ``python -m hub.server FOLDER [--rate BYTES_PER_SECOND]`` from tests/: it
prints its address and serves until it is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import select
import socket
import socketserver
import ssl
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, BinaryIO

from hub import xet
from hub.repository import Repository

CHUNK = 1 << 18


@dataclass
class Fault:
    """What goes wrong with the next ``times`` requests whose path contains ``match``.

    kind: status | drop | cut | hang | trickle | short | announced_short | long | flip | ignore_range |
    html | moved | gzip | no_length | wrong_and_drop. ``at`` is a fraction of the body. ``cut`` ends the connection
    after ``byte`` bytes of the answer, its header included, and ``reset`` says whether by RST.
    """

    match: str
    kind: str
    times: int = 1
    at: float = 0.5
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 30.0
    rate: float = 1000.0
    commit: str = "f" * 40
    byte: int = 0
    reset: bool = True


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    range: str | None
    authorized: bool
    host: str


class Hub(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """``with Hub(repository) as hub:`` serves in a thread. ``rate`` limits each body, bytes/s.

    ``certificate``: PEM file with key and certificate, for TLS. ``xet``: shards are kept in xet too.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self, *repositories: Repository, address: str = "127.0.0.1", port: int = 0, certificate: str | None = None
    ) -> None:
        self.repositories = {item.commit: item for item in repositories}
        self.refs = {"main": repositories[0].commit}
        self.repo = repositories[0].repo
        self.faults: list[Fault] = []
        self.log: list[Seen] = []
        self.sent = 0  # bytes of bodies of files
        self.wrote = 0  # bytes of the last answer that a cut did not reach, its header included
        self.token: str | None = None
        self.gate_error = "GatedRepo"
        self.page_size = 1000
        self.redirect_host: str | None = None
        self.extra_tree: list[dict[str, object]] = []
        self.rate: float | None = None
        self.on_request: Callable[[str], object] = lambda path: None
        self.xet = False
        self.xet_token = "xet_first"
        self.tunnels_to: tuple[str, int] | None = None  # where CONNECT leads, whatever it asks for
        self.lock = threading.Lock()
        self.dropped: set[socket.socket] = set()
        self.tls = certificate is not None
        super().__init__((address, port), _Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.server_address[0]}:{self.server_address[1]}"

    @property
    def mirror(self) -> str:
        return f"{self.url}/plain"

    def __enter__(self) -> Hub:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def shutdown_request(self, request: object) -> None:
        """Close a dropped connection at once: with its linger time of 0 that sends RST in place of FIN."""
        assert isinstance(request, socket.socket)
        if request in self.dropped:
            self.dropped.discard(request)
            request.close()
        else:
            super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no error here."""

    def fault_for(self, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.match in path and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def requests(self, part: str = "") -> list[Seen]:
        return [seen for seen in self.log if part in seen.path]


class _CutOff(Exception):
    """The answer ends here."""


class _Cut:
    """A stream that passes on ``left`` bytes and no more."""

    def __init__(self, stream: BinaryIO, left: int) -> None:
        self._stream = stream
        self.left = left

    def write(self, data: bytes) -> int:
        self._stream.write(data[: max(0, self.left)])
        self.left -= len(data)
        if self.left < 0:
            self._stream.flush()
            raise _CutOff
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if path == "/__stats":
            return self._answer(200, json.dumps({"requests": len(hub.log), "sent": hub.sent}).encode())
        authorization = self.headers.get("Authorization")
        seen = Seen(self.command, self.path, self.headers.get("Range"), bool(authorization), self.headers["Host"])
        with hub.lock:
            hub.log.append(seen)
        hub.on_request(path)
        fault = hub.fault_for(path)
        if fault and fault.kind == "cut":
            whole = self.wfile
            self.wfile = _Cut(whole, fault.byte)  # type: ignore[assignment]
            try:
                self._checked(path, fault, authorization)
                hub.wrote = fault.byte - self.wfile.left  # type: ignore[attr-defined]
            except _CutOff:
                self.close_connection = True
                if fault.reset:
                    self._reset()
            finally:
                self.wfile = whole
            return None
        return self._checked(path, fault, authorization)

    def _checked(self, path: str, fault: Fault | None, authorization: str | None) -> None:
        hub = self.server
        if fault and fault.kind == "status":
            return self._answer(fault.status, b"injected", fault.headers)
        if fault and fault.kind == "hang" and not path.startswith(("/plain/", f"/{hub.repo}/", "/cdn/")):
            time.sleep(fault.seconds)
            return self._answer(500, b"late")
        if path.startswith("/xet/v1/") and authorization != f"Bearer {hub.xet_token}":
            return self._answer(401, b"")
        secret = hub.token and authorization != f"Bearer {hub.token}"
        if secret and not path.startswith(("/cdn/", "/xet/")):
            headers = {"X-Error-Code": hub.gate_error, "X-Error-Message": "Access to this model is restricted."}
            return self._answer(401 if authorization is None else 403, b"{}", headers)
        return self._route(path, fault)

    def _route(self, path: str, fault: Fault | None) -> None:
        hub = self.server
        api = f"/api/models/{hub.repo}/"
        if path.startswith(api + "revision/"):
            return self._revision(path[len(api) + 9 :])
        if path.startswith(api + "tree/"):
            return self._tree(path[len(api) + 5 :])
        if path.startswith(api + "xet-read-token/") and hub.xet:
            answer = {"accessToken": hub.xet_token, "exp": int(time.time()) + 3600, "casUrl": f"{hub.url}/xet"}
            return self._answer(200, json.dumps(answer).encode())
        if path.startswith("/xet/"):
            return self._xet(path, fault)
        if match := re.fullmatch(rf"/(?:{hub.repo}|cdn)/resolve/([^/]+)/(.+)", path):
            revision, name = match.groups()
            commit = hub.refs.get(revision, revision)
            repository = hub.repositories.get(commit)
            if repository is None:
                return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            if hub.redirect_host and not path.startswith("/cdn/"):
                port = hub.server_address[1]
                where = f"http://{hub.redirect_host}:{port}/cdn/resolve/{commit}/{urllib.parse.quote(name)}"
                return self._answer(302, b"", {"Location": where, "X-Repo-Commit": commit})
            return self._file(repository, name, fault, hub_headers=not path.startswith("/cdn/"))
        if path.startswith("/plain/"):
            repository = hub.repositories[hub.refs["main"]]
            if path == "/plain/pdstack-listing.json":
                return self._listing(json.dumps(repository.listing()).encode(), fault)
            return self._file(repository, path[7:], fault, hub_headers=False)
        return self._answer(404, b"no such page")

    def _listing(self, body: bytes, fault: Fault | None) -> None:
        if fault is None or fault.kind != "trickle":
            return self._answer(200, body)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        step = max(1, int(fault.rate / 20))
        for start in range(0, len(body), step):
            self.wfile.write(body[start : start + step])
            time.sleep(step / fault.rate)
        return None

    def _revision(self, revision: str) -> None:
        commit = self.server.refs.get(revision, revision)
        if commit not in self.server.repositories:
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        return self._answer(200, json.dumps({"id": self.server.repo, "sha": commit}).encode())

    def _tree(self, revision: str) -> None:
        hub = self.server
        repository = hub.repositories.get(hub.refs.get(revision, revision))
        if repository is None:
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        entries = repository.tree() + hub.extra_tree
        if hub.xet:
            entries = [{**e, **({"xetHash": xet.name(e["lfs"]["oid"])} if "lfs" in e else {})} for e in entries]
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        start = int(query.get("cursor", ["0"])[0])
        headers = {}
        if start + hub.page_size < len(entries):
            following = (
                f"{hub.url}{urllib.parse.urlsplit(self.path).path}?recursive=true&cursor={start + hub.page_size}"
            )
            headers["Link"] = f'<{following}>; rel="next"'
        return self._answer(200, json.dumps(entries[start : start + hub.page_size]).encode(), headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _file(self, repository: Repository, name: str, fault: Fault | None, hub_headers: bool) -> None:
        if name not in repository.paths():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        kind = fault.kind if fault else ""
        if kind == "html":
            return self._answer(200, b"<html>Sign in</html>", {"Content-Type": "text/html; charset=utf-8"})
        size, digests = repository.size(name), repository.digests(name)
        match = re.match(r"bytes=(\d+)-$", self.headers.get("Range") or "")
        start = int(match.group(1)) if match and kind != "ignore_range" else 0
        if start >= size > 0:
            return self._answer(416, b"")
        count = size - start
        announced = {"announced_short": count // 2, "long": count + 10}.get(kind, count)
        self.send_response(206 if match and kind != "ignore_range" else 200)
        if match and kind != "ignore_range":
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        if hub_headers:
            self._hub_headers(repository, name, digests, fault)
        if not hub_headers:
            self.send_header("ETag", f'"{digests["git"]}"')
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if kind == "gzip":
            self.send_header("Content-Encoding", "gzip")
        if kind == "no_length":
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(announced))
        self.end_headers()
        if self.command == "HEAD":
            return None
        with (repository.folder / name).open("rb") as stream:
            return self._body(stream.fileno(), start, count, announced, fault)

    def _xet(self, path: str, fault: Fault | None) -> None:
        hub = self.server
        for repository in hub.repositories.values():
            for name in repository.paths():
                sha256 = repository.digests(name)["sha256"]
                if path == f"/xet/v1/reconstructions/{xet.name(sha256)}":
                    asked, url = self.headers.get("Range"), f"{hub.url}/xet/xorb/{xet.name(sha256)}"
                    found = xet.reconstruction(sha256, repository.size(name), asked, url)
                    return self._answer(200, json.dumps(found).encode())
                if path == f"/xet/xorb/{xet.name(sha256)}":
                    fd = xet.xorb(repository.folder / name)
                    first, last = (int(text) for text in self.headers["Range"].removeprefix("bytes=").split("-"))
                    try:
                        self.send_response(206)
                        self.send_header("Content-Range", f"bytes {first}-{last}/{os.fstat(fd).st_size}")
                        self.send_header("Content-Length", str(last - first + 1))
                        self.end_headers()
                        return self._body(fd, first, last - first + 1, last - first + 1, fault)
                    finally:
                        os.close(fd)
        return self._answer(404, b"")

    def do_CONNECT(self) -> None:
        """Be a proxy for TLS."""
        hub = self.server
        with hub.lock:
            hub.log.append(Seen("CONNECT", self.path, None, False, self.headers.get("Host", "")))
        self.close_connection = True
        if hub.tunnels_to is None:
            return self._answer(502, b"")
        self.send_response(200)
        self.end_headers()
        self.wfile.flush()
        with socket.create_connection(hub.tunnels_to) as far:
            pairs = {self.connection: far, far: self.connection}
            while True:
                for ready in select.select(list(pairs), [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return None
                    pairs[ready].sendall(data)

    def _hub_headers(self, repository: Repository, name: str, digests: dict[str, str], fault: Fault | None) -> None:
        lfs = name.endswith(".safetensors")
        moved = fault is not None and fault.kind == "moved"
        self.send_header("X-Repo-Commit", fault.commit if fault is not None and moved else repository.commit)
        self.send_header("ETag", f'"{digests["sha256" if lfs else "git"]}"')
        if lfs:
            self.send_header("X-Linked-Etag", f'"{"0" * 64 if moved else digests["sha256"]}"')
            self.send_header("X-Linked-Size", str(repository.size(name)))

    def _body(self, fd: int, start: int, count: int, announced: int, fault: Fault | None) -> None:
        hub = self.server
        kind = fault.kind if fault else ""
        stop = int(count * fault.at) if fault and kind in ("drop", "hang", "short", "wrong_and_drop") else None
        flip = start + int(count * fault.at) if fault and kind == "flip" else None
        flip = start if kind == "wrong_and_drop" else flip
        limit = min(count, announced) if stop is None else stop
        if hub.rate is None and not kind and not hub.tls:
            self.wfile.flush()
            while limit > 0:
                done = os.sendfile(self.connection.fileno(), fd, start, min(limit, CHUNK * 16))
                if not done:
                    return
                start, limit = start + done, limit - done
                with hub.lock:
                    hub.sent += done
            return
        rate = fault.rate if fault and kind == "trickle" else hub.rate
        while limit > 0:
            size = min(limit, CHUNK if not rate else max(1, min(CHUNK, int(rate / 20))))
            chunk = bytearray(os.pread(fd, size, start))
            if flip is not None and start <= flip < start + len(chunk):
                chunk[flip - start] ^= 0x40
            self.wfile.write(chunk)
            start, limit = start + len(chunk), limit - len(chunk)
            with hub.lock:
                hub.sent += len(chunk)
            if rate:
                time.sleep(len(chunk) / rate)
        if kind == "long":
            self.wfile.write(b"x" * 10)
        if kind == "hang" and fault:
            time.sleep(fault.seconds)
        if kind in ("drop", "hang", "short", "wrong_and_drop"):
            self.close_connection = True
        if kind == "drop":
            self.wfile.flush()
            self._reset()

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.server.dropped.add(self.connection)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rate", type=float, help="bytes per second and body")
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token", help="what it wants of who asks")
    parser.add_argument("--xet", action="store_true", help="keep shards in xet too")
    arguments = parser.parse_args()
    hub = Hub(Repository(arguments.folder), address=arguments.address, port=arguments.port)
    hub.rate, hub.token, hub.xet = arguments.rate, arguments.token, arguments.xet
    print(hub.url, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        hub.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
