"""Which candidate wins, by how much, and what is not a difference."""

from pdstack.bench import ab
from unit.bench.made import result, run


def test_the_winner_of_each_step_with_its_lead():
    pd = result([run(1, 50, ttft=40), run(64, 400, ttft=40)], label="pd")
    replicas = result([run(1, 51, ttft=20), run(64, 500, ttft=20)], label="replicas")
    found = {(item.step, item.metric): item for item in ab.verdicts([pd, replicas], 0.05)}
    assert found["C=64", "output_tok_s"].winner == "replicas"
    assert round(found["C=64", "output_tok_s"].lead, 3) == 0.25
    assert found["C=1", "output_tok_s"].winner is None
    assert found["C=1", "ttft_p50_ms"].winner == "replicas"
    words = ab.text(list(found.values()))
    assert "C=64 tok/s: replicas wins by 25% (500 against 400 of pd, noise +-5%)" in words
    assert "C=1 tok/s: no difference beyond noise (+-5%)" in words
    assert "replicas has the most tok/s at 1 of 2 steps" in words


def test_repeats_that_differ_more_than_the_candidates_decide_nothing():
    pd = result([run(1, 50, repeat=1), run(1, 90, repeat=2)], label="pd")
    replicas = result([run(1, 100, repeat=1), run(1, 60, repeat=2)], label="replicas")
    assert [item.winner for item in ab.verdicts([pd, replicas], 0.05) if item.metric == "output_tok_s"] == [None]


def test_one_candidate_alone_wins_nothing():
    assert ab.verdicts([result([run(1, 50)], label="pd")], 0.05) == []
