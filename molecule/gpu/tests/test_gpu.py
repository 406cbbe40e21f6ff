"""A deployed GPU runner against its plan: read from systemd, /proc, the driver and HTTP."""

from __future__ import annotations

import json
import re

import pytest


def pids_of(host, unit):
    paths = host.check_output(f"grep -lF '/{unit}' /proc/[0-9]*/cgroup 2>/dev/null || true")
    return [path.split("/")[2] for path in paths.split()]


def test_systemd_is_process_1_and_no_unit_of_ours_failed(host):
    assert host.check_output("cat /proc/1/comm") == "systemd"
    assert host.check_output("systemctl list-units --failed --no-legend --plain 'pd*'") == ""


def test_every_process_has_the_planned_cpus_and_memory(host, instances, found):
    for instance in instances:
        pids = pids_of(host, instance["unit"])
        assert len(pids) >= 2, "an engine has a parent and at least a scheduler"
        for pid in pids:
            status = host.file(f"/proc/{pid}/status").content_string
            assert f"Cpus_allowed_list:\t{instance['cpus']}\n" in status
            if instance["memory_nodes"]:
                assert f" bind:{instance['memory_nodes']} " in host.check_output(f"head -n 1 /proc/{pid}/numa_maps")
        found.setdefault("pinned", {})[instance["name"]] = {"processes": len(pids), "cpus": instance["cpus"]}


def test_each_engine_uses_the_planned_gpus_and_no_other(host, instances, found):
    """By the driver's own account of which process has a context on which GPU.

    Not by open device files: an engine also opens the GPU that it hands its KV cache to.
    """
    listed = host.check_output("nvidia-smi --query-compute-apps=pid,gpu_uuid --format=csv,noheader").splitlines()
    contexts = [line.split(", ") for line in listed]
    for instance in instances:
        pids = pids_of(host, instance["unit"])
        used = {uuid for pid, uuid in contexts if pid in pids}
        found.setdefault("gpus", {})[instance["name"]] = sorted(used)
        assert used == {gpu["uuid"] for gpu in instance["gpus"]}


def test_the_kernel_gives_what_the_units_ask_for(host, instances, found):
    """From /proc: systemd reports what was asked for, not what a container's hard limit left of it."""
    for instance in instances:
        main = host.check_output(f"systemctl show --value -p MainPID {instance['unit']}")
        text = host.file(f"/proc/{main}/limits").content_string
        locked = re.search(r"Max locked memory\s+(\S+)", text)[1]
        files = re.search(r"Max open files\s+(\S+)", text)[1]
        found.setdefault("limits", {})[instance["name"]] = {"locked memory": locked, "open files": files}
        assert locked == "unlimited"


def test_engines_run_hardened_as_the_service_user(host, instances, found):
    for instance in instances:
        main = host.check_output(f"systemctl show --value -p MainPID {instance['unit']}")
        status = host.file(f"/proc/{main}/status").content_string
        assert host.check_output(f"stat -c %U /proc/{main}") == "pdstack"
        assert re.search(r"NoNewPrivs:\s+1", status)
        assert re.search(r"CapBnd:\s+0+\n", status)


def test_nothing_in_the_engines_caches_is_another_users(host):
    """What a proof as root left there, an engine could not write to: the driver's own cache is below HOME."""
    assert host.check_output("find /var/lib/pdstack/jit -mindepth 1 ! -user pdstack") == ""


def test_the_kv_cache_goes_from_gpu_to_gpu(host, instances, found):
    """The role's own measurement: between the two engines' GPUs, in both directions, never over tcp."""
    if not any(instance["role"] == "prefill" for instance in instances):
        pytest.skip("no pair in this topology: no KV cache goes anywhere")
    names = host.check_output("ls /var/lib/pdstack/nixl").split()
    assert names, "the transport was never measured"
    for name in names:
        result = json.loads(host.file(f"/var/lib/pdstack/nixl/{name}").content_string)
        found.setdefault("nixl", {})[name] = result
        for item in result if isinstance(result, list) else [result]:
            assert item["memory"] == "VRAM"
            assert "tcp" not in item["lane"] + item["lane_back"]
            # Where UCX does not name the lane, its words are kept; no path through the host's network comes near this.
            assert item["lane"] != "unknown" or item["words"]
            assert all(speed["best"] > 20e9 for speed in item["directions"].values())


def test_the_same_tokens_from_the_pair_plain_and_streamed(host, plan, found):
    router = plan["routers"][0]
    url = f"http://{router['address']}:{router['ports']['http']}/v1/completions"
    answers = []
    for stream in (False, True):
        body = {"model": plan["model"]["served_name"], "prompt": "the quick brown fox", "max_tokens": 8}
        words = json.dumps({**body, "temperature": 0, "stream": stream})
        text = host.check_output(f"curl -sS -m 60 -H 'Content-Type: application/json' -d '{words}' {url}")
        if stream:
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            answers.append("".join(event["choices"][0]["text"] for event in events if event["choices"]))
        else:
            answers.append(json.loads(text)["choices"][0]["text"])
    assert answers[0] == answers[1] != ""


def test_the_golden_answers_are_those_of_transformers(host, found):
    """Kept by pd_reference, which ran on this machine; pd_verify compared the service's with them."""
    names = host.check_output("ls /var/lib/pdstack/golden").split()
    cases = json.loads(host.file(f"/var/lib/pdstack/golden/{names[-1]}").content_string)
    found["golden"] = [{"tokens": case["tokens"], "margin": case["margin"]} for case in cases]
    assert cases
    assert all(len(case["tokens"]) == case["max_tokens"] for case in cases)
