"""The report of drift: from what tasks return in check mode, and from hardware."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pdstack import codec, drift, facts, files, units
from pdstack.refusal import Refusal

HOST = facts.HostFacts(
    host="a",
    gpus=[
        facts.Gpu(pci="0000:06:00.0", uuid="GPU-1", name="RTX PRO 6000", memory_bytes=96),
        facts.Gpu(pci="0000:07:00.0", uuid="GPU-2", name="RTX PRO 6000", memory_bytes=96),
    ],
    driver=facts.Driver(state="ok", loaded_version="595.1", library_version="595.1", cuda_version=13020),
    numa=[facts.NumaNode(0, "0-31"), facts.NumaNode(1, "32-63")],
)


def of(result: dict[str, Any], action: str = "pd_files", task: str = "role : part | Write it") -> list[drift.Item]:
    return drift.of_result("a", task, action, result)


def test_an_unchanged_result_is_no_item() -> None:
    assert of({"changed": False, "paths": {}}) == []


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("create", "missing"),
        ("update", "edited"),
        ("comments", "comments edited"),
        ("attributes", "owner or mode changed"),
        ("remove", "not ours"),
    ],
)
def test_each_file_is_an_item_with_what_differs(action: str, words: str) -> None:
    diff = {"after_header": f"/etc/x ({action})", "before": "a: 1\n", "after": "a: 2\n"}
    (item,) = of({"changed": True, "paths": {"/etc/x": action}, "diff": [diff]})
    assert (item.host, item.kind, item.item, item.repair) == ("a", "file", "/etc/x", "deploy_pd.yml")
    assert words in item.found
    assert item.why == ("" if action in ("create", "remove") else "-a: 1; +a: 2")


def test_every_action_of_pd_files_has_words() -> None:
    """Read from the type's own documentation, which lists them."""
    listed = (files.Change.__doc__ or "").split("``action`` is ")[1].split(".")[0]
    names = [name for name in ("create", "update", "comments", "attributes", "remove") if name in listed]
    assert len(names) == 5
    for name in names:
        (item,) = of({"changed": True, "paths": {"/x": name}, "diff": []})
        assert item.found != name


def test_each_unit_is_an_item_with_its_reason() -> None:
    todo = units.UnitsPlan(reload=True, restart=["b.service"], why={"b.service": "/x changed"})
    actions = {verb: getattr(todo, verb) for verb in ("reload", "enable", "disable", "stop", "start", "restart")}
    found = of({"changed": True, "actions": actions, "reasons": todo.why}, "pd_units")
    assert [(item.item, item.found, item.why) for item in found][1:] == [("b.service", "to restart", "/x changed")]
    assert found[0].found == "needs daemon-reload"


def test_each_step_of_a_release_is_an_item() -> None:
    step = {"action": "repair", "subject": "cpu-1-abc", "why": "engine: torch 1 is not there"}
    (item,) = of({"changed": True, "steps": [step]}, "pd_venv")
    assert (item.kind, item.item, item.found, item.why) == ("release", "cpu-1-abc", "repair", step["why"])


def test_a_checkpoint_is_told_by_its_units_and_its_files() -> None:
    diff = {"before": "a.json: sha256:1\n", "after": "a.json: sha256:2\n"}
    timer = {"changed": True, "service_files": ["pd-scrub.timer"]}
    assert [item.item for item in of(timer, "pd_checkpoint", "checkpoint : Bring it")] == ["pd-scrub.timer"]
    both = of({**timer, "diff": diff}, "pd_checkpoint", "checkpoint : Bring it")
    assert [(item.item, item.why) for item in both][1:] == [("Bring it", "-a.json: sha256:1; +a.json: sha256:2")]


def test_another_module_is_told_by_its_task_and_diff() -> None:
    diff = {"before": {"shell": "/bin/sh"}, "after": {"shell": "/usr/sbin/nologin"}}
    (item,) = of({"changed": True, "diff": diff}, "ansible.builtin.user", "gpu_host : present | Make the service user")
    assert (item.kind, item.item) == ("user", "Make the service user")
    assert item.why == "-shell: /bin/sh; +shell: /usr/sbin/nologin"


def test_workers_that_a_repair_takes_out_are_no_drift_and_those_that_nobody_planned_are() -> None:
    def result(out: list[str]) -> dict[str, Any]:
        diff = {"before": "", "after": "router-0 remove http://a:1\n"}
        return {"changed": True, "diff": diff, "out": out}

    assert of(result(["prefill-0"]), "pd_router", "pd_service : roll | Take the workers out") == []
    assert [item.item for item in of(result([]), "pd_router", "pd_service : Keep the workers")] == ["Keep the workers"]


def test_checks_that_do_not_hold_are_items() -> None:
    checks = [
        {"subject": "decode-0 tp-size", "ok": False, "found": "2", "wanted": "4"},
        {"subject": "x", "ok": True, "found": "", "wanted": ""},
    ]
    (item,) = of({"changed": False, "failed": True, "checks": checks}, "pd_verify")
    assert (item.kind, item.item, item.found, item.why) == ("process", "decode-0 tp-size", "2", "wanted: 4")


def test_the_hardware_that_was_deployed_on_is_no_drift() -> None:
    assert drift.hardware(HOST, drift.hardware_of(HOST)) == []
    assert drift.hardware(HOST, {}) == []


def test_another_gpu_a_lost_gpu_and_another_driver_are_named() -> None:
    baseline = drift.hardware_of(HOST)
    swapped = replace(
        HOST, gpus=[replace(HOST.gpus[0], uuid="GPU-9")], driver=replace(HOST.driver, library_version="600")
    )
    found = {item.item: (item.found, item.why) for item in drift.hardware(swapped, baseline)}
    assert found == {
        "GPU 0000:06:00.0 uuid": ("GPU-9", "recorded at the deployment: GPU-1"),
        "GPU 0000:07:00.0": ("gone", "recorded at the deployment: RTX PRO 6000 GPU-2"),
        "driver library": ("600", "recorded at the deployment: 595.1"),
    }
    assert [item.item for item in drift.hardware(HOST, {**baseline, "gpus": baseline["gpus"][:1]})] == [
        "GPU 0000:07:00.0"
    ]


@pytest.mark.parametrize(
    "damaged",
    [{"gpus": 3}, {"gpus": [5]}, {"gpus": [{}]}, {"gpus": []}, {"gpus": [], "driver": [], "numa": {}}, {"x": 1}],
)
def test_a_damaged_baseline_is_told_and_put_right_by_a_deployment(damaged: dict[str, Any]) -> None:
    (item,) = drift.hardware(HOST, damaged)
    assert (item.item, item.found) == ("/etc/pdstack/baseline.json", "damaged")
    assert item.repair == drift.DEPLOY


def test_the_content_of_the_baseline_is_told_as_hardware_alone() -> None:
    assert of({"changed": True, "paths": {drift.BASELINE: "update"}, "diff": []}) == []
    assert len(of({"changed": True, "paths": {drift.BASELINE: "create"}, "diff": []})) == 1


def test_refusals_are_told_by_host() -> None:
    refusals = [Refusal("a port 8000", "held by x", "free", "stop it"), Refusal("pd_topology", "1 GPU", "2", "add")]
    items = drift.of_refusals("in use", refusals, ["a", "b"])
    assert [(item.host, item.item, item.repair) for item in items] == [
        ("a", "port 8000", "stop it"),
        ("all hosts", "pd_topology", "add"),
    ]


def test_the_exit_code_says_none_drift_or_error() -> None:
    item = drift.Item("a", "file", "/x", "edited", "")
    assert drift.Report().exit_code == 0
    assert drift.Report(items=[item]).exit_code == 2
    assert drift.Report(items=[item], failures=[drift.Failure("b", "t", "unreachable")]).exit_code == 1


HOLDER = {"who": "alice@ctl1", "place": "x", "pid": 100, "started": 5, "what": "inventory mine", "since": 1000.0}


def test_what_a_running_deployment_has_not_finished_is_no_drift() -> None:
    """Found at the end of a look, too: what it saw until then may be half-done work."""
    report = drift.Report(items=[drift.Item("a", "file", "/x", "edited", "")], hosts=["a", "b"])
    report.held("a", {"holder": HOLDER, "alive": True, "told": "a is held by alice@ctl1, process 100"})
    document = report.document()
    assert (document["result"], document["exit_code"], document["items"]) == ("under way", 3, [])
    (one,) = document["deploying"]
    assert (one["host"], one["who"], one["since"], one["alive"]) == ("a", "alice@ctl1", 1000.0, True)
    assert "UNDER WAY a is held by alice@ctl1, process 100\nnot judged: a deployment is under way" in report.text()
    assert "managed items" not in report.text()


def test_a_deployment_that_may_be_dead_hides_nothing() -> None:
    answer = {"holder": HOLDER, "alive": None, "told": "a is held by alice@ctl1"}
    report = drift.Report(hosts=["a"])
    report.held("a", answer)
    report.held("a", answer)  # asked at the beginning and at the end
    assert (report.exit_code, len(report.deploying)) == (0, 1)
    report.add([drift.Item("a", "file", "/x", "edited", "")])
    document = report.document()
    assert (document["result"], document["exit_code"], len(document["items"])) == ("under way", 3, 1)
    assert "1 items differ (where that deployment still runs, it may be its half-done work" in report.text()
    assert drift.Report(failures=[drift.Failure("b", "t", "unreachable")], deploying=report.deploying).exit_code == 1


def test_the_document_and_the_table_say_the_same() -> None:
    report = drift.Report(hosts=["a"], managed={"a": ["/x", "/y"]}, seconds=1.5)
    report.add([drift.Item("a", "file", "/x", "edited", "-1; +2")])
    report.add([drift.Item("a", "file", "/x", "edited", "-1; +2")])  # two tasks that say one thing
    document = report.document()
    assert (document["result"], document["exit_code"], len(document["items"])) == ("drift", 2, 1)
    assert codec.load(drift.Item, document["items"][0]) == report.items[0]
    text = report.text()
    assert "a     file  /x    edited  deploy_pd.yml" in text
    assert text.endswith("drift in 1 items: 2 managed items on 1 host compared in 1.5 s")


def test_what_was_compared_is_known_whether_it_differs_or_not() -> None:
    assert drift.managed_of("t", "pd_files", {"declared": ["/x"]}) == ["/x"]
    # The user is made where the look before finds another one: the same item.
    assert drift.managed_of("gpu_host : Make it", "ansible.builtin.user", {"name": "pdstack"}) == ["user: pdstack"]
    assert drift.managed_of("gpu_host : Look", "pd_host_info", {"user": {"name": "pdstack"}}) == ["user: pdstack"]
    assert drift.managed_of("Look", "pd_host_info", {"user": {}}) == []
    assert drift.managed_of("t", "ansible.builtin.debug", {}) == []
