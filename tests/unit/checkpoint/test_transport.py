"""HTTP itself: what is followed, what is sent, what an address may show."""

from __future__ import annotations

import shutil

import pytest
from hub import repository
from hub.server import Fault
from pdstack.checkpoint.errors import SourceError
from pdstack.checkpoint.transport import HttpTransport, get_json, retry_after, shown


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("-5", 0.0),
        ("Thu, 01 Jan 1970 00:02:00 GMT", 20.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("soon", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after(value, seconds):
    assert retry_after(value, now=100.0) == seconds


def test_an_address_is_shown_without_its_secrets():
    assert shown("https://me:secret@bucket.example:8443/a/b?signature=secret") == "https://bucket.example:8443/a/b"


@pytest.mark.parametrize("url", ["ftp://example/x", "file:///etc/passwd", "http:///x", "x"])
def test_only_http(url):
    with pytest.raises(SourceError):
        HttpTransport().get(url)


def redirect(where: str) -> Fault:
    return Fault("/tree/", "status", status=302, times=99, headers={"Location": where})


@pytest.mark.parametrize("where", ["file:///etc/passwd", "ftp://example/x"])
def test_redirects_stay_with_http(site, where):
    site.hub.faults = [redirect(where)]
    with pytest.raises(SourceError, match="not followed"):
        HttpTransport().get(f"{site.hub.url}/api/models/org/toy/tree/x")


def test_a_loop_of_redirects_ends(site):
    site.hub.faults = [redirect(f"{site.hub.url}/api/models/org/toy/tree/x")]
    with pytest.raises(SourceError, match="more than 5 redirects"):
        HttpTransport().get(f"{site.hub.url}/api/models/org/toy/tree/x")


def test_what_is_not_json_is_an_error_of_the_source(site):
    with pytest.raises(SourceError, match="not JSON"):
        get_json(HttpTransport(), f"{site.hub.mirror}/inference/README.md")


def test_a_proxy_is_used_for_everything(site):
    result = site.present(endpoint="http://hub.invalid", proxy=site.hub.url)

    assert site.wrong_files() == []
    assert list(result.bytes_by_source) == ["hub http://hub.invalid"]
    assert all(seen.path.startswith("http://hub.invalid/") for seen in site.hub.log)


def test_files_of_the_same_content_are_fetched_once(site, tmp_path):
    twins = repository.make(tmp_path / "twins")
    shutil.copy(twins.folder / "config.json", twins.folder / "inference/config.json")
    site.toy = site.hub.repositories[twins.commit] = twins

    result = site.present()

    assert site.wrong_files() == []
    assert len([seen for seen in site.hub.log if seen.path.endswith("config.json")]) == 1
    assert {"config.json", "inference/config.json"} <= set(result.fetched)
    assert site.present().verified == []
