"""Bytes that another program writes to its standard output, as a source's stream.

What the program must know and nobody else goes in by standard input or by a file, never as an argument. It gets a small
environment of its own: the proxies and certificates of the request, and nothing secret that ours may hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
from typing import Callable, Dict, List, Mapping, Optional

from .errors import TRANSIENT, SourceError

PIPE = 1 << 20  # bytes that the kernel holds between the program and us
SAID = 2000  # bytes of its last words
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_PASSED = ("PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", *_PROXIES)
_F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)

Explain = Callable[[int, str], SourceError]  # exit status (0 where nothing at all came) and last words to the error


def environment(proxy: Optional[str], ca_file: Optional[str], **more: str) -> Dict[str, str]:
    """Return the program's environment. ``proxy`` None keeps the proxies of ours, "" takes them away."""
    found = {name: os.environ[name] for name in _PASSED if name in os.environ}
    if proxy is not None:
        found = {name: value for name, value in found.items() if name not in _PROXIES}
        if proxy:
            found.update(http_proxy=proxy, https_proxy=proxy, HTTP_PROXY=proxy, HTTPS_PROXY=proxy)
    if ca_file:
        found["SSL_CERT_FILE"] = ca_file
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", **found, **more}


class CommandBody:
    """A program's output. ``timeout``: seconds without a byte. Raises SourceError, also for a bad end."""

    def __init__(self, argv: List[str], say: bytes, env: Mapping[str, str], timeout: float, explain: Explain) -> None:
        self._program = argv[0]
        self._timeout = timeout
        self._explain = explain
        self._any = False
        self._said = os.memfd_create("pdstack-said", os.MFD_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, env=dict(env), bufsize=0
            )
        except OSError as error:
            os.close(self._said)
            raise SourceError(TRANSIENT, f"{argv[0]}: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        with contextlib.suppress(OSError):  # more than an unprivileged user may ask for
            fcntl.fcntl(self._out, _F_SETPIPE_SZ, PIPE)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(say)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def readinto(self, buffer: memoryview) -> int:
        waiting = select.poll()
        waiting.register(self._out, select.POLLIN)
        if not waiting.poll(self._timeout * 1000):
            raise SourceError(TRANSIENT, f"no byte for {self._timeout:g} s from {self._program}")
        got = os.readv(self._out, [buffer])
        self._any = self._any or got > 0
        if not got:
            try:
                status = self._process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                raise SourceError(TRANSIENT, "the program closed its output and goes on") from None
            if status or not self._any:
                raise self._explain(status, last_words(self._said))
        return got

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self._said)


def last_words(fd: int) -> str:
    """Return the end of what the program said, on one line and without the queries of addresses, which may sign."""
    size = os.fstat(fd).st_size
    text = os.pread(fd, SAID, max(0, size - SAID)).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"\?[^\s\"']+", "", lines[-1])[:500] if lines else ""
