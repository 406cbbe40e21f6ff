"""One lab host, switched between its topologies and routers by deploying again: exactly the units concerned change.

Ten minutes of starts of engines and their proofs: opt-in by PDSTACK_LONG, with the host kept as tests/deployed.py says.
What each switch took and changed is kept in reports/topologies.md. How units are compared is held by unit tests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import deployed
import load
import own_lab
import pytest
from deployed import Deployed

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not os.environ.get("PDSTACK_LONG"), reason="ten minutes; set PDSTACK_LONG=1"),
]

REPORT = own_lab.ROOT / "reports/topologies.md"
HOST = "one"
INVENTORY = """
gpu_hosts:
  hosts:
    one:
router_hosts:
  hosts:
    one:
"""
ROUTER, PREFILL, DECODE = "pd-router.service", "pd-prefill@0.service", "pd-decode@0.service"
FIRST, SECOND = "pd-aggregated@0.service", "pd-aggregated@1.service"
REPLICAS = {"mode": "replicas", "context_length": 4096, "replicas": {"tp": 4, "count": 2}}
ONE_SERVER = {"mode": "aggregated", "context_length": 4096, "aggregated": {"tp": 4}}


@pytest.fixture(scope="module")
def system() -> Iterator[Deployed]:
    with deployed.hosts("topo", INVENTORY, {}) as made:
        yield made


def running(system: Deployed) -> dict[str, float]:
    """When the process of each serving unit started. Units that run are enabled, and no other is or has files."""
    listed = system.on(HOST, "systemctl list-units --plain --no-legend --state=active 'pd-*@*' pd-router.service")
    units = [line.split()[0] for line in listed.splitlines()]
    enabled = system.on(HOST, "ls /etc/systemd/system/pd.target.wants").split()
    assert sorted(set(enabled) - {"pd-canary.timer"}) == sorted(units)
    files = {name.rpartition(".")[0] for name in system.on(HOST, "ls /etc/pdstack/instances").split()}
    assert files == {unit[3:-8].replace("@", "-") for unit in units if "@" in unit}
    placed = system.on(HOST, "ls -d /etc/systemd/system/pd-*@*.service.d").split()
    assert {path.rpartition("/")[2][:-2] for path in placed} == {unit for unit in units if "@" in unit}
    return {unit: system.started(HOST, unit) for unit in units}


class Switches:
    """Deploys with another intent, and keeps what that took and changed, as rows of a table."""

    def __init__(self, system: Deployed) -> None:
        self.system = system
        self.now = running(system)

    def to(self, name: str, **intent: object) -> dict[str, float]:
        """Deploy twice, the second time to see that nothing is left to do; return the units with their starts."""
        before, begin = self.now, time.monotonic()
        self.system.play("deploy_pd.yml", **intent)  # it ends with golden completions, or fails
        took = time.monotonic() - begin
        self.now = running(self.system)
        assert self.system.client(HOST).one(f"after {name}").ok

        begin = time.monotonic()
        assert own_lab.changed(self.system.play("deploy_pd.yml", **intent)) == {HOST: 0}
        again = time.monotonic() - begin
        assert running(self.system) == self.now
        kinds = {
            "started": [unit for unit in self.now if unit not in before],
            "restarted": [unit for unit in self.now if unit in before and before[unit] != self.now[unit]],
            "kept": [unit for unit in self.now if before.get(unit) == self.now[unit]],
            "removed": [unit for unit in before if unit not in self.now],
        }
        words = "; ".join(
            f"{kind} {', '.join(short(unit) for unit in units)}" for kind, units in kinds.items() if units
        )
        keep(f"| {name} | {words} | {took:.0f} s | changed=0 in {again:.1f} s |")
        return self.now


def short(unit: str) -> str:
    return unit[len("pd-") : -len(".service")]


def keep(row: str) -> None:
    REPORT.parent.mkdir(exist_ok=True)
    if not REPORT.exists():
        REPORT.write_text("| Deployed again as | units | whole run | next run |\n|---|---|---|---|\n")
    with REPORT.open("a") as report:
        report.write(row + "\n")


def test_each_switch_changes_exactly_the_units_concerned(system: Deployed) -> None:
    switches = Switches(system)
    pair = switches.now
    assert set(pair) == {PREFILL, DECODE, ROUTER}

    replicas = switches.to("replicas, 2 x tp 4", pd_topology=REPLICAS)
    assert set(replicas) == {FIRST, SECOND, ROUTER}
    assert replicas[ROUTER] > pair[ROUTER], "a router of pairs cannot route to replicas"

    server = switches.to("aggregated, tp 4", pd_topology=ONE_SERVER)
    assert set(server) == {FIRST, ROUTER}
    assert server[FIRST] == replicas[FIRST], "the server that stays is the same process"

    again = switches.to("pd, 1P1D")
    assert set(again) == {PREFILL, DECODE, ROUTER}


def test_a_router_is_changed_for_the_other_and_back(system: Deployed) -> None:
    """smg, from its own lock: deployed, which proves golden completions through it; the engines stay up."""
    switches = Switches(system)
    pair = switches.now
    smg = switches.to("pd, router smg", pd_router={"implementation": "smg"})
    title = system.on(HOST, "tr '\\0' ' ' < /proc/$(systemctl show --value -p MainPID pd-router.service)/cmdline")
    assert title.startswith("smg::router")
    with system.client(HOST, clients=2) as clients:
        time.sleep(5)
    assert load.summary(clients.records).failed == 0, clients.records[:3]
    back = switches.to("pd, router sglang-router")
    for engine in (PREFILL, DECODE):
        assert pair[engine] == smg[engine] == back[engine]
    assert pair[ROUTER] < smg[ROUTER] < back[ROUTER]


def test_a_replica_is_drained_and_brought_back_without_a_failed_request(system: Deployed) -> None:
    system.play("serve.yml", pd_topology=REPLICAS)
    with system.client(HOST, clients=3) as clients:
        time.sleep(3)
        system.play("drain.yml", pd_drain="aggregated-1")
        for verb, words in (("is-active", ["active", "inactive"]), ("is-enabled", ["enabled", "disabled"])):
            assert system.on(HOST, f"systemctl {verb} {FIRST} {SECOND}; true").split() == words
        time.sleep(2)
        system.play("resume.yml", pd_resume="aggregated-1")
        time.sleep(3)
    assert set(running(system)) == {FIRST, SECOND, ROUTER}
    assert load.summary(clients.records).failed == 0, [record for record in clients.records if not record.ok][:5]


def test_a_replica_stopped_without_a_drain_finishes_what_it_has_and_refuses_the_rest(system: Deployed) -> None:
    """As at a reboot. The router sends what was refused to the other replica: no client sees a failure."""
    system.play("serve.yml", pd_topology=REPLICAS)
    with system.client(HOST, clients=3) as clients:
        time.sleep(3)
        begin = time.monotonic()
        system.on(HOST, f"systemctl stop {SECOND}")
        took = time.monotonic() - begin
        time.sleep(3)
    seen = load.summary(clients.records, begin)
    seen_as = f"{seen.words()}, longest {seen.longest_s:.1f} s"
    keep(f"| (`systemctl stop` of a replica under load) | {seen_as} | {took:.0f} s | - |")
    system.on(HOST, f"systemctl start {SECOND}")
    assert seen.failed == 0, [record for record in clients.records if not record.ok][:5]
    assert took < 60  # of the 120 s that the unit may take
