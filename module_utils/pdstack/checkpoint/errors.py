"""Errors for the operator, and errors of a source of bytes."""

from __future__ import annotations

from typing import Optional

AUTH = "auth"  # 401, 403, gated: no retry helps
MISSING = "missing"  # this source does not have this file
BUSY = "busy"  # 429, 503: wait as long as the server says
TRANSIENT = "transient"  # resets, timeouts, 5xx, early ends: try again
SLOW = "slow"  # below the speed floor
WRONG = "wrong"  # not the bytes that were asked for


class CheckpointError(Exception):
    """What was found, what was needed and what to do; ``code`` is stable for programs.

    Codes: bad-input, no-listing, no-space, disk, locked, fetch-failed, not-sane, not-verified, no-systemd,
    interrupted.
    """

    def __init__(self, code: str, found: str, needed: str = "", remedy: str = "") -> None:
        self.code = code
        self.found = found
        self.needed = needed
        self.remedy = remedy
        parts = [found, f"needed: {needed}" if needed else "", f"do: {remedy}" if remedy else ""]
        super().__init__("; ".join(part for part in parts if part))


class SourceError(Exception):
    """One source could not deliver; ``kind`` is one of the constants above.

    ``retry_after``: seconds that the server asked for, where it did.
    """

    def __init__(self, kind: str, message: str, retry_after: Optional[float] = None) -> None:
        self.kind = kind
        self.retry_after = retry_after
        super().__init__(message)
