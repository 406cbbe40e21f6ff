"""What runs on each host is what the plan says: read from systemd, /proc and HTTP."""

from __future__ import annotations

import json
import socket

import pytest


def show(host, unit: str, name: str) -> str:
    return host.check_output(f"systemctl show --value -p {name} '{unit}'")


def curl(host, plan, item, path: str, body: dict | None = None, key: str = "api_key") -> tuple[int, str]:
    """Ask an instance or router of the plan from this host; return the status and the body.

    The key goes in by standard input, so that no process list has it.
    """
    data = f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'" if body else ""
    tls = plan["security"]["tls"] != "off" and item in plan["routers"]
    url = f"{'https' if tls else 'http'}://{item['address']}:{item['ports']['http']}{path}"
    header = f"printf 'Authorization: Bearer '; cat /etc/pdstack/credentials/{key} 2>/dev/null"
    command = f"({header}) | curl -sS -k -m 60 -H @- -w '\\n%{{http_code}}' {data} {url}"
    answer, _, status = host.check_output(command).rpartition("\n")
    return int(status), answer


def complete(host, plan, prompt: str, stream: bool = False) -> str:
    body = {
        "model": plan["model"]["served_name"],
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "stream": stream,
    }
    status, answer = curl(host, plan, plan["routers"][0], "/v1/completions", body)
    assert status == 200, answer
    return answer


def metric(host, plan, item, name: str) -> float:
    """The sum of an engine's metric over its labels."""
    lines = curl(host, plan, item, "/metrics")[1].splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    assert values, f"{item['name']} has no metric {name}"
    return sum(values)


def test_units_are_enabled_and_run_as_the_service_user(host, units):
    for unit in units:
        assert show(host, unit, "ActiveState") == "active"
        assert show(host, unit, "UnitFileState") == "enabled"
        assert show(host, unit, "User") == "pdstack"


def test_only_planned_units_are_there(host, units):
    """Nothing of an earlier plan or made by hand beside them."""
    listed = host.check_output("systemctl list-units --all --plain --no-legend 'pd-*@*' pd-router.service").splitlines()
    running = {line.split()[0] for line in listed if " active " in line}
    assert {unit for unit in running if not unit.startswith("pd-checkpoint@")} == set(units)


def test_target_starts_at_boot(host):
    assert host.service("pd.target").is_enabled


def test_no_unit_has_failed(host):
    assert host.check_output("systemctl list-units --failed --no-legend --plain 'pd*'") == ""


def test_unit_files_pass_systemd(host, units):
    done = host.run(f"systemd-analyze verify {' '.join(units)} pd.target")
    assert done.rc == 0, done.stderr


def test_processes_are_pinned_as_planned(host, instances):
    for instance in instances:
        found = host.check_output(f"grep -lF '/{instance['unit']}' /proc/[0-9]*/cgroup 2>/dev/null || true")
        pids = [path.split("/")[2] for path in found.split()]
        assert len(pids) >= 2, "an engine has a parent and at least a scheduler"
        for pid in pids:
            status = host.file(f"/proc/{pid}/status").content_string
            assert f"Cpus_allowed_list:\t{instance['cpus']}\n" in status
            assert f" bind:{instance['memory_nodes']} " in host.check_output(f"head -n 1 /proc/{pid}/numa_maps")


def test_processes_run_the_current_release(host, units):
    """Libraries that a process has mapped cannot lie about where they came from, a command line can."""
    target = host.check_output("readlink -f /opt/pdstack/current")
    assert host.file(f"{target}/manifest.json").exists
    for unit in units:
        mapped = host.check_output(f"grep -o '/opt/pdstack/releases/[^/]*' /proc/{show(host, unit, 'MainPID')}/maps")
        assert set(mapped.split()) == {target}


def test_nothing_in_the_engines_caches_is_another_users(host):
    """What a proof as root left there, an engine could not write to."""
    assert host.check_output("find /var/lib/pdstack/jit -mindepth 1 ! -user pdstack") == ""


def test_engines_map_no_file_of_the_checkpoint(host, plan, instances):
    """They have loaded it whole, so that a repair may replace a file under them: docs/checkpoint.md."""
    assert host.run(f"grep -lsF {plan['model']['path']}/ /proc/[0-9]*/maps").stdout == ""


def test_prefill_and_decode_share_neither_cpus_nor_gpus(plan):
    prefill, decode = (next(i for i in plan["instances"] if i["role"] == role) for role in ("prefill", "decode"))
    assert (prefill["host"], prefill["cpus"]) != (decode["host"], decode["cpus"])
    assert {(prefill["host"], gpu["pci"]) for gpu in prefill["gpus"]}.isdisjoint(
        (decode["host"], gpu["pci"]) for gpu in decode["gpus"]
    )


def test_the_same_answer_plain_and_streamed(host, plan):
    plain = json.loads(complete(host, plan, "the quick brown fox"))
    assert plain["usage"]["completion_tokens"] == 8
    streamed = complete(host, plan, "the quick brown fox", stream=True)
    events = [line[6:] for line in streamed.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1] if json.loads(event)["choices"])
    assert text == plain["choices"][0]["text"] != ""


def test_a_request_goes_through_prefill_and_decode(host, plan):
    """Each engine counts the request, and decode takes none that has not come by the router."""
    pair = [next(i for i in plan["instances"] if i["role"] == role) for role in ("prefill", "decode")]
    assert curl(host, plan, pair[1], "/generate", {"text": "x"})[0] == 400
    counter = "sglang:e2e_request_latency_seconds_count"
    complete(host, plan, "a first request, so that every counter exists")

    def counted() -> list[float]:
        before = [metric(host, plan, item, counter) for item in pair]
        complete(host, plan, "a request that both sides count")
        return [metric(host, plan, item, counter) - old for item, old in zip(pair, before, strict=True)]

    # Now and then a request of the canary comes between.
    assert [1, 1] in (counted(), counted(), counted())


def test_router_knows_both_workers_as_healthy(host, plan):
    if plan["routers"][0]["host"] != host.backend.get_hostname():
        return  # only that host has the key
    workers = json.loads(curl(host, plan, plan["routers"][0], "/workers", key="admin_key")[1])["workers"]
    assert {worker["url"] for worker in workers if worker["is_healthy"]} == {
        f"http://{item['address']}:{item['ports']['http']}" for item in plan["instances"]
    }


def test_a_stranger_reaches_no_engine(instances):
    """From this machine, which is in no inventory: refused at once, and not by silence."""
    for item in instances:
        for port in item["ports"].values():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((item["address"], port), timeout=3)


def test_only_the_expected_units_have_restarted(host, units):
    """After a breakage and its repair, exactly what it touches runs a new process."""
    file = host.file("/run/pdstack-test/record.json")
    if not file.exists:
        return  # nothing was broken yet
    record = json.loads(file.content_string)
    assert set(units) <= set(record["pids"])
    restarted = {unit for unit, pid in record["pids"].items() if show(host, unit, "MainPID") != pid}
    assert restarted == set(record["restarted"]), record["breakage"]


def test_the_router_sends_small_packets_at_once(host, plan):
    """Else the first token on a kept connection waits 40 ms: its journal says so once the option is set."""
    assert plan["routers"]
    for item in plan["routers"]:
        if item["host"] == host.backend.get_hostname():
            run = show(host, item["unit"], "InvocationID")
            journal = host.check_output(f"journalctl -o cat --no-pager _SYSTEMD_INVOCATION_ID={run}")
            assert f"port {item['ports']['http']} sends small packets at once" in journal
