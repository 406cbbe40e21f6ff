"""The client that modules ask engines and routers with: keys from files, one trusted certificate."""

from __future__ import annotations

import http.server
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdstack import http as client
from pdstack.http import Access

KEY = "k" * 32


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    subprocess.run([*argv, "-subj", f"/CN={name}", "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        good = self.headers["Authorization"] == f"Bearer {KEY}"
        self.send_response(200 if good else 401)
        self.end_headers()
        self.wfile.write(b"yes" if good else b"no")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    cert, key = certificate(tmp_path_factory.mktemp("tls"), "api.example.com")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.socket = context.wrap_socket(listener.socket, server_side=True)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{listener.server_port}/", cert
    listener.shutdown()
    listener.server_close()


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    return str(path)


def test_the_key_of_the_file_opens_and_the_certificate_is_trusted_under_any_name(server, key_file) -> None:
    url, cert = server
    assert client.request("GET", url, access=Access(key_file, str(cert))) == client.Reply(200, "yes")
    assert client.look(url, Access("", str(cert))).status == 401


def test_another_certificate_is_not_trusted_even_of_the_same_name(server, key_file, tmp_path) -> None:
    other, _ = certificate(tmp_path, "api.example.com")
    reply = client.request("GET", server[0], access=Access(key_file, str(other)))
    assert reply.status == 0
    assert "CERTIFICATE_VERIFY_FAILED" in reply.body


def test_a_missing_key_file_is_an_answer_in_words(server, tmp_path) -> None:
    reply = client.request("GET", server[0], access=Access(str(tmp_path / "none"), str(server[1])))
    assert (reply.status, "No such file" in reply.body) == (0, True)
