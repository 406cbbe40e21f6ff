"""launch.py: keys come from systemd's folder, and leave neither by a log nor by an answer."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

KEY = "client-key-0123456789"


@pytest.fixture
def launch(project_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("launch", project_root / "roles/pd_service/files/launch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_missing_credential_ends_the_process(launch, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PDSTACK_CREDENTIALS", "api_key admin_key")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    (tmp_path / "api_key").write_text(KEY + "\n")
    with pytest.raises(SystemExit, match="no credential admin_key"):
        launch.credentials()
    (tmp_path / "admin_key").write_text("other")
    assert launch.credentials() == {"api_key": KEY, "admin_key": "other"}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream, before = io.StringIO(), logging.getLogRecordFactory()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("pdstack-test")
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)
    logging.setLogRecordFactory(before)


def test_no_log_record_carries_a_key(launch, log) -> None:
    launch.hide_in_logs([KEY])
    logger = logging.getLogger("pdstack-test")
    logger.warning(f"server_args=ServerArgs(api_key='{KEY}')")
    logger.warning("args %s and %d of %r", {"api_key": KEY}, 7, [KEY])
    logger.warning("%(key)s", {"key": KEY})
    logger.warning("%s", {"key": [KEY]})
    assert KEY not in log.getvalue()
    assert log.getvalue().splitlines()[0] == "server_args=ServerArgs(api_key='(not shown)')"
    assert " and 7 of " in log.getvalue()


@pytest.mark.parametrize(("path", "hidden"), [("/server_info", True), ("/v1/completions", False)])
def test_a_servers_account_of_itself_lacks_the_keys_and_keeps_its_length(launch, path, hidden) -> None:
    body = f'{{"api_key": "{KEY}", "port": 1}}'.encode()
    sent: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(launch.HideInAnswers(app, [KEY])({"type": "http", "path": path}, None, send))
    assert (KEY.encode() in sent[1]["body"]) is not hidden
    assert len(sent[1]["body"]) == len(body)


@pytest.mark.parametrize(
    ("method", "path", "stopping", "status"),
    [
        ("POST", "/v1/completions", False, 200),
        ("POST", "/v1/completions", True, 503),
        ("POST", "/v1/chat/completions", True, 503),
        ("POST", "/generate", True, 503),
        ("GET", "/v1/models", True, 200),
        ("GET", "/health", True, 200),  # the engine's own word, which is 503 then
    ],
)
def test_an_engine_that_stops_takes_no_new_request(launch, method, path, stopping, status) -> None:
    sent: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path}
    asyncio.run(launch.RefuseWhileStopping(app, lambda: stopping)(scope, None, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == status
    if status == 503:
        assert json.loads(sent[1]["body"])["error"]["code"] == 503
        assert dict(sent[0]["headers"])[b"content-length"] == str(len(sent[1]["body"])).encode()


BUSY = """
import ctypes, os, socket, sys
sys.path.insert(0, sys.argv[1])
import launch
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
before = len(os.listdir("/proc/self/fd"))
launch.send_at_once(port)
ctypes.PyDLL(None).usleep(500_000)  # a slow start, in which the copy looks five times
late = socket.create_server(("127.0.0.1", port))
ctypes.PyDLL(None).usleep(700_000)  # holds the interpreter lock, as the routers do: no thread of ours runs
client = socket.create_connection(("127.0.0.1", port))
accepted, _ = late.accept()
print(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
print(len(os.listdir("/proc/self/fd")) - before)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="clone's number is not known here")
def test_accepted_connections_of_a_router_send_at_once(project_root: Path) -> None:
    """Also where the socket is opened later, by code that never lets another thread run; no file is left open by us."""
    folder = str(project_root / "roles/pd_service/files")
    done = subprocess.run([sys.executable, "-c", BUSY, folder], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n3\n"), (done.stdout, done.stderr)
    assert "sends small packets at once" in done.stderr


def test_a_router_starts_where_the_option_cannot_be_set(launch, monkeypatch) -> None:
    monkeypatch.setattr(launch, "fork_with_files", lambda: -1)  # what a filter of system calls makes of it
    assert launch.send_at_once(1) is None
