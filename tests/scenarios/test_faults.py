"""Faults under load, on three lab hosts (router, prefill, decode) with the real engine: what clients saw, and how long.

Half an hour in all, so it runs where PDSTACK_LONG is set. Each fault is a test of its own, which takes about a minute
on hosts that are kept (tests/deployed.py). Each leaves a row below reports/faults, and table.md there shows
the rows there are. What the scenario `cluster` tries in every run of the tests is not tried again here.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deployed
import load
import pytest
import wrong_clock
from deployed import Deployed
from fault_table import Row

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not os.environ.get("PDSTACK_LONG"), reason="half an hour; set PDSTACK_LONG=1"),
]

ROUTER, PREFILL, DECODE = "c1", "c2", "c3"
UNITS = {ROUTER: "pd-router.service", PREFILL: "pd-prefill@0.service", DECODE: "pd-decode@0.service"}
PORTS = {ROUTER: 8000, PREFILL: 30000, DECODE: 30100}
# A router is ready when it has workers; an engine that answers /health has generated a token.
READY = {ROUTER: "/readiness", PREFILL: "/health", DECODE: "/health"}
REQUEST_TIMEOUT_S = 40
# A hung worker leaves the router within 3 checks of 5 s, each 5 s after the last, so before an attempt ends; the other
# four attempts then fail at once, 0.2 to 1.6 s apart.
BOUND_S = REQUEST_TIMEOUT_S + 3 + 2
# Where both sides look well to the router each attempt lasts until decode gives up waiting for its KV cache, in 30 s on
# this profile.
BOUND_OF_ALL_ATTEMPTS_S = 5 * 30 + 3 + 2
GOAL_S = 15  # beyond the engine's own start
# As by default, but for short times of an attempt and of the canary: a test of an hour shows no more.
SETTINGS = {
    "pd_router": {"request_timeout_s": REQUEST_TIMEOUT_S},
    "pd_canary": {"interval_s": 5, "failures": 2, "timeout_s": 5.0, "cooldown_s": 0, "per_day": 50},
}
# Half of each host's GPUs, so that a pair of tp 4 spans the hosts.
INVENTORY = """
gpu_hosts:
  hosts:
    c2:
      pd_excluded_gpus: ["0000:84:00.0", "0000:85:00.0", "0000:f4:00.0", "0000:f5:00.0"]
    c3:
      pd_excluded_gpus: ["0000:06:00.0", "0000:07:00.0", "0000:75:00.0", "0000:76:00.0"]
router_hosts:
  hosts:
    c1:
"""
REPLICAS = {"mode": "replicas", "context_length": 4096, "replicas": {"tp": 4, "count": 2}}


@pytest.fixture(scope="module")
def system() -> Iterator[Deployed]:
    with deployed.hosts("fault", INVENTORY, SETTINGS) as made:
        yield made


@pytest.fixture(autouse=True)
def whole(system: Deployed) -> Iterator[None]:
    """Begin where everything serves, whatever the test before has left, with no unit near its limit of restarts."""
    for host, unit in UNITS.items():
        system.on(host, f"systemctl reset-failed {unit} 2>/dev/null; systemctl start pd.target")
    deployed.wait_until(lambda: system.client(ROUTER).one("before").ok, 240, "a completion before the fault")
    yield
    for host, unit in UNITS.items():
        system.on(host, f"systemctl kill --signal=CONT --kill-whom=all {unit} 2>/dev/null; {HEAL}", check=False)


HEAL = (
    "nft delete table inet cut 2>/dev/null; umount -l /var/lib/pdstack/jit 2>/dev/null; "
    "systemctl stop thief.service 2>/dev/null; true"
)


def under_load(
    system: Deployed,
    host: str,
    do: Callable[[], Any],
    undo: Callable[[], Any] | None = None,
    held_s: float = 15,
    restarts: bool = True,
    bound_s: float = BOUND_S,
) -> tuple[load.Outcome, Row]:
    """Break something under load; return what clients saw, and the row without its name.

    ``undo`` ends the fault after ``held_s`` seconds; without it the system has to heal by itself. ``restarts``: the
    process of ``host`` is another one afterwards.
    """
    before = system.started(host, UNITS[host])
    watch = deployed.Watch(lambda: system.answers(host, PORTS[host], READY[host]))
    with system.client(ROUTER, timeout_s=180) as clients, watch:
        time.sleep(5)
        assert clients.records
        assert all(record.ok for record in clients.records), [r for r in clients.records if not r.ok][:3]
        begin = time.monotonic()
        do()
        if undo:
            time.sleep(held_s)
            undo()
        healed = time.monotonic()
        if restarts:  # until then, requests that were nearly done still come back whole
            deployed.wait_until(lambda: system.started(host, UNITS[host]) > before, 240, f"another {UNITS[host]}")
        served = steady(clients, healed, 240)
        time.sleep(2)
    started = system.started(host, UNITS[host])
    answered = watch.first(started) if restarts else None
    outcome = load.summary(clients.records, begin)
    row = Row(
        "",
        outcome.words(),
        outcome.wrong,
        outcome.longest_s,
        served - (healed if undo else begin),
        own_s=answered - started if answered else None,
        held_s=healed - begin if undo else None,
    )
    assert outcome.wrong == 0, [record for record in clients.records if record.wrong][:3]
    assert outcome.longest_s <= bound_s, f"a client waited {outcome.longest_s:.1f} s, past the bound"
    return outcome, row


def steady(clients: load.Load, since: float, limit_s: float) -> float:
    """Wait until every client has been answered whole twice after the last failure; return when the first of these was.

    Requests count that began after ``since``.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        recent = [record for record in list(clients.records) if record.begin >= since]
        last_bad = max((record.end for record in recent if not record.ok), default=since)
        good = [record for record in recent if record.ok and record.begin >= last_bad]
        if len(good) >= 2 * clients.clients:
            return min(record.end for record in good)
        time.sleep(0.25)
    raise AssertionError(f"not served again within {limit_s:.0f} s: {clients.records[-5:]}")


def signal(system: Deployed, host: str, name: str, whom: str = "all") -> None:
    system.on(host, f"systemctl kill --signal={name} --kill-whom={whom} {UNITS[host]}")


def named(row: Row, fault: str, note: str = "") -> Row:
    return replace(row, fault=fault, note=note)


@pytest.mark.parametrize(("number", "host"), [(1, DECODE), (2, PREFILL), (3, ROUTER)])
def test_sigkill(system: Deployed, number: int, host: str) -> None:
    """The main process, as the kernel's OOM killer would: systemd ends its children, and starts it again."""
    outcome, row = under_load(system, host, lambda: signal(system, host, "KILL", "main"))
    named(row, f"SIGKILL of {UNITS[host]}").keep(number)
    assert outcome.failed > 0
    assert row.own_s is not None
    assert row.served_s <= row.own_s + GOAL_S


@pytest.mark.parametrize(("number", "host"), [(4, DECODE), (5, PREFILL), (6, ROUTER)])
def test_sigstop(system: Deployed, number: int, host: str) -> None:
    """Nothing dies and nothing answers: the canary finds it and kills it."""
    since = system.on(host, "date +%s.%N")
    _, row = under_load(system, host, lambda: signal(system, host, "STOP"))
    told = system.on(host, f"journalctl -u pd-canary.service -o short-monotonic --since @{since} --no-pager")
    named(row, f"SIGSTOP of every process of {UNITS[host]}", "killed by the canary").keep(number)
    assert f"{UNITS[host]}: killed after 2 failures in a row" in told
    assert row.own_s is not None


def test_decode_dies_in_the_middle_of_a_stream(system: Deployed) -> None:
    """What had come is right as far as it goes, and the stream ends without [DONE] as soon as its engine is gone."""
    clients = system.client(ROUTER)
    assert clients.one("a long answer", streamed=True, tokens=600).ok
    records: list[load.Record] = []
    thread = threading.Thread(target=lambda: records.append(clients.one("a long answer", streamed=True, tokens=600)))
    thread.start()
    time.sleep(1)
    begin = time.monotonic()
    signal(system, DECODE, "KILL", "main")
    thread.join(60)
    deployed.wait_until(lambda: clients.one("after").ok, 240, "a completion after the fault")
    served, started = time.monotonic(), system.started(DECODE, UNITS[DECODE])
    assert records[0].begin < begin, "the stream ended before the fault"
    row = Row(
        "decode killed in the middle of one stream of 600 tokens",
        f"status 200, right as far as it came, its end without [DONE] {records[0].end - begin:.1f} s after the kill",
        int(records[0].wrong),
        records[0].seconds,
        served - begin,
        note="no load meanwhile",
    )
    row.keep(7)
    assert (records[0].ok, records[0].wrong, records[0].status) == (False, False, 200), records[0]
    assert "cut" in records[0].detail or "IncompleteRead" in records[0].detail
    assert records[0].end - begin < 10
    assert started > begin


def test_a_hung_prefill_keeps_no_client_past_the_bound(system: Deployed) -> None:
    """Without the canary, so that nothing ends it: the router's own limits bound what a client waits."""
    for host in UNITS:
        system.on(host, "systemctl stop pd-canary.timer")
    outcome, row = under_load(
        system,
        PREFILL,
        lambda: signal(system, PREFILL, "STOP"),
        lambda: signal(system, PREFILL, "CONT"),
        held_s=BOUND_S + 15,
        restarts=False,
    )
    named(row, f"prefill hangs for {row.held_s:.0f} s, no canary; then it goes on").keep(8)
    assert outcome.failed > 0


def test_network_cut_between_prefill_and_decode(system: Deployed) -> None:
    """Packets between them vanish, longer than UCX keeps a silent peer; afterwards nobody has to restart anything."""
    other = system.addresses[PREFILL]
    cut = (
        "nft 'add table inet cut; add chain inet cut in { type filter hook input priority -300; }; "
        "add chain inet cut out { type filter hook output priority -300; }; "
        f"add rule inet cut in ip saddr {other} drop; add rule inet cut out ip daddr {other} drop'"
    )
    before = {host: system.started(host, UNITS[host]) for host in UNITS}
    outcome, row = under_load(
        system,
        DECODE,
        lambda: system.on(DECODE, cut),
        lambda: system.on(DECODE, "nft delete table inet cut"),
        held_s=45,
        restarts=False,
        bound_s=BOUND_OF_ALL_ATTEMPTS_S,
    )
    after = {host: system.started(host, UNITS[host]) for host in UNITS}
    again = [UNITS[host] for host in UNITS if after[host] != before[host]]
    note = f"restarted: {', '.join(again)}" if again else "nothing restarted"
    named(row, f"no packet between prefill and decode for {row.held_s:.0f} s, then healed", note).keep(9)
    assert outcome.failed > 0


def test_router_restarted(system: Deployed) -> None:
    """What is in flight is finished; connections are refused until it is back."""
    outcome, row = under_load(system, ROUTER, lambda: system.on(ROUTER, "systemctl restart pd-router.service"))
    named(row, "systemctl restart pd-router").keep(10)
    assert not {"cut stream", "cut answer"} & set(outcome.statuses)
    assert row.own_s is not None
    assert row.served_s <= row.own_s + GOAL_S


def test_reboot_of_the_decode_host(system: Deployed) -> None:
    outcome, row = under_load(system, DECODE, lambda: system.lab.call("reboot", DECODE))
    named(row, "reboot of the decode host").keep(11)
    assert outcome.failed > 0
    assert row.own_s is not None


def test_disk_full_while_decode_restarts(system: Deployed) -> None:
    """The disk of its caches and of temporary files has no room while it starts: it serves all the same, or later."""
    jit = "/var/lib/pdstack/jit"
    fill = f"mount -t tmpfs -o size=64k,mode=0777 full {jit}; head -c 1M /dev/zero > {jit}/full 2>/dev/null; df {jit}"

    def do() -> None:
        assert "100%" in system.on(DECODE, fill)
        signal(system, DECODE, "KILL", "main")

    outcome, row = under_load(system, DECODE, do, lambda: system.on(DECODE, f"umount -l {jit}"), held_s=30)
    named(row, f"SIGKILL of decode while the disk of its caches is full, for {row.held_s:.0f} s").keep(12)
    assert outcome.failed > 0


def test_port_stolen_while_decode_restarts(system: Deployed) -> None:
    """systemd starts it again and again until the port is free."""
    address = system.addresses[DECODE]
    thief = (
        "systemd-run --quiet --unit=thief --collect python3 -c 'import socket, time; s = socket.socket(); "
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); "
        f's.bind(("{address}", {PORTS[DECODE]})); s.listen(); time.sleep(300)\''
    )

    def do() -> None:
        signal(system, DECODE, "KILL", "main")
        system.on(
            DECODE, f"for i in 1 2 3 4 5 6 7 8 9; do {thief} && sleep 0.5 && systemctl is-active thief && break; done"
        )

    outcome, row = under_load(system, DECODE, do, lambda: system.on(DECODE, "systemctl stop thief.service"), held_s=30)
    tries = system.on(DECODE, f"systemctl show --value -p NRestarts {UNITS[DECODE]}")
    named(row, f"SIGKILL of decode, its port stolen for {row.held_s:.0f} s", f"{tries} starts").keep(13)
    assert outcome.failed > 0


@pytest.fixture
def settable_clock(system: Deployed, tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """A wall clock of the three servers that can be stepped: hosts of the lab share the machine's, so a library lies.

    CLOCK_MONOTONIC is left alone, as by a step of the real clock. (libfaketime breaks the sleep of Python 3.11.)
    """
    library = wrong_clock.compiled(tmp_path)

    def step(seconds: int) -> None:
        for host in UNITS:
            code = f"open({wrong_clock.CLOCK!r}, 'r+b').write(({seconds}).to_bytes(8, 'little'))"
            system.on(host, f'python3 -c "{code}"')

    try:
        for host, unit in UNITS.items():
            folder = f"/run/systemd/system/{unit}.d"
            system.lab.on(
                host, f"cat > {wrong_clock.PRELOADED}; head -c 8 /dev/zero > {wrong_clock.CLOCK}", library.read_bytes()
            )
            drop_in = f"[Service]\\nEnvironment=LD_PRELOAD={wrong_clock.PRELOADED}\\n"
            system.on(host, f"mkdir -p {folder}; printf '{drop_in}' > {folder}/clock.conf")
            system.on(host, f"systemctl daemon-reload; systemctl restart {unit}")
        deployed.wait_until(lambda: system.client(ROUTER).one("before").ok, 240, "a completion with another clock")
        yield step
    finally:
        for host, unit in UNITS.items():
            system.on(host, f"rm -rf /run/systemd/system/{unit}.d {wrong_clock.PRELOADED}; systemctl daemon-reload")
            system.on(host, f"systemctl restart {unit}")


def test_clock_stepped(system: Deployed, settable_clock: Callable[[int], None]) -> None:
    """An hour forward for 20 s, then an hour back: what is in flight may fail, nothing restarts, nothing hangs."""
    hour = system.on(DECODE, "date -u -d '1 hour' '+%Y-%m-%d %H:'")
    before = {host: system.started(host, UNITS[host]) for host in UNITS}
    _, row = under_load(
        system, DECODE, lambda: settable_clock(3600), lambda: settable_clock(0), held_s=20, restarts=False
    )
    assert f"[{hour}" in system.on(DECODE, f"journalctl -o cat -n 2000 --no-pager -u {UNITS[DECODE]}"), "not stepped"
    assert {host: system.started(host, UNITS[host]) for host in UNITS} == before
    named(
        row,
        f"wall clock of all three processes an hour forward for {row.held_s:.0f} s, then back",
        "by a preloaded library: hosts of the lab share the machine's clock",
    ).keep(18)


def test_key_rotated(system: Deployed) -> None:
    """Who has the old key is told so from then on; who has the new one is served as soon as all units have it."""
    old = system.key
    before = {host: system.started(host, UNITS[host]) for host in UNITS}
    clients = system.client(ROUTER, clients=2, timeout_s=180)
    with clients:
        time.sleep(5)
        assert all(record.ok for record in clients.records)
        begin = time.monotonic()
        system.change_key()
        told: list[str] = []
        play = threading.Thread(target=lambda: told.append(system.play("serve.yml")))
        play.start()
        new = system.client(ROUTER, timeout_s=180)
        deployed.wait_until(lambda: new.one("with the new key").ok, 180, "a completion with the new key")
        served = time.monotonic()
        play.join()
        time.sleep(3)
    after = load.summary(clients.records, begin)
    named(
        Row("", after.words(), after.wrong, after.longest_s, served - begin),
        "key of clients changed at the controller, serve.yml",
        "clients keep the old key; the time is from the start of the playbook to an answer for the new key",
    ).keep(14)
    assert told
    assert all(system.started(host, UNITS[host]) > before[host] for host in UNITS)
    assert clients.records[-1].status == 401
    assert system.client(ROUTER, key=old).one("with the old key").status == 401
    assert after.wrong == 0
    assert after.longest_s <= BOUND_S


def test_drain_is_refused_where_nothing_else_serves(system: Deployed) -> None:
    with pytest.raises(AssertionError, match="no healthy decode would be left"):
        system.play("drain.yml", pd_drain="decode-0")
    with system.client(ROUTER) as clients:
        time.sleep(3)
    assert clients.records
    assert all(record.ok for record in clients.records)


def test_drain_finishes_what_is_in_flight_and_resume_brings_it_back(system: Deployed) -> None:
    client = system.client(ROUTER)
    records: list[load.Record] = []
    long = threading.Thread(target=lambda: records.append(client.one("a long answer", streamed=True, tokens=1500)))
    long.start()
    time.sleep(1.5)
    told = system.play("drain.yml", pd_drain="decode-0", pd_drain_outage=True)
    long.join()
    assert "No request was cut" in told
    assert records[0].ok, records
    assert system.on(DECODE, f"systemctl is-active {UNITS[DECODE]}; true") == "inactive"
    assert system.on(DECODE, f"systemctl is-enabled {UNITS[DECODE]}; true") == "disabled"
    refused = client.one("nobody decodes")
    assert (refused.ok, refused.status) == (False, 503)
    begin = time.monotonic()
    system.play("resume.yml", pd_resume="decode-0")
    assert client.one("somebody decodes").ok
    assert system.on(DECODE, f"systemctl is-enabled {UNITS[DECODE]}") == "enabled"
    Row(
        "drain.yml of decode during a stream of 1500 tokens, then resume.yml",
        f"the stream whole after {records[0].seconds:.1f} s, then 503 in {refused.seconds:.1f} s",
        0,
        max(records[0].seconds, refused.seconds),
        time.monotonic() - begin,
        note="the time is that of resume.yml",
    ).keep(15)


def test_a_late_worker_is_added(system: Deployed) -> None:
    """A worker that the router has given up, or that somebody removed, is a member again after the serve phase.

    Without the canary, which would kill the router: it completes nothing, and the pair behind it does.
    """
    system.on(ROUTER, "systemctl stop pd-canary.timer pd-canary.service")
    before = system.started(ROUTER, UNITS[ROUTER])
    base = f"http://{system.addresses[ROUTER]}:{PORTS[ROUTER]}/workers"
    curl = "(printf 'Authorization: Bearer '; cat /etc/pdstack/credentials/admin_key) | curl -s -H @-"

    def decodes() -> list[str]:
        workers = json.loads(system.on(ROUTER, f"{curl} {base}"))["workers"]
        return [worker["id"] for worker in workers if worker["worker_type"] == "decode"]

    (worker,) = decodes()
    system.on(ROUTER, f"{curl} -X DELETE {base}/{worker}")
    deployed.wait_until(lambda: not decodes(), 10, "no decode at the router")
    refused = system.client(ROUTER).one("nobody decodes")
    assert refused.status == 503
    begin = time.monotonic()
    system.play("serve.yml")
    took = time.monotonic() - begin
    assert len(decodes()) == 1
    assert system.started(ROUTER, UNITS[ROUTER]) == before
    assert system.client(ROUTER).one("somebody decodes").ok
    Row(
        "decode unknown to the router, then serve.yml",
        f"503 in {refused.seconds:.1f} s until then",
        0,
        refused.seconds,
        took,
        note="no canary; the time is that of serve.yml, the router is the same process",
    ).keep(19)


def test_a_change_of_the_pair_refuses_for_one_window_and_cuts_nothing(system: Deployed) -> None:
    with system.client(ROUTER, timeout_s=180) as clients:
        time.sleep(3)
        begin = time.monotonic()
        told = system.play("serve.yml", pd_engine={"watchdog_timeout_s": 500 + int(begin) % 100})
        time.sleep(3)
    assert "answers 503 from here until pair-0 is back" in told
    outcome = load.summary(clients.records, begin)
    Row(
        "serve.yml with another argument of the pair (announced window)",
        outcome.words(),
        outcome.wrong,
        outcome.longest_s,
        outcome.outage_s,
        note="the time is from the first 503 to the last",
    ).keep(16)
    assert set(outcome.statuses) == {"503"}
    assert clients.records[-1].ok


def test_a_change_of_replicas_loses_no_request(system: Deployed) -> None:
    """Both restart, one after the other, each out at the router first."""
    system.play("serve.yml", pd_topology=REPLICAS)
    units = {PREFILL: "pd-aggregated@0.service", DECODE: "pd-aggregated@1.service"}
    before = {host: system.started(host, unit) for host, unit in units.items()}
    with system.client(ROUTER, clients=3, timeout_s=180) as clients:
        time.sleep(3)
        begin = time.monotonic()
        system.play("serve.yml", pd_topology=REPLICAS, pd_engine={"watchdog_timeout_s": 600})
        took = time.monotonic() - begin
        time.sleep(3)
    outcome = load.summary(clients.records)
    Row(
        "serve.yml with another argument of two replicas on two hosts",
        outcome.words(),
        outcome.wrong,
        outcome.longest_s,
        outcome.outage_s,
        note=f"both restarted, one after the other, in {took:.0f} s",
    ).keep(17)
    assert all(system.started(host, unit) > before[host] > 0 for host, unit in units.items())
    assert outcome.failed == 0, [record for record in clients.records if not record.ok][:5]
    assert outcome.sent > 20
