"""Who listens where, read from this machine's own /proc and from made-up ones."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pdstack import ports


def test_finds_a_socket_of_this_process() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        number = server.getsockname()[1]
        found = [item for item in ports.listening() if item.port == number]
    assert [(item.address, item.pid) for item in found] == [("127.0.0.1", os.getpid())]
    assert found[0].command
    assert "py" in found[0].command
    assert found[0].since
    assert found[0].since.endswith("Z")


def test_a_socket_that_only_is_connected_does_not_count() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname()) as client:
            mine = client.getsockname()[1]
            assert mine not in [item.port for item in ports.listening()]


def test_reads_ipv6_and_the_unit(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    head = "  sl  local_address remote_address st tx rx tr tm retrnsmt uid timeout inode\n"
    (tmp_path / "net" / "tcp").write_text(head)
    (tmp_path / "net" / "tcp6").write_text(
        head + "   0: 00000000000000000000000001000000:1F40 0:0 0A 0:0 00:0 0 1000 0 77 1 0 100 0 0 10 0\n"
    )
    process = tmp_path / "42"
    (process / "fd").mkdir(parents=True)
    (process / "fd" / "3").symlink_to("socket:[77]")
    (process / "cmdline").write_bytes(b"old-router\0--port\08000\0")
    (process / "cgroup").write_text("0::/system.slice/old-router.service\n")
    (process / "stat").write_text("42 (a) b) S" + " 0" * 18 + " 250 0\n")
    (tmp_path / "stat").write_text("cpu 1\nbtime 1000000000\n")
    (item,) = ports.listening(str(tmp_path))
    assert (item.port, item.address, item.pid, item.command, item.unit) == (
        8000, "::1", 42, "old-router --port 8000", "old-router.service",
    )  # fmt: skip
    assert item.since == "2001-09-09T01:46:42Z"


def test_a_hidden_holder_is_unknown_not_absent(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text("head\n   0: 0100007F:1F40 0:0 0A 0:0 00:0 0 0 0 77 1\n")
    (item,) = ports.listening(str(tmp_path))
    assert (item.port, item.address, item.pid) == (8000, "127.0.0.1", None)
