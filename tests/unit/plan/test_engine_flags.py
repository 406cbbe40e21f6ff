"""Every plan against the real argument parser of each release: a renamed flag fails here and not on a host.

Needs the network once, for the locked wheels of the engine and the router (90 MB, kept in the cache).
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pdstack import engine_options, flags, plan, refusal
from unit.plan import inventories as inv, wheels
from unit.plan.recorded import recorded

GPU_RELEASES = sorted(name for name, item in flags.RELEASES.items() if item.profile == "gpu")
# The cpu release has the same engine, locked for one Python only.
LOCKED = {**{name: name for name in GPU_RELEASES}, "cpu-0.5.23": "sglang-0.5.23", "cpu-0.5.22": "cpu-0.5.22"}
TOPOLOGIES = [
    inv.pd(4, 4),
    inv.pd(1, 1),
    inv.pd(2, 2, p="auto", d="auto"),
    inv.pd(1, 2, p=2, d=1),
    inv.aggregated(8),
    inv.aggregated(4),
    inv.aggregated(1),
    inv.replicas(4, "auto"),
    inv.replicas(2, "auto"),
    inv.replicas(1, 1),
]
SMALL = {"repo": "pdstack/tiny", "revision": inv.COMMIT, "heads": 64}
LEVERS = {
    "pd_engine": {"extra_args": {"ep-size": 4, "schedule-conservativeness": 0.5}, "moe_runner_backend": "triton"},
    "pd_router": {"policy": "round_robin", "health_interval_s": 7, "extra_args": {"log-level": "warn"}},
}


@functools.cache
def plans(release: str) -> list[plan.Plan]:
    """Return the plan of every fixture host and topology that can be planned with this release."""
    made = []
    for name, found in sorted(recorded().items()):
        for topology in TOPOLOGIES:
            for model, levers in ((SMALL, {}), (inv.FLASH, LEVERS)):
                settings = {"pd_topology": topology, "pd_model": model, "pd_release": release, **levers}
                interface = "eth0" if len(name) % 2 else None
                profile = flags.RELEASES[release].profile
                try:
                    made.append(inv.planned(found, pd_profile=profile, pd_service_interface=interface, **settings))
                except refusal.PlanRefused:
                    continue
    return made


def with_speculation(release: str) -> Iterator[plan.Plan]:
    for algorithm in flags.RELEASES[release].engine.speculative:
        if flags.RELEASES[release].profile == "gpu":
            yield inv.planned(inv.host(), pd_release=release, pd_speculative={"algorithm": algorithm})


@pytest.mark.parametrize("release", sorted(flags.RELEASES))
def test_engine_arguments_are_what_the_engine_reads(release: str) -> None:
    found = [item for wanted in plans(release) for item in wanted.instances]
    found += [item for wanted in with_speculation(release) for item in wanted.instances]
    assert {item.role for item in found} == {"prefill", "decode", "aggregated"}
    assert any("numa-node" in item.args for item in found) == (flags.RELEASES[release].profile == "gpu")
    different = {json.dumps(item.args, sort_keys=True): item.args for item in found}
    reply = wheels.ask("engine", LOCKED[release], list(different.values()))
    answers = reply["answers"]
    assert len(answers) == len(different) > 10
    for args, answer in zip(different.values(), answers):
        assert "error" not in answer, f"{release}: {answer['error']}\n{args}"
        values = answer["values"]
        for name, value in args.items():
            read = values[reply["attributes"][name]]
            assert read == value, f"{release}: --{name} {value} is read as {read}"


@pytest.mark.parametrize("release", GPU_RELEASES)
def test_a_wrong_flag_would_be_seen(release: str) -> None:
    """The flags of the other release and a misspelt one are refused, so the test above can fail."""
    args = {"model-path": "/x"}
    wrong: dict[str, dict[str, Any]] = {
        "sglang-0.5.13.post1": {"cuda-graph-max-bs-decode": 32},
        "sglang-0.5.23": {"cuda-graph-max-bs": 32},
    }
    requests = [{**args, **wrong[release]}, {**args, "tp-sizze": 4}, {**args, "disaggregation-mode": "prefil"}]
    if release == "sglang-0.5.23":
        requests.append({**args, "disable-cuda-graph": True})  # retired, and an error in a YAML file
    answers = wheels.ask("engine", release, requests)["answers"]
    assert all("error" in answer for answer in answers), answers


@pytest.mark.parametrize("kind", ["router", "smg"])
def test_router_arguments_are_what_the_router_reads(kind: str) -> None:
    found = [router for wanted in plans("sglang-0.5.23") for router in wanted.routers]
    found += [router for wanted in plans("cpu-0.5.23") for router in wanted.routers]
    two = [inv.host("gpu1"), inv.host("gpu2")]
    pairs = inv.planned(*two, pd_topology=inv.pd(p=2, d=2), pd_router={"scope": "host", "policy": "round_robin"})
    found += pairs.routers
    different = {json.dumps(router.argv): router for router in found}
    answers = wheels.ask(kind, "sglang-0.5.23", [router.argv for router in different.values()])["answers"]
    assert len(answers) > 8
    for router, answer in zip(different.values(), answers):
        assert "error" not in answer, f"{answer['error']}\n{router.argv}"
        values = answer["values"]
        for name, value in router.args.items():
            assert values[name.replace("-", "_")] == value, name
        assert values["disable_circuit_breaker"] is False
        assert values["prefill_urls"] == [[w.url, w.bootstrap_port] for w in router.workers.get("prefill", [])]
        assert values["decode_urls"] == [w.url for w in router.workers.get("decode", [])]
        assert values["worker_urls"] == [w.url for w in router.workers.get("aggregated", [])]


@pytest.mark.parametrize("release", [*GPU_RELEASES, "cpu-0.5.22"])
def test_names_of_all_options_are_the_parsers(release: str) -> None:
    """The list against which extra arguments are checked before anything is contacted."""
    version = flags.RELEASES[release].engine.version
    assert sorted(engine_options.ENGINES[version]) == wheels.ask("engine", release, [])["options"]
    for router in flags.ROUTERS.values():
        key = f"{router.package} {router.version}"
        assert sorted(engine_options.ROUTERS[key]) == wheels.ask(router.venv, "sglang-0.5.23", [])["options"]


@pytest.mark.parametrize("release", sorted(flags.RELEASES))
def test_environment_variables_are_ones_that_the_engine_reads(release: str) -> None:
    names = {name for wanted in plans(release) for item in wanted.instances for name in item.env}
    ours = {name for name in names if name.startswith("SGLANG_")}
    assert len(ours) > 3
    text = engine_source(LOCKED[release])
    missing = sorted(name for name in ours if not re.search(rf"\b{name}\b", text))
    assert not missing, f"{release} does not know {missing}"


@pytest.mark.parametrize("release", sorted(flags.RELEASES))
def test_the_launcher_takes_what_the_engine_has(release: str) -> None:
    """launch.py reaches into the engine: a name that is gone would end each start, or each request, of that release."""
    launcher = ast.parse((wheels.ROOT / "roles/pd_service/files/launch.py").read_text())
    (engine,) = [node for node in launcher.body if isinstance(node, ast.FunctionDef) and node.name == "engine"]
    modules = {}
    for item in [node for node in ast.walk(engine) if isinstance(node, ast.ImportFrom)]:
        modules.update({alias.name: f"{item.module}.{alias.name}" for alias in item.names})
    used = [node for node in ast.walk(engine) if isinstance(node, ast.Attribute)]
    reached = {(node.value.id, node.attr) for node in used if isinstance(node.value, ast.Name)}
    folder = wheels.unpacked(LOCKED[release], "engine", wheels.ENGINE)
    checked = set()
    for module, name in sorted(pair for pair in reached if pair[0] in modules):
        source = (folder / f"{modules[module].replace('.', '/')}.py").read_text()
        assert re.search(rf"(^|\bdef |\bimport .*|^    ){name}\b", source, re.MULTILINE), f"{module}.{name}"
        checked.add(f"{module}.{name}")
    assert checked == {
        "http_server.app",
        "http_server.get_global_state",
        "launch_server.kill_process_tree",
        "launch_server.prepare_server_args",
        "launch_server.run_server",
    }
    manager = (folder / "sglang/srt/managers/tokenizer_manager.py").read_text()
    assert re.search(r"self\.gracefully_exit = False", manager)
    assert re.search(r"tokenizer_manager\.gracefully_exit = True", manager)  # in its handler of SIGTERM
    assert "tokenizer_manager" in (folder / "sglang/srt/entrypoints/http_server.py").read_text()


@functools.cache
def engine_source(release: str) -> str:
    folder = wheels.unpacked(release, "engine", wheels.ENGINE)
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("sglang/srt/**/*.py")))
