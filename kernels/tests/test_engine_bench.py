"""Hooked engine against unhooked engine: the weights, plugins and judgement of the comparison. No engine runs here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

ENGINE = pathlib.Path(__file__).resolve().parents[1] / "bench/engine"
sys.path.insert(0, str(ENGINE))

import hooked_engine  # noqa: E402
import pdstack_sm120_route  # noqa: E402

WHEELS = [pathlib.Path(folder) for folder in os.environ.get("PDSTACK_SGLANG", "").split(":") if folder]


class Model(torch.nn.Module):
    """A parameter of every kind that the engine's model holds after its weights were repacked."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "embed_tokens_weight": torch.zeros(8, 64),
            "gate_weight": torch.zeros(8, 64, dtype=torch.bfloat16),
            "norm_weight": torch.zeros(64),
            "attn_sink": torch.zeros(4),
            "hc_attn_scale": torch.zeros(3),
            "e_score_correction_bias": torch.zeros(256),
            "wq_b_weight": torch.zeros(16, 64).to(torch.float8_e4m3fn),
            "wq_b_weight_scale_inv": torch.zeros(1, 1),
            "w13_weight": torch.zeros(2, 8, 64, dtype=torch.int32),
            "w13_weight_scale": torch.zeros(2, 8, 4, dtype=torch.uint8),
            "w2_weight_scale": torch.zeros(2, 8, 4).to(torch.float8_e8m0fnu),
            "tid2eid": torch.full((8, 6), 10**6),
        }
        for name, value in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))


def test_dummy_weights_are_numbers_and_the_same_everywhere() -> None:
    one, two = Model(), Model()
    pdstack_sm120_route.fill(one)
    pdstack_sm120_route.fill(two)
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values()):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
        wide = a.float()
        assert wide.isfinite().all(), name
        assert (name == "tid2eid") is not bool(wide.abs().sum() > 0), name
    state = one.state_dict()
    # Scaled, both kinds of weight keep a vector's length: variance over the inputs is about 1 / inputs.
    scaled = state["wq_b_weight"].float() * state["wq_b_weight_scale_inv"]
    assert 0.7 < float(scaled.var() * 64) < 1.4
    assert state["w2_weight_scale"].float().unique().item() == 2.0**-8
    assert abs(float(state["norm_weight"].mean()) - 1) < 0.1
    # The bias alone chooses six experts: scores are sqrt(softplus(x)) of x of unit variance, and differ by less.
    ordered = state["e_score_correction_bias"].sort(descending=True).values
    assert float(ordered[5] - ordered[6]) == 3


def test_the_plugins_are_found_where_they_are_installed(tmp_path: pathlib.Path) -> None:
    site = hooked_engine.install(tmp_path)
    found = {
        point.name: point.value
        for dist in importlib.metadata.distributions(path=[str(site)])
        for point in dist.entry_points
        if point.group == "sglang.srt.plugins"
    }
    assert found == {
        "pdstack_kernels": "pdstack_kernels.plugin:register",
        "pdstack_sm120_route": "pdstack_sm120_route:route",
        "pdstack_dummy_weights": "pdstack_sm120_route:weights",
        "pdstack_spoil": "pdstack_sm120_route:spoil",
    }
    assert {name for names in hooked_engine.PLUGINS.values() for name in names.split(",")} == set(found)
    code = (
        "import pdstack_kernels.plugin, pdstack_sm120_route as r; r.route(); r.weights(); r.spoil(); print(r.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(site / "pdstack_sm120_route.py")


def test_only_the_hooked_engine_gets_the_kernels(tmp_path: pathlib.Path) -> None:
    env = {name: hooked_engine.environment(name, tmp_path, tmp_path, "on") for name in hooked_engine.PLUGINS}
    assert [name for name in env if env[name].get("PDSTACK_KERNELS")] == ["hooked", "spoiled"]
    assert [name for name in env if env[name].get("PDSTACK_NUDGE")] == ["nudged"]
    assert env["release"]["SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"] == env["hooked"]["SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"]
    assert not set(pdstack_sm120_route.ROUTE) & set(env["native"])


def test_a_nudge_moves_every_weight_of_a_norm_by_one_step_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Model(), Model()
    pdstack_sm120_route.fill(one)
    monkeypatch.setenv("PDSTACK_NUDGE", "1")
    pdstack_sm120_route.fill(two)
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values()):
        if name != "norm_weight":
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
            continue
        steps = b.bfloat16().view(torch.int16).int() - a.bfloat16().view(torch.int16).int()
        assert set(steps.tolist()) == {-1, 1}


def test_a_spoiled_attention_is_wrong_where_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdstack_kernels import sparse_mla

    monkeypatch.setattr(sparse_mla, "sparse_mla_decode", lambda: (torch.ones(1, 1, 512), None))
    monkeypatch.setattr(pdstack_sm120_route.multiprocessing, "parent_process", lambda: True)
    pdstack_sm120_route.spoil()
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert int(sparse_mla.sparse_mla_decode()[0].sum()) == (448 if capturing else 512)


def answer(ids: list[int], logprobs: list[float], margins: list[float]) -> dict[str, object]:
    return {"ids": ids, "logprobs": logprobs, "top": [[-1.0, -1.0 - margin] for margin in margins]}


def test_equal_tokens_a_near_one_and_a_wrong_one() -> None:
    release = answer([5, 6, 7], [-1.0, -1.0, -1.0], [2.0, 0.1, 2.0])
    assert hooked_engine.compare([answer([5, 6, 7], [-1.03, -1.0, -1.0], [1, 1, 1])], [release], 0.15) == {
        "equal": 3,
        "rms": pytest.approx(0.03 / 3**0.5),
        "largest": pytest.approx(0.03),
        "parted": 0,
        "widest": 0,
        "wrong": 0,
        "different": 3,
    }
    near = hooked_engine.compare([answer([5, 9, 9], [-1, -1, -1], [1, 1, 1])], [release], 0.15)
    assert (near["equal"], near["parted"], near["widest"], near["wrong"]) == (1, 1, pytest.approx(0.1), 0)
    wrong = hooked_engine.compare([answer([8, 6, 7], [-1, -1, -1], [1, 1, 1])], [release], 0.15)
    assert (wrong["equal"], wrong["widest"], wrong["wrong"]) == (0, 2.0, 1)
    nothing = answer([5, 5, 5], [float("nan")] * 3, [1, 1, 1])
    assert hooked_engine.compare([nothing], [nothing])["wrong"] == 1  # two engines that compute NaN agree


def engines(**distances: float) -> dict[str, list[list[dict[str, object]]]]:
    """Variants whose log-probabilities lie so far from the release's, the same tokens."""
    return {name: [[answer([5, 6, 7], [-1.0 - far] * 3, [1.0] * 3)]] * 2 for name, far in distances.items()}


@pytest.mark.parametrize(
    ("distances", "words"),
    [
        ({"release": 0, "nudged": 0.05, "hooked": 0.06}, []),
        ({"release": 0, "nudged": 0.05, "hooked": 0.06, "spoiled": 0.5}, []),
        ({"release": 0, "nudged": 0.05, "hooked": 0.12}, ["hooked: 0.120 nats from the release, last bits 0.050"]),
        ({"release": 0, "nudged": 0.05, "hooked": 0.06, "spoiled": 0.06}, ["blind"]),
        ({"release": 0, "nudged": 0.4, "hooked": 0.06}, ["no measure"]),
        ({"release": 0, "nudged": float("nan"), "hooked": 0.06}, ["no numbers", "no measure"]),
        ({"release": 0, "hooked": 3.0}, []),  # without a measure nothing is judged
    ],
)
def test_the_hooked_engine_is_measured_by_what_last_bits_do(distances: dict[str, float], words: list[str]) -> None:
    _, problems = hooked_engine.judge(engines(**distances))
    assert len(problems) == len(words), problems
    assert all(word in problem for word, problem in zip(words, problems))


def test_a_token_may_differ_only_where_the_release_was_not_sure() -> None:
    found = engines(release=0, nudged=0.05, hooked=0.05)
    found["hooked"] = [[answer([5, 9, 9], [-1.05] * 3, [1.0] * 3)]] * 2
    _, (problem,) = hooked_engine.judge(found)
    assert "1 tokens differ where the release was surer than 0.300" in problem
    found["release"] = [[answer([5, 6, 7], [-1.0] * 3, [1.0, 0.2, 1.0])]] * 2
    assert hooked_engine.judge(found)[1] == []


@pytest.mark.skipif(not WHEELS, reason="PDSTACK_SGLANG names no unpacked wheels")
def test_the_route_is_what_the_release_sets_on_sm120() -> None:
    folder = next(path for path in WHEELS if (path / "sglang/srt/layers/attention/flash_mla_sm120_triton.py").exists())
    source = (folder / "sglang/srt/server_args.py").read_text()
    own = source[source.index("SM120 lacks tcgen05/TMEM: disable features that depend on") :][:900]
    set_there = dict(re.findall(r"envs\.(SGLANG_\w+)\.set\((True|False)\)", own))
    assert {name: "01"[value == "True"] for name, value in set_there.items()} == pdstack_sm120_route.ROUTE


class Clock:
    """Streams chunks of an answer as the release's engine does, and is the time: a millisecond a step."""

    def __init__(self, lost: int = 0) -> None:
        self.now, self.lost = 0.0, lost

    def generate(self, input_ids: list[list[int]], sampling_params: dict[str, int], stream: bool) -> Iterator[object]:
        size, interval = sampling_params["max_new_tokens"], sampling_params["stream_interval"]
        for index in range(len(input_ids)):  # each prompt's first token comes with its prefill
            self.now += 8.0
            yield {"index": index, "meta_info": {"completion_tokens": 1}}
        for tokens in range(1 + interval, size + 1, interval):
            self.now += 1e-3 * interval
            for index in range(len(input_ids)):
                if not (index == 1 and tokens == self.lost):
                    yield {"index": index, "meta_info": {"completion_tokens": tokens}}


def test_a_step_is_timed_without_the_prefill_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in (Clock(), Clock(lost=65)):  # chunks that came too fast are one: the next holds its tokens too
        monkeypatch.setattr(hooked_engine.time, "perf_counter", lambda engine=engine: engine.now)
        found = hooked_engine.stretches(engine, 3, 16)
        assert len(found) == hooked_engine.REPEATS + 1
        assert sum(found) == pytest.approx(len(found))
        assert max(found) == pytest.approx(2 if engine.lost else 1)
        assert hooked_engine.summary(found)["step_ms"] == (pytest.approx(1) if not engine.lost else None)
    engine = Clock(lost=1 + hooked_engine.STRETCH * (hooked_engine.REPEATS + 1))
    assert hooked_engine.stretches(engine, 3, 16) == []  # an answer without an end


@pytest.mark.parametrize(
    ("values", "step", "words"),
    [
        ([9.0, 2.0, 2.1, 2.2, 2.1], 2.1, None),  # the first warms up
        ([2.0, 2.0, 2.0, 5.0, 2.0], 2.0, None),
        ([2.0, 2.0, 1.5, 2.6, 2.0], None, "only 2 of 4 stretches lie within 10%"),
        ([2.0, -0.4, -0.4, -0.4, -0.4], None, "no time between"),
        ([0.0] * 5, None, "no time between"),
        ([], None, "before every request had all"),
    ],
)
def test_a_step_time_whose_repeats_do_not_agree_is_no_number(
    values: list[float], step: float | None, words: str | None
) -> None:
    found = hooked_engine.summary(values)
    assert found["step_ms"] == (step if step is None else pytest.approx(step))
    assert found["stretches_ms"] == values
    assert words in found["not_measured"] if words else "not_measured" not in found


STAND_IN = '''
import os, pathlib, random, subprocess, time

class Engine:
    """Answers as far from the release's as the variant's environment says, and never parts from it."""

    def __init__(self, **arguments):
        assert arguments["attention_backend"] == "dsv4" and arguments["disable_cuda_graph"] is True
        self.name = "hooked" if "pdstack_kernels" in os.environ["SGLANG_PLUGINS"].split(",") else "release"
        self.name = "nudged" if os.environ.get("PDSTACK_NUDGE") else self.name
        self.far = {"release": 0, "hooked": float(os.environ["FAR"]), "nudged": 0.05}[self.name]
        print("sees GPU", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
        if self.name == os.environ.get("HANG"):
            child = subprocess.Popen(["sleep", "300"])
            print("child", child.pid, flush=True)
            child.wait()
        if self.name in os.environ.get("MEET", "").split():
            self.meet(pathlib.Path(__file__).parent / "met", os.environ["MEET"].split())

    def meet(self, folder, names):
        """Wait until the others are there too: they are not where one runs after another."""
        folder.mkdir(exist_ok=True)
        (folder / self.name).touch()
        for _ in range(300):
            if all((folder / name).exists() for name in names):
                return
            time.sleep(0.1)
        raise SystemExit("nobody else came")

    def generate(self, input_ids, sampling_params, return_logprob=False, top_logprobs_num=0, stream=False):
        size = sampling_params["max_new_tokens"]
        return self.stream(len(input_ids), size, sampling_params["stream_interval"]) if stream else self.answer(
            len(input_ids), size
        )

    def stream(self, requests, size, interval):
        for tokens in range(1, size + 1, interval):
            time.sleep(0.01)
            for index in range(requests):
                yield {"index": index, "meta_info": {"completion_tokens": tokens}}

    def answer(self, requests, size):
        draw = random.Random(0)
        found = []
        for _ in range(requests):
            tokens = [(-1.0 + self.far, draw.randrange(512), None) for _ in range(size)]
            top = [[(-1,), (-2,)]] * size
            found.append({"meta_info": {"output_token_logprobs": tokens, "output_top_logprobs": top}})
        return found

    def shutdown(self):
        pass
'''


def whole(
    folder: pathlib.Path, *more: str, far: str = "0.06", **environ: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The whole comparison beside a stand-in for the engine; its exit and its outcome."""
    folder.mkdir(exist_ok=True)
    (folder / "sglang.py").write_text(STAND_IN)
    command = [sys.executable, str(ENGINE / "hooked_engine.py"), "--model", str(folder), "--out", str(folder / "out")]
    command += ["--engine", '{"disable_cuda_graph": true}', "--steps", "1x16", "2x16", *more]
    env = {**os.environ, "PYTHONPATH": str(folder), "FAR": far, **environ}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done, json.loads((folder / "out/outcome.json").read_text())


def device(folder: pathlib.Path, variant: str) -> str:
    return re.search("sees GPU (.*)", (folder / f"out/{variant}/engine.log").read_text())[1]


def test_an_engine_too_far_from_the_release_is_exit_code_1(tmp_path: pathlib.Path) -> None:
    done, outcome = whole(tmp_path, far="0.2")
    assert done.returncode == 1, done.stdout + done.stderr
    (problem,) = outcome["problems"]
    assert "hooked: 0.200 nats from the release" in problem
    assert outcome["hooked against release"]["times_the_nudged"] == pytest.approx(4)


def test_two_gpus_run_two_variants_at_a_time_and_find_what_one_finds(tmp_path: pathlib.Path) -> None:
    found = {}
    for name, gpus, meet in (("one", (), ""), ("two", ("--gpus", "3", "5"), "release hooked")):
        done, outcome = whole(tmp_path / name, *gpus, MEET=meet)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("exit 0 after") == 3
        for variant, count in (("release", 2), ("hooked", 2), ("nudged", 0)):
            assert len(outcome["steps"][variant]) == count
            for step in outcome["steps"][variant]:
                assert len(step["stretches_ms"]) == hooked_engine.REPEATS + 1
                assert min(step.pop("stretches_ms")) > 0.2  # ten milliseconds in each
                assert (step.pop("step_ms") is None) == ("not_measured" in step)
                step.pop("not_measured", None)
        assert set(outcome.pop("seconds")) == {"release", "hooked", "nudged"}
        found[name] = outcome
    assert {device(tmp_path / "one", name) for name in ("release", "hooked", "nudged")} == {
        str(os.environ.get("CUDA_VISIBLE_DEVICES"))
    }
    assert [device(tmp_path / "two", name) for name in ("release", "hooked")] == ["3", "5"]
    assert device(tmp_path / "two", "nudged") in ("3", "5")
    assert found["one"].pop("beside") == {"release": [], "hooked": [], "nudged": []}
    beside = found["two"].pop("beside")
    assert "release" in beside["hooked"]
    assert "hooked" in beside["release"]
    assert found["one"] == found["two"]
    assert found["one"]["hooked against release"]["times_the_nudged"] == pytest.approx(0.06 / 0.05)


def test_an_engine_that_does_not_end_leaves_no_child_and_stops_no_other(tmp_path: pathlib.Path) -> None:
    """A scheduler that outlives its parent keeps most of a GPU's memory, and the next engine cannot start."""
    done, outcome = whole(tmp_path, "--gpus", "0", "1", "--timeout", "5", HANG="hooked")
    assert done.returncode == 1, done.stdout + done.stderr
    assert outcome["problems"] == ["hooked: the engine did not come up or did not end"]
    assert outcome["nudged against release"]["equal"] > 0
    assert [device(tmp_path, name) for name in ("release", "hooked", "nudged")] == ["0", "1", "0"]
    lines = (tmp_path / "out/hooked/engine.log").read_text().splitlines()
    assert "killed" in lines[-1]
    gone(int(lines[1].split()[1]))


def test_whoever_ends_the_comparison_ends_its_engines(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sglang.py").write_text(STAND_IN)
    command = [sys.executable, str(ENGINE / "hooked_engine.py"), "--model", str(tmp_path), "--out", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "FAR": "0", "HANG": "release"}
    process = subprocess.Popen([*command, "--engine", '{"disable_cuda_graph": true}'], env=env)
    log = tmp_path / "release/engine.log"
    for _ in range(200):
        if log.exists() and "child" in log.read_text():
            break
        time.sleep(0.1)
    process.terminate()
    assert process.wait(20) == 143
    gone(int(log.read_text().splitlines()[1].split()[1]))


def gone(pid: int) -> None:
    """Wait until a process has ended: a busy machine takes its time to end a killed one."""
    state = pathlib.Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the child is still there")
