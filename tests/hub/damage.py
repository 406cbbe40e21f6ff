"""What disks, people and other programs do to files."""

from __future__ import annotations

import os
import pathlib


def flip(path: pathlib.Path, offset: int = 30_000) -> None:
    """Change one bit and set the mtime back."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncate(path: pathlib.Path) -> None:
    before = path.stat()
    os.truncate(path, before.st_size - 1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_link(path: pathlib.Path) -> None:
    path.rename(path.with_suffix(".old"))
    path.symlink_to(path.with_suffix(".old"))


def replace_by_folder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")


def grow(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")
