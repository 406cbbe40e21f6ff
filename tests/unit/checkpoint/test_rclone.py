"""The real rclone as a source: a folder, a web server, S3's protocol, and what its errors become."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
from hub.damage import flip
from hub.server import Fault
from pdstack.checkpoint.errors import CheckpointError

NAME = "model-00002-of-00004.safetensors"
KEY = "rclone_secret"


@pytest.fixture
def remotes(site, tmp_path):
    """The site, and rclone's configuration with a remote of each kind."""
    copy = tmp_path / "copy"
    shutil.copytree(site.toy.folder, copy)
    (copy / "pdstack-listing.json").write_text(json.dumps(site.toy.listing()))
    config = tmp_path / "rclone.conf"
    config.write_text(
        f"[folder]\ntype = alias\nremote = {copy}\n\n"
        f"[web]\ntype = http\nurl = {site.hub.url}/plain/\n\n"
        "[store]\ntype = s3\nprovider = Other\naccess_key_id = AKID\n"
        f"secret_access_key = {KEY}\nendpoint = {site.hub.url}\nforce_path_style = true\nregion = x\n\n"
        "[dead]\ntype = http\nurl = http://127.0.0.1:9/\n"
    )
    site.rclone = {"rclone_config": str(config), "stall": 10.0}  # a busy machine takes its time to start rclone
    site.copy = copy
    return site


@pytest.mark.parametrize("remote", ["folder:", "web:", "store:plain"])
def test_everything_from_a_remote(remotes, remote):
    result = remotes.present(sources=[f"rclone:{remote}"], **remotes.rclone)

    assert remotes.wrong_files() == []
    assert list(result.bytes_by_source) == [f"rclone:{remote}"]
    if remote == "store:plain":
        signed = [seen for seen in remotes.hub.log if seen.authorized]
        assert signed, "S3 requests are signed with the configuration's keys"


def test_a_partial_is_resumed(remotes):
    partial = remotes.root / ".pdstack/partial" / f"sha256-{remotes.toy.digests(NAME)['sha256']}"
    partial.parent.mkdir(parents=True)
    partial.write_bytes((remotes.toy.folder / NAME).read_bytes()[:50_000])

    result = remotes.present(sources=["rclone:store:plain"], **remotes.rclone)

    assert remotes.wrong_files() == []
    assert result.resumed_bytes == 50_000
    ranges = [s.range for s in remotes.hub.requests(NAME) if s.method == "GET" and s.range]
    assert any(text.startswith("bytes=50000-") for text in ranges)


@pytest.mark.parametrize(
    "damage",
    [pathlib.Path.unlink, flip, lambda path: path.write_bytes(path.read_bytes()[:1000])],
    ids=["missing", "wrong bytes", "short"],
)
def test_the_hub_stands_behind_it(remotes, damage):
    damage(remotes.copy / NAME)

    result = remotes.present(sources=["rclone:folder:", "hub"], **remotes.rclone)

    assert remotes.wrong_files() == []
    assert result.bytes_by_source[f"hub {remotes.hub.url}"] <= remotes.toy.size(NAME)


FAULTS = {
    "500": Fault(NAME, "status", times=2, status=500),
    "dropped": Fault(NAME, "drop", times=2),
    "dropped at once": Fault(NAME, "drop", times=2, at=0.0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_heals_by_itself(remotes, name):
    remotes.hub.faults = [FAULTS[name]]

    remotes.present(sources=["rclone:web:"], listing=remotes.toy.listing(), **remotes.rclone)

    assert FAULTS[name].times == 0, "the fault never struck"
    assert remotes.wrong_files() == []


def test_what_rclone_says_reaches_the_operator(remotes):
    with pytest.raises(CheckpointError, match="connection refused"):
        remotes.present(sources=["rclone:dead:"], attempts=1, **remotes.rclone)
    with pytest.raises(CheckpointError, match="didn't find section"):
        remotes.present(sources=["rclone:unknown:"], attempts=1, **remotes.rclone)
    remotes.hub.token = "another"
    with pytest.raises(CheckpointError) as caught:
        remotes.present(sources=["rclone:store:plain"], listing=remotes.toy.listing(), **remotes.rclone)
    assert "403" in str(caught.value)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "source", ["rclone:", "rclone:models", "rclone:--config=/x:y", "rclone::s3,secret_access_key=x:bucket"]
)
def test_an_address_that_is_no_remote_is_refused(remotes, source):
    with pytest.raises(CheckpointError, match="rclone:REMOTE:PATH"):
        remotes.present(sources=[source], **remotes.rclone)


def test_without_rclone_or_its_configuration_it_says_what_to_do(remotes, monkeypatch, tmp_path):
    with pytest.raises(CheckpointError, match="no rclone_config"):
        remotes.present(sources=["rclone:folder:"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CheckpointError, match="apt-get install rclone"):
        remotes.present(sources=["rclone:folder:"], **remotes.rclone)


def test_a_hanging_rclone_is_left_after_the_stall(remotes, monkeypatch, tmp_path):
    program = tmp_path / "bin/rclone"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")

    result = remotes.present(
        sources=["rclone:folder:", "hub"], listing=remotes.toy.listing(), **{**remotes.rclone, "stall": 0.1}
    )

    assert list(result.bytes_by_source) == [f"hub {remotes.hub.url}"]
    assert remotes.wrong_files() == []
