"""tools/gpu_evidence: results add up over several calls, and a failed step is written down as failed."""

import importlib.machinery
import importlib.util
import json
import pathlib
import sys

import pytest
from pdstack import codec
from unit.bench.made import result

CARD = {"name": "NVIDIA H200", "driver_version": "580.159.04"}
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent


@pytest.fixture
def evidence(monkeypatch):
    loader = importlib.machinery.SourceFileLoader("gpu_evidence", str(ROOT / "tools/gpu_evidence"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_evidence", loader))
    loader.exec_module(module)
    return module


def call(module, monkeypatch, folder, *steps):
    monkeypatch.setattr(sys, "argv", ["gpu_evidence", "--output", str(folder), *steps])
    with pytest.raises(SystemExit) as ended:
        module.main()
    return ended.value.code


def test_steps_add_to_what_is_there_and_failures_stay_visible(evidence, monkeypatch, tmp_path):
    def good(run):
        """Good."""
        text, _seconds = run.command(["echo", "words"])
        return {"said": text.strip()}

    def bad(run):
        """Bad."""
        run.command(["sh", "-c", "echo the reason; exit 3"])

    monkeypatch.setattr(evidence, "STEPS", {"good": good, "bad": bad, "page": evidence.page})
    assert call(evidence, monkeypatch, tmp_path, "bad") == "failed: bad"
    assert call(evidence, monkeypatch, tmp_path, "good", "page") == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["steps"]["good"]["found"] == {"said": "words"}
    assert 0 <= results["steps"]["good"]["at"] - results["steps"]["bad"]["at"] < 60
    assert results["steps"]["bad"]["ok"] is False
    assert "the reason" in results["steps"]["bad"]["error"]
    assert "words" in (tmp_path / "logs/good-01.log").read_text()
    page = (tmp_path / "results.md").read_text()
    assert "| bad | **failed** |" in page
    assert "the reason" in page


def test_a_recap_is_read(evidence):
    text = "PLAY RECAP ****\nrunner   : ok=10   changed=2    unreachable=0    failed=0\n"
    assert evidence.recap(text) == {"runner": {"ok": 10, "changed": 2, "unreachable": 0, "failed": 0}}
    assert evidence.recap("no recap") == {}


def test_a_run_that_changes_something_is_not_idempotent(evidence, monkeypatch, tmp_path):
    run = evidence.Run(tmp_path, tmp_path)
    answers = ["PLAY RECAP *\nrunner : ok=9 changed=1\n", "nothing at all", "PLAY RECAP *\nrunner : ok=9 changed=0\n"]
    monkeypatch.setattr(run, "play", lambda *args, **options: (answers.pop(0), 1.0))
    for _ in range(2):
        with pytest.raises(evidence.Failed, match="changed something"):
            evidence.again(run)
    assert evidence.again(run)["recap"]["runner"]["changed"] == 0


def test_the_page_has_a_row_for_each_topology_and_concurrency(evidence):
    figures = {"p50": 1.5, "mean": 0, "p95": 0, "p99": 0}
    item = {
        "concurrency": 16,
        "output_tok_s": 4321.0,
        "tpot_ms": figures,
        "ttft_ms": None,
        "completed": 95,
        "requests": 96,
    }
    results = {"steps": {"pd": {"ok": True, "seconds": 1, "found": {"bench": {"runs": [item]}}}}}
    assert "| pd | 16 | 4321 | 1.50 | - | 95 of 96 |" in evidence.render(results)


def test_the_benchmarks_of_the_topologies_stand_side_by_side_in_one_report(evidence, monkeypatch, tmp_path):
    known = {"kind": "GPU", "machine": "runner: 2 x NVIDIA H200"}
    steps = {
        mode: {"ok": True, "seconds": 1, "found": {"bench": {**codec.dump(result(label=mode)), **known}}}
        for mode in ("pd", "replicas")
    }
    (tmp_path / "results.json").write_text(json.dumps({"schema": 1, "steps": steps}))
    assert call(evidence, monkeypatch, tmp_path, "page") == 0
    page = (tmp_path / "benchmark.html").read_text()
    assert "2 x NVIDIA H200" in page
    assert all(f"<td>{mode}" in page or f">{mode}<" in page for mode in steps)


def test_a_topology_that_needs_more_gpus_is_skipped_and_said_so(evidence, monkeypatch, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"schema": 1, "steps": {}, "cards": {"runner": [CARD]}}))
    assert call(evidence, monkeypatch, tmp_path, "replicas", "page") == 0
    assert "| replicas | skipped: needs 2 GPUs, there is 1 |" in (tmp_path / "results.md").read_text()


def test_every_role_of_the_plan_is_killed_once(evidence, monkeypatch, tmp_path):
    run = evidence.Run(tmp_path, tmp_path)
    plan = {"instances": [{"role": "aggregated", "unit": f"pd-aggregated@{n}.service"} for n in (0, 1)]}
    killed = []

    def play(playbook, variables=None, **_options):
        if variables:
            killed.append(variables["gpu_unit"])
            pathlib.Path(variables["gpu_report"]).write_text('{"seconds_to_completion": 1, "restarted": []}')
        return "", 1.0

    monkeypatch.setattr(run, "hosts", lambda _argv: {"runner": json.dumps(plan)})
    monkeypatch.setattr(run, "play", play)
    assert set(evidence.kill(run)) == {"router", "aggregated", "verify_s"}
    assert killed == ["pd-router.service", "pd-aggregated@0.service"]


def test_a_comparison_that_failed_keeps_what_it_measured(evidence, monkeypatch, tmp_path):
    def kernels(run):
        """Kernels."""
        raise evidence.Failed("tokens differ", {"outcome": {"problems": ["hooked: 0.2 nats"]}})

    monkeypatch.setattr(evidence, "STEPS", {"kernels": kernels, "page": evidence.page})
    assert call(evidence, monkeypatch, tmp_path, "kernels", "page") == "failed: kernels"
    step = json.loads((tmp_path / "results.json").read_text())["steps"]["kernels"]
    assert (step["ok"], step["found"]) == (False, {"outcome": {"problems": ["hooked: 0.2 nats"]}})
    page = (tmp_path / "results.md").read_text()
    assert "tokens differ" in page
    assert "Problems: hooked: 0.2 nats." in page


@pytest.fixture
def h200x2():
    """What a run on two H200s found, shortened."""
    return json.loads((ROOT / "tests/fixtures/gpu-h200x2.json").read_text())


def test_the_page_of_a_real_run_is_tables(evidence, h200x2):
    page = evidence.render(h200x2)
    for row in (
        "| decode-0 | 4 | 16-31 | 1 | unlimited | 20000 |",
        "| decode-0.gpu1 to prefill-0.gpu0 | cuda_ipc/cuda | 243.7 | 241.7 | 388.7 | 63% | 62% |",
        "| prefill-0.gpu0 to decode-0.gpu1 | cuda_ipc/cuda | 260.8 | 245.7 | 388.0 | 67% | 63% |",
        "| dense | 0.0227 | 24% | 9.0 |",
        "| 1 x 512 | 2.98 | 2.46 | 1.2 |",
        "| 16 x 2048 | 7.80 | not measured | - |",  # the negative time of that run
        "| hooked against release | 417 | 0.0642 | 0.77 | 52 | 0.188 | 0 |",
        "| all of them | | 650.4 |",
    ):
        assert row in page.splitlines(), row
    assert "2 golden answers, 32 tokens" in page
    assert "Hooks of hooked, in the decode graphs: draft_moe=0, hc_pre=150, indexer=30, sparse_mla=75." in page
    assert "Problems: none." in page
    assert "{" not in page


def test_the_page_of_an_engine_that_has_no_result_and_of_one_whose_steps_differ(evidence, h200x2):
    outcome = h200x2["steps"]["kernels"]["found"]["outcome"]
    outcome["steps"] = {
        "release": None,
        "hooked": [
            {"requests": 1, "context": 512, "step_ms": None, "stretches_ms": [9, 1, 2, 3, 4], "not_measured": "no"},
            {"requests": 64, "context": 512, "step_ms": 2.0, "stretches_ms": [9, 2, 2.1, 1.9, 2]},
        ],
    }
    outcome |= {"seconds": {"release": None, "hooked": 99.5}, "beside": {"release": None, "hooked": ["release"]}}
    outcome["problems"] = ["release: the engine did not come up or did not end"]
    page = evidence.render(h200x2).splitlines()
    assert "| 1 x 512 | not measured (1.00, 2.00, 3.00, 4.00) | - |" in page
    assert "| 64 x 512 | 2.00 (1.90 to 2.10) | - |" in page
    assert "Engine release: no result." in page
    assert "Engine hooked: 99.5 s, beside release." in page
    assert "Problems: release: the engine did not come up or did not end." in page


@pytest.mark.parametrize("p2p", [None, {"data_ok": False, "measured_gb_s": [[None, 388.0], [388.0, None]]}])
def test_a_transfer_without_a_measured_copy_has_no_share(evidence, h200x2, p2p):
    h200x2["facts"]["runner"]["p2p"] = p2p
    (pair,) = h200x2["steps"]["service"]["found"]["found"]["nixl"].values()
    pair["busy"] = "GPU 0 has 9 MiB in use"
    page = evidence.render(h200x2).splitlines()
    assert "| decode-0.gpu1 to prefill-0.gpu0 | cuda_ipc/cuda | 243.7 | 241.7 | - | - | - |" in page
    assert "prefill-0.gpu0 to decode-0.gpu1: bandwidth says little: GPU 0 has 9 MiB in use." in page


def test_the_time_of_a_run_is_from_its_first_step_to_its_last(evidence):
    steps = {"machine": {"ok": True, "at": 100.0, "seconds": 7.0}, "again": {"ok": True, "at": 150.0, "seconds": 20.0}}
    assert "with what ran between them: 70 s." in evidence.render({"steps": steps})
    del steps["again"]["at"]  # a run of an earlier version
    assert "between them" not in evidence.render({"steps": steps})


@pytest.mark.parametrize(("count", "words"), [(1, []), (2, ["--gpus", "0", "1"])])
def test_the_engines_run_side_by_side_where_there_are_gpus_for_it(evidence, monkeypatch, tmp_path, count, words):
    run = evidence.Run(tmp_path, tmp_path)
    run.results["cards"] = {"runner": [{**CARD, "index": str(i)} for i in range(count)]}
    called = []

    def command(argv, **_options):
        if "hooked_engine.py" in str(argv[1]):
            called.extend(argv[argv.index("--out") + 2 :])
            (tmp_path / "kernels").mkdir()
            (tmp_path / "kernels/outcome.json").write_text("{}")
        return '{"_meta": {"hostvars": {"runner": {"ansible_connection": "local"}}}}', 1.0

    monkeypatch.setattr(run, "command", command)
    monkeypatch.setattr(run, "hosts", lambda argv: {})
    assert evidence.kernels(run) == {"seconds": 1.0, "outcome": {}}
    assert called == words


def test_a_service_that_failed_a_test_keeps_what_was_read(evidence, monkeypatch, tmp_path):
    def command(argv, timeout=900, check=True, environment=None):
        path = pathlib.Path(environment["PDSTACK_GPU_FOUND"])
        assert not path.exists()  # what an earlier run left is not this one's
        path.write_text('{"limits": {"decode-0": {"locked memory": "8388608", "open files": "20000"}}}')
        raise evidence.Failed("1 failed, 8 passed")

    (tmp_path / "service.json").write_text("{}")
    monkeypatch.setattr(evidence.Run, "command", lambda self, *args, **options: command(*args, **options))
    assert call(evidence, monkeypatch, tmp_path, "service", "page") == "failed: service"
    page = (tmp_path / "results.md").read_text()
    assert "| decode-0 | - | - | - | 8388608 | 20000 |" in page
    assert "Tests of the service: not all passed." in page
    assert "1 failed, 8 passed" in page
