"""Right bytes may still be a wrong checkpoint."""

from __future__ import annotations

import json
import pathlib
import random
import time

import pytest
from hub import repository
from pdstack.checkpoint import sanity
from pdstack.checkpoint.errors import CheckpointError
from pdstack.checkpoint.sanity import Expectations

SHARD = "model-00002-of-00004.safetensors"


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    return repository.make(tmp_path / "toy").folder


def problems(folder: pathlib.Path, **expect: object) -> str:
    return "; ".join(sanity.check(str(folder), Expectations(**expect)))  # type: ignore[arg-type]


def edit(path: pathlib.Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_good_one_passes(folder):
    assert problems(folder, shards=4, expert_dtype="fp4") == ""


def swap(folder: pathlib.Path) -> None:
    first, second = folder / SHARD, folder / "model-00003-of-00004.safetensors"
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def as_fp8(folder: pathlib.Path) -> None:
    tensors = {"layers.2.experts.0.w1.weight": ("F8_E4M3", [8], 8)}
    repository.write_shard(folder / SHARD, tensors, random.Random(0))
    (folder / sanity.INDEX).unlink()


DEFECTS = {
    "short shard": (lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-100]), "the header says"),
    "trailing bytes": (lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes() + b"x"), "the header says"),
    "empty shard": (lambda f: (f / SHARD).write_bytes(b""), "no safetensors file"),
    "pointer shard": (
        lambda f: (f / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "git-lfs pointer",
    ),
    "pointer tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "tokenizer.json: a git-lfs pointer",
    ),
    "header too long": (lambda f: (f / SHARD).write_bytes(b"\xff" * 100), "header of"),
    "header not JSON": (lambda f: (f / SHARD).write_bytes(b"\x02" + bytes(7) + b"xx"), "not JSON"),
    "header not a table": (lambda f: (f / SHARD).write_bytes(b"\x02" + bytes(7) + b"[]"), "malformed"),
    "missing shard": (lambda f: (f / SHARD).unlink(), "missing"),
    "stale shard": (
        lambda f: (f / "old.safetensors").write_bytes((f / SHARD).read_bytes()),
        "not in the index",
    ),
    "swapped shards": (swap, "the index says"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "broken index": (lambda f: (f / sanity.INDEX).write_text("{"), "not JSON"),
    "wrong total": (lambda f: edit(f / sanity.INDEX, metadata={"total_size": 1}), "the index says 1"),
    "experts are fp4, config says fp8": (lambda f: edit(f / "config.json", expert_dtype="fp8"), "stored as I8"),
    "F8 experts and no expert_dtype": (
        lambda f: (as_fp8(f), edit(f / "config.json", expert_dtype=None)),
        "lacks expert_dtype",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_named(folder, name):
    damage, words = DEFECTS[name]
    damage(folder)

    assert words in problems(folder)


def test_expectations(folder):
    assert "4 shards, expected 46" in problems(folder, shards=46)
    assert "expected 'fp8'" in problems(folder, expert_dtype="fp8")


def test_not_published_where_upstream_is_broken(site, tmp_path):
    """The hub's bytes arrive unharmed, and are still no checkpoint (vmlx-swift#217)."""
    broken = repository.make(tmp_path / "broken")
    (broken.folder / SHARD).write_bytes((broken.folder / SHARD).read_bytes()[:-100])
    site.hub.repositories[broken.commit] = broken

    with pytest.raises(CheckpointError) as caught:
        site.present()

    assert caught.value.code == "not-sane"
    assert not site.folder.exists()


@pytest.mark.parametrize("wrong", [{"shards": 46}, {"expert_dtype": "fp8"}])
def test_an_intact_one_that_is_not_as_expected_is_refused_too(site, wrong):
    """The operator may expect something else than when it was placed."""
    site.present(shards=4, expert_dtype="fp4")
    assert not site.present(shards=4, expert_dtype="fp4").changed
    for check in (False, True):
        with pytest.raises(CheckpointError, match="expected") as caught:
            site.reconciler(**wrong).present(check)
        assert caught.value.code == "not-sane"


def test_46_shards_with_real_headers_take_less_than_a_second(tmp_path):
    """70,656 tensors in 145 GB of holes, as many as DeepSeek-V4-Flash has; the bound is the issue's."""
    folder = tmp_path / "wide"
    repository.make_wide(folder)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 140e9
    started = time.process_time()

    assert problems(folder, shards=46) == ""

    assert time.process_time() - started < 1.0
