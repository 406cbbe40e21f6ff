"""A small HTTP client for health checks and completions: standard library, bounded, never through a proxy."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, Dict, Optional

from .verify import Reply

# Trust a certificate that is itself in the file, whoever issued it. The name is Python 3.10's, the value OpenSSL's.
_PARTIAL_CHAIN = 0x80000


@dataclass(frozen=True)
class Access:
    """How to be let in: files on the host where the request is made, "" for none. Never a key itself.

    ``key_file`` holds the key that is sent as a bearer token. ``ca_file`` holds the one certificate that a
    server of ours may show. Its name is not compared: an operator's certificate is for the name that
    clients use, and we ask at the service address.
    """

    key_file: str = ""
    ca_file: str = ""

    def problem(self) -> str:
        """Say which of the files cannot be read, "" where nothing is in the way."""
        for path in (self.key_file, self.ca_file):
            try:
                if path and not read_key(path):
                    return f"{path} is empty"
            except (OSError, ValueError) as error:
                return f"{path} cannot be read: {error}"
        return ""


def request(
    method: str, url: str, body: Optional[Dict[str, Any]] = None, timeout_s: float = 10.0, access: Access = Access()
) -> Reply:
    """Send one request and read its whole answer. Errors of the connection become status 0."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} if data else {}
    try:
        if access.key_file:
            headers["Authorization"] = f"Bearer {read_key(access.key_file)}"
        with _opener(access.ca_file).open(
            urllib.request.Request(url, data=data, headers=headers, method=method), timeout=timeout_s
        ) as answer:
            return Reply(answer.status, answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.read().decode(errors="replace"))
    except Exception as error:  # refused, reset, cut, timed out: each is an answer to report, not a crash
        return Reply(0, f"{type(error).__name__}: {error}")


def look(url: str, access: Access = Access()) -> Reply:
    """Return the answer to a GET, of status 0 when none comes in a few seconds."""
    return request("GET", url, timeout_s=5.0, access=access)


def read_key(path: str) -> str:
    """Return the key in a file. Raises OSError."""
    with open(path, encoding="utf-8") as handle:
        return handle.read().strip()


def trust(ca_file: str) -> ssl.SSLContext:
    """Return a context that believes the certificates of one file, for whatever name. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= _PARTIAL_CHAIN
    context.load_verify_locations(cafile=ca_file)
    return context


def _opener(ca_file: str) -> urllib.request.OpenerDirector:
    if not ca_file:
        return _DIRECT
    context = trust(ca_file)
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
