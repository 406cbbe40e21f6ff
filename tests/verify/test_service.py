"""What runs on the host is what the plan says: read from systemd, /proc and HTTP."""

from __future__ import annotations

import json

import pytest

UNITS = ("pd-prefill@0.service", "pd-decode@0.service", "pd-router.service")


def show(host, unit: str, name: str) -> str:
    return host.check_output(f"systemctl show --value -p {name} '{unit}'")


def curl(host, item, path: str, body: dict | None = None) -> tuple[int, str]:
    """Ask an instance or router of the plan from its own host; return the status and the body."""
    data = f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'" if body else ""
    url = f"http://{item['address']}:{item['ports']['http']}{path}"
    answer, _, status = host.check_output(f"curl -sS -m 60 -w '\\n%{{http_code}}' {data} {url}").rpartition("\n")
    return int(status), answer


def complete(host, plan, prompt: str, stream: bool = False) -> str:
    body = {
        "model": plan["model"]["served_name"],
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "stream": stream,
    }
    status, answer = curl(host, plan["routers"][0], "/v1/completions", body)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("unit", UNITS)
def test_unit_is_enabled_and_running(host, unit):
    assert show(host, unit, "ActiveState") == "active"
    assert show(host, unit, "UnitFileState") == "enabled"
    assert show(host, unit, "User") == "pdstack"


def test_target_starts_at_boot(host):
    assert host.service("pd.target").is_enabled


def test_no_unit_has_failed(host):
    assert host.check_output("systemctl list-units --failed --no-legend --plain 'pd*'") == ""


def test_files_of_the_units_pass_systemd(host):
    done = host.run("systemd-analyze verify pd-prefill@0.service pd-decode@0.service pd-router.service pd.target")
    assert done.rc == 0, done.stderr


def test_processes_are_pinned_as_planned(host, plan):
    for instance in plan["instances"]:
        found = host.check_output(f"grep -lF '/{instance['unit']}' /proc/[0-9]*/cgroup 2>/dev/null || true")
        pids = [path.split("/")[2] for path in found.split()]
        assert len(pids) >= 2, "an engine has a parent and at least a scheduler"
        for pid in pids:
            status = host.file(f"/proc/{pid}/status").content_string
            assert f"Cpus_allowed_list:\t{instance['cpus']}\n" in status
            assert f" bind:{instance['memory_nodes']} " in host.check_output(f"head -n 1 /proc/{pid}/numa_maps")


def test_prefill_and_decode_have_different_cpus(plan):
    prefill, decode = (next(i for i in plan["instances"] if i["role"] == role) for role in ("prefill", "decode"))
    assert prefill["cpus"] != decode["cpus"]
    assert {gpu["pci"] for gpu in prefill["gpus"]}.isdisjoint(gpu["pci"] for gpu in decode["gpus"])


def test_the_same_answer_plain_and_streamed(host, plan):
    plain = json.loads(complete(host, plan, "the quick brown fox"))
    assert plain["usage"]["completion_tokens"] == 8
    events = [
        line[6:]
        for line in complete(host, plan, "the quick brown fox", stream=True).splitlines()
        if line.startswith("data: ")
    ]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1] if json.loads(event)["choices"])
    assert text == plain["choices"][0]["text"] != ""


def test_a_request_goes_through_both_engines(host, plan):
    """A worker of a pair refuses a request that did not come through the router with a bootstrap room."""
    decode = next(i for i in plan["instances"] if i["role"] == "decode")
    assert curl(host, decode, "/generate", {"text": "x"})[0] == 400
    counts = {}
    for role in ("prefill", "decode"):
        unit = next(i["unit"] for i in plan["instances"] if i["role"] == role)
        counts[unit] = len(host.check_output(f"journalctl -o cat --no-pager -u '{unit}'").splitlines())
    complete(host, plan, "a request that leaves a trace on both sides")
    for unit, before in counts.items():
        assert len(host.check_output(f"journalctl -o cat --no-pager -u '{unit}'").splitlines()) > before, unit


def test_router_knows_both_workers_as_healthy(host, plan):
    workers = json.loads(curl(host, plan["routers"][0], "/workers")[1])["workers"]
    assert {worker["url"] for worker in workers if worker["is_healthy"]} == {
        f"http://{item['address']}:{item['ports']['http']}" for item in plan["instances"]
    }


def test_only_the_expected_units_have_restarted(host):
    """After a breakage and its repair, exactly what it touches runs a new process."""
    record = host.file("/run/pdstack-test/record.json")
    if not record.exists:
        return  # nothing was broken yet
    record = json.loads(record.content_string)
    restarted = {unit for unit, pid in record["pids"].items() if show(host, unit, "MainPID") != pid}
    assert restarted == set(record["restarted"]), record["breakage"]


def test_processes_run_the_current_release(host):
    """Libraries that a process has mapped cannot lie about where they came from, a command line can."""
    target = host.check_output("readlink -f /opt/pdstack/current")
    assert host.file(f"{target}/manifest.json").exists
    for unit in UNITS:
        mapped = host.check_output(f"grep -o '/opt/pdstack/releases/[^/]*' /proc/{show(host, unit, 'MainPID')}/maps")
        assert set(mapped.split()) == {target}
