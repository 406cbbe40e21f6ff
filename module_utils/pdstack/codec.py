"""Dataclasses to and from plain JSON values, strictly.

``load`` refuses unknown keys, missing keys and wrong types with the path of the culprit, so that
a document of another schema version fails at the door and not deep inside the planner.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any, Dict, Optional, Type, TypeVar

T = TypeVar("T")


class CodecError(ValueError):
    """A document does not have the shape of its type; the message starts with the JSON path."""


def dump(value: Any) -> Any:
    """Return the plain JSON value of a dataclass, list, tuple, dict or scalar."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: dump(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): dump(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [dump(item) for item in value]
    return value


def load(cls: Type[T], data: Any, path: str = "$") -> T:
    """Return ``data`` as an instance of the dataclass ``cls``.

    A key may be missing where its field has a default. Raises CodecError.
    """
    return typing.cast(T, _load(cls, data, path))


def kept(cls: Type[T], path: str) -> Optional[T]:
    """Return what a file keeps; None where there is none, and where it was cut short or is of another schema."""
    try:
        with open(path, encoding="utf-8") as stream:
            return load(cls, json.load(stream))
    except (OSError, ValueError):
        return None


def _load(kind: Any, data: Any, path: str) -> Any:
    if kind is Any:
        return data
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin is typing.Union:
        if data is None and type(None) in args:
            return None
        options = [arg for arg in args if arg is not type(None)]
        if len(options) == 1:
            return _load(options[0], data, path)
        for option in options:
            try:
                return _load(option, data, path)
            except CodecError:
                continue
        raise CodecError(f"{path}: {data!r} fits none of {options}")
    if dataclasses.is_dataclass(kind):
        return _load_dataclass(kind, data, path)
    if origin is list:
        _need(isinstance(data, (list, tuple)), data, "a list", path)
        return [_load(args[0], item, f"{path}[{i}]") for i, item in enumerate(data)]
    if origin is tuple:
        _need(isinstance(data, (list, tuple)), data, "a list", path)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_load(args[0], item, f"{path}[{i}]") for i, item in enumerate(data))
        _need(len(data) == len(args), data, f"{len(args)} items", path)
        return tuple(_load(arg, item, f"{path}[{i}]") for i, (arg, item) in enumerate(zip(args, data)))
    if origin is dict:
        _need(isinstance(data, dict), data, "a mapping", path)
        return {_load(args[0], key, path): _load(args[1], item, f"{path}.{key}") for key, item in data.items()}
    if kind is float:
        _need(isinstance(data, (int, float)) and not isinstance(data, bool), data, "a number", path)
        return float(data)
    if kind is int:
        _need(isinstance(data, int) and not isinstance(data, bool), data, "an integer", path)
        return data
    if kind in (str, bool):
        _need(isinstance(data, kind), data, {"str": "a string", "bool": "true or false"}[kind.__name__], path)
        return kind(data)  # Ansible's tagged strings become plain ones
    raise CodecError(f"{path}: no rule to read {kind!r}")


def _load_dataclass(kind: Any, data: Any, path: str) -> Any:
    _need(isinstance(data, dict), data, "a mapping", path)
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(str(key) for key in data if key not in fields)
    if unknown:
        raise CodecError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(sorted(fields))}")
    values: Dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _load(hints[name], data[name], f"{path}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise CodecError(f"{path}: key {name!r} is missing")
    return kind(**values)


def _need(ok: bool, data: Any, wanted: str, path: str) -> None:
    if not ok:
        raise CodecError(f"{path}: expected {wanted}, found {data!r}")
