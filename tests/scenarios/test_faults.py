"""Faults under load, on three lab hosts (router, prefill, decode) with the real engine: what clients saw, and how long.

Takes half an hour, so it runs where PDSTACK_LONG is set, and writes docs/results/faults.md. What the scenario `default`
breaks in every run of the tests is a part of it.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import load
import pytest
import yaml
from pdstack import http

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BIN = pathlib.Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "LAB_ID": f"f{os.getpid() % 100000}", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not os.environ.get("PDSTACK_LONG"), reason="half an hour; set PDSTACK_LONG=1"),
]

ROUTER, PREFILL, DECODE = "c1", "c2", "c3"
UNITS = {ROUTER: "pd-router.service", PREFILL: "pd-prefill@0.service", DECODE: "pd-decode@0.service"}
PORTS = {ROUTER: 8000, PREFILL: 30000, DECODE: 30100}
REQUEST_TIMEOUT_S = 30
ATTEMPTS = 2
# Short times, so that a test does not take an hour: of an attempt at the router, and of the canary.
SETTINGS = {
    "pd_router": {"request_timeout_s": REQUEST_TIMEOUT_S, "attempts": ATTEMPTS, "health_interval_s": 5},
    "pd_canary": {"interval_s": 5, "failures": 3, "timeout_s": 5.0, "cooldown_s": 0, "per_day": 50},
    "pd_security": {"firewall": False},  # the tests look at the engines themselves
}
BOUND_S = REQUEST_TIMEOUT_S * ATTEMPTS + 5


def lab(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools/lab/lab", *words], env=ENVIRONMENT, capture_output=True, text=True, check=check
    )


def on(host: str, command: str, check: bool = True) -> str:
    return lab("exec", host, "--", command, check=check).stdout.strip()


@dataclass
class System:
    """The deployed hosts."""

    inventory: pathlib.Path
    addresses: dict[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def play(self, playbook: str, *options: str) -> str:
        command = [BIN / "ansible-playbook", "-i", self.inventory, ROOT / "playbooks" / playbook, *options]
        done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        return done.stdout

    def client(self, **options: Any) -> load.Load:
        return load.Load(self.addresses[ROUTER], PORTS[ROUTER], timeout_s=180, **options)

    def healthy(self, host: str) -> bool:
        return http.request("GET", f"http://{self.addresses[host]}:{PORTS[host]}/health", timeout_s=5).status == 200

    def started(self, host: str) -> str:
        """When the unit's process started, as systemd has it: another text for another process."""
        return on(host, f"systemctl show --value -p ExecMainStartTimestampMonotonic {UNITS[host]}")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("inventory")
    shutil.copy(ROOT / "molecule/cluster/inventory/hosts.yml", folder / "hosts.yml")
    (folder / "group_vars").mkdir()
    values = yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text())
    (folder / "group_vars/all.yml").write_text(yaml.safe_dump({**values, **SETTINGS}))
    subprocess.run([sys.executable, ROOT / "tools/tiny_model"], check=True, capture_output=True)
    lab("up", "--inventory", str(folder / "connection.yml"), *UNITS)
    try:
        for host in UNITS:
            on(host, "apt-get update -qq")
        hosts = yaml.safe_load((folder / "connection.yml").read_text())
        made = System(folder, {host: _address(hosts, host) for host in UNITS})
        made.play("deploy_pd.yml")
        yield made
        if made.rows:
            _write(made.rows)
    finally:
        lab("down")


def _address(tree: Any, host: str) -> str:
    """Find ansible_host of a host, wherever in the inventory's tree it stands."""
    if isinstance(tree, dict):
        if isinstance(tree.get(host), dict) and "ansible_host" in tree[host]:
            return str(tree[host]["ansible_host"])
        for value in tree.values():
            found = _address(value, host)
            if found:
                return found
    return ""


class Watch:
    """Looks twice a second which host's server answers, and keeps when each came back."""

    def __init__(self, system: System, host: str) -> None:
        self.system, self.host = system, host
        self.answers: list[tuple[float, bool]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.answers.append((time.monotonic(), self.system.healthy(self.host)))
            self._stop.wait(0.5)

    def back(self, since: float) -> float | None:
        """Return when it answered again after it had not, None when it never stopped answering."""
        down = [moment for moment, good in self.answers if moment >= since and not good]
        if not down:
            return None
        return min((moment for moment, good in self.answers if good and moment > down[0]), default=None)


def break_and_watch(
    system: System,
    fault: str,
    host: str,
    do: Callable[[], Any],
    undo: Callable[[], Any] | None = None,
    after: float = 15,
) -> tuple[load.Outcome, float, float | None]:
    """Break something under load; return what clients saw, the time to serve again, and that of the engine alone.

    ``undo`` heals after ``after`` seconds. Without it the system has to heal by itself.
    """
    on(host, f"systemctl reset-failed {UNITS[host]}", check=False)
    with system.client() as clients, Watch(system, host) as watch:
        time.sleep(4)
        assert all(record.ok for record in clients.records), clients.records[-3:]
        begin = time.monotonic()
        do()
        if undo:
            time.sleep(after)
            undo()
        healed = time.monotonic()
        served = _steady(clients, begin if not undo else healed, 240)
        time.sleep(2)
    outcome = load.summary(clients.records, begin)
    back = watch.back(begin)
    system.rows.append(
        {
            "fault": fault,
            "saw": outcome.words(),
            "longest": outcome.longest_s,
            "back": None if back is None else back - begin,
            "served": served - begin,
        }
    )
    assert outcome.longest_s <= BOUND_S, "a client waited past the bound"
    return outcome, served - begin, None if back is None else back - begin


def _steady(clients: load.Load, since: float, limit_s: float) -> float:
    """Wait until every client has been answered whole twice in a row, and return since when nothing has failed."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        recent = [record for record in list(clients.records) if record.begin >= since]
        bad = [record.end for record in recent if not record.ok]
        good = [record for record in recent if record.ok and record.begin >= max(bad, default=since)]
        if len(good) >= 2 * clients.clients:
            return min(record.end for record in good)
        time.sleep(0.5)
    raise AssertionError(f"not served again within {limit_s:.0f} s: {clients.records[-5:]}")


def signal_all(host: str, name: str) -> Callable[[], str]:
    return lambda: on(host, f"systemctl kill --signal={name} --kill-whom=all {UNITS[host]}")


@pytest.mark.parametrize("host", [DECODE, PREFILL, ROUTER])
def test_sigkill(system: System, host: str) -> None:
    """Streams that run are cut, or finish; within the engine's own start and 15 s everything is served again."""
    before = system.started(host)
    outcome, served, back = break_and_watch(system, f"SIGKILL of {UNITS[host]}", host, signal_all(host, "KILL"))
    assert system.started(host) != before
    assert outcome.failed > 0
    assert back is not None
    assert served <= back + 15


@pytest.mark.parametrize("host", [DECODE, PREFILL, ROUTER])
def test_sigstop_is_healed_by_the_canary(system: System, host: str) -> None:
    before = system.started(host)
    _, served, back = break_and_watch(system, f"SIGSTOP of {UNITS[host]}", host, signal_all(host, "STOP"))
    assert system.started(host) != before
    assert "killed after 3 failures in a row" in on(host, "journalctl -u pd-canary.service -o cat -n 50 --no-pager")
    assert back is not None
    assert served <= back + 15


def test_network_cut_between_prefill_and_decode(system: System) -> None:
    """Nothing restarts for 20 s without the network; once it is back, requests are served."""
    route = f"blackhole {system.addresses[PREFILL]}/32"
    break_and_watch(
        system,
        "network between prefill and decode cut for 15 s",
        DECODE,
        lambda: on(DECODE, f"ip route add {route}"),
        lambda: on(DECODE, f"ip route del {route}"),
    )


def test_router_restarted(system: System) -> None:
    """What is in flight is finished; connections are refused until it is back."""
    outcome, served, _ = break_and_watch(
        system, "systemctl restart of the router", ROUTER, lambda: on(ROUTER, "systemctl restart pd-router.service")
    )
    assert "cut stream" not in outcome.statuses
    assert served < 30


def test_reboot_of_the_decode_host(system: System) -> None:
    _, served, back = break_and_watch(system, "reboot of the decode host", DECODE, lambda: lab("reboot", DECODE))
    assert back is not None
    assert served <= back + 15


def test_disk_full_while_decode_restarts(system: System) -> None:
    """The engine starts although its caches cannot be written, or is back once there is room again."""
    jit = "/var/lib/pdstack/jit"
    fill = f"mount -t tmpfs -o size=64k,mode=0777 full {jit} && (head -c 1M /dev/zero > {jit}/full 2>/dev/null || true)"

    def undo() -> None:
        on(DECODE, f"umount -l {jit}")
        on(DECODE, f"systemctl reset-failed {UNITS[DECODE]}; systemctl start {UNITS[DECODE]}", check=False)

    break_and_watch(
        system,
        "SIGKILL of decode, the disk of its caches full for 15 s",
        DECODE,
        lambda: (on(DECODE, fill), signal_all(DECODE, "KILL")()),
        undo,
    )


def test_port_stolen_while_decode_restarts(system: System) -> None:
    """systemd starts it again and again until the port is free."""
    address = system.addresses[DECODE]
    thief = (
        "systemd-run --unit=thief --collect python3 -c 'import socket, time; s = socket.socket(); "
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); "
        f's.bind(("{address}", {PORTS[DECODE]})); s.listen(); time.sleep(300)\''
    )
    break_and_watch(
        system,
        "SIGKILL of decode, its port stolen for 40 s",
        DECODE,
        lambda: (signal_all(DECODE, "KILL")(), on(DECODE, thief)),
        lambda: on(DECODE, "systemctl stop thief.service"),
        after=40,
    )


def test_drain_is_refused_where_nothing_else_serves(system: System) -> None:
    with pytest.raises(AssertionError, match="no healthy decode would be left"):
        system.play("drain.yml", "-e", "pd_drain=decode-0")
    with system.client() as clients:
        time.sleep(3)
    assert clients.records
    assert all(record.ok for record in clients.records)


def test_drain_finishes_what_is_in_flight_and_resume_brings_it_back(system: System) -> None:
    client = system.client()
    records: list[load.Record] = []
    long = threading.Thread(target=lambda: records.append(client.one("a long answer", streamed=True, tokens=800)))
    long.start()
    time.sleep(1.5)
    told = system.play("drain.yml", "-e", "pd_drain=decode-0", "-e", "pd_drain_outage=true")
    long.join()
    assert "No request was cut" in told
    assert records[0].ok, records
    assert on(DECODE, f"systemctl is-active {UNITS[DECODE]}", check=False) == "inactive"
    assert on(DECODE, f"systemctl is-enabled {UNITS[DECODE]}", check=False) == "disabled"
    refused = client.one("nobody decodes")
    assert (refused.ok, refused.status) == (False, 503)
    system.play("resume.yml", "-e", "pd_resume=decode-0")
    assert client.one("somebody decodes").ok
    assert on(DECODE, f"systemctl is-enabled {UNITS[DECODE]}") == "enabled"


def test_a_late_worker_is_added(system: System) -> None:
    """A worker that the router has given up, or that somebody removed, is a member again after the serve phase."""
    base = f"http://{system.addresses[ROUTER]}:{PORTS[ROUTER]}"
    key = on(ROUTER, "cat /etc/pdstack/credentials/admin_key")
    ids = f"curl -s -H 'Authorization: Bearer {key}' {base}/workers"
    worker = next(w for w in json.loads(on(ROUTER, ids))["workers"] if w["worker_type"] == "decode")
    on(ROUTER, f"curl -s -X DELETE -H 'Authorization: Bearer {key}' {base}/workers/{worker['id']}")
    time.sleep(2)
    assert system.client().one("nobody decodes").status == 503
    assert "changed=1" in system.play("serve.yml")
    assert system.client().one("somebody decodes").ok


def test_a_change_of_the_pair_refuses_for_one_window_and_cuts_nothing(system: System) -> None:
    before = time.monotonic()
    with system.client() as clients:
        time.sleep(3)
        told = system.play("serve.yml", "-e", json.dumps({"pd_engine": {"watchdog_timeout_s": 500}}))
        assert "answers 503 from here until pair-0 is back" in told
        time.sleep(3)
    outcome = load.summary(clients.records, before)
    system.rows.append(
        {
            "fault": "change of the pair's configuration (announced window)",
            "saw": outcome.words(),
            "longest": outcome.longest_s,
            "back": None,
            "served": outcome.outage_s,
        }
    )
    assert set(outcome.statuses) <= {"503"}
    system.play("serve.yml")


def test_a_change_of_replicas_loses_no_request(system: System) -> None:
    replicas = {"mode": "replicas", "context_length": 4096, "replicas": {"tp": 4, "count": 2}}
    system.play("serve.yml", "-e", json.dumps({"pd_topology": replicas}))
    with system.client(clients=3) as clients:
        time.sleep(3)
        system.play("serve.yml", "-e", json.dumps({"pd_topology": replicas, "pd_engine": {"watchdog_timeout_s": 600}}))
        time.sleep(3)
    outcome = load.summary(clients.records)
    system.rows.append(
        {
            "fault": "rolling change of two replicas",
            "saw": outcome.words(),
            "longest": outcome.longest_s,
            "back": None,
            "served": outcome.outage_s,
        }
    )
    assert outcome.failed == 0, [record for record in clients.records if not record.ok][:5]
    assert outcome.sent > 20


def _write(rows: list[dict[str, Any]]) -> None:
    """Write the table of what was seen."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    lines = [
        "# Faults under load",
        "",
        "Kind of truth: **simulated** (GPUs), with the real engine, router, NIXL and systemd on three lab hosts: a",
        f"router, a prefill and a decode host on one machine of {os.cpu_count()} cores, {day}. Four clients send",
        "completions of 16 tokens, every other one streams. An attempt at the router is bounded to",
        f"{REQUEST_TIMEOUT_S} s, {ATTEMPTS} are made; the canary looks every 5 s and kills after 3 failures.",
        "",
        "```console",
        '$ PDSTACK_LONG=1 make test PYTEST_ARGS="-k test_faults"',
        "```",
        "",
        "| Fault | What clients saw | longest request | server answers again | everything served again |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        back = "-" if row["back"] is None else f"{row['back']:.1f} s"
        lines.append(f"| {row['fault']} | {row['saw']} | {row['longest']:.1f} s | {back} | {row['served']:.1f} s |")
    lines += [
        "",
        "Not tried: a stepped clock. Hosts of the lab share the machine's clock. Bounds, marks and restarts count in "
        "CLOCK_MONOTONIC.",
    ]
    (ROOT / "docs/results/faults.md").write_text("\n".join(lines) + "\n")
