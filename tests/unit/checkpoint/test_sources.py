"""Directories, mirrors and what hf download left: where listings and bytes come from."""

from __future__ import annotations

import json
import shutil

import pytest
from hub.damage import flip
from pdstack.checkpoint.errors import CheckpointError

NAME = "model-00002-of-00004.safetensors"


def test_a_folder_of_hf_download_is_adopted_without_a_request_for_shards(site):
    shutil.copytree(site.toy.folder, site.folder)
    (site.folder / ".cache/huggingface/download").mkdir(parents=True)
    (site.folder / ".cache/huggingface/download/config.json.metadata").write_text("x")

    result = site.present()

    assert not [seen for seen in site.hub.log if "/resolve/" in seen.path]
    assert result.quarantined == [".cache/huggingface/download/config.json.metadata"]
    assert site.wrong_files() == []


def test_a_directory_with_a_listing(site, tmp_path):
    shutil.copytree(site.toy.folder, tmp_path / "copy")
    (tmp_path / "copy/pdstack-listing.json").write_text(json.dumps(site.toy.listing()))

    result = site.present(sources=[f"dir://{tmp_path}/copy"])

    assert site.wrong_files() == []
    assert list(result.bytes_by_source) == [f"dir://{tmp_path}/copy"]
    assert site.hub.log == []


def test_a_directory_of_hf_download_with_wrong_bytes_of_the_right_length(site, tmp_path):
    """hf download accepts them (huggingface_hub#3643); its own metadata tells us the digest."""
    copy = tmp_path / "copy"
    shutil.copytree(site.toy.folder, copy)
    for path in site.toy.paths():
        digests = site.toy.digests(path)
        etag = digests["sha256" if path.endswith(".safetensors") else "git"]
        metadata = copy / ".cache/huggingface/download" / f"{path}.metadata"
        metadata.parent.mkdir(parents=True, exist_ok=True)
        metadata.write_text(f"{site.toy.commit}\n{etag}\n1700000000.0\n")
    assert site.reconciler(sources=[f"dir://{copy}"]).present(check=True).changed
    flip(copy / NAME)

    with pytest.raises(CheckpointError, match="wrong digest"):
        site.present(sources=[f"dir://{copy}"])

    assert site.present(sources=[f"dir://{copy}", "hub"]).changed
    assert site.wrong_files() == []


def test_a_mirror_with_a_listing(site):
    site.present(sources=[site.hub.mirror])

    assert site.wrong_files() == []


def test_a_source_without_a_listing_says_so(site, tmp_path):
    with pytest.raises(CheckpointError, match="carries none"):
        site.present(sources=[f"dir://{tmp_path}"])
