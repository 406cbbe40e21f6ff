"""A wall clock that a test can step, for the processes of one unit: a library that is loaded before all others.

Hosts of the lab share the machine's clock. CLOCK_MONOTONIC is left alone, as by a step of the real one.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

CLOCK = "/run/pdstack-test-clock"  # seconds by which the wall clock is wrong, 8 bytes that processes map
PRELOADED = "/usr/local/lib/pdstack-test-clock.so"
SOURCE = r"""
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long step(void) {
    static volatile long *page;
    if (!page) {
        int file = open(CLOCK, O_RDONLY);
        void *found = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        if (found == MAP_FAILED) return 0;
        page = found;
    }
    return *page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = syscall(SYS_clock_gettime, clock, now);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += step();
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


def compiled(folder: Path) -> Path:
    """Compile the library with this machine's compiler and return its path."""
    library = folder / "clock.so"
    command = ["cc", "-shared", "-fPIC", "-O2", f'-DCLOCK="{CLOCK}"', "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    return library
