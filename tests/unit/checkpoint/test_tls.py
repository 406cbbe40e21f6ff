"""A hub behind TLS with a certificate of its own: trusted by file or environment, straight and through a proxy."""

from __future__ import annotations

import sys

import pytest
from hub.server import Hub
from pdstack.checkpoint.errors import CheckpointError


@pytest.fixture
def secure(site, tls):
    with Hub(site.toy, certificate=tls.server) as hub:
        site.hub = hub
        yield site


def test_a_certificate_that_nobody_vouches_for_is_refused(secure, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(CheckpointError, match="CERTIFICATE_VERIFY_FAILED"):
        secure.present(attempts=1)

    assert not secure.folder.exists()
    assert secure.hub.log == []


def test_a_file_of_certificates_is_trusted(secure, tls, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)

    secure.present(ca_file=tls.ca)

    assert secure.wrong_files() == []


def test_the_environments_certificates_are_trusted(secure, tls, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", tls.ca)

    secure.present()

    assert secure.wrong_files() == []


def test_a_certificate_for_another_name_is_refused(secure, tls):
    endpoint = secure.hub.url.replace("127.0.0.1", "localhost")
    with pytest.raises(CheckpointError, match="CERTIFICATE_VERIFY_FAILED"):
        secure.present(ca_file=tls.ca, endpoint=endpoint, attempts=1)


def test_through_a_proxy_that_sees_no_token(secure, tls, tmp_path):
    """hub.invalid resolves nowhere: only the proxy can lead there, and it sees names, not requests."""
    (tmp_path / "token").write_text("hf_secret")
    secure.hub.token = "hf_secret"
    port = secure.hub.server_address[1]
    with Hub(secure.toy) as proxy:
        proxy.tunnels_to = ("127.0.0.1", port)
        endpoint = f"https://hub.invalid:{port}"
        secure.present(endpoint=endpoint, proxy=proxy.url, ca_file=tls.ca, token_file=str(tmp_path / "token"))

    assert secure.wrong_files() == []
    assert {(seen.method, seen.path) for seen in proxy.log} == {("CONNECT", f"hub.invalid:{port}")}
    assert all(seen.authorized for seen in secure.hub.log)


def test_xet_too(secure, tls):
    secure.hub.xet = True

    result = secure.present(ca_file=tls.ca, xet=True, xet_python=sys.executable, stall=10.0)

    assert secure.wrong_files() == []
    assert any(name.startswith("xet of ") for name in result.bytes_by_source)


@pytest.mark.parametrize("where", ["endpoint", "proxy", "sources"])
@pytest.mark.parametrize("url", ["https://me:hf_secret@127.0.0.1/", "https://127.0.0.1/?signature=hf_secret"])
def test_an_address_with_a_secret_is_refused_and_not_repeated(site, where, url):
    with pytest.raises(CheckpointError, match="may be shown") as caught:
        site.present(**{where: [url] if where == "sources" else url})

    assert "hf_secret" not in str(caught.value)


def test_a_missing_file_is_named(site):
    for name in ("ca_file", "token_file", "rclone_config"):
        with pytest.raises(CheckpointError, match=f"{name} /nowhere is missing"):
            site.present(**{name: "/nowhere"})
