"""Small but valid sharded checkpoints, from a seed."""

from __future__ import annotations

import hashlib
import json
import pathlib
import random
import struct
from dataclasses import dataclass, field

LFS_SUFFIXES = (".safetensors",)


@dataclass
class Repository:
    """One repository at one commit, its files on disk below ``folder``."""

    folder: pathlib.Path
    repo: str = "org/toy"
    commit: str = "a" * 40
    _digests: dict[str, dict[str, str]] = field(default_factory=dict)

    def paths(self) -> list[str]:
        found = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        return sorted(path for path in found if path != "pdstack-listing.json")

    def size(self, path: str) -> int:
        return (self.folder / path).stat().st_size

    def digests(self, path: str) -> dict[str, str]:
        if path not in self._digests:
            sha256, size = hashlib.sha256(), self.size(path)
            sha1 = hashlib.sha1(b"blob %d\0" % size)
            with (self.folder / path).open("rb") as stream:
                while chunk := stream.read(1 << 20):
                    sha256.update(chunk)
                    sha1.update(chunk)
            self._digests[path] = {"sha256": sha256.hexdigest(), "git": sha1.hexdigest()}
        return self._digests[path]

    def tree(self) -> list[dict[str, object]]:
        entries: list[dict[str, object]] = []
        for path in self.paths():
            size, digests = self.size(path), self.digests(path)
            entry: dict[str, object] = {"type": "file", "path": path, "size": size, "oid": digests["git"]}
            if path.endswith(LFS_SUFFIXES):
                entry["lfs"] = {"oid": digests["sha256"], "size": size, "pointerSize": 135}
                entry["oid"] = hashlib.sha1(digests["sha256"].encode()).hexdigest()
            entries.append(entry)
        return entries

    def listing(self) -> dict[str, object]:
        files = [{"path": p, "size": self.size(p), "sha256": self.digests(p)["sha256"]} for p in self.paths()]
        return {"repo": self.repo, "commit": self.commit, "files": files}


def shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_shard(path: pathlib.Path, tensors: dict[str, tuple[str, list[int], int]], rng: random.Random | None) -> int:
    """Write tensors (name: dtype, shape, bytes) of random content, a hole without ``rng``; return their bytes."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        if rng is None:
            stream.truncate(stream.tell() + end)
        left = end if rng is not None else 0
        while left and rng is not None:
            count = min(left, 1 << 20)
            stream.write(rng.randbytes(count))
            left -= count
    return end


def make_wide(folder: pathlib.Path) -> None:
    """Write what sanity reads of a checkpoint as large as DeepSeek-V4-Flash: 46 shards, 70,656 tensors, 145 GB of hole.

    The headers are of real size: names, shapes and offsets of 256 experts a layer in fp4, 3.2 GB a shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(1, 47):
        name = shard_name(number, 46)
        tensors: dict[str, tuple[str, list[int], int]] = {}
        for expert in range(256):
            for part in ("gate_proj", "up_proj", "down_proj"):
                stem = f"model.layers.{number - 1}.mlp.experts.{expert}.{part}"
                tensors[f"{stem}.weight"] = ("I8", [2048, 2048], 2048 * 2048)
                tensors[f"{stem}.weight_scale_inv"] = ("F8_E8M0", [2048, 64], 2048 * 64)
        total += write_shard(folder / name, tensors, None)
        weight_map.update(dict.fromkeys(tensors, name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", "expert_dtype": "fp4"}))
    (folder / "tokenizer.json").write_text("{}")


def make(
    folder: pathlib.Path, shards: int = 4, shard_bytes: int = 1 << 16, seed: int = 0, **config: object
) -> Repository:
    """Write a checkpoint of ``shards`` files with fp4 experts, index, config, tokenizer and a nested file."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(1, shards + 1):
        name = shard_name(number, shards)
        tensors = {
            f"layers.{number}.experts.0.w1.weight": ("I8", [shard_bytes // 2], shard_bytes // 2),
            f"layers.{number}.experts.0.w1.scale": ("F8_E8M0", [shard_bytes // 4], shard_bytes // 4),
            f"layers.{number}.attention.weight": ("BF16", [shard_bytes // 8], shard_bytes // 4),
        }
        total += write_shard(folder / name, tensors, rng)
        weight_map.update(dict.fromkeys(tensors, name))
    write = lambda name, data: (folder / name).write_text(json.dumps(data))  # noqa: E731
    write("model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write("config.json", {"model_type": "deepseek_v4", "expert_dtype": "fp4", **config})
    write("tokenizer.json", {"version": "1.0", "seed": seed})
    (folder / "inference").mkdir(exist_ok=True)
    (folder / "inference" / "README.md").write_text("toy\n")
    return Repository(folder)
