"""Lab hosts with the real engine, deployed once and kept for the tests of a module, or for the next run of it.

``PDSTACK_KEEP_LAB=1`` leaves the hosts up, so that one test at a time takes a minute:
``PDSTACK_LONG=1 PDSTACK_KEEP_LAB=1 pytest tests/scenarios/test_faults.py -k stolen``. The fixture deploys again
each time, which mends what the last run left; a run without the variable takes them away.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import load
import yaml
from own_lab import ROOT, OwnLab
from pdstack import http


@dataclass(frozen=True)
class Deployed:
    """The hosts of one lab, by their inventory."""

    lab: OwnLab
    folder: pathlib.Path  # of the inventory
    addresses: Mapping[str, str]

    def on(self, host: str, command: str, check: bool = True) -> str:
        """Run a shell command on a host as root and return what it printed. Without ``check`` the host may be down."""
        return self.lab.on(host, command, check=check)

    def play(self, playbook: str, **variables: Any) -> str:
        """Run a playbook, which must succeed, and return what it said."""
        status, output = self.lab.play(
            self.folder, ROOT / "playbooks" / playbook, more={"ANSIBLE_NOCOLOR": "1"}, **variables
        )
        assert status == 0, output[-8000:]
        return output

    @property
    def key(self) -> str:
        """The key of clients, as the controller has it now."""
        return (self.folder / "api_key").read_text().strip()

    def change_key(self) -> None:
        """Have another key at the controller; the next deployment gives it to the hosts."""
        (self.folder / "api_key").write_text(secrets.token_hex(16) + "\n")

    def client(self, host: str, port: int = 8000, **options: Any) -> load.Load:
        """Return clients of the router on a host."""
        return load.Load(self.addresses[host], port, **{"key": self.key, **options})

    def answers(self, host: str, port: int, path: str = "/health") -> bool:
        return http.request("GET", f"http://{self.addresses[host]}:{port}{path}", timeout_s=5).status == 200

    def started(self, host: str, unit: str) -> float:
        """When the unit's process started, in seconds of CLOCK_MONOTONIC, which the hosts share with us; 0 for none."""
        shown = self.on(host, f"systemctl show --value -p ExecMainStartTimestampMonotonic {unit}", check=False)
        return float(shown or 0) / 1e6


@contextmanager
def hosts(name: str, inventory: str, settings: Mapping[str, Any]) -> Iterator[Deployed]:
    """Boot the hosts of an inventory of two groups (a YAML document), deploy to them, and take them away at the end.

    The lab is of this checkout: ``name``, five letters at most, and a part of a hash of its path.
    """
    lab = OwnLab(name, hashlib.sha1(str(ROOT).encode()).hexdigest()[:3])
    folder = ROOT / ".cache" / f"lab-{lab.prefix}{lab.suffix}"
    (folder / "group_vars").mkdir(parents=True, exist_ok=True)
    document = yaml.safe_load(inventory)
    (folder / "hosts.yml").write_text(inventory)
    names = sorted({host for group in document.values() for host in group.get("hosts", {})})
    subprocess.run([sys.executable, ROOT / "tools/tiny_model"], check=True, capture_output=True)
    lab.up(folder / "connection.yml", *names)
    try:
        connection = yaml.safe_load((folder / "connection.yml").read_text())
        made = Deployed(lab, folder, {host: _address(connection, host) for host in names})
        if not (folder / "api_key").exists():
            made.change_key()
        here = made.addresses[names[0]].rpartition(".")[0] + ".254"
        values = yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text())
        security = {
            "api_key": f"{{{{ lookup('ansible.builtin.file', '{folder}/api_key') }}}}",
            "metrics_networks": [f"{here}/32"],  # this machine looks at the engines' /health
        }
        (folder / "group_vars/all.yml").write_text(yaml.safe_dump({**values, "pd_security": security, **settings}))
        for host in names:
            made.on(host, "test -e /run/pdstack-test-apt || (apt-get update -qq && touch /run/pdstack-test-apt)")
        made.play("deploy_pd.yml")
        yield made
    finally:
        if not os.environ.get("PDSTACK_KEEP_LAB"):
            lab.down()


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
    """Looks four times a second whether a server answers, and keeps when. Times are of CLOCK_MONOTONIC."""

    def __init__(self, answers: Callable[[], bool]) -> None:
        self.seen: list[tuple[float, bool]] = []
        self._answers = answers
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
            begin = time.monotonic()
            good = self._answers()
            self.seen.append((time.monotonic() if good else begin, good))
            self._stop.wait(0.25)

    def first(self, since: float) -> float | None:
        """Return when it first answered after ``since``, None for never."""
        return min((moment for moment, good in list(self.seen) if good and moment > since), default=None)


def wait_until(true: Callable[[], bool], limit_s: float, what: str) -> float:
    """Return when it became true, seconds of CLOCK_MONOTONIC. Raises AssertionError after the limit."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.5)
    return time.monotonic()
