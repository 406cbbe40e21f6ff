"""From a plan to the files and units of one host."""

from __future__ import annotations

import fnmatch
import json
import shlex
import subprocess

import pytest
import yaml
from pdstack import service
from plans import OPEN, PLAN, UNIT_TEXTS, instance


def paths(host: str) -> set[str]:
    found = {item["path"].replace("/etc/systemd/system", "U") for item in service.files(PLAN, host, UNIT_TEXTS)}
    return {path for path in found if not path.startswith(service.LIBRARY)}


def test_a_host_gets_the_files_of_its_own_instances() -> None:
    assert paths("a") == {
        "/etc/pdstack/plan.json",
        "U/pd.target",
        "/opt/pdstack/launch.py",
        "/etc/pdstack/canary.json",
        "U/pd-canary.service",
        "U/pd-canary.timer",
        "U/pd-prefill@.service",
        "U/pd-decode@.service",
        "U/pd-prefill@0.service.d",
        "U/pd-prefill@0.service.d/placement.conf",
        "U/pd-decode@0.service.d",
        "U/pd-decode@0.service.d/placement.conf",
        "/etc/pdstack/instances/prefill-0.yaml",
        "/etc/pdstack/instances/prefill-0.env",
        "/etc/pdstack/instances/decode-0.yaml",
        "/etc/pdstack/instances/decode-0.env",
        "/var/lib/pdstack/jit/r",
        "/var/lib/pdstack/jit/r/cuda-13.0",
    }
    assert "U/pd-router.service" in paths("b")
    assert paths("c") == {"/etc/pdstack/plan.json"}


def test_a_jit_cache_is_the_user_s_whom_engines_run_as() -> None:
    """Whatever ran as root and made it first, or what an operator did to it: no engine could start."""
    caches = [
        item
        for item in service.files(PLAN, "a", UNIT_TEXTS, user="llm")
        if item["path"].startswith("/var/lib/pdstack/jit")
    ]
    assert [(item["path"], item["owner"], item["group"], item["mode"]) for item in caches] == [
        ("/var/lib/pdstack/jit/r", "llm", "llm", "0700"),
        ("/var/lib/pdstack/jit/r/cuda-13.0", "llm", "llm", "0700"),
    ]


def test_the_engine_reads_back_exactly_the_planned_arguments() -> None:
    planned = PLAN["instances"][0]
    assert yaml.safe_load(service.engine_config(planned)) == planned["args"]


def test_the_shell_reads_back_exactly_the_planned_environment() -> None:
    """systemd's EnvironmentFile quotes as a shell does in double quotes."""
    text = service.environment(PLAN["instances"][0])
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = shlex.split(line)[0].partition("=")
            values[name] = value
    assert values == PLAN["instances"][0]["env"]


def test_placement_says_why_and_binds_only_what_the_plan_binds() -> None:
    text = service.placement(PLAN["instances"][0])
    assert "# cpus: GPUs 0-3 hang on node 0" in text
    assert "not placement" not in text
    assert {"CPUAffinity=0-31", "NUMAPolicy=bind", "NUMAMask=0"} <= set(text.splitlines())
    free = service.placement(instance("decode", 0, "a", cpus="", memory_nodes=""))
    assert "CPUAffinity" not in free
    assert "NUMA" not in free.replace("NUMA node", "")


def test_every_file_of_an_instance_makes_its_unit_stale() -> None:
    found = service.files(PLAN, "a", UNIT_TEXTS, {"gpus": []})
    written = {item["path"] for item in found}
    shared = {"/etc/pdstack/plan.json", "/etc/pdstack/baseline.json", "/etc/systemd/system/pd.target"}
    # The canary runs anew every time.
    shared |= {"/etc/pdstack/canary.json", "/etc/systemd/system/pd-canary.service"}
    shared |= {path for path in written if path.startswith(service.LIBRARY)}
    watched = {path for unit in service.units(PLAN, "a") for path in unit["files"]}
    folders = {item["path"] for item in found if "content" not in item}
    files = written - shared - folders
    assert {path for path in files if not any(fnmatch.fnmatch(path, pattern) for pattern in watched)} == set()
    others = {pattern for pattern in watched if not any(fnmatch.fnmatch(path, pattern) for path in files)}
    by_hand = {path for path in others if path.endswith(".service.d")}
    assert others - by_hand == {*service.RELEASE, service.KERNELS, f"{service.CREDENTIALS}/admin_key"}


@pytest.mark.parametrize(
    "path",
    [
        "/etc/systemd/system/pd-prefill@0.service.d/zz-by-hand.conf",
        "/etc/systemd/system/pd-prefill@.service.d",
        "/etc/systemd/system/pd-.service.d",
        "/run/systemd/system/pd-prefill@0.service.d",
        "/run/systemd/system.control/pd-prefill@0.service.d",
        "/etc/systemd/system.control/pd-prefill@0.service.d",
    ],
)
def test_a_drop_in_by_hand_makes_its_unit_stale_and_no_other(path: str) -> None:
    stale = {
        unit["name"]
        for unit in service.units(PLAN, "a")
        if any(fnmatch.fnmatch(path, pattern) for pattern in unit["files"])
    }
    everywhere = "/pd-.service.d" in path
    assert stale == ({"pd-prefill@0.service", "pd-decode@0.service"} if everywhere else {"pd-prefill@0.service"})


def test_units_of_a_pair_share_a_set_and_the_router_does_not() -> None:
    assert {unit["name"]: unit["set"] for unit in service.units(PLAN, "a")} == {
        "pd-decode@0.service": "pair-0",
        "pd-prefill@0.service": "pair-0",
        "pd-canary.timer": "",
        "pd.target": "",
    }
    assert {unit["name"]: unit["set"] for unit in service.units(PLAN, "b")}["pd-router.service"] == "router-0"


def test_engines_are_waited_for_apart_from_routers() -> None:
    engines, routers = service.engine_targets(PLAN, "b"), service.router_targets(PLAN, "b")
    assert [item["name"] for item in engines] == ["decode-1"]
    assert [item["name"] for item in routers] == ["router-0"]
    assert service.targets(PLAN, "b") == engines + routers


def test_a_router_may_lag_behind_its_workers_by_one_look_at_them() -> None:
    args = {"health-check-interval-secs": 600, "health-check-timeout-secs": 5}
    routers = [{"host": "b", "args": args}, {"host": "c", "args": {}}]  # c: a plan of an earlier version
    assert [service.router_lag_s({"routers": routers}, host) for host in "abc"] == [0, 605, 0]


def test_the_router_waits_for_both_sides() -> None:
    assert [item["url"] for item in service.targets(PLAN, "b")] == [
        "http://10.0.0.1:30001/health",
        "http://10.0.0.2:8000/readiness",
    ]


def test_plan_json_is_the_plan() -> None:
    (item,) = [item for item in service.files(PLAN, "c", UNIT_TEXTS) if item["path"].endswith("plan.json")]
    assert json.loads(item["content"]) == PLAN


@pytest.mark.parametrize("host", ["a", "b"])
def test_contents_end_with_a_newline(host: str) -> None:
    contents = {item["path"]: item["content"] for item in service.files(PLAN, host, UNIT_TEXTS) if "content" in item}
    assert len(contents) > len(UNIT_TEXTS) / 2
    assert [path for path, content in contents.items() if not content.endswith("\n")] == []


def test_shell_agrees_on_quoting() -> None:
    """The same environment through a real shell, as a second reader."""
    text = service.environment(PLAN["instances"][0])
    done = subprocess.run(["sh", "-c", f'{text}\nprintf %s "$QUOTED"'], capture_output=True, text=True, check=True)
    assert done.stdout == PLAN["instances"][0]["env"]["QUOTED"]


SECURED = {**PLAN, "security": {**OPEN, "api_key": True, "tls": "own", "tls_names": ["pd.example"]}}
VALUES = {"api_key": "client", "admin_key": "", "tls_cert": "", "tls_key": ""}


def test_targets_name_the_files_of_keys_and_certificate_and_never_hold_one() -> None:
    engine, router = service.targets(SECURED, "b")
    folder = service.CREDENTIALS
    assert (engine["base"], engine["key_file"], engine["ca_file"]) == (
        "http://10.0.0.1:30001",
        f"{folder}/api_key",
        "",
    )
    assert engine["admin_key_file"] == router["admin_key_file"] == f"{folder}/admin_key"
    assert (router["url"], router["key_file"], router["ca_file"]) == (
        "https://10.0.0.2:8000/readiness",
        f"{folder}/api_key",
        f"{folder}/tls_pin",
    )
    for target in service.targets(PLAN, "b"):
        assert (target["key_file"], target["ca_file"]) == ("", "")


def test_each_host_gets_the_credentials_of_its_own_programs() -> None:
    engine = service.credentials(SECURED, "a", VALUES)
    assert engine == {"given": {"api_key": "client"}, "random": ["admin_key"], "certificate": []}
    router = service.credentials(SECURED, "b", VALUES)
    assert router == {**engine, "certificate": ["b", "10.0.0.2", "pd.example"]}
    given = {**PLAN, "security": {**OPEN, "admin_key": "given", "tls": "given"}}
    assert set(service.credentials(given, "b", VALUES)["given"]) == {"admin_key", "tls_cert", "tls_key"}
    assert set(service.credentials(given, "a", VALUES)["given"]) == {"admin_key"}
    assert service.credentials(SECURED, "c", VALUES) == {"given": {}, "random": [], "certificate": []}


def test_a_changed_key_makes_exactly_the_units_stale_that_use_it() -> None:
    users: dict[str, set[str]] = {}
    for host in ("a", "b"):
        for unit in service.units(SECURED, host):
            for path in unit["files"]:
                users.setdefault(path.removeprefix(service.CREDENTIALS + "/"), set()).add(f"{unit['name']} on {host}")
    engines = {"pd-decode@0.service on a", "pd-prefill@0.service on a", "pd-decode@1.service on b"}
    assert users["api_key"] == users["admin_key"] == {*engines, "pd-router.service on b"}
    assert users["tls_cert"] == users["tls_key"] == {"pd-router.service on b"}


def test_an_ipv6_address_stands_in_brackets() -> None:
    plan = {**PLAN, "instances": [instance("decode", 1, "b", address="fd00::1")], "routers": []}
    assert service.targets(plan, "b")[0]["base"] == "http://[fd00::1]:30001"
