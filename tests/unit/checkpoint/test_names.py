"""Names come from outside: none may lead out of the folder."""

from __future__ import annotations

import pytest
from pdstack.checkpoint import listing
from pdstack.checkpoint.errors import CheckpointError
from pdstack.checkpoint.listing import RepoFile

HOSTILE = [
    "../escape",
    "a/../../escape",
    "/etc/passwd",
    "a//b",
    "./a",
    "a/.",
    "",
    ".",
    "..",
    "a\0b",
    "a\nb",
    "a\x1b[31mb",
    "a\\..\\b",
    "a/ b",
    "trailing /b",
    ".pdstack-manifest.json",
    "inference/.pdstack",
    "x" * 256,
    "/".join(["d"] * 600),
    "lone\ud800surrogate",
]


@pytest.mark.parametrize("path", HOSTILE)
def test_hostile_names_are_refused(path):
    with pytest.raises(CheckpointError) as caught:
        listing.make("org/toy", "a" * 40, [RepoFile(path, 1, sha256="0" * 64)])
    assert caught.value.code == "bad-input"


@pytest.mark.parametrize("path", ["config.json", ".gitattributes", "a/b/c.bin", "..name", "weight 1.bin", "\u00e9.txt"])
def test_plain_names_pass(path):
    assert listing.make("org/toy", "a" * 40, [RepoFile(path, 1, sha256="0" * 64)]).files[0].path == path


@pytest.mark.parametrize(
    "files",
    [
        [RepoFile("a", 1, sha256="0" * 64), RepoFile("a", 1, sha256="0" * 64)],
        [RepoFile("a", 1, sha256="0" * 64), RepoFile("a/b", 1, sha256="0" * 64)],
        [RepoFile("a", -1, sha256="0" * 64)],
        [RepoFile("a", 1)],
        [RepoFile("a", 1, sha256="../../etc/passwd")],
        [RepoFile("a", 1, git_sha1="G" * 40)],
    ],
)
def test_listings_that_contradict_themselves_are_refused(files):
    with pytest.raises(CheckpointError):
        listing.make("org/toy", "a" * 40, files)


@pytest.mark.parametrize("repo", ["toy", "../x", "a/b/c", "a/..", "-a/b", "a--b/c", "a/b--c", "a /b", ""])
def test_repositories_that_could_collide_or_escape_are_refused(repo):
    with pytest.raises(CheckpointError):
        listing.directory_name(repo, "a" * 40)


@pytest.mark.parametrize("commit", ["main", "A" * 40, "a" * 39, "../" + "a" * 37, ""])
def test_only_a_commit_is_a_revision(commit):
    with pytest.raises(CheckpointError):
        listing.directory_name("org/toy", commit)


@pytest.mark.parametrize("path", ["../../escape", "/tmp/pdstack-escape", "a/../../../escape"])
def test_a_hostile_hub_writes_nothing(site, path):
    site.hub.extra_tree = [{"type": "file", "path": path, "size": 1, "oid": "0" * 40}]

    with pytest.raises(CheckpointError, match="hostile"):
        site.present()

    assert not site.root.exists() or [p for p in site.root.rglob("*") if p.is_file() and p.name != "lock"] == []


def test_a_link_in_the_published_folder_is_not_followed(site, tmp_path):
    site.present()
    outside = tmp_path / "outside"
    outside.mkdir()
    (site.folder / "inference/README.md").unlink()
    (site.folder / "inference").rmdir()
    (site.folder / "inference").symlink_to(outside)

    site.present()

    assert list(outside.iterdir()) == []
    assert site.wrong_files() == []
