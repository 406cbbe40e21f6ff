"""From samples to figures. All times in milliseconds, percentiles by linear interpolation (as numpy's default)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Mapping, Optional, Sequence

from .load import Measured
from .stream import Sample


@dataclass(frozen=True)
class Spread:
    """A distribution's figures."""

    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True)
class Client:
    """What the client itself spent: whether it could have been the limit."""

    cpu_share: float = 0.0  # of one CPU
    lag_p99_ms: float = 0.0  # its event loop was this late
    late_ms: float = 0.0  # open loop: the latest departure


@dataclass(frozen=True)
class Run:
    """One measurement: so many requests at one concurrency or rate."""

    concurrency: Optional[int]  # None in an open loop
    rate: Optional[float]  # requests a second of an open loop
    repeat: int  # 1, 2, ... of the same measurement
    requests: int
    completed: int
    failed: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    output_tok_s: float
    total_tok_s: float
    requests_s: float
    ttft_ms: Optional[Spread]  # from the request to the first token; None where the client cannot tell
    tpot_ms: Spread  # per request: (last - first token) / (tokens - 1)
    itl_ms: Spread  # between token events of a stream
    e2e_ms: Spread
    cached_tokens: Optional[int] = None  # of the prompts, by the engine's account
    unsent: int = 0
    errors: Dict[str, int] = field(default_factory=dict)  # what went wrong, how often
    client: Client = field(default_factory=Client)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share (0 to 1) of the sorted values lies."""
    place = (len(values) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def spread(values: Sequence[float]) -> Spread:
    """Return mean and percentiles; zeros without values."""
    if not values:
        return Spread()
    ordered = sorted(values)
    p50, p95, p99 = (percentile(ordered, share) for share in (0.5, 0.95, 0.99))
    return Spread(sum(ordered) / len(ordered), p50, p95, p99)


def tpot_ms(sample: Sample) -> Optional[float]:
    """Return the time per output token after the first, None for an answer of one token."""
    if sample.output_tokens < 2:
        return None
    return (sample.last - sample.first) / (sample.output_tokens - 1) * 1000


def run(measured: Measured, concurrency: Optional[int], rate: Optional[float], repeat: int = 1) -> Run:
    """Return the figures of one measurement. Failed requests count in ``failed`` and in nothing else."""
    good = [sample for sample in measured.samples if not sample.error]
    errors: Dict[str, int] = {}
    for sample in measured.samples:
        if sample.error:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    seconds = measured.duration_s or 1e-9
    tokens_in, tokens_out = sum(s.input_tokens for s in good), sum(s.output_tokens for s in good)
    cached = [sample.cached_tokens for sample in good if sample.cached_tokens is not None]
    lag = sorted(measured.lag_s)
    return Run(
        concurrency=concurrency,
        rate=rate,
        repeat=repeat,
        requests=len(measured.samples),
        completed=len(good),
        failed=len(measured.samples) - len(good),
        duration_s=measured.duration_s,
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        output_tok_s=tokens_out / seconds,
        total_tok_s=(tokens_in + tokens_out) / seconds,
        requests_s=len(good) / seconds,
        ttft_ms=spread([(sample.first - sample.sent) * 1000 for sample in good]),
        tpot_ms=spread([value for value in map(tpot_ms, good) if value is not None]),
        itl_ms=spread([gap * 1000 for sample in good for gap in sample.gaps]),
        e2e_ms=spread([(sample.end - sample.sent) * 1000 for sample in good]),
        cached_tokens=sum(cached) if cached else None,
        unsent=measured.unsent,
        errors=dict(sorted(errors.items(), key=lambda item: -item[1])[:10]),
        client=Client(measured.cpu_s / seconds, percentile(lag, 0.99) * 1000 if lag else 0.0, measured.late_s * 1000),
    )


METRICS: Mapping[str, Callable[[Run], Optional[float]]] = {
    "output_tok_s": lambda item: item.output_tok_s,
    "ttft_p50_ms": lambda item: item.ttft_ms.p50 if item.ttft_ms else None,
    "ttft_p99_ms": lambda item: item.ttft_ms.p99 if item.ttft_ms else None,
    "tpot_p50_ms": lambda item: item.tpot_ms.p50,
    "tpot_p99_ms": lambda item: item.tpot_ms.p99,
    "itl_p99_ms": lambda item: item.itl_ms.p99,
}
HIGHER_IS_BETTER = frozenset({"output_tok_s"})


def step(item: Run) -> str:
    """Return a measurement's name: C=16, or 4/s for an open loop."""
    return f"C={item.concurrency}" if item.concurrency is not None else f"{item.rate:g}/s"


def steps(runs: Sequence[Run]) -> List[str]:
    """Return the names of the measurements in their order, each once."""
    return list(dict.fromkeys(step(item) for item in runs))


def of_step(runs: Sequence[Run], name: str) -> List[Run]:
    return [item for item in runs if step(item) == name]


def median(values: Sequence[float]) -> float:
    return percentile(sorted(values), 0.5)
