"""P:D advice from rates: checked against requests counted by hand."""

import pytest
from hypothesis import given, strategies
from pdstack.bench import advice
from pdstack.bench.advice import AdviceError, Rates


def test_the_ratio_balances_the_time_of_both_kinds():
    # a prefill instance: 8000 / 256 = 31.25 requests/s; a decode instance: 400 / 128 = 3.125, a tenth
    found = advice.advise(Rates(8000, 400, 1, 1), 256, 128, gpus=11)
    assert found.exact == pytest.approx(0.1)
    assert (found.best.prefill, found.best.decode, found.best.bound) == (1, 10, "both")
    assert found.best.requests_s == pytest.approx(31.25)
    assert found.best.output_tok_s == pytest.approx(4000)


def test_long_prompts_want_prefill_and_long_answers_decode():
    rates = Rates(8000, 800, 1, 1)
    prompts = advice.advise(rates, 8000, 100, gpus=8).best
    answers = advice.advise(rates, 100, 2000, gpus=8).best
    assert (prompts.prefill, prompts.decode) == (7, 1)
    assert (answers.prefill, answers.decode) == (1, 7)
    assert prompts.bound == "prefill"


def test_the_reference_host_has_one_choice():
    found = advice.advise(Rates(3000, 385), 256, 128, gpus=8)
    assert [(item.prefill, item.decode) for item in found.choices] == [(1, 1)]
    assert found.best.bound == "decode"
    # 4 GPUs for 256/3000 s and 4 for 128/385 s, on 8 GPUs
    assert found.aggregated_requests_s == pytest.approx(8 / (4 * 256 / 3000 + 4 * 128 / 385))


def test_a_prefix_cache_takes_work_from_prefill():
    cold = advice.advise(Rates(1000, 1000, 1, 1), 1000, 1000, gpus=4)
    warm = advice.advise(Rates(1000, 1000, 1, 1), 1000, 1000, gpus=4, hit_rate=2 / 3)
    assert (cold.best.prefill, cold.best.decode) == (2, 2)
    assert (warm.best.prefill, warm.best.decode) == (1, 3)


@given(
    strategies.floats(1, 1e5), strategies.floats(1, 1e5), strategies.integers(1, 10**5), strategies.integers(1, 10**5)
)
def test_no_choice_carries_more_than_the_aggregated_bound_or_than_the_best(prefill, decode, input_len, output_len):
    found = advice.advise(Rates(prefill, decode, 1, 1), input_len, output_len, gpus=8)
    assert all(item.requests_s <= found.aggregated_requests_s * 1.000001 for item in found.choices)
    assert found.best.requests_s == pytest.approx(max(item.requests_s for item in found.choices))


@pytest.mark.parametrize(
    ("rates", "lengths", "gpus", "words"),
    [
        (Rates(0, 1), (1, 1), 8, "prefill_tok_s is 0"),
        (Rates(1, 1), (0, 1), 8, "lengths 0"),
        (Rates(1, 1), (1, 1), 7, "needed: 8"),
    ],
)
def test_what_nothing_follows_from_is_refused(rates, lengths, gpus, words):
    with pytest.raises(AdviceError, match=words):
        advice.advise(rates, *lengths, gpus)


@pytest.mark.parametrize(("exact", "words"), [(0.5, "1:2"), (0.1, "1:8"), (3.02, "3:1"), (0.001, "1:8 or less")])
def test_ratios_in_small_numbers(exact, words):
    assert advice.ratio(exact) == words


def test_the_text_prints_what_it_assumed():
    found = advice.advise(Rates(3000, 385), 256, 128, gpus=8)
    words = advice.text(found, Rates(3000, 385), 256, 128)
    assert "1 prefill, 1 decode (8 GPUs), bound by decode" in words
    assert all(item in words for item in advice.ASSUMPTIONS)
