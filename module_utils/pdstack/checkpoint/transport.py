"""HTTP GET over the standard library: redirects, proxies, time-outs, typed errors.

``http.client`` and not huggingface_hub for the bytes: hashing inline, resuming and switching
sources need the raw stream, and reading into one buffer costs a fraction of its CPU.
"""

from __future__ import annotations

import base64
import email.utils
import http.client
import json
import ssl
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Dict, Mapping, Optional, Protocol

from .errors import AUTH, BUSY, MISSING, TRANSIENT, WRONG, SourceError

MAX_REDIRECTS = 5
MAX_JSON = 64 << 20  # bytes of a listing page
JSON_SECONDS = 120.0  # that it may take: a byte now and then would hold a run up for ever
USER_AGENT = "pdstack-checkpoint/1"


class Body(Protocol):
    """A stream of bytes. ``readinto`` returns what one read of the socket or file gives, 0 at the end."""

    def readinto(self, buffer: memoryview) -> int: ...

    def close(self) -> None: ...


@dataclass
class Response:
    """``headers`` has lower-case names; ``length`` is the body's, None where the server gave none."""

    status: int
    headers: Dict[str, str]
    body: Body
    url: str
    length: Optional[int] = None


class Transport(Protocol):
    def get(self, url: str, headers: Optional[Mapping[str, str]] = None) -> Response:
        """Return the response of the last hop, its status 200 or 206; raises SourceError for all others."""


def shown(url: str) -> str:
    """Return the URL without what may be secret: user, password and query."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class _Header:
    """Says of the lines that http.client reads whether the last one was the end of the connection."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.cut = False

    def readline(self, limit: int = -1) -> Any:
        line = self._stream.readline(limit)
        self.cut = not line.endswith(b"\n")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Response(http.client.HTTPResponse):
    """http.client takes the end of a connection for the end of the header, and believes what came until then."""

    def begin(self) -> None:
        stream: Any = self.fp
        header: Any = _Header(stream)
        self.fp = header
        super().begin()
        if self.fp is header:
            self.fp = stream
        if header.cut:
            raise http.client.HTTPException("the connection ended within the answer's header")


class _HttpBody:
    def __init__(self, response: http.client.HTTPResponse, connection: http.client.HTTPConnection) -> None:
        self._response = response
        self._connection = connection
        # http.client's readinto() waits until the buffer is full, so that a trickle would look
        # like a hang. One read of the socket at a time keeps the speed floor honest.
        self._raw = response.fp if not response.chunked else None
        self._left = response.length

    def readinto(self, buffer: memoryview) -> int:
        try:
            if self._raw is None:
                data = self._response.read1(len(buffer))
                buffer[: len(data)] = data
                return len(data)
            if self._left is not None:
                buffer = buffer[: self._left]
                if not len(buffer):
                    return 0
            got = self._raw.readinto1(buffer)
            if self._left is not None:
                self._left -= got
            return got
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(TRANSIENT, f"connection lost: {type(error).__name__}: {error}") from None

    def close(self) -> None:
        self._response.close()
        self._connection.close()


@dataclass
class HttpTransport:
    """``timeout``: seconds without any byte, also for connecting.

    ``proxy``: URL, "" for none, None for the environment's. ``ca_file``: certificates to trust, None for the system's
    (or those of SSL_CERT_FILE in the environment).
    """

    timeout: float = 30.0
    proxy: Optional[str] = None
    source_address: Optional[str] = None
    ca_file: Optional[str] = None
    _context: Optional[ssl.SSLContext] = field(default=None, repr=False)

    def get(self, url: str, headers: Optional[Mapping[str, str]] = None) -> Response:
        sent = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity", **(headers or {})}
        first = urllib.parse.urlsplit(url)
        for _ in range(MAX_REDIRECTS + 1):
            response, location = self._hop(url, sent)
            if location is None:
                return response
            response.body.close()
            target = urllib.parse.urlsplit(urllib.parse.urljoin(url, location))
            if target.scheme not in ("http", "https") or (first.scheme == "https" and target.scheme != "https"):
                raise SourceError(WRONG, f"{shown(url)} redirects to {target.scheme}://, which is not followed")
            if (target.scheme, target.netloc) != (first.scheme, first.netloc):
                sent.pop("Authorization", None)  # the token is for the hub, not for its storage
            url = target.geturl()
        raise SourceError(WRONG, f"{shown(url)}: more than {MAX_REDIRECTS} redirects")

    def _hop(self, url: str, headers: Mapping[str, str]) -> tuple[Response, Optional[str]]:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SourceError(WRONG, f"{shown(url)} is not an http(s) address")
        connection: Optional[http.client.HTTPConnection] = None
        try:
            connection, target, extra = self._connect(parts)
            connection.response_class = _Response
            connection.request("GET", target, headers={**headers, **extra})
            raw = connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            if connection is not None:
                connection.close()
            raise SourceError(TRANSIENT, f"{shown(url)}: {type(error).__name__}: {error}") from None
        found = {name.lower(): value for name, value in raw.getheaders()}
        response = Response(raw.status, found, _HttpBody(raw, connection), url, raw.length)
        if raw.status in (301, 302, 303, 307, 308) and "location" in found:
            return response, found["location"]
        if raw.status in (200, 206):
            return response, None
        response.body.close()
        raise _status_error(raw.status, found, url)

    def _connect(self, parts: urllib.parse.SplitResult) -> tuple[http.client.HTTPConnection, str, Dict[str, str]]:
        host, target = parts.hostname or "", parts.path or "/"
        if parts.query:
            target += "?" + parts.query
        source = (self.source_address, 0) if self.source_address else None
        proxy = self._proxy_for(parts)
        if proxy is None:
            port = parts.port
            if parts.scheme == "https":
                return (
                    http.client.HTTPSConnection(
                        host, port, timeout=self.timeout, context=self._tls(), source_address=source
                    ),
                    target,
                    {},
                )
            return http.client.HTTPConnection(host, port, timeout=self.timeout, source_address=source), target, {}
        extra = _proxy_authorization(proxy)
        if parts.scheme == "https":
            tunnel = http.client.HTTPSConnection(
                proxy.hostname or "", proxy.port or 3128, timeout=self.timeout, context=self._tls()
            )
            tunnel.set_tunnel(host, parts.port or 443, headers=extra)
            return tunnel, target, {}
        plain = http.client.HTTPConnection(proxy.hostname or "", proxy.port or 3128, timeout=self.timeout)
        return plain, urllib.parse.urlunsplit(("http", parts.netloc, parts.path or "/", parts.query, "")), extra

    def _proxy_for(self, parts: urllib.parse.SplitResult) -> Optional[urllib.parse.SplitResult]:
        url = self.proxy
        if url is None:
            host = parts.hostname or ""
            if urllib.request.proxy_bypass(host):
                return None
            url = urllib.request.getproxies().get(parts.scheme, "")
        if not url:
            return None
        return urllib.parse.urlsplit(url if "://" in url else f"http://{url}")

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = ssl.create_default_context(cafile=self.ca_file)
        return self._context


def _proxy_authorization(proxy: urllib.parse.SplitResult) -> Dict[str, str]:
    if not proxy.username:
        return {}
    pair = f"{urllib.parse.unquote(proxy.username)}:{urllib.parse.unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


def _status_error(status: int, headers: Mapping[str, str], url: str) -> SourceError:
    code = headers.get("x-error-code", "")
    said = " ".join(part for part in (code, headers.get("x-error-message", "")[:200]) if part)
    text = f"HTTP {status} from {shown(url)}" + (f" ({said})" if said else "")
    if status in (401, 403, 407):
        return SourceError(AUTH, text)
    if status in (404, 410, 416):
        return SourceError(MISSING, text)
    if status in (429, 503):
        return SourceError(BUSY, text, retry_after(headers.get("retry-after"), time.time()))
    if status == 408 or status >= 500:
        return SourceError(TRANSIENT, text)
    return SourceError(WRONG, text)


def retry_after(value: Optional[str], now: float) -> Optional[float]:
    """Return the seconds of a Retry-After header (a number or a date); None where it says nothing usable."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
    except (TypeError, ValueError, IndexError):
        return None


def get_json(transport: Transport, url: str, headers: Optional[Mapping[str, str]] = None) -> tuple[Any, Response]:
    """Return the parsed body and the response; raises SourceError, also for a body that is not JSON or trickles in."""
    response = transport.get(url, headers)
    end = time.monotonic() + JSON_SECONDS
    try:
        parts = bytearray()
        buffer = memoryview(bytearray(1 << 16))
        while True:
            got = response.body.readinto(buffer)
            if not got:
                break
            parts += buffer[:got]
            if time.monotonic() > end:
                raise SourceError(TRANSIENT, f"{shown(url)}: only {len(parts)} bytes in {JSON_SECONDS:g} s")
            if len(parts) > MAX_JSON:
                raise SourceError(WRONG, f"{shown(url)}: more than {MAX_JSON} bytes of JSON")
    finally:
        response.body.close()
    if response.length is not None and len(parts) != response.length:
        raise SourceError(TRANSIENT, f"{shown(url)}: body ended at {len(parts)} of {response.length} bytes")
    try:
        return json.loads(bytes(parts)), response
    except ValueError:
        kind = response.headers.get("content-type", "no type")
        raise SourceError(WRONG, f"{shown(url)}: not JSON ({kind})") from None
