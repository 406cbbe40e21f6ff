"""Is it a checkpoint at all? Headers, index, tokenizer and dtypes, in milliseconds.

Digests prove that the bytes are the hub's. This proves that the hub's bytes make one whole
checkpoint: a derivative with short shards loads without an error and answers nonsense
(vmlx-swift#217). Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import re
import struct
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Set, Tuple

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes, the format's own limit
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
EXPERT = re.compile(r"\bexperts\.\d+\.[^.]+\.weight$")
EXPERT_DTYPES = {"fp4": {"I8", "U8", "F4"}, "fp8": {"F8_E4M3", "F8_E5M2"}, "bf16": {"BF16"}}
LFS_POINTER = b"version https://git-lfs"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
_NUMBERED = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


@dataclass(frozen=True)
class Expectations:
    """What the operator knows of the model; None is not checked."""

    shards: Optional[int] = None
    expert_dtype: Optional[str] = None


class NotSane(ValueError):
    """One file is not what its name says."""


def read_header(path: str) -> Tuple[Dict[str, str], int]:
    """Return dtype by tensor name and the bytes of all tensors. Raises NotSane."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            if start == LFS_POINTER[:8]:
                raise NotSane("a git-lfs pointer, not the file")
            if len(start) < 8:
                raise NotSane(f"{size} bytes are no safetensors file")
            length = struct.unpack("<Q", start)[0]
            if length > MAX_HEADER or length + 8 > size:
                raise NotSane(f"header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise NotSane(error.strerror or str(error)) from None
    except ValueError as error:
        raise error if isinstance(error, NotSane) else NotSane(f"header is not JSON: {error}") from None
    return _tensors(header, size - 8 - length)


def _tensors(header: Any, room: int) -> Tuple[Dict[str, str], int]:
    dtypes: Dict[str, str] = {}
    end = 0
    try:
        header.pop("__metadata__", None)
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            first, last = tensor["data_offsets"]
            bits = BITS[tensor["dtype"]]
            for extent in tensor["shape"]:
                bits *= extent
            if first != end or (last - first) * 8 != bits:
                raise NotSane(f"{name}: offsets {first}-{last} do not fit its shape or its neighbour")
            end = last
            dtypes[name] = tensor["dtype"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise error if isinstance(error, NotSane) else NotSane(f"header is malformed: {error!r}") from None
    if end != room:
        raise NotSane(f"{room} bytes of tensors, the header says {end}")
    return dtypes, end


def check(directory: str, expect: Expectations) -> List[str]:
    """Return what is wrong with the checkpoint in ``directory``, an empty list where nothing is."""
    names = _shard_names(directory)
    config, problems = _json(directory, "config.json")
    problems += _unexpected(names, config, expect)
    index: Any = None
    if os.path.exists(os.path.join(directory, INDEX)):
        index, more = _json(directory, INDEX)
        problems += more
    problems += _shards(directory, names, index, config)
    if not any(os.path.exists(os.path.join(directory, name)) for name in TOKENIZERS):
        problems.append(f"no tokenizer (any of {', '.join(TOKENIZERS)})")
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if not name.endswith(".safetensors") and os.path.isfile(path) and _is_pointer(path):
            problems.append(f"{name}: a git-lfs pointer, not the file")
    return problems


def unexpected(directory: str, expect: Expectations) -> List[str]:
    """Return what is not as expected. It reads no shard: ``check`` has shown that these are as config.json says."""
    if expect == Expectations():
        return []
    config, problems = _json(directory, "config.json")
    return problems + _unexpected(_shard_names(directory), config, expect)


def _unexpected(names: List[str], config: Any, expect: Expectations) -> List[str]:
    problems: List[str] = []
    if expect.shards is not None and len(names) != expect.shards:
        problems.append(f"{len(names)} shards, expected {expect.shards}")
    said = config.get("expert_dtype")
    if expect.expert_dtype is not None and said != expect.expert_dtype:
        problems.append(f"config.json says expert_dtype {said!r}, expected {expect.expert_dtype!r}")
    return problems


def _shard_names(directory: str) -> List[str]:
    return sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))


def _json(directory: str, name: str) -> Tuple[Any, List[str]]:
    try:
        with open(os.path.join(directory, name), encoding="utf-8") as stream:
            data = json.load(stream)
    except OSError as error:
        return {}, [f"{name}: {error.strerror}"]
    except ValueError as error:
        return {}, [f"{name}: not JSON ({error})"]
    return (data, []) if isinstance(data, dict) else ({}, [f"{name}: not a JSON object"])


def _is_pointer(path: str) -> bool:
    with open(path, "rb") as stream:
        return stream.read(len(LFS_POINTER)) == LFS_POINTER


def _shards(directory: str, names: List[str], index: Any, config: Any) -> List[str]:
    problems: List[str] = []
    where: Dict[str, str] = {}
    dtypes: Dict[str, str] = {}
    total = 0
    for name in names:
        try:
            found, size = read_header(os.path.join(directory, name))
        except NotSane as error:
            problems.append(f"{name}: {error}")
            continue
        twice = set(found) & set(where)
        if twice:
            problems.append(f"{name}: {len(twice)} tensors are also in {where[min(twice)]}, such as {min(twice)}")
        where.update(dict.fromkeys(found, name))
        dtypes.update(found)
        total += size
    if not names:
        problems.append("no *.safetensors file")
    if index is not None:
        problems += _index(index, names, where, total, bool(problems))
    numbers = [match for match in map(_NUMBERED.search, names) if match]
    if numbers:
        counts = {int(match.group(2)) for match in numbers}
        if counts != {len(numbers)} or {int(m.group(1)) for m in numbers} != set(range(1, len(numbers) + 1)):
            problems.append(f"shard numbers are incomplete: {len(numbers)} of {max(counts)}")
    return problems + _experts(dtypes, config)


def _index(index: Any, names: List[str], where: Dict[str, str], total: int, broken: bool) -> List[str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        return [f"{INDEX}: no weight_map"]
    problems: List[str] = []
    wanted = {str(name) for name in weight_map.values()}
    missing, stale = sorted(wanted - set(names)), sorted(set(names) - wanted)
    if missing:
        problems.append(f"{len(missing)} shards of the index are missing, such as {missing[0]}")
    if stale:
        problems.append(f"{len(stale)} shards are not in the index, such as {stale[0]}")
    if problems or broken:
        return problems
    for tensor, name in weight_map.items():
        if where.get(tensor) != name:
            problems.append(f"{tensor}: the index says {name}, found in {where.get(tensor, 'no shard')}")
            break
    extra = sorted(set(where) - set(weight_map))
    if extra:
        problems.append(f"{len(extra)} tensors are not in the index, such as {extra[0]}")
    said = (index.get("metadata") or {}).get("total_size")
    if not problems and said is not None and said != total:
        problems.append(f"tensors of {total} bytes, the index says {said}")
    return problems


def _experts(dtypes: Dict[str, str], config: Any) -> List[str]:
    problems: List[str] = []
    said = config.get("expert_dtype")
    found: Set[str] = {dtype for name, dtype in dtypes.items() if EXPERT.search(name)}
    if said in EXPERT_DTYPES and not found <= EXPERT_DTYPES[said]:
        problems.append(f"config.json says expert_dtype {said!r}, the experts are stored as {', '.join(sorted(found))}")
    v4 = "deepseek_v4" in str(config.get("model_type", "")).lower()
    if said is None and v4 and any(dtype.startswith("F8_E4M3") for dtype in found):
        problems.append("experts are F8 and config.json lacks expert_dtype: the engine would take them for fp4")
    return problems
