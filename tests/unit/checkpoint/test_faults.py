"""Faults of the network and of servers: never success with a wrong byte, never a whole refetch for one bad shard."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from hub.server import Fault
from pdstack.checkpoint import transport
from pdstack.checkpoint.errors import CheckpointError

SHARD = "00002-of-00004"

# A fault, and how often the shard may be asked for until it is right.
HEALED = {
    "dropped at once": (Fault(SHARD, "drop", at=0.0), 2),
    "dropped after a byte": (Fault(SHARD, "drop", at=1 / 65536), 2),
    "dropped half-way": (Fault(SHARD, "drop"), 2),
    "dropped three times": (Fault(SHARD, "drop", times=3), 4),
    "ends early": (Fault(SHARD, "short", at=0.9), 2),
    "hangs half-way": (Fault(SHARD, "hang", seconds=3), 2),
    "hangs before a byte": (Fault(SHARD, "hang", at=0.0, seconds=3), 2),
    "trickles": (Fault(SHARD, "trickle", rate=20_000), 2),
    "500": (Fault(SHARD, "status", status=500), 2),
    "502 twice": (Fault(SHARD, "status", status=502, times=2), 3),
    "503": (Fault(SHARD, "status", status=503), 2),
    "429 with Retry-After": (Fault(SHARD, "status", status=429, headers={"Retry-After": "7"}), 2),
    "408": (Fault(SHARD, "status", status=408), 2),
    "one bit wrong, right length": (Fault(SHARD, "flip"), 2),
    "first byte wrong": (Fault(SHARD, "flip", at=0.0), 2),
    "no length announced": (Fault(SHARD, "no_length"), 1),
    "429 on the tree": (Fault("/tree/", "status", status=429, headers={"Retry-After": "3"}), 1),
    "the tree hangs": (Fault("/tree/", "hang", seconds=1.5), 1),
}


@pytest.mark.parametrize("name", HEALED)
def test_heals_by_itself(site, name):
    fault, asked = HEALED[name]
    site.hub.faults = [dataclasses.replace(fault)]

    result = site.present()

    assert site.hub.faults[0].times == 0, "the fault never struck"
    assert site.wrong_files() == []
    assert result.changed
    slow = fault.kind in ("hang", "trickle")  # here a busy machine may look slow too
    assert asked <= len(site.hub.requests(SHARD)) <= asked + 2 * slow
    assert len(site.hub.requests("00001-of-00004")) == 1, "a good shard was fetched twice"


# A fault that does not go away, and words that the error must have.
FATAL = {
    "401": (Fault(SHARD, "status", times=99, status=401), "HTTP 401"),
    "403": (Fault(SHARD, "status", times=99, status=403, headers={"X-Error-Code": "GatedRepo"}), "GatedRepo"),
    "404": (Fault(SHARD, "status", times=99, status=404), "HTTP 404"),
    "500 for ever": (Fault(SHARD, "status", times=99), "HTTP 500"),
    "wrong bytes for ever": (Fault(SHARD, "flip", times=99), "wrong digest"),
    "an HTML page with status 200": (Fault(SHARD, "html", times=99), "HTML page"),
    "another commit": (Fault(SHARD, "moved", times=99), "commit ffffffff"),
    "compressed": (Fault(SHARD, "gzip", times=99), "content-encoding gzip"),
    "announces fewer bytes": (Fault(SHARD, "announced_short", times=99), "bytes, the listing says"),
    "announces more bytes": (Fault(SHARD, "long", times=99), "bytes, the listing says"),
    "hangs for ever": (Fault(SHARD, "hang", times=99, at=0.0, seconds=2), "timed out"),
    "dropped at byte 0 for ever": (Fault(SHARD, "drop", times=99, at=0.0), "Connection"),
    "dropped after a byte for ever": (Fault(SHARD, "drop", times=999, at=1 / 32768), SHARD),
    "tree 401": (Fault("/tree/", "status", times=99, status=401), "HTTP 401"),
    "tree 403": (Fault("/tree/", "status", times=99, status=403, headers={"X-Error-Code": "GatedRepo"}), "GatedRepo"),
    "tree 500 for ever": (Fault("/tree/", "status", times=99), "HTTP 500"),
    "a page in place of the tree": (Fault("/tree/", "status", times=99, status=200), "not JSON"),
    "tree 404": (Fault("/tree/", "status", times=99, status=404, headers={"X-Error-Code": "RevisionNotFound"}), "Rev"),
}


@pytest.mark.parametrize("name", FATAL)
def test_fails_with_the_reason_and_publishes_nothing(site, name):
    fault, words = FATAL[name]
    site.hub.faults = [dataclasses.replace(fault)]

    with pytest.raises(CheckpointError) as caught:
        site.present()

    assert words in str(caught.value)
    assert not site.folder.exists()


def test_what_arrived_before_a_failure_is_not_fetched_again(site):
    site.hub.faults = [Fault(SHARD, "status", times=99, status=404)]
    with pytest.raises(CheckpointError):
        site.present(workers=1)
    site.hub.faults.clear()
    sent = site.hub.sent

    site.present()

    assert site.wrong_files() == []
    again = site.hub.sent - sent
    assert again <= site.toy.size("model-00002-of-00004.safetensors") + 3 * 2**16 + 5000
    assert len(site.hub.requests("00001-of-00004")) == 1


def test_resumes_where_the_connection_dropped(site):
    site.hub.faults = [Fault(SHARD, "drop", at=0.5)]

    site.present()

    first, second = site.hub.requests(SHARD)
    assert first.range is None
    assert second.range is not None
    assert int(second.range.split("=")[1].rstrip("-")) > 1000


def test_keeps_what_it_has_when_range_is_ignored(site):
    site.hub.faults = [Fault(SHARD, "drop", at=0.5), Fault(SHARD, "ignore_range")]

    result = site.present()

    assert site.wrong_files() == []
    assert sum(result.bytes_by_source.values()) == result.bytes, "the prefix was written twice"


def test_waits_as_long_as_the_server_says(site):
    site.hub.faults = [Fault(SHARD, "status", status=429, headers={"Retry-After": "7"})]

    site.present(workers=1)

    assert 7 <= sum(site.clock.slept) < 8


def test_a_mirror_that_lies_is_left_for_the_hub(site, toy):
    site.hub.faults = [Fault(f"/plain/model-{SHARD}", "flip", times=99)]

    result = site.present(sources=[site.hub.mirror, "hub"])

    assert site.wrong_files() == []
    assert result.bytes_by_source["hub " + site.hub.url] == toy.size(f"model-{SHARD}.safetensors")
    assert len(site.hub.requests(f"/resolve/{toy.commit}/model-{SHARD}")) == 1


def test_a_wrong_beginning_from_one_source_does_not_spoil_the_next(site):
    """The mirror sends a wrong byte and breaks off, the hub goes on from there: nobody knows whose fault it is."""
    site.hub.faults = [Fault(f"/plain/model-{SHARD}", "wrong_and_drop", times=99)]

    site.present(sources=[site.hub.mirror, "hub"])

    assert site.wrong_files() == []
    assert len(site.hub.requests(f"/plain/model-{SHARD}")) <= 3


def test_a_dead_mirror_costs_nothing_but_time(site):
    result = site.present(sources=["http://127.0.0.1:9/", "hub"])

    assert site.wrong_files() == []
    assert list(result.bytes_by_source) == ["hub " + site.hub.url]


def test_the_token_reaches_the_hub_and_not_its_storage(site, tmp_path):
    site.hub.token = "hf_secret"
    site.hub.redirect_host = "localhost"  # another host to a client, the same server to us
    token_file = tmp_path / "token"
    token_file.write_text("hf_secret\n")

    site.present(token_file=str(token_file))

    assert site.wrong_files() == []
    assert all(seen.authorized for seen in site.hub.requests("/org/toy/resolve"))
    stored = site.hub.requests("/cdn/")
    assert stored
    assert not any(seen.authorized for seen in stored)


def test_a_gated_repository_says_what_to_do_and_never_the_token(site, tmp_path):
    site.hub.token = "hf_right"
    token_file = tmp_path / "token"
    token_file.write_text("hf_wrong\n")

    with pytest.raises(CheckpointError) as caught:
        site.present(token_file=str(token_file))

    assert "GatedRepo" in str(caught.value)
    assert "token" in str(caught.value)
    assert "hf_wrong" not in str(caught.value)


def test_follows_the_pages_of_a_long_listing(site):
    site.hub.page_size = 3

    site.present()

    assert site.wrong_files() == []
    assert len(site.hub.requests("/tree/")) == 3


# Every address that a fetch asks for, and what leads there.
ROUTES = {
    "/tree/": {},
    f"/resolve/{'a' * 40}/model-{SHARD}": {},
    f"/resolve/{'a' * 40}/config.json": {},
    "/cdn/": {"redirect_host": "localhost"},
    "/plain/pdstack-listing.json": {"sources": "mirror"},
    f"/plain/model-{SHARD}": {"sources": "mirror"},
    "xet-read-token": {"xet": True},
    "/xet/v1/reconstructions/": {"xet": True},
    "/xet/xorb/": {"xet": True},
}


CASES = [(route, status) for route in ROUTES for status in (429, 500, 502, 503, 504)]


@pytest.mark.parametrize(("route", "status"), [case for case in CASES if case[1] == 503 or "xet" not in case[0]])
def test_every_route_may_be_ill_for_a_moment(site, route, status):
    how = ROUTES[route]
    site.hub.xet, site.hub.redirect_host = how.get("xet", False), how.get("redirect_host")
    site.hub.faults = [Fault(route, "status", times=2, status=status)]
    changes = {"sources": [site.hub.mirror]} if "sources" in how else {}
    if site.hub.xet:
        changes = {"xet": True, "xet_python": sys.executable, "stall": 10.0}

    site.present(**changes)

    assert site.hub.faults[0].times == 0, "the fault never struck"
    assert site.wrong_files() == []


def test_a_listing_that_trickles_in_is_given_up(site, monkeypatch):
    monkeypatch.setattr(transport, "JSON_SECONDS", 0.2)
    site.hub.faults = [Fault("pdstack-listing", "trickle", times=99, rate=2000)]

    with pytest.raises(CheckpointError, match=r"only \d+ bytes in 0\.2 s"):
        site.present(sources=[site.hub.mirror], attempts=2)
