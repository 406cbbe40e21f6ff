"""Another release and another commit of the model, in place; and a release that does not serve, taken back."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import scenario

OLD, NEW = "cpu-0.5.22", "cpu-0.5.23"


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    """Another commit of the lab's model: the same shape, other weights."""
    command = [sys.executable, scenario.ROOT / "tools/tiny_model", "--seed", "1"]
    made = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {
        "repo": made["repo"],
        "revision": made["commit"],
        "source": f"controller://{made['folder']}",
        "served_name": "tiny",
        "heads": 4,
    }


def release(host: Any, link: str) -> str:
    return host.check_output(f"readlink /opt/pdstack/{link}").removeprefix("releases/").rpartition("-")[0]


def processes(host: Any, plan: dict[str, Any]) -> list[str]:
    """The main process of each unit that serves; the canary's comes and goes."""
    units = [item["unit"] for item in plan["instances"] + plan["routers"]]
    return [host.check_output("systemctl show --value -p MainPID %s", unit) for unit in units]


def running(host: Any, plan: dict[str, Any]) -> set[str]:
    """The releases that the processes of all units have mapped."""
    found = set()
    for pid in processes(host, plan):
        found |= set(host.check_output(f"grep -o '/opt/pdstack/releases/[^/]*' /proc/{pid}/maps").split())
    return {path.rpartition("/")[2].rpartition("-")[0] for path in found}


def answer(host: Any, plan: dict[str, Any]) -> str:
    router = plan["routers"][0]
    body = json.dumps({"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0})
    url = f"http://{router['address']}:{router['ports']['http']}/v1/completions"
    text = host.check_output(f"curl -sS -m 60 -H 'Content-Type: application/json' -d '{body}' {url}")
    return json.loads(text)["choices"][0]["text"]


def plan_of(host: Any) -> dict[str, Any]:
    return json.loads(host.check_output("cat /etc/pdstack/plan.json"))


def test_both_are_upgraded_in_place(host: Any, model: dict[str, Any]) -> None:
    before = plan_of(host)
    assert (before["release"], release(host, "current"), running(host, before)) == (OLD, OLD, {OLD})
    old_answer = answer(host, before)
    intent = ["-e", f"pd_release={NEW}", "-e", json.dumps({"pd_model": model})]
    done = scenario.playbook("deploy_pd.yml", *intent)
    assert done.returncode == 0, done.stdout[-6000:]
    after = plan_of(host)
    assert (after["release"], after["model"]["revision"]) == (NEW, model["revision"])
    assert (release(host, "current"), release(host, "previous"), running(host, after)) == (NEW, OLD, {NEW})
    # verify compared it with transformers on the new weights, and it is not what the old ones said.
    assert answer(host, after) != old_answer
    # GPUs, CPUs and ports stayed where they were.
    kept = ("name", "host", "gpus", "cpus", "memory_nodes", "ports")
    assert [[item[key] for key in kept] for item in after["instances"]] == [
        [item[key] for key in kept] for item in before["instances"]
    ]
    look = scenario.playbook("drift.yml", *intent)
    assert look.returncode == 0, look.stdout


@pytest.mark.skipif(not os.environ.get("PDSTACK_LONG"), reason="PDSTACK_LONG is not set: a release that fails to start")
def test_a_release_that_does_not_serve_is_taken_back(host: Any, model: dict[str, Any]) -> None:
    """Forward was proven above; here the way leads to a release whose engine ends at its start."""
    intent = ["-e", json.dumps({"pd_model": model})]
    before = plan_of(host)
    old_answer = answer(host, before)
    folder = host.check_output("readlink -f /opt/pdstack/previous")
    # A file that no comparison with the lock looks at, since Python writes it itself: the engine dies at its import.
    cached = f"{folder}/venv/lib/python3.11/site-packages/sglang/srt/__pycache__/server_args.cpython-311.pyc"
    host.check_output(f"cp -p {cached} /run/whole.pyc && truncate -s 100 {cached}")
    done = scenario.playbook("deploy_pd.yml", "-e", f"pd_release={OLD}", *intent)
    words = " ".join(done.stdout.split())
    assert done.returncode == 2, done.stdout[-6000:]
    assert f"{OLD} did not serve, so that this run went back: every host is on {NEW} again" in words
    after = plan_of(host)
    assert (release(host, "current"), after["release"], running(host, after)) == (NEW, NEW, {NEW})
    assert answer(host, after) == old_answer
    host.check_output(f"cp -p /run/whole.pyc {cached}")


@pytest.fixture(scope="module")
def unloadable(model: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A commit of the model whose files are all what it says, and whose architecture no engine knows."""
    folder = tmp_path_factory.mktemp("unloadable")
    maker = runpy.run_path(str(scenario.ROOT / "tools/tiny_model"))
    content = maker["files"](1)
    content["config.json"] = content["config.json"].replace(b"LlamaForCausalLM", b"NobodyForCausalLM")
    listing = maker["listing"](model["repo"], content)
    maker["write"](folder, {**content, "pdstack-listing.json": json.dumps(listing).encode()})
    return {**model, "revision": listing["commit"], "source": f"controller://{folder}"}


@pytest.mark.skipif(not os.environ.get("PDSTACK_LONG"), reason="PDSTACK_LONG is not set: as the other")
def test_a_commit_of_the_model_that_does_not_serve_is_taken_back(
    host: Any, model: dict[str, Any], unloadable: dict[str, Any]
) -> None:
    before = plan_of(host)
    old_answer = answer(host, before)
    done = scenario.playbook("deploy_pd.yml", "-e", f"pd_release={NEW}", "-e", json.dumps({"pd_model": unloadable}))
    words = " ".join(done.stdout.split())
    assert done.returncode == 2, done.stdout[-6000:]
    assert f"commit {unloadable['revision'][:12]} of the model did not serve, so that this run went back" in words
    assert f"every host is on commit {model['revision'][:12]} of the model again, and it is proven" in words
    after = plan_of(host)
    assert (after["model"], after["release"], release(host, "current")) == (before["model"], NEW, NEW)
    assert answer(host, after) == old_answer
    look = scenario.playbook("drift.yml", "-e", f"pd_release={NEW}", "-e", json.dumps({"pd_model": model}))
    assert look.returncode == 0, look.stdout


@pytest.mark.skipif(not os.environ.get("PDSTACK_LONG"), reason="PDSTACK_LONG is not set: as the other")
@pytest.mark.parametrize("reached", ["plan", "switch"])
def test_what_a_killed_run_switched_to_is_taken_back_by_the_next_one(
    host: Any, model: dict[str, Any], unloadable: dict[str, Any], reached: str
) -> None:
    """Release and commit of the model at once; the kill comes between the switch, or the plan, and the verification."""
    before = plan_of(host)
    old_answer = answer(host, before)
    assert (before["release"], before["model"]["revision"]) == (NEW, model["revision"])
    intent = ["-e", json.dumps({"pd_release": OLD, "pd_model": unloadable})]
    sign = {
        "plan": f"grep -q {unloadable['revision']} /etc/pdstack/plan.json",
        "switch": "readlink /opt/pdstack/current",
    }
    killed = subprocess.Popen(
        scenario.command("deploy_pd.yml", *intent),
        cwd=scenario.ROOT,
        env=scenario.env(),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    end = time.monotonic() + 300
    while time.monotonic() < end and killed.poll() is None:
        if (seen := host.run(sign[reached])).rc == 0 and (reached == "plan" or f"/{OLD}-" in seen.stdout):
            break
        time.sleep(0.1)
    assert killed.poll() is None, "it ended before its kill"
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert release(host, "current") == OLD
    assert (plan_of(host)["model"]["revision"] == unloadable["revision"]) == (reached == "plan")

    broken = {"plan": {}, "switch": {"nixl_ucx_forbidden_lanes": ["cma"]}}[reached]  # the phase right after the switch
    done = scenario.playbook("deploy_pd.yml", *intent, "-e", json.dumps(broken))
    words = " ".join(done.stdout.split())
    assert done.returncode == 2, done.stdout[-6000:]
    assert f"every host is on {NEW}" in words
    assert "again, and it is proven" in words
    after = plan_of(host)
    assert (after["model"], after["release"], release(host, "current")) == (before["model"], NEW, NEW)
    assert running(host, after) == {NEW}
    assert answer(host, after) == old_answer
    look = scenario.playbook("drift.yml", "-e", f"pd_release={NEW}", "-e", json.dumps({"pd_model": model}))
    assert look.returncode == 0, look.stdout


def test_one_playbook_goes_back_to_the_release_before(host: Any, model: dict[str, Any]) -> None:
    intent = ["-e", json.dumps({"pd_model": model})]
    before = plan_of(host)
    old_answer = answer(host, before)
    assert (release(host, "current"), release(host, "previous")) == (NEW, OLD)
    done = scenario.playbook("rollback.yml", *intent)
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"Set pd_release: {OLD} in the inventory now" in " ".join(done.stdout.split())
    after = plan_of(host)
    assert (after["release"], release(host, "current"), release(host, "previous")) == (OLD, OLD, NEW)
    assert running(host, after) == {OLD}
    assert answer(host, after) == old_answer  # the same weights, another release of the engine
    assert [item["ports"] for item in after["instances"]] == [item["ports"] for item in before["instances"]]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"nixl_ucx_forbidden_lanes": ["cma"]}, "UCX moves the KV cache over cma/memory"),
        pytest.param(
            {"pd_model": {"source": "controller:///nonexistent", "revision": 40 * "1"}},
            "/nonexistent",
            marks=pytest.mark.skipif(
                not os.environ.get("PDSTACK_LONG"), reason="PDSTACK_LONG is not set: as the other"
            ),
        ),
    ],
    ids=["transport", "checkpoint"],
)
def test_a_release_that_fails_before_it_serves_leaves_what_serves(
    host: Any, model: dict[str, Any], broken: dict[str, Any], words: str
) -> None:
    """`current` was switched already in those phases; nothing has been restarted then."""
    before = plan_of(host)
    assert (before["release"], release(host, "current")) == (OLD, OLD)
    pids = processes(host, before)
    intent = {"pd_release": NEW, **broken, "pd_model": {**model, **broken.get("pd_model", {})}}
    done = scenario.playbook("deploy_pd.yml", "-e", json.dumps(intent))
    output = " ".join(done.stdout.split())
    assert done.returncode == 2, done.stdout[-6000:]
    assert words in output
    assert f"every host is on {OLD} again, and what runs there was not touched" in output
    assert (release(host, "current"), running(host, before)) == (OLD, {OLD})
    assert processes(host, before) == pids
    assert host.run("test -e /run/pdstack/deploy.lock").rc == 1, "the canary would look away"
    assert plan_of(host) == before
