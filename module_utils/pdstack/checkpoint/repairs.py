"""Since when an engine may have loaded wrong bytes: what a repair leaves behind for those who restart units.

A repair replaces files by rename. A running engine keeps what it has mapped or loaded, so nothing has to be drained.
Whether that was right depends on when it started: before the file was last proven it loaded good bytes, after the
repair too. In between nobody knows, and such an engine has to load again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import List, Optional

from .. import codec
from .progress import write_json
from .store import Store

LOADING = 1800.0  # seconds after its start in which an engine may still read the checkpoint
KEPT = 20  # windows; older ones count as one with the oldest


@dataclass(frozen=True)
class Window:
    """Seconds since the epoch; ``until`` is None until the repair has ended. ``files``: paths that were replaced."""

    since: float
    until: Optional[float] = None
    files: List[str] = field(default_factory=list)


@dataclass(frozen=True)
class Document:
    windows: List[Window] = field(default_factory=list)


def load(store: Store) -> Document:
    return codec.kept(Document, store.repairs) or Document()


def is_open(store: Store) -> bool:
    """True where a repair began and was not seen to its end."""
    return any(window.until is None for window in load(store).windows)


def begin(store: Store, since: float, files: List[str]) -> None:
    """Note that ``files`` are about to be replaced, which were last proven at ``since`` (0 for never)."""
    windows = load(store).windows
    if len(windows) >= KEPT:
        oldest, second, *rest = windows
        windows = [Window(min(oldest.since, second.since), second.until, sorted({*oldest.files, *second.files})), *rest]
    _save(store, [*windows, Window(since, None, files)])


def end(store: Store, now: float) -> None:
    """Note that every repair has ended."""
    if is_open(store):
        _save(store, [Window(w.since, now if w.until is None else w.until, w.files) for w in load(store).windows])


def _save(store: Store, windows: List[Window]) -> None:
    os.makedirs(os.path.dirname(store.repairs), mode=0o755, exist_ok=True)
    write_json(store.repairs, codec.dump(Document(windows)))


def suspect(directory: str, started: float) -> Optional[str]:
    """Say why a process that ``started`` (seconds since the epoch) may have loaded wrong bytes; None if it has not."""
    store = Store(os.path.dirname(directory), os.path.basename(directory))
    for window in load(store).windows:
        if window.until is not None and window.since - LOADING < started < window.until:
            more = f" and {len(window.files) - 1} more" if len(window.files) > 1 else ""
            return f"{directory}/{window.files[0]}{more} was wrong at an unknown time before its repair"
    return None
