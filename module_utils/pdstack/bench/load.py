"""Driving the load: so many requests at a time (closed loop), or each at its own time (open loop)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable, Dict, List, Optional, Sequence

from . import workload
from .stream import Pool, Sample, Server
from .workload import Calibration, Prompt, WorkloadError

Progress = Callable[[str], None]
LAG_INTERVAL_S = 0.01  # between looks at how late the client's own event loop is
PROGRESS_INTERVAL_S = 5.0
CALIBRATION_WORDS = (64, 192)


@dataclass(frozen=True)
class Endpoint:
    """Which server, which model, which of the two kinds of completion."""

    server: Server
    model: str
    chat: bool = True
    ignore_eos: bool = True
    timeout_s: float = 600.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


@dataclass
class Measured:
    """All samples of one measurement, and what the client itself spent."""

    samples: List[Sample] = field(default_factory=list)
    duration_s: float = 0.0  # from the first request until the last answer's end
    cpu_s: float = 0.0  # of this process
    lag_s: List[float] = field(default_factory=list)  # how late the client's event loop was, a sample every 10 ms
    late_s: float = 0.0  # open loop: the longest delay of a departure
    unsent: int = 0  # the time was over before these were sent


async def closed_loop(
    endpoint: Endpoint, prompts: Sequence[Prompt], concurrency: int, max_s: float, progress: Optional[Progress] = None
) -> Measured:
    """Keep ``concurrency`` requests under way until all are answered; after ``max_s`` no new one leaves."""
    found, queue, began = Measured(), iter(prompts), time.perf_counter()
    pool = Pool(endpoint.server, endpoint.timeout_s)

    async def client() -> None:
        while time.perf_counter() - began <= max_s:
            prompt = next(queue, None)
            if prompt is None:
                return
            found.samples.append(await _ask(pool, endpoint, prompt))

    await _measure(found, pool, [client() for _ in range(min(concurrency, len(prompts)))], len(prompts), progress)
    return found


async def open_loop(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    times: Sequence[float],
    max_s: float,
    progress: Optional[Progress] = None,
) -> Measured:
    """Send each prompt at its time in seconds, however many are under way; after ``max_s`` no new one leaves."""
    found, began = Measured(), time.perf_counter()
    pool = Pool(endpoint.server, endpoint.timeout_s)

    async def client(prompt: Prompt, at: float) -> None:
        if at > max_s:
            return
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        found.late_s = max(found.late_s, time.perf_counter() - began - at)
        found.samples.append(await _ask(pool, endpoint, prompt))

    clients = [client(prompt, at) for prompt, at in zip(prompts, times)]
    await _measure(found, pool, clients, len(prompts), progress)
    return found


async def _ask(pool: Pool, endpoint: Endpoint, prompt: Prompt) -> Sample:
    return await pool.ask(endpoint.path, workload.body(prompt, endpoint.model, endpoint.chat, endpoint.ignore_eos))


async def _measure(
    found: Measured, pool: Pool, clients: Sequence[Awaitable[None]], wanted: int, progress: Optional[Progress]
) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    async with _watched(found, wanted, progress):
        await asyncio.gather(*clients)
    found.duration_s, found.cpu_s = time.perf_counter() - began, time.process_time() - cpu
    found.unsent = wanted - len(found.samples)
    pool.close()


@contextlib.asynccontextmanager
async def _watched(found: Measured, wanted: int, progress: Optional[Progress]) -> AsyncIterator[None]:
    """Look at the event loop's lateness, and say how far it is."""

    async def lag() -> None:
        while True:
            wake = time.perf_counter() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            found.lag_s.append(max(0.0, time.perf_counter() - wake))

    async def say() -> None:
        while progress is not None:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            failed = sum(1 for sample in found.samples if sample.error)
            progress(f"{len(found.samples)} of {wanted} answered" + (f", {failed} failed" if failed else ""))

    watchers = [asyncio.ensure_future(lag()), asyncio.ensure_future(say())]
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


async def ask_json(
    server: Server, path: str, document: Optional[Dict[str, Any]] = None, timeout_s: float = 60.0
) -> Any:
    """Return a plain answer's JSON. Raises WorkloadError with the server's words."""
    pool = Pool(server, timeout_s)
    sample = await pool.ask(path, document)
    pool.close()
    if sample.error:
        raise WorkloadError(f"{server.host}:{server.port}{server.path}{path}: {sample.error}")
    try:
        return json.loads(sample.text)
    except ValueError:
        raise WorkloadError(
            f"{server.host}:{server.port}{server.path}{path}: not JSON: {sample.text[:200]!r}"
        ) from None


async def first_model(server: Server) -> str:
    """Return the name of the model that a server lists first."""
    answer = await ask_json(server, "/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise WorkloadError(f"{server.host}:{server.port}/v1/models lists no model; name one") from None


async def calibrate(endpoint: Endpoint, salt: str) -> Calibration:
    """Return how many tokens a word costs, from two short requests and their ``usage``."""
    counted = []
    for count in CALIBRATION_WORDS:
        text = workload.words(count, random.Random(f"calibration {salt} {count}"))
        document = workload.body(Prompt(text, 1), endpoint.model, endpoint.chat, endpoint.ignore_eos, stream=False)
        answer = await ask_json(endpoint.server, endpoint.path, document, endpoint.timeout_s)
        try:
            counted.append((count, int(answer["usage"]["prompt_tokens"])))
        except (KeyError, TypeError, ValueError):
            raise WorkloadError(f"an answer without usage: {str(answer)[:200]}; needed: prompt_tokens") from None
    return workload.calibration(counted[0], counted[1])
