"""What the kernel is told about the page cache: hints that it may not know, so that none is an error."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
from typing import Callable, Optional

_SYNC_FILE_RANGE_WRITE = 2


def bypass(fd: int, wanted: bool) -> bool:
    """Have ``fd`` read past the page cache or not; True where that is a change and the filesystem can do it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    changed = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
    if changed == flags:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, changed)
    except OSError:
        return False
    return True


def start_writeback(fd: int, start: int, count: int) -> bool:
    """Have the disk begin with these bytes, and do not wait for it. What is written stays in the cache.

    False where the C library or the kernel did not take it.

    posix_fadvise(DONTNEED) would do so too, and then wait until every core has emptied its list of fresh pages.
    https://man7.org/linux/man-pages/man2/sync_file_range.2.html
    """
    call = _sync_file_range()
    return call is not None and call(fd, start, count, _SYNC_FILE_RANGE_WRITE) == 0


@functools.cache
def _sync_file_range() -> Optional[Callable[[int, int, int, int], int]]:
    """Return the C library's function, which Python does not have; None where the library has none either."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call
