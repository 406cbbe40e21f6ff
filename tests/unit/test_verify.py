"""The proof looks at the running machine, and each of its checks can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pdstack import verify


def process(root: Path, pid: int, unit: str, cpus: str, policy: str) -> None:
    folder = root / str(pid)
    folder.mkdir()
    (folder / "cgroup").write_text(f"0::/system.slice/system-pd.slice/{unit}\n")
    (folder / "status").write_text(f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\n")
    (folder / "numa_maps").write_text(f"00400000 {policy} file=/usr/bin/python3 mapped=1\n")


def test_pinning_holds_for_every_process(tmp_path: Path) -> None:
    process(tmp_path, 10, "pd-decode@0.service", "32-63", "bind:1")
    process(tmp_path, 11, "pd-decode@0.service", "32-63", "bind:1")
    process(tmp_path, 12, "pd-prefill@0.service", "0-31", "bind:0")
    checks = verify.check_pinning("pd-decode@0.service", "32-63", "1", str(tmp_path))
    assert [(check.subject, check.ok) for check in checks] == [
        ("pd-decode@0.service CPUs of 2 processes", True),
        ("pd-decode@0.service memory policy of 2 processes", True),
    ]


@pytest.mark.parametrize(("gone", "subject"), [("status", "CPUs"), ("numa_maps", "memory policy")])
def test_what_can_be_read_of_no_process_is_not_proven(tmp_path: Path, gone: str, subject: str) -> None:
    process(tmp_path, 10, "pd-decode@0.service", "32-63", "bind:1")
    process(tmp_path, 11, "pd-decode@0.service", "32-63", "bind:1")
    (tmp_path / "10" / gone).unlink()  # it has ended
    assert all(check.ok for check in verify.check_pinning("pd-decode@0.service", "32-63", "1", str(tmp_path)))
    (tmp_path / "11" / gone).unlink()
    (failed,) = [c for c in verify.check_pinning("pd-decode@0.service", "32-63", "1", str(tmp_path)) if not c.ok]
    assert subject in failed.subject
    assert failed.found == "it can be read of none of them"


@pytest.mark.parametrize(("cpus", "policy"), [("0-63", "bind:1"), ("32-63", "default"), ("32-63", "bind:0")])
def test_one_process_that_strays_fails_and_is_named(tmp_path: Path, cpus: str, policy: str) -> None:
    process(tmp_path, 10, "pd-decode@0.service", "32-63", "bind:1")
    process(tmp_path, 11, "pd-decode@0.service", cpus, policy)
    failed = [
        check for check in verify.check_pinning("pd-decode@0.service", "32-63", "1", str(tmp_path)) if not check.ok
    ]
    assert len(failed) == 1
    assert "pid 11" in failed[0].found


def test_a_unit_without_processes_fails(tmp_path: Path) -> None:
    (check,) = verify.check_pinning("pd-decode@0.service", "0", "", str(tmp_path))
    assert not check.ok


RANK = {"calls": {"sparse_mla": 43, "indexer": 21}, "silent": [], "broken": [], "captured": True}


def ranks(root: Path, **reports: Any) -> dict[str, str]:
    """A unit of three processes, the last two of which are ranks with a report; and the planned environment."""
    (root / "run").mkdir()
    for pid in (20, 21, 22):
        process(root, pid, "pd-decode@0.service", "0", "default")
    for name, report in reports.items():
        text = report if isinstance(report, str) else json.dumps(RANK | report)
        (root / "run" / f"kernels-{name.removeprefix('pid')}.json").write_text(text)
    return {"PDSTACK_KERNELS": "on", "PDSTACK_KERNELS_REPORT": f"{root}/run/kernels-{{pid}}.json"}


def kernels(root: Path, env: dict[str, str]) -> verify.Check:
    (check,) = verify.check_kernels("pd-decode@0.service", env, str(root))
    return check


def test_kernels_of_every_rank_are_live(tmp_path: Path) -> None:
    check = kernels(tmp_path, ranks(tmp_path, pid21={}, pid22={}))
    assert check.ok
    assert check.found == "2 ranks: indexer, sparse_mla"


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({"broken": ["indexer"]}, "indexer computes wrongly on this GPU (pid 22)"),
        ({"silent": ["hc_pre"]}, "hc_pre is not in the decode graphs (pid 22)"),
        ("{", "no readable report of process 22"),
    ],
)
def test_one_rank_without_a_kernel_fails_when_on(tmp_path: Path, report: Any, said: str) -> None:
    check = kernels(tmp_path, ranks(tmp_path, pid21={}, pid22=report))
    assert not check.ok
    assert said in check.found


def test_a_prefill_rank_has_no_graphs_to_be_silent_in(tmp_path: Path) -> None:
    env = ranks(tmp_path, pid21={"silent": ["sparse_mla"], "captured": False})
    assert kernels(tmp_path, env).ok


def test_the_report_of_a_process_that_is_gone_does_not_count(tmp_path: Path) -> None:
    check = kernels(tmp_path, ranks(tmp_path, pid99={}))
    assert not check.ok
    assert check.found == "no rank has reported: the plugin was not loaded"


def test_auto_reports_and_passes(tmp_path: Path) -> None:
    env = ranks(tmp_path, pid21={"broken": ["indexer"]}) | {"PDSTACK_KERNELS": "auto"}
    check = kernels(tmp_path, env)
    assert check.ok
    assert "indexer computes wrongly" in check.found


def test_nothing_is_asked_of_an_instance_without_the_extension(tmp_path: Path) -> None:
    assert verify.check_kernels("pd-decode@0.service", {"SGLANG_PLUGINS": "none"}, str(tmp_path)) == []


def answer(status: int, body: str) -> verify.Http:
    return lambda method, url, payload: verify.Reply(status, body)


INFO = json.dumps({"tp_size": 4, "disaggregation_mode": "decode", "disable_overlap_schedule": True, "model_path": "/m"})
PLANNED = {"tp-size": 4, "disaggregation-mode": "decode", "disable-overlap-schedule": True}


@pytest.mark.parametrize("reported", [4, 4.0])
def test_running_configuration_equals_the_plan(reported: float) -> None:
    info = json.dumps({**json.loads(INFO), "tp_size": reported})  # engines turn some integers into floats
    checks = verify.check_configuration("decode-0", "u", PLANNED, answer(200, info))
    assert [check.ok for check in checks] == [True]


@pytest.mark.parametrize(("reported", "ok"), [("mooncake", True), ("nixl", False)])
def test_mooncake_over_tcp_is_reported_as_mooncake(reported: str, ok: bool) -> None:
    planned = {"disaggregation-transfer-backend": "mooncake_tcp"}
    info = json.dumps({"disaggregation_transfer_backend": reported})
    checks = verify.check_configuration("decode-0", "u", planned, answer(200, info))
    assert all(check.ok for check in checks) is ok


@pytest.mark.parametrize(
    ("args", "status", "body"),
    [
        ({**PLANNED, "tp-size": 8}, 200, INFO),
        ({**PLANNED, "no-such-option": 1}, 200, INFO),
        ({**PLANNED, "disaggregation-mode": "prefill"}, 200, INFO),
        (PLANNED, 404, ""),
        (PLANNED, 0, "ConnectionRefusedError"),
        (PLANNED, 200, "<html>"),
    ],
    ids=["value", "missing", "role", "404", "refused", "html"],
)
def test_another_running_configuration_fails(args: dict[str, Any], status: int, body: str) -> None:
    assert not all(check.ok for check in verify.check_configuration("decode-0", "u", args, answer(status, body)))


EXACT = verify.GoldenCase("q", expect=" brown fox")
PLAIN = json.dumps({"choices": [{"text": " brown fox"}]})
STREAM = 'data: {"choices": [{"text": " brown"}]}\n\ndata: {"choices": [{"text": " fox"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(("body", "stream"), [(PLAIN, False), (STREAM, True)])
def test_the_expected_text_passes(body: str, stream: bool) -> None:
    assert verify.check_completion("u", "m", EXACT, answer(200, body), stream).ok


@pytest.mark.parametrize(
    ("status", "body", "stream"),
    [
        (200, PLAIN.replace("fox", "dog"), False),
        (200, STREAM.replace("fox", "dog"), True),
        (200, STREAM.replace("data: [DONE]\n\n", ""), True),
        (200, "", True),
        (200, '{"choices": []}', False),
        (503, '{"error": "no decode worker"}', False),
        (0, "timed out", True),
    ],
    ids=["other-text", "other-stream", "cut-stream", "empty-stream", "no-choice", "503", "no-answer"],
)
def test_anything_else_fails(status: int, body: str, stream: bool) -> None:
    assert not verify.check_completion("u", "m", EXACT, answer(status, body), stream).ok


def test_a_pattern_must_match() -> None:
    case = verify.GoldenCase("capital", pattern="Paris")
    assert verify.check_completion("u", "m", case, answer(200, '{"choices": [{"text": " Paris."}]}'), False).ok
    assert not verify.check_completion("u", "m", case, answer(200, PLAIN), False).ok


@pytest.mark.parametrize(
    "text", ["", "{", "null", "5", '"x"', "[]", "[[]]", "{}", '{"choices": 5}', '{"choices": [5]}']
)
def test_an_answer_of_any_other_shape_is_a_check_that_failed_and_no_traceback(tmp_path: Path, text: str) -> None:
    """Whatever listens on the port, and whatever a rank that was killed has left."""
    case = verify.GoldenCase("p", 1, pattern=".")
    answer = lambda method, url, body: verify.Reply(200, text)  # noqa: E731
    streamed = lambda method, url, body: verify.Reply(200, f"data: {text}\n\ndata: [DONE]\n\n")  # noqa: E731
    checks = [
        *verify.check_configuration("decode-0", "http://h/server_info", {"tp-size": 4}, answer),
        verify.check_completion("http://h", "m", case, answer, stream=False),
        verify.check_completion("http://h", "m", case, streamed, stream=True),
        kernels(tmp_path, ranks(tmp_path, pid21=text, pid22={})),
    ]
    assert [check.ok for check in checks] == [False] * 4
