"""The canary blames whom it can, kills what has failed in a row, and leaves alone what is starting or only busy."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pdstack import canary, runlock, service
from pdstack.completion import Endpoint, Outcome

PREFILL = Endpoint("prefill-0", "http://a:1", set="pair-0", bootstrap_host="a", bootstrap_port=8998)
DECODE = Endpoint("decode-0", "http://b:2", set="pair-0")
ROUTER = Endpoint("router-0", "http://c:3")
WATCHED = [
    canary.Watched("pd-prefill@0.service", "prefill", PREFILL, [DECODE]),
    canary.Watched("pd-decode@0.service", "decode", DECODE, [PREFILL]),
    canary.Watched("pd-router.service", "router", ROUTER, [PREFILL, DECODE]),
]
LIMITS = canary.Limits(failures=3, timeout_s=1, cooldown_s=900, per_day=2)


class World(canary.World):
    """A host whose servers answer as told. A kill heals, unless ``incurable``."""

    def __init__(self) -> None:
        self.now = 1000.0
        units = [*(item.unit for item in WATCHED), "pd-decode@1.service"]
        self.pids = {unit: 10 + i for i, unit in enumerate(units)}
        self.active = dict.fromkeys(units, "active")
        self.silent: set[str] = set()  # neither /health nor completions
        self.compiling: set[str] = set()  # of those, whose HTTP server answers all the same
        self.slept = 0.0
        self.hung: set[str] = set()  # /health, no completion
        self.busy: set[str] = set()
        self.killed: list[str] = []
        self.incurable = False
        self.deployment = False
        self.memory: dict[str, canary.Memory] = {}

    def completion(self, through: Endpoint, prefill: Endpoint | None, model: str, timeout_s: float) -> Outcome:
        asked = {through.name} | ({prefill.name} if prefill else set())
        if through.name == "router-0":
            asked |= {"prefill-0", "decode-0"}
        bad = asked & (self.silent | self.hung)
        return Outcome(not bad, 0.1, f"nothing from {sorted(bad)}" if bad else "")

    def healthy(self, endpoint: Endpoint, timeout_s: float) -> bool:
        return endpoint.name not in self.silent

    def mute(self, endpoint: Endpoint) -> bool:
        return endpoint.name in self.silent - self.compiling

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds

    def generating(self, endpoint: Endpoint) -> bool:
        return endpoint.name in self.busy

    def states(self, names: Sequence[str]) -> Mapping[str, canary.State]:
        return {name: canary.State(self.active[name], str(self.pids[name])) for name in names}

    def kill(self, unit: str) -> None:
        self.killed.append(unit)
        self.pids[unit] += 100
        if not self.incurable:
            name = next(item.endpoint.name for item in WATCHED if item.unit == unit)
            self.silent.discard(name)
            self.hung.discard(name)

    def monotonic(self) -> float:
        return self.now

    def deploying(self) -> bool:
        return self.deployment

    def looks(self, count: int = 1) -> dict[str, str]:
        """Run ``count`` times, a minute apart, and return the last states by unit."""
        for _ in range(count):
            findings, self.said = canary.run(WATCHED, "tiny", LIMITS, self.memory, self)
            self.now += 60
        return {found.unit.partition(".")[0]: found.state for found in findings}


def test_what_serves_is_ok() -> None:
    assert set(World().looks().values()) == {"ok"}


def test_a_stopped_process_is_killed_after_three_failures_and_its_peer_is_not_blamed() -> None:
    """SIGSTOP of decode: it says nothing, prefill and router answer."""
    world = World()
    world.looks()
    world.silent = {"decode-0"}
    assert world.looks(2) == {"pd-prefill@0": "blameless", "pd-decode@0": "failing", "pd-router": "blameless"}
    assert world.killed == []
    world.looks()
    assert world.killed == ["pd-decode@0.service"]
    assert set(world.looks().values()) == {"ok"}


def test_a_pair_that_answers_health_and_completes_nothing_is_killed_as_a_whole() -> None:
    world = World()
    world.looks()
    world.hung = {"prefill-0", "decode-0"}
    assert world.looks(3) == {"pd-prefill@0": "failing", "pd-decode@0": "failing", "pd-router": "blameless"}
    assert world.killed == ["pd-prefill@0.service", "pd-decode@0.service"]


def test_that_holds_for_a_pair_that_never_completed_anything() -> None:
    world = World()
    world.hung = {"prefill-0", "decode-0"}
    world.looks(3)
    assert "pd-decode@0.service" in world.killed


def test_a_router_that_fails_before_good_engines_is_killed() -> None:
    world = World()
    world.looks()
    world.hung = {"router-0"}
    assert world.looks(3)["pd-router"] == "failing"
    assert world.killed == ["pd-router.service"]


def test_an_engine_that_still_loads_is_left_alone() -> None:
    world = World()
    world.silent = {"decode-0"}
    assert world.looks(20)["pd-decode@0"] == "starting"
    assert world.killed == []


def test_a_new_process_is_starting_again() -> None:
    world = World()
    world.looks()
    world.silent = {"decode-0"}
    world.looks(2)
    world.pids["pd-decode@0.service"] = 99
    assert world.looks(5)["pd-decode@0"] == "starting"
    assert world.killed == []


def test_a_stopped_unit_is_left_alone() -> None:
    """Drained, or failed for good: systemd and people know of it."""
    world = World()
    world.looks()
    world.silent = {"decode-0"}
    world.active["pd-decode@0.service"] = "inactive"
    assert world.looks(5)["pd-decode@0"] == "stopped"
    assert world.killed == []


def test_an_engine_that_generates_for_others_is_busy() -> None:
    world = World()
    world.looks()
    world.hung, world.busy = {"prefill-0", "decode-0"}, {"prefill-0", "decode-0"}
    assert world.looks(5)["pd-decode@0"] == "busy"
    assert world.killed == []


def test_one_success_forgives() -> None:
    world = World()
    for _ in range(4):
        world.silent = {"decode-0"}
        world.looks(2)
        world.silent = set()
        world.looks()
    assert world.killed == []


def test_kills_are_spaced_and_bounded_a_day() -> None:
    world = World()
    world.looks()
    world.hung, world.incurable = {"prefill-0", "decode-0"}, True
    world.looks(10)
    assert world.killed.count("pd-decode@0.service") == 1
    assert any("s after the last time" in line for line in world.said)
    world.looks(100)
    assert world.killed.count("pd-decode@0.service") == 2
    assert any("a person must look" in line for line in world.said)
    world.now += 86400
    world.looks(3)
    assert world.killed.count("pd-decode@0.service") == 3


def test_nothing_is_killed_while_a_deployment_runs() -> None:
    world = World()
    world.looks()
    world.silent, world.compiling, world.deployment = {"decode-0", "decode-1"}, {"decode-1"}, True
    world.looks(5)
    assert world.killed == []
    assert any("a deployment runs" in line for line in world.said)


def test_one_run_remembers_for_the_next_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, state = tmp_path / "canary.json", tmp_path / "run" / "state.json"
    watched = [
        {
            "unit": item.unit,
            "role": item.role,
            "endpoint": item.endpoint.__dict__,
            "peers": [peer.__dict__ for peer in item.peers],
        }
        for item in WATCHED
    ]
    config.write_text(json.dumps({"model": "tiny", "limits": LIMITS.__dict__, "watched": watched}))
    world = World()

    def look() -> dict[str, Any]:
        assert canary.main(str(config), str(state), world) == 0
        return json.loads(state.read_text())

    assert look()["ok"]
    world.silent = world.compiling = {"decode-0"}
    assert [look()["units"]["pd-decode@0.service"]["state"] for _ in range(2)] == ["failing", "failing"]
    assert not look()["ok"]
    assert world.killed == ["pd-decode@0.service"]
    assert world.slept == 0
    assert "killed after 3 failures in a row" in capsys.readouterr().out
    state.write_text("{")  # a host that lost power in the middle
    assert look()["ok"]


def test_what_says_nothing_at_all_is_looked_at_again_at_once(tmp_path: Path) -> None:
    """SIGSTOP: three looks of one run, where a scheduler that is busy for minutes has three intervals."""
    config, state = tmp_path / "canary.json", tmp_path / "state.json"
    busy = Endpoint("decode-1", "http://d:4", set="pair-1")
    watched = [
        {"unit": "pd-decode@0.service", "role": "decode", "endpoint": DECODE.__dict__, "peers": [PREFILL.__dict__]},
        {"unit": "pd-decode@1.service", "role": "decode", "endpoint": busy.__dict__, "peers": [PREFILL.__dict__]},
    ]
    config.write_text(json.dumps({"model": "tiny", "limits": LIMITS.__dict__, "watched": watched}))
    world = World()
    world.silent = {"decode-0"}
    canary.main(str(config), str(state), world)
    assert (world.killed, world.slept) == ([], 0), "it has not answered yet: it is starting"
    world.silent = set()
    canary.main(str(config), str(state), world)
    world.silent, world.compiling, world.deployment = {"decode-0", "decode-1"}, {"decode-1"}, True
    canary.main(str(config), str(state), world)
    assert (world.killed, world.slept) == ([], 2 * canary.AGAIN_S), "a deployment runs, and the run ends"
    world.deployment = False
    canary.main(str(config), str(state), world)
    assert world.killed == ["pd-decode@0.service"]
    assert json.loads(state.read_text())["memory"]["pd-decode@1.service"]["failures"] == 2, "once in each run"


def test_what_is_put_on_a_host_imports_by_itself(tmp_path: Path) -> None:
    for item in service.library():
        path = tmp_path / os.path.relpath(item["path"], service.LIBRARY)
        path.parent.mkdir(exist_ok=True)
        path.write_text(item["content"])
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    code = "import pdstack.canary, sys; print(sorted(n for n in sys.modules if n.startswith('pdstack.')))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    needed = {"pdstack." + name for name in service.CANARY_MODULES if name != "__init__"}
    assert set(json.loads(done.stdout.replace("'", '"'))) == needed


class Stub(http.server.BaseHTTPRequestHandler):
    """An engine or router that completes, unless its server is told to hang."""

    def do_GET(self) -> None:
        self.answer({"loads": [{"num_running_reqs": 0, "gen_throughput": 0.0}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        room = body.get("bootstrap_room")
        self.server.rooms.append(room)  # type: ignore[attr-defined]
        waited = time.monotonic() + 10
        while room not in self.server.source.rooms and time.monotonic() < waited:  # type: ignore[attr-defined]
            time.sleep(0.01)  # decode has no KV cache before prefill has the request
        hung = self.server.hung  # type: ignore[attr-defined]
        self.answer({"usage": {"completion_tokens": 0 if hung else body["max_tokens"]}})

    def answer(self, document: dict[str, Any]) -> None:
        text = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[dict[str, Any]]:
    made = {name: http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub) for name in ("prefill", "decode", "router")}
    for server in made.values():
        server.rooms, server.hung = [], False  # type: ignore[attr-defined]
        server.source = server if server is made["router"] else made["prefill"]  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield made
    for server in made.values():
        server.shutdown()
        server.server_close()


SYSTEMCTL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
[ "$1" = show ] || exit 0
shift 4
for unit; do printf 'ActiveState=active\\nMainPID=7\\nExecMainStartTimestampMonotonic=5\\n\\n'; done
"""


def test_as_a_host_runs_it(tmp_path: Path, servers: dict[str, Any]) -> None:
    """The files, the command of the unit, real HTTP: a pair is asked with one room, and what hangs is killed."""
    for item in service.library():
        path = tmp_path / os.path.relpath(item["path"], service.LIBRARY)
        path.parent.mkdir(exist_ok=True)
        path.write_text(item["content"])
    (tmp_path / "systemctl").write_text(SYSTEMCTL)
    (tmp_path / "systemctl").chmod(0o755)

    def endpoint(name: str, **more: Any) -> dict[str, Any]:
        base = f"http://127.0.0.1:{servers[name].server_address[1]}"
        return {**Endpoint(f"{name}-0", base, set="" if name == "router" else "pair-0").__dict__, **more}

    prefill, decode = endpoint("prefill", bootstrap_host="127.0.0.1", bootstrap_port=8998), endpoint("decode")
    watched = [
        {"unit": "pd-prefill@0.service", "role": "prefill", "endpoint": prefill, "peers": [decode]},
        {"unit": "pd-decode@0.service", "role": "decode", "endpoint": decode, "peers": [prefill]},
        {"unit": "pd-router.service", "role": "router", "endpoint": endpoint("router"), "peers": [prefill, decode]},
    ]
    config, state = tmp_path / "config.json", tmp_path / "state.json"
    limits = canary.Limits(failures=2, timeout_s=5).__dict__
    config.write_text(json.dumps({"model": "tiny", "limits": limits, "watched": watched}))
    code = f"from pdstack import canary; canary.main({str(config)!r}, {str(state)!r})"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}

    def look() -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(state.read_text())

    assert look()["ok"]
    assert set(servers["prefill"].rooms) == set(servers["decode"].rooms) - {None}
    assert len(set(servers["prefill"].rooms)) == 2
    assert servers["router"].rooms == [None]
    servers["decode"].hung = servers["router"].hung = True
    look()
    states = {unit: found["state"] for unit, found in look()["units"].items()}
    assert states == {
        "pd-prefill@0.service": "failing",
        "pd-decode@0.service": "failing",
        "pd-router.service": "blameless",
    }
    kills = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("kill")]
    assert kills == [
        "kill --signal=KILL --kill-whom=all pd-prefill@0.service",
        "kill --signal=KILL --kill-whom=all pd-decode@0.service",
    ]


def test_a_deployment_runs_while_its_lock_is_young_by_the_clock_that_no_one_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "deploy.lock"
    monkeypatch.setattr(canary, "LOCK", str(lock))
    world = canary.World()
    assert not world.deploying()
    assert runlock.take(str(lock), runlock.Owner("alice@ctl1", "kernel-1", 100, 5000, "mine"), now=0.0).held
    assert world.deploying(), "the wall clock of the lock (1970) says nothing"
    world.monotonic = lambda: time.monotonic() + canary.LOCK_S + 1  # type: ignore[method-assign]
    assert not world.deploying()
