"""One invocation: find the model, calibrate, warm up, then measure each step, repeats in turn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Callable, List, Optional, Sequence, Tuple

from . import load, stats, workload
from .results import OURS, Result
from .stats import Run
from .stream import Server
from .workload import FIXED, SHAREGPT_LIKE, Calibration, Prompt, Workload


@dataclass(frozen=True)
class Request:
    """What to measure."""

    url: str
    concurrencies: Sequence[int] = (1, 8, 16, 64)
    rates: Sequence[float] = ()  # open loop, requests a second; instead of concurrencies
    model: str = ""  # "" takes the first that the server lists
    chat: bool = True
    workload: Workload = Workload()
    repeats: int = 1
    warmup: Optional[int] = None  # requests before each step; None takes as many as run at once, 4 to 32
    max_s: float = 600.0  # of one measurement: no request leaves later
    timeout_s: float = 600.0  # of one request
    label: str = ""
    first_repeat: int = 1


def now() -> str:
    """Return the time as UTC, ISO 8601."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def measure(
    request: Request,
    server: Server,
    dataset: Optional[Sequence[str]] = None,
    say: Callable[[str], None] = lambda words: None,
) -> Result:
    """Run the whole measurement. ``dataset`` holds the lines of the user's file. Raises WorkloadError."""
    return asyncio.run(_measure(request, server, dataset, say))


def prepare(request: Request, server: Server, dataset: Optional[Sequence[str]] = None) -> Tuple[Result, List[Prompt]]:
    """Return an empty result and the prompts of the first step, for another client to send. Raises WorkloadError."""

    async def both() -> Tuple[Result, List[Prompt]]:
        endpoint, line = await _endpoint(request, server)
        mine = _salted(request, request.first_repeat, _steps(request)[0])
        return _result(request, endpoint.model, line, []), _prompts(mine, line, dataset)

    return asyncio.run(both())


Step = Tuple[Optional[int], Optional[float]]  # concurrency, or rate


def _steps(request: Request) -> List[Step]:
    if request.rates:
        return [(None, rate) for rate in request.rates]
    return [(count, None) for count in request.concurrencies]


def _salted(request: Request, repeat: int, step: Step) -> Workload:
    return replace(request.workload, salt=f"{request.workload.salt} {repeat} {step[0] or step[1]}")


async def _endpoint(request: Request, server: Server) -> Tuple[load.Endpoint, Calibration]:
    model = request.model or await load.first_model(server)
    endpoint = load.Endpoint(server, model, request.chat, request.workload.ignore_eos, request.timeout_s)
    return endpoint, await load.calibrate(endpoint, request.workload.salt)


async def _measure(
    request: Request, server: Server, dataset: Optional[Sequence[str]], say: Callable[[str], None]
) -> Result:
    endpoint, line = await _endpoint(request, server)
    say(f"model {endpoint.model}; a word is {line.per_word:.2f} tokens, a prompt's frame {line.overhead:.0f}")
    runs: List[Run] = []
    for repeat in range(request.first_repeat, request.first_repeat + request.repeats):
        for step in _steps(request):
            runs.append(await _one(request, endpoint, line, step, repeat, dataset, say))
            say(words(runs[-1]))
    return _result(request, endpoint.model, line, runs)


async def _one(
    request: Request,
    endpoint: load.Endpoint,
    line: Calibration,
    step: Step,
    repeat: int,
    dataset: Optional[Sequence[str]],
    say: Callable[[str], None],
) -> Run:
    concurrency, rate = step
    mine = _salted(request, repeat, step)
    prompts = _prompts(mine, line, dataset)
    await _warm(endpoint, request, mine, line, prompts, concurrency or 16)
    progress = _named(f"C={concurrency}" if concurrency else f"{rate:g}/s", say)
    if concurrency is not None:
        found = await load.closed_loop(endpoint, prompts, concurrency, request.max_s, progress)
    else:
        times = workload.arrivals(len(prompts), rate or 0.0, mine.seed)
        found = await load.open_loop(endpoint, prompts, times, request.max_s, progress)
    return stats.run(found, concurrency, rate, repeat)


def _result(request: Request, model: str, line: Calibration, runs: List[Run]) -> Result:
    return Result(
        label=request.label or request.url,
        when=now(),
        client=OURS,
        url=request.url,
        model=model,
        chat=request.chat,
        workload=request.workload,
        tokens_per_word=line.per_word,
        runs=runs,
    )


def _named(name: str, say: Callable[[str], None]) -> Callable[[str], None]:
    return lambda words: say(f"{name}: {words}")


def _prompts(wanted: Workload, line: Calibration, dataset: Optional[Sequence[str]]) -> List[Prompt]:
    if wanted.dataset in (FIXED, SHAREGPT_LIKE):
        return workload.prompts(wanted, line)
    return workload.read_dataset(dataset or (), wanted, wanted.dataset)


async def _warm(
    endpoint: load.Endpoint,
    request: Request,
    mine: Workload,
    line: Calibration,
    prompts: Sequence[Prompt],
    at_once: int,
) -> None:
    """Send the warm-up, whose answers count nowhere: other prompts, or a file's own first ones."""
    count = request.warmup if request.warmup is not None else max(4, min(32, at_once))
    if count == 0:
        return
    synthetic = mine.dataset in (FIXED, SHAREGPT_LIKE)
    sent = workload.warm_up(mine, line, count) if synthetic else list(prompts[:count])
    await load.closed_loop(endpoint, sent, at_once, request.max_s)


def words(run: Run) -> str:
    """Return a run in one line."""
    ttft = f"TTFT {run.ttft_ms.p50:.1f} / {run.ttft_ms.p99:.1f} ms" if run.ttft_ms else "TTFT not known"
    return (
        f"{stats.step(run)}: {run.output_tok_s:.1f} tok/s, {ttft}, "
        f"TPOT {run.tpot_ms.p50:.2f} / {run.tpot_ms.p99:.2f} ms (p50 / p99), "
        f"{run.completed} of {run.requests} answered"
        + (f", {run.unsent} not sent in time" if run.unsent else "")
        + (f"; failed: {next(iter(run.errors))}" if run.errors else "")
    )
