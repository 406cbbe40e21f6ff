"""Processes of a former deployment: only the very process that was named is stopped."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from pdstack import foreign, ports
from pdstack.facts import Port
from pdstack.runner import Completed

HOLDER = Port(30000, "0.0.0.0", 4711, "python -m sglang.launch_server", "old-sglang.service", "2026-11-01T10:00:00Z")


def test_a_process_that_took_the_port_since_is_left_alone() -> None:
    assert foreign.still_there([HOLDER], [HOLDER]) == [HOLDER]
    assert foreign.still_there([HOLDER], [replace(HOLDER, pid=99)]) == []
    assert foreign.still_there([HOLDER], [replace(HOLDER, since="2026-11-30T10:00:00Z")]) == []
    assert foreign.still_there([HOLDER], []) == []


def test_a_service_is_stopped_and_disabled() -> None:
    calls = []
    listening = [[HOLDER], []]

    def runner(argv):  # type: ignore[no-untyped-def]
        calls.append(" ".join(argv))
        return Completed(0, "", "")

    done = foreign.stop([HOLDER], runner, lambda: listening.pop(0), time.monotonic, lambda s: None, kill=None)  # type: ignore[arg-type]
    assert calls == ["systemctl disable --now old-sglang.service"] == done
    assert "process 4711 (python -m sglang.launch_server) of unit old-sglang.service since" in foreign.words(HOLDER)


LISTEN = """
import signal, socket, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen(); print(s.getsockname()[1], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("manner", "number"), [("polite", signal.SIGTERM), ("stubborn", signal.SIGKILL)])
def test_a_real_process_by_hand_is_ended(manner: str, number: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", LISTEN, manner], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        (holder,) = [item for item in ports.listening() if item.port == port]
        assert holder.pid == process.pid
        mine = replace(holder, unit=None)  # whatever unit the tests themselves run in
        now = lambda: [replace(item, unit=None) for item in ports.listening()]  # noqa: E731

        def reaping(seconds: float) -> None:
            process.poll()
            time.sleep(seconds / 10)

        foreign.stop([mine], lambda argv: Completed(1, "", ""), now, time.monotonic, reaping, timeout_s=2)
        assert process.wait(5) == -number
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    finally:
        process.kill()
        process.communicate()


def test_who_does_not_let_go_is_named() -> None:
    clock = iter(range(1000))
    with pytest.raises(TimeoutError, match="port 30000: process 4711"):
        foreign.stop(
            [replace(HOLDER, unit=None)],
            lambda argv: Completed(0, "", ""),
            lambda: [replace(HOLDER, unit=None)],
            lambda: float(next(clock)),
            lambda s: None,
            kill=lambda pid, sig: None,
            timeout_s=5,
        )
