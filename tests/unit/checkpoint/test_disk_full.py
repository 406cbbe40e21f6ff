"""A real filesystem has no byte left from any moment of a run on: nothing wrong is published, nothing good goes.

Another process fills the disk just before the run's n-th call that could need space: an open, a write, a sync, a
rename, a link, a folder. The kernel's ENOSPC then strikes whatever comes next, manifests and status files among it.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import pathlib
import random
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest
from hub.damage import flip
from pdstack.checkpoint.errors import CheckpointError
from pdstack.checkpoint.reconcile import Reconciler, World

CALLS = ("open", "mkdir", "makedirs", "rename", "replace", "link", "unlink", "fsync", "fchmod", "ftruncate", "utime")
LONG = bool(os.environ.get("PDSTACK_LONG"))  # every call; else one of seven, from a random one on
NAME = "model-00002-of-00004.safetensors"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small filesystem")


@contextlib.contextmanager
def mounted(root: pathlib.Path) -> Iterator[None]:
    root.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(root)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(root)], check=True)


def fill(path: pathlib.Path) -> None:
    """Write zeros until the filesystem has no byte left."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(fd, bytes(1 << 16))
    with contextlib.suppress(OSError):
        while True:
            os.write(fd, bytes(512))
    os.close(fd)


class Trap:
    """Counts the calls of this process's run and does something before the given one."""

    def __init__(self, at: int, strike: Callable[[], None]) -> None:
        self.seen = 0
        self._at = at
        self._strike = strike
        self._lock = threading.RLock()
        self._inside = False

    def wrap(self, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            with self._lock:
                if not self._inside:
                    self.seen += 1
                    if self.seen == self._at:
                        self._inside = True
                        self._strike()
                        self._inside = False
            return call(*args, **kwargs)

        return wrapped

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self.wrap(getattr(os, name)))
            patch.setattr(builtins, "open", self.wrap(builtins.open))
            yield


def run(site, at: int) -> int:
    """Run with the disk full from the ``at``-th call on; return the calls there were."""
    trap = Trap(at, lambda: fill(site.root / "filler"))
    world = World(clock=site.clock, rng=lambda: 0.5, write=trap.wrap(os.pwrite))  # type: ignore[arg-type]
    with trap.set(), contextlib.suppress(NoSpace):
        present(Reconciler(site.request(workers=1), world))
    return trap.seen


class NoSpace(Exception):
    pass


def present(reconciler: Reconciler) -> None:
    try:
        reconciler.present()
    except CheckpointError as error:
        raise (NoSpace() if error.code == "no-space" else error) from None


def moments(count: int) -> list[int]:
    step = 1 if LONG else 7
    return list(range(random.SystemRandom().randrange(1, step + 1), count + 1, step))


def test_a_disk_that_fills_at_any_call_of_a_first_run(site):
    with mounted(site.root):
        count = run(site, -1)
    assert count > 60
    total = sum(site.toy.size(path) for path in site.toy.paths())
    failed = 0
    for at in moments(count):
        site.hub.sent = 0
        with mounted(site.root):
            run(site, at)
            whole = site.folder.exists()
            assert not whole or site.wrong_files() == [], f"call {at}"
            failed += not whole
            with contextlib.suppress(FileNotFoundError):
                (site.root / "filler").unlink()

            site.present()

            assert site.wrong_files() == [], f"call {at}"
            assert site.hub.sent <= total + 70_000, f"call {at}: more than the file under way came again"
    assert failed > 5, "the disk was full too late"


def test_a_disk_that_fills_at_any_call_of_a_repair(site):
    def damaged() -> None:
        site.present()
        flip(site.folder / NAME)

    with mounted(site.root):
        damaged()
        count = run(site, -1)
    for at in moments(count):
        with mounted(site.root):
            damaged()
            run(site, at)
            assert [path for path in site.wrong_files() if path != NAME] == [], f"call {at}: a good file went"
            with contextlib.suppress(FileNotFoundError):
                (site.root / "filler").unlink()

            site.present()

            assert site.wrong_files() == [], f"call {at}"
