"""The part of SGLang's hook registry that the plugin leans on, for machines without the wheel.

As the original it fails open: a target that cannot be patched is skipped in silence. `test_plugin` also runs on the
original where PDSTACK_SGLANG names unpacked wheels.
"""

from __future__ import annotations

import enum
import functools
import pkgutil
from typing import Any


class HookType(enum.Enum):
    """The kind that the plugin uses."""

    AROUND = "around"


class HookRegistry:
    """Registered and applied hooks."""

    _hooks: dict[str, list[tuple[HookType, Any]]] = {}  # noqa: RUF012
    _patched: set[str] = set()  # noqa: RUF012

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
        cls._hooks.setdefault(target, []).append((hook_type, hook))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hooks in cls._hooks.items():
            if target in cls._patched:
                continue
            path, name = target.rsplit(".", 1)
            try:
                owner = pkgutil.resolve_name(path)
                for kind, hook in hooks:
                    setattr(owner, name, _wrap(getattr(owner, name), kind, hook))
                cls._patched.add(target)
            except Exception:
                continue

    @classmethod
    def reset(cls) -> None:
        cls._hooks.clear()
        cls._patched.clear()


def _wrap(original: Any, kind: HookType, hook: Any) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        assert kind is HookType.AROUND
        return hook(original, *args, **kwargs)

    return wrapper
