"""Is a result worse than a former one? With a noise band that is stated, and comes from repeats where there are any."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import List, Optional, Sequence

from . import stats
from .results import Result
from .stats import Run

BETTER, SAME, WORSE = "better", "within noise", "worse"
SIGMAS = 3.0


@dataclass(frozen=True)
class Change:
    """One figure now and before. ``change`` and ``band`` are shares: 0.05 is 5%."""

    step: str
    metric: str
    before: float
    now: float
    change: float
    band: float
    verdict: str
    repeats: int  # the fewer of both sides


def band(before: Sequence[float], now: Sequence[float], floor: float) -> float:
    """Return the share by which two medians may differ by chance.

    Three standard errors of the difference, from the spread of the repeats on both sides, and never below ``floor``,
    which stands for what repeats of one hour do not show. With fewer than two repeats on a side the other side's
    spread serves for both; with none, the floor alone.
    """
    spreads = [_deviation(values) for values in (before, now) if len(values) > 1]
    if not spreads:
        return floor
    worst = max(spreads)
    deviations = [(_deviation(values) if len(values) > 1 else worst, len(values)) for values in (before, now)]
    return max(floor, SIGMAS * math.sqrt(sum(spread**2 / count for spread, count in deviations)))


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation over the mean."""
    mean = sum(values) / len(values)
    if not mean:
        return 0.0
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)) / mean


def changes(before: Sequence[Run], now: Sequence[Run], floor: float) -> List[Change]:
    """Return each figure that both have, step by step."""
    found = []
    for name in stats.steps(now):
        old, new = stats.of_step(before, name), stats.of_step(now, name)
        for metric, of in stats.METRICS.items():
            a = [value for value in map(of, old) if value]
            b = [value for value in map(of, new) if value]
            if a and b:
                found.append(_change(name, metric, a, b, floor))
    return found


def _change(step: str, metric: str, before: Sequence[float], now: Sequence[float], floor: float) -> Change:
    old, new = stats.median(before), stats.median(now)
    share, width = new / old - 1, band(before, now, floor)
    good = share if metric in stats.HIGHER_IS_BETTER else -share
    verdict = SAME if abs(share) <= width else BETTER if good > 0 else WORSE
    return Change(step, metric, old, new, share, width, verdict, min(len(before), len(now)))


# What a regression is judged by: percentiles in the tail of some dozen requests are one request's luck.
JUDGED = ("output_tok_s", "ttft_p50_ms", "tpot_p50_ms")


def regressions(found: Sequence[Change]) -> List[Change]:
    """Return the figures that got worse by more than their noise."""
    return [change for change in found if change.verdict == WORSE and change.metric in JUDGED]


def incomparable(before: Result, now: Result) -> Optional[str]:
    """Return why two results must not be compared, None where they may."""
    for what, a, b in (
        ("client", before.client, now.client),
        ("model", before.model, now.model),
        ("endpoint", before.chat, now.chat),
        *((name, getattr(before.workload, name), getattr(now.workload, name)) for name in _SAME),
    ):
        if a != b:
            return f"{what} was {a} and is {b}; needed: the same load on both sides"
    return None


_SAME = ("dataset", "input_len", "output_len", "shared_prefix", "ignore_eos")


def line(change: Change) -> str:
    """Return a change in one line."""
    return (
        f"{change.step} {change.metric}: {change.before:.4g} -> {change.now:.4g} ({change.change:+.1%}, noise band "
        f"+-{change.band:.1%} from {change.repeats} repeat{'s' if change.repeats != 1 else ''}): {change.verdict}"
    )
