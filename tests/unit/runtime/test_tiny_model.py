"""The lab's model: the same bytes everywhere, sound files, and a commit that inventories may pin."""

import json
import pathlib
import runpy
import struct
import subprocess
import sys

import pytest
import yaml
from pdstack import codec
from pdstack.checkpoint import listing

ROOT = pathlib.Path(__file__).resolve().parents[3]
COMMIT = "eeeac82a68f9a8e4a99ef2622069d83ca62f4ae4"  # of seed 0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    command = [sys.executable, ROOT / "tools/tiny_model", folder]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return folder, json.loads(answer)


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools/tiny_model"))


def tensors(path):
    """Name -> header entry of a safetensors file, and the size of its data."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    return header, len(data) - 8 - size


def test_the_commit_is_the_pinned_one(model):
    assert model[1]["commit"] == COMMIT


def test_the_listing_is_one_that_the_checkpoint_role_takes(model):
    folder, answer = model
    document = json.loads((folder / listing.LISTING_NAME).read_text())
    found = listing.from_document(document, answer["repo"], answer["commit"])
    assert {file.path: file.size for file in found.files} == {
        path.name: path.stat().st_size for path in folder.iterdir() if path.name != listing.LISTING_NAME
    }


def test_shards_and_index_agree(model):
    folder, _ = model
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    seen, total = {}, 0
    for path in sorted(folder.glob("*.safetensors")):
        header, size = tensors(path)
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, stop = entry["data_offsets"]
            elements = 1
            for length in entry["shape"]:
                elements *= length
            assert (begin, stop) == (end, end + 2 * elements)
            end, seen[name] = stop, path.name
        assert end == size
        total += size
    assert seen == index["weight_map"]
    assert total == index["metadata"]["total_size"]
    assert len(seen) == 3 + 9 * config["num_hidden_layers"]


def test_only_printable_tokens_can_be_spoken(model, tool):
    """All other rows of the output matrix are zero; so are none of the printable ones."""
    folder, _ = model
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    spoken = set(tool["speakable"](vocabulary))
    assert len(spoken) > 200
    path = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]["lm_head.weight"]
    header, size = tensors(path)
    begin, _ = header["lm_head.weight"]["data_offsets"]
    rows, columns = header["lm_head.weight"]["shape"]
    data = path.read_bytes()[-size:][begin:]
    for row in range(rows):
        values = data[row * columns * 2 : (row + 1) * columns * 2]
        assert any(values) is (row in spoken)


def test_another_seed_is_another_model(tool):
    assert tool["listing"]("a/b", tool["files"](1))["commit"] != COMMIT


def test_bfloat16_keeps_the_upper_half(tool):
    assert tool["bfloat16"]([1.0, -2.0, 0.0]) == struct.pack("<HHH", 0x3F80, 0xC000, 0)


def test_writing_again_touches_nothing(model, tool):
    folder, _ = model
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    tool["write"](folder, {name: (folder / name).read_bytes() for name in before})
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_inventories_pin_this_commit():
    variables = yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text())
    assert codec.dump(variables["pd_model"])["revision"] == COMMIT
