"""A small HTTP client for health checks and completions: standard library, bounded, never through a proxy."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, Dict, Optional

from .verify import Reply

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def request(method: str, url: str, body: Optional[Dict[str, Any]] = None, timeout_s: float = 10.0) -> Reply:
    """Send one request and read its whole answer. Errors of the connection become status 0."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} if data else {}
    try:
        with _DIRECT.open(
            urllib.request.Request(url, data=data, headers=headers, method=method), timeout=timeout_s
        ) as answer:
            return Reply(answer.status, answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.read().decode(errors="replace"))
    except Exception as error:  # refused, reset, cut, timed out: each is an answer to report, not a crash
        return Reply(0, f"{type(error).__name__}: {error}")


def status(url: str) -> int:
    """Return the status of a GET, 0 when nothing answers in a few seconds."""
    return request("GET", url, timeout_s=5.0).status
