"""Which of several topologies wins, by how much, and whether that is more than noise. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Sequence

from . import compare, stats
from .results import Result

# What is compared, and what a person calls it.
METRICS = {"output_tok_s": "tok/s", "ttft_p50_ms": "TTFT", "tpot_p50_ms": "TPOT", "itl_p99_ms": "ITL p99"}


@dataclass(frozen=True)
class Verdict:
    """The best candidate for one figure of one step. ``lead`` and ``band`` are shares of the runner-up's figure."""

    step: str
    metric: str
    winner: Optional[str]  # None: no difference beyond noise
    value: float
    second: str
    second_value: float
    lead: float
    band: float


def verdicts(found: Sequence[Result], floor: float) -> List[Verdict]:
    """Return the winner of each step and figure among results with labels of their own."""
    result = []
    for step in stats.steps([run for item in found for run in item.runs]):
        for metric in METRICS:
            verdict = _one(found, step, metric, floor)
            if verdict is not None:
                result.append(verdict)
    return result


def _one(found: Sequence[Result], step: str, metric: str, floor: float) -> Optional[Verdict]:
    of = stats.METRICS[metric]
    measured = []
    for item in found:
        values = [value for value in map(of, stats.of_step(item.runs, step)) if value]
        if values:
            measured.append((stats.median(values), item.label, values))
    if len(measured) < 2:
        return None
    measured.sort(key=lambda entry: -entry[0] if metric in stats.HIGHER_IS_BETTER else entry[0])
    (best, winner, values), (next_best, second, others) = measured[0], measured[1]
    lead = abs(best / next_best - 1)
    band = compare.band(others, values, floor)
    return Verdict(step, metric, winner if lead > band else None, best, second, next_best, lead, band)


def text(found: Sequence[Verdict]) -> str:
    """Return the verdicts for a person, step by step, and who wins most often."""
    lines = []
    for item in found:
        name = METRICS[item.metric]
        if item.winner is None:
            lines.append(f"{item.step} {name}: no difference beyond noise (+-{item.band:.0%}); best {item.value:.4g}")
        else:
            lines.append(
                f"{item.step} {name}: {item.winner} wins by {item.lead:.0%} ({item.value:.4g} against "
                f"{item.second_value:.4g} of {item.second}, noise +-{item.band:.0%})"
            )
    won = [item.winner for item in found if item.winner and item.metric == "output_tok_s"]
    for name in dict.fromkeys(won):
        lines.append(f"{name} has the most tok/s at {won.count(name)} of {len({item.step for item in found})} steps")
    return "\n".join(lines)
