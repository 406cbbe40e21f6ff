"""Read nested plain values into dataclasses whose fields carry their own rules and documentation.

A field made by ``option()`` says what it means, why its default is what it is, and what is
allowed. The reader collects every error instead of stopping at the first, and ``table()`` gives
the same data for the documentation and for argument specifications.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import sys
import typing
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple, Type, TypeVar

from .refusal import Refusal

T = TypeVar("T")
_MISSING = dataclasses.MISSING
_TYPE_WORDS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
_TYPE_NAMES = {str: "str", bool: "bool", int: "int", float: "float"}


@dataclass(frozen=True)
class Rule:
    """What may stand in a field."""

    doc: str
    why: str = ""  # why the default is what it is
    choices: Tuple[str, ...] = ()
    low: Optional[float] = None
    high: Optional[float] = None
    pattern: str = ""
    pattern_words: str = ""
    auto: bool = False  # the word "auto" is allowed and read as None
    secret: bool = False
    elsewhere: Optional[Mapping[str, str]] = None  # keys that people put below this one by mistake, and the remedy


@dataclass(frozen=True)
class Row:
    """One line of the table of variables."""

    name: str
    type: str
    default: Any
    required: bool
    doc: str
    why: str
    choices: Tuple[str, ...] = ()
    secret: bool = False


def option(default: Any, doc: str, why: str = "", **rule: Any) -> Any:
    """Declare an optional field; a callable default is called for each instance."""
    metadata = {"rule": Rule(doc=doc, why=why, **rule)}
    show = not rule.get("secret", False)
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata, repr=show)
    return dataclasses.field(default=default, metadata=metadata, repr=show)


def required(doc: str, **rule: Any) -> Any:
    """Declare a field that the operator must give."""
    return dataclasses.field(metadata={"rule": Rule(doc=doc, **rule)})


@functools.cache
def _hints(cls: Any) -> Dict[str, Any]:
    """Return the types of a dataclass's fields; evaluating them is most of the time of a large inventory."""
    return typing.get_type_hints(cls)


def rule_of(field: dataclasses.Field[Any]) -> Rule:
    """Return the field's rule; every field read here has one."""
    return typing.cast(Rule, field.metadata["rule"])


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the closest known name, or ``""``."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def read(
    cls: Type[T], data: Any, path: str, errors: List[Refusal], elsewhere: Optional[Mapping[str, str]] = None
) -> Optional[T]:
    """Return ``data`` as ``cls``, after adding to ``errors`` all that is wrong with it.

    Where there are errors the result is good only for finding more of them: a wrong value is
    replaced by its default, and None stands for an object whose required fields are not there.
    ``elsewhere`` maps a key that people put here by mistake to the remedy that helps them.
    """
    if not isinstance(data, dict):
        errors.append(Refusal(path, f"{data!r}", "a mapping", "write the keys of this variable below it"))
        return None
    hints = _hints(typing.cast(Any, cls))
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls))}
    for key in sorted(str(k) for k in data if str(k) not in fields):
        hint = (elsewhere or {}).get(key) or nearest(key, fields) or "remove it"
        errors.append(Refusal(f"{path}.{key}", "an unknown key", f"one of: {', '.join(sorted(fields))}", hint))
    values: Dict[str, Any] = {}
    complete = True
    for name, field in fields.items():
        where = f"{path}.{name}"
        needed = field.default is _MISSING and field.default_factory is _MISSING
        before = len(errors)
        if name in data:
            values[name] = value(hints[name], data[name], where, rule_of(field), errors)
            if len(errors) > before and (not needed or values[name] is None):
                del values[name]
        elif needed:
            errors.append(Refusal(where, "nothing", rule_of(field).doc, f"set {where}"))
        complete = complete and (name in values or not needed)
    return cls(**values) if complete else None


def value(kind: Any, data: Any, where: str, rule: Rule, errors: List[Refusal]) -> Any:
    """Return one field's value, or add to ``errors``. The returned value is then of no use."""
    args = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if rule.auto and data == "auto":
        return None
    if origin is typing.Union:
        if data is None:
            return None
        kind = next(arg for arg in args if arg is not type(None))
        args, origin = typing.get_args(kind), typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return read(typing.cast(Any, kind), data, where, errors, rule.elsewhere)
    shown = "(not shown)" if rule.secret else repr(data)
    if origin is dict:
        if not isinstance(data, dict):
            errors.append(Refusal(where, shown, "a mapping", "write keys and values below it"))
            return {}
        return {str(key): plain(item) for key, item in data.items()}
    if origin is list:
        if not isinstance(data, (list, tuple)) or not all(_is_a(args[0], item) for item in data):
            errors.append(Refusal(where, shown, f"a list, each item {_TYPE_WORDS[args[0]]}", "write a YAML list"))
            return []
        return [plain(item) for item in data]
    wanted = _TYPE_WORDS[kind] + (' or "auto"' if rule.auto else "")
    if not _is_a(kind, data):
        remedy = "remove the quotes" if isinstance(data, str) and kind is not str else f"write {wanted}"
        errors.append(Refusal(where, f"{shown} ({type(plain(data)).__name__})", wanted, remedy))
        return kind()  # of no use, but of the right type: the rules between values go on looking
    found = kind(data)
    if rule.choices and found not in rule.choices:
        hint = nearest(str(found), rule.choices) or "choose one of them"
        errors.append(Refusal(where, shown, f"one of: {', '.join(rule.choices)}", hint))
    if (rule.low is not None and found < rule.low) or (rule.high is not None and found > rule.high):
        errors.append(Refusal(where, shown, _range_words(rule), "choose a value in this range"))
    if rule.pattern and not re.fullmatch(rule.pattern, str(found)):
        errors.append(Refusal(where, shown, rule.pattern_words or f"text matching {rule.pattern}", rule.doc))
    return found


def _is_a(kind: Any, data: Any) -> bool:
    """Whether a value is of a type. YAML's .nan and .inf are numbers that no bound holds; true is no number."""
    if isinstance(data, bool):
        return kind is bool
    if kind is float:
        return isinstance(data, (int, float)) and abs(data) <= sys.float_info.max
    return isinstance(data, kind)


def plain(data: Any) -> Any:
    """Return ``data`` as builtin types only (Ansible hands out tagged subclasses of str, dict, list)."""
    if isinstance(data, dict):
        return {str(key): plain(item) for key, item in data.items()}
    if isinstance(data, (list, tuple)):
        return [plain(item) for item in data]
    for kind in (bool, int, float, str):
        if isinstance(data, kind):
            return kind(data)
    return data


def table(cls: Any, prefix: str = "") -> List[Row]:
    """Return the rows of a dataclass's options, nested keys dotted, in the order of declaration."""
    rows: List[Row] = []
    hints = _hints(typing.cast(Any, cls))
    for field in dataclasses.fields(cls):
        rule = rule_of(field)
        kind = hints[field.name]
        if typing.get_origin(kind) is typing.Union:
            kind = next(arg for arg in typing.get_args(kind) if arg is not type(None))
        name = prefix + field.name
        nested = dataclasses.is_dataclass(kind)
        needed = field.default is _MISSING and field.default_factory is _MISSING
        default: Any = None
        if not needed and not nested:
            factory: Any = field.default_factory
            default = field.default if field.default is not _MISSING else factory()
        if rule.auto and default is None and not needed:
            default = "auto"
        words = (
            "dict" if nested or typing.get_origin(kind) is dict else "list" if typing.get_origin(kind) is list else ""
        )
        rows.append(
            Row(name, words or _TYPE_NAMES[kind], default, needed, rule.doc, rule.why, rule.choices, rule.secret)
        )
        if nested:
            rows += table(kind, name + ".")
    return rows


def _range_words(rule: Rule) -> str:
    if rule.low is not None and rule.high is not None:
        return f"{rule.low:g} to {rule.high:g}"
    return f"at least {rule.low:g}" if rule.low is not None else f"at most {rule.high:g}"
