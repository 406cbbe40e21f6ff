"""From measured prefill and decode rates to a ratio of prefill to decode instances, with the assumptions said. Pure.

One request of ``input_len`` and ``output_len`` tokens takes input_len / P seconds of a prefill instance (P: prompt
tokens a second at saturation) and output_len / D seconds of a decode instance (D: answer tokens a second at a batch
that still keeps the wanted TPOT). Instances of one kind add up, so p of them and d of the other carry
min(p * P / input_len, d * D / output_len) requests a second, and the best ratio makes both equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import List, Optional, Sequence

ASSUMPTIONS = (
    "rates add up: no router, network or KV transfer limits before the engines do",
    "the rates hold at the wanted lengths: prefill slows with very long prompts, decode with the context behind it",
    "decode's rate was taken at a batch whose TPOT is acceptable, prefill's with a full queue",
    "no prefix cache hits; with a hit rate h, prefill's rate counts 1 / (1 - h) times",
    "an aggregated server is taken to lose nothing when it switches between both kinds of work: an upper bound for it. "
    "What disaggregation gains against that bound is steadiness (ITL), not tokens",
)


class AdviceError(ValueError):
    """Rates or lengths from which nothing follows."""


@dataclass(frozen=True)
class Rates:
    """What one instance of each kind does at saturation, and how many GPUs it has."""

    prefill_tok_s: float  # prompt tokens a second of one prefill instance
    decode_tok_s: float  # answer tokens a second of one decode instance
    prefill_gpus: int = 4
    decode_gpus: int = 4


@dataclass(frozen=True)
class Choice:
    """So many instances of each kind, and what they would carry."""

    prefill: int
    decode: int
    gpus: int
    requests_s: float
    output_tok_s: float
    bound: str  # prefill | decode | both


@dataclass(frozen=True)
class Advice:
    """The best choice for the lengths and the GPUs, what else there is, and the ratio that would balance exactly."""

    exact: float  # prefill instances for each decode instance
    best: Choice
    choices: List[Choice]  # all that fit, best first
    aggregated_requests_s: float  # upper bound of the same GPUs without disaggregation
    assumptions: Sequence[str] = ASSUMPTIONS


def advise(rates: Rates, input_len: float, output_len: float, gpus: int, hit_rate: float = 0.0) -> Advice:
    """Return the advice for a budget of GPUs. Raises AdviceError where none fits."""
    for name, value in (("prefill_tok_s", rates.prefill_tok_s), ("decode_tok_s", rates.decode_tok_s)):
        if value <= 0:
            raise AdviceError(f"{name} is {value}; needed: a measured rate above 0")
    if input_len <= 0 or output_len <= 0 or not 0 <= hit_rate < 1:
        raise AdviceError(
            f"lengths {input_len} and {output_len}, hit rate {hit_rate}; needed: above 0, and 0 to below 1"
        )
    per_prefill = rates.prefill_tok_s / (1 - hit_rate) / input_len  # requests a second
    per_decode = rates.decode_tok_s / output_len
    choices = [
        _choice(prefill, decode, rates, per_prefill, per_decode, output_len)
        for prefill in range(1, gpus // rates.prefill_gpus + 1)
        for decode in range(1, gpus // rates.decode_gpus + 1)
        if prefill * rates.prefill_gpus + decode * rates.decode_gpus <= gpus
    ]
    if not choices:
        needed = rates.prefill_gpus + rates.decode_gpus
        raise AdviceError(f"{gpus} GPUs; needed: {needed}, one prefill and one decode instance")
    choices.sort(key=lambda item: (-round(item.requests_s, 9), item.gpus, item.prefill))
    # Seconds of GPUs that one request takes, were both kinds done by the same instances.
    gpu_seconds = rates.prefill_gpus / per_prefill + rates.decode_gpus / per_decode
    return Advice(per_decode / per_prefill, choices[0], choices, gpus / gpu_seconds)


def _choice(
    prefill: int, decode: int, rates: Rates, per_prefill: float, per_decode: float, output_len: float
) -> Choice:
    left, right = prefill * per_prefill, decode * per_decode
    carried = min(left, right)
    bound = "both" if abs(left - right) <= 0.05 * carried else "prefill" if left < right else "decode"
    used = prefill * rates.prefill_gpus + decode * rates.decode_gpus
    return Choice(prefill, decode, used, carried, carried * output_len, bound)


def ratio(exact: float, most: int = 8) -> str:
    """Return a ratio in small whole numbers: 0.52 is 1:2."""
    near = Fraction(exact).limit_denominator(most) if exact < 1 else 1 / Fraction(1 / exact).limit_denominator(most)
    return f"{near.numerator}:{near.denominator}" if near else f"1:{most} or less"


def text(advice: Advice, rates: Rates, input_len: float, output_len: float, measured: Optional[str] = None) -> str:
    """Return the advice for a person."""
    best = advice.best
    lines = [
        f"P:D advice for {input_len:g} tokens in, {output_len:g} out: {best.prefill} prefill, {best.decode} decode "
        f"({best.gpus} GPUs), bound by {best.bound}: {best.requests_s:.3g} requests/s, {best.output_tok_s:.4g} tok/s",
        f"rates: prefill {rates.prefill_tok_s:.4g} tok/s an instance of {rates.prefill_gpus} GPUs, decode "
        f"{rates.decode_tok_s:.4g} tok/s an instance of {rates.decode_gpus}" + (f"; {measured}" if measured else ""),
        f"exact balance: {advice.exact:.2f} prefill for each decode instance, about {ratio(advice.exact)}",
        f"upper bound of aggregated servers on these GPUs: {advice.aggregated_requests_s:.3g} requests/s",
    ]
    lines += [
        f"  {item.prefill}P {item.decode}D ({item.gpus} GPUs): {item.requests_s:.3g} requests/s, bound by {item.bound}"
        for item in advice.choices[:6]
    ]
    return "\n".join([*lines, "assumptions:", *(f"- {words}" for words in advice.assumptions)])
