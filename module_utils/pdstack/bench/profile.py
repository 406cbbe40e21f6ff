"""Asking an engine for a trace by its own API, and waiting until all ranks have written theirs."""

from __future__ import annotations

import glob
import os
import zlib
from dataclasses import dataclass
from typing import Callable, List

from ..verify import Http

POLL_S = 0.5


class ProfileError(RuntimeError):
    """No trace; the message says what was found, what is needed and what to do."""


@dataclass(frozen=True)
class Job:
    """Which engine writes how many steps where. ``timeout_s`` bounds the wait for load, and that for the traces."""

    base: str
    folder: str
    steps: int = 5
    ranks: int = 1
    shapes: bool = True
    timeout_s: float = 180.0


def running_requests(metrics: str) -> float:
    """Return the requests under way by an engine's /metrics."""
    names = ("sglang:num_running_reqs{", "sglang:num_running_reqs ")
    lines = [line for line in metrics.splitlines() if line.startswith(names)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def record(job: Job, http: Http, clock: Callable[[], float], sleep: Callable[[float], None]) -> List[str]:
    """Return the traces, one of each rank. Raises ProfileError."""
    _wait_for_load(job, http, clock, sleep)
    body = {
        "output_dir": job.folder,
        "num_steps": job.steps,
        "activities": ["CPU", "GPU"],
        "with_stack": False,
        "record_shapes": job.shapes,
    }
    reply = http("POST", f"{job.base}/start_profile", body)
    if reply.status != 200:
        raise ProfileError(
            f"/start_profile answered {reply.status}: {reply.body[:300]}; needed: 200; do: look at the engine's "
            "journal, and at the admin key if one is set"
        )
    until = clock() + job.timeout_s
    while clock() < until:
        files = whole(job.folder)
        if len(files) >= job.ranks:
            return files
        sleep(POLL_S)
    http("POST", f"{job.base}/stop_profile", None)  # it would go on recording into memory
    sleep(POLL_S)
    files = whole(job.folder)
    if len(files) >= job.ranks:
        return files
    raise ProfileError(
        f"{len(files)} of {job.ranks} traces after {job.timeout_s:.0f} s in {job.folder}; needed: one of each rank; "
        "do: send load while it records, or record fewer steps"
    )


def _wait_for_load(job: Job, http: Http, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    until = clock() + job.timeout_s
    while True:
        reply = http("GET", f"{job.base}/metrics", None)
        if reply.status == 200 and running_requests(reply.body) > 0:
            return
        if clock() > until:
            raise ProfileError(
                f"no request under way within {job.timeout_s:.0f} s (/metrics: {reply.status}); needed: load while it "
                "records; do: run playbooks/profile.yml, which sends it"
            )
        sleep(POLL_S)


def whole(folder: str) -> List[str]:
    """Return the traces that are written to their end: a packed one is checked to its last byte."""
    return [path for path in sorted(glob.glob(os.path.join(folder, "*.trace.json.gz"))) if _is_whole(path)]


def _is_whole(path: str) -> bool:
    unpack = zlib.decompressobj(wbits=31)
    try:
        with open(path, "rb") as stream:
            while True:
                part = stream.read(1 << 20)
                if not part:
                    return unpack.eof
                unpack.decompress(part)
    except (OSError, zlib.error):
        return False
