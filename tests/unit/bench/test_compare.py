"""A regression is what is worse by more than its noise, and both clients are compared in what both can tell."""

import json
import os

import pytest
from pdstack.bench import compare, peer, results, stats
from pdstack.bench.workload import Prompt, Workload, WorkloadError
from pdstack.runner import Completed
from unit.bench.made import result, run


def verdicts(before, now, floor=0.05):
    return {item.metric: item.verdict for item in compare.changes(before, now, floor)}


def test_a_change_beyond_the_floor_is_one_in_the_right_direction():
    found = verdicts([run(tok_s=100, ttft=50, tpot=10)], [run(tok_s=90, ttft=40, tpot=10.2)])
    assert found["output_tok_s"] == "worse"
    assert found["ttft_p50_ms"] == "better"
    assert found["tpot_p50_ms"] == "within noise"


def test_the_band_is_three_standard_errors_of_the_repeats():
    # both sides deviate by 10% of their mean and have two repeats: 3 * sqrt(0.1^2 / 2 + 0.1^2 / 2) = 0.3
    low, high = 100 - 10 / 2**0.5, 100 + 10 / 2**0.5
    assert compare.band([low, high], [low, high], 0.05) == pytest.approx(0.3)
    assert compare.band([100.0, 100.0], [100.0, 100.0], 0.05) == 0.05
    assert compare.band([low, high], [100.0], 0.05) == pytest.approx(3 * (0.005 + 0.01) ** 0.5)
    assert compare.band([100.0], [80.0], 0.05) == 0.05


def test_noisy_repeats_hide_what_steady_ones_show():
    steady = [run(tok_s=100, repeat=1), run(tok_s=101, repeat=2)]
    noisy = [run(tok_s=80, repeat=1), run(tok_s=120, repeat=2)]
    lower = [run(tok_s=88, repeat=1), run(tok_s=89, repeat=2)]
    assert verdicts(steady, lower)["output_tok_s"] == "worse"
    assert verdicts(noisy, lower)["output_tok_s"] == "within noise"


def test_only_medians_and_throughput_make_a_regression():
    before, now = [run()], [run(itl_ms=stats.Spread(1, 1, 900, 900))]
    found = compare.changes(before, now, 0.05)
    assert {item.metric for item in found if item.verdict == "worse"} == {"itl_p99_ms"}
    assert compare.regressions(found) == []
    assert len(compare.regressions(compare.changes(before, [run(tok_s=50)], 0.05))) == 1


def test_steps_that_only_one_side_has_are_not_compared():
    assert compare.changes([run(concurrency=1)], [run(concurrency=8)], 0.05) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, "model was m and is other"),
        ({"workload": Workload(output_len=64)}, "output_len was 128 and is 64"),
        ({"chat": False}, "endpoint"),
        ({"client": "bench_serving"}, "client"),
        ({"workload": Workload(salt="x", seed=2, requests=24)}, None),
    ],
)
def test_another_load_is_not_compared(change, words):
    found = compare.incomparable(result(), result(**change))
    assert found is None if words is None else words in found


LINE = {
    **dict.fromkeys(("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms"), 70.0),
    **dict.fromkeys(("mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms"), 10.0),
    **dict.fromkeys(("mean_itl_ms", "median_itl_ms", "p95_itl_ms", "p99_itl_ms"), 11.0),
    **dict.fromkeys(("mean_e2e_latency_ms", "median_e2e_latency_ms", "p99_e2e_latency_ms"), 1300.0),
    "duration": 10.0,
    "max_concurrency": 16,
    "completed": 3,
    "total_input_tokens": 1000,
    "total_output_tokens": 384,
    "output_throughput": 38.4,
    "request_throughput": 0.3,
}


def test_the_engines_client_gets_our_prompts_and_its_line_becomes_a_run(tmp_path):
    argv = peer.command("py", "http://h:8000", "m", "/models/m", False, Workload(requests=3), 16, str(tmp_path))
    asked = []

    def runner(words):
        asked.append(words)
        (tmp_path / "out.jsonl").write_text(json.dumps({"old": 1}) + "\n" + json.dumps(LINE) + "\n")
        return Completed(0, "", "")

    found = peer.run(argv, [Prompt("a b", 128), Prompt("c", 128), Prompt("d", 128)], str(tmp_path), runner, 2)
    sent = [
        json.loads(line)["conversations"][0]["value"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()
    ]
    assert sent == ["a b", "c", "d"]
    assert (found.concurrency, found.repeat, found.requests, found.failed, found.output_tok_s) == (16, 2, 3, 0, 38.4)
    assert found.ttft_ms.p50 == 70
    assert found.itl_ms.p95 == 11
    assert found.total_tok_s == pytest.approx(138.4)
    words = " ".join(asked[0])
    assert "--backend sglang-oai " in words
    assert "--max-concurrency 16" in words
    assert "--sharegpt-output-len 128" in words


def test_a_ttft_of_zero_is_no_ttft_and_takes_its_tpot_out_of_the_comparison():
    ours = [run(concurrency=16, tok_s=40, tpot=10)]
    good, bad = results.from_bench_serving(LINE), results.from_bench_serving({**LINE, "median_ttft_ms": 0.0})
    assert bad.ttft_ms is None
    assert [item.metric for item in peer.agreement(ours, [bad])] == ["output_tok_s"]
    assert {item.metric: round(item.difference, 3) for item in peer.agreement(ours, [good])} == {
        "output_tok_s": -0.04,
        "tpot_p50_ms": 0.0,
    }


def test_lost_requests_of_the_engines_client_are_failures():
    assert results.from_bench_serving(LINE, sent=5).failed == 2


def test_what_the_engines_client_cannot_do_is_refused(tmp_path):
    for wrong in (Workload(dataset="sharegpt-like"), Workload(ignore_eos=False), Workload(output_len=3)):
        with pytest.raises(WorkloadError, match="needed"):
            peer.refuse(wrong)
    with pytest.raises(WorkloadError, match="ended with 1: boom"):
        peer.run(["x"], [Prompt("a", 1)], str(tmp_path), lambda words: Completed(1, "", "boom"), 1)


def test_a_missing_import_gets_a_stand_in_and_a_present_one_none(tmp_path):
    peer.stand_ins("py", str(tmp_path), lambda words: Completed(0, "", ""))
    assert os.listdir(tmp_path) == []
    peer.stand_ins("py", str(tmp_path), lambda words: Completed(1, "", ""))
    assert os.listdir(tmp_path) == ["datasets.py"]
