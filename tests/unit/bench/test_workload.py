"""What is sent: lengths, words, arrival times, and the user's files."""

import itertools
import json
import statistics

import pytest
from pdstack.bench import workload
from pdstack.bench.workload import Calibration, Workload, WorkloadError


def tokens(text, line):
    return line.overhead + line.per_word * len(text.split())


def test_a_prompt_has_the_tokens_that_were_asked_for():
    line = Calibration(overhead=6, per_word=1.25)
    prompts = workload.prompts(Workload(input_len=256, output_len=32, requests=5), line)
    assert len(prompts) == 5
    for prompt in prompts:
        assert abs(tokens(prompt.text, line) - 256) <= 1.25
        assert prompt.max_tokens == 32


def test_calibration_is_the_line_through_two_counts():
    assert workload.calibration((64, 90), (192, 250)) == Calibration(10.0, 1.25)
    with pytest.raises(WorkloadError, match="more words, more tokens"):
        workload.calibration((64, 90), (192, 90))


def test_the_same_seed_and_salt_give_the_same_prompts_and_another_salt_other_words():
    wanted = Workload(requests=3, dataset="sharegpt-like", salt="a")
    other = Workload(requests=3, dataset="sharegpt-like", salt="b")
    assert workload.prompts(wanted, Calibration()) == workload.prompts(wanted, Calibration())
    assert workload.lengths(wanted) == workload.lengths(other)
    assert workload.prompts(wanted, Calibration())[0].text[:40] != workload.prompts(other, Calibration())[0].text[:40]


def test_cold_prompts_share_no_prefix_and_warm_ones_the_asked_share():
    def common(texts):
        columns = zip(*(text.split() for text in texts))
        return next((number for number, column in enumerate(columns) if len(set(column)) > 1), None)

    cold = [prompt.text for prompt in workload.prompts(Workload(requests=20, input_len=200), Calibration())]
    warm = [
        prompt.text
        for prompt in workload.prompts(Workload(requests=20, input_len=200, shared_prefix=0.75), Calibration())
    ]
    assert common(cold) == 0
    assert common(warm) == 150
    assert {len(text.split()) for text in warm} == {200}


def test_the_warm_up_shares_the_prefix_and_nothing_else():
    wanted = Workload(requests=10, input_len=100, shared_prefix=0.5)
    sent = [prompt.text.split() for prompt in workload.prompts(wanted, Calibration())]
    before = [prompt.text.split() for prompt in workload.warm_up(wanted, Calibration(), 4)]
    assert before[0][:50] == sent[0][:50]
    assert not {tuple(words[50:]) for words in before} & {tuple(words[50:]) for words in sent}
    assert len(before) == 4


def test_sharegpt_like_lengths_have_its_means_and_a_tail():
    drawn = workload.lengths(Workload(dataset="sharegpt-like", requests=4000))
    prompts, answers = zip(*drawn)
    assert statistics.mean(prompts) == pytest.approx(161, rel=0.08)
    assert statistics.mean(answers) == pytest.approx(338, rel=0.15)  # cut off at 1024
    assert max(answers) == 1024
    assert statistics.median(answers) < 0.75 * statistics.mean(answers)


def test_arrivals_are_a_poisson_process_from_the_seed():
    times = workload.arrivals(4000, 8.0, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times == workload.arrivals(4000, 8.0, seed=3) != workload.arrivals(4000, 8.0, seed=4)
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.08)  # of an exponential: its mean
    with pytest.raises(WorkloadError, match="above 0"):
        workload.arrivals(1, 0.0, 1)


def test_the_users_file_in_each_known_shape():
    lines = [
        json.dumps({"prompt": "one", "max_tokens": 7}),
        "",
        json.dumps({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}]}),
        json.dumps({"conversations": [{"from": "human", "value": "three"}, {"from": "gpt", "value": "x"}]}),
    ]
    found = workload.read_dataset(lines, Workload(requests=4, output_len=99))
    assert [(item.text, item.max_tokens) for item in found] == [("one", 7), ("two", 99), ("three", 99), ("one", 7)]
    assert workload.body(found[1], "m", chat=True, ignore_eos=True)["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "two"},
    ]
    assert workload.body(found[1], "m", chat=False, ignore_eos=False) == {
        "model": "m",
        "prompt": "two",
        "max_tokens": 99,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1"),
        ("[]", "not a JSON object"),
        ('{"text": "x"}', "no prompt"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
        ('{"prompt": "x", "max_tokens": true}', "max_tokens is True"),
        ('{"messages": [{"role": "user"}]}', "content"),
        ("", "has no line"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(line, words):
    with pytest.raises(WorkloadError, match=words):
        workload.read_dataset([line], Workload(), "mine.jsonl")


@pytest.mark.parametrize("change", [{"requests": 0}, {"input_len": 0}, {"output_len": -1}, {"shared_prefix": 1.0}])
def test_a_workload_that_cannot_be_sent_is_refused(change):
    with pytest.raises(WorkloadError, match="needed"):
        workload.check(Workload(**change))
