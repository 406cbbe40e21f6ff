"""A test module's own lab: its hosts, commands on them, playbooks against them."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLAYS = ROOT / "tests/fixtures/host_plays"
BIN = pathlib.Path(sys.executable).parent


@dataclass(frozen=True)
class OwnLab:
    """``prefix`` and ``suffix``: the lab's id, by default one that no other run has, nor another module of it."""

    prefix: str
    suffix: str = field(default_factory=lambda: str(os.getpid() % 100000))

    @property
    def environment(self) -> dict[str, str]:
        lab_id = self.prefix + self.suffix
        return {**os.environ, "LAB_ID": lab_id, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}

    def call(self, *words: str | pathlib.Path, data: bytes = b"", check: bool = True) -> str:
        """Return what tools/lab/lab printed; by default it must end well."""
        return self.read(*words, data=data, check=check).decode().strip()

    def read(self, *words: str | pathlib.Path, data: bytes = b"", check: bool = True) -> bytes:
        """Return what tools/lab/lab printed as it is, such as an archive."""
        command = [sys.executable, ROOT / "tools/lab/lab", *words]
        done = subprocess.run(command, env=self.environment, input=data, capture_output=True, check=False)
        assert done.returncode == 0 or not check, f"{words}\n{done.stdout.decode()}{done.stderr.decode()}"
        return done.stdout

    def up(self, connection: pathlib.Path, *hosts: str) -> None:
        """Boot the hosts (``name[:suite[:python]]``) and write the inventory of their connections."""
        self.call("up", "--inventory", connection, *hosts)

    def down(self) -> None:
        self.call("down")

    def on(self, host: str, command: str, data: bytes = b"", check: bool = True) -> str:
        """Return what a shell command on the host printed."""
        return self.call("exec", host, "--", command, data=data, check=check)

    def play_command(
        self, inventory: pathlib.Path, book: pathlib.Path, *options: str, **variables: object
    ) -> list[str | pathlib.Path]:
        extra = [word for key, value in variables.items() for word in ("-e", json.dumps({key: value}))]
        return [BIN / "ansible-playbook", "-i", inventory, book, *extra, *options]

    def play(
        self,
        inventory: pathlib.Path,
        book: pathlib.Path,
        *options: str,
        more: Mapping[str, str] = {},
        **variables: object,
    ) -> tuple[int, str]:
        """Run a playbook to its end, whatever that is; return its status and what it said. ``more``: environment."""
        done = subprocess.run(
            self.play_command(inventory, book, *options, **variables),
            cwd=ROOT,
            env={**self.environment, **more},
            # Scenarios that ran before may leave our own standard input non-blocking, which Ansible refuses.
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


def changed(output: str) -> dict[str, int]:
    """Return the number of changes by host, from the recap."""
    return {name: int(count) for name, count in re.findall(r"^(\S+) +: .*changed=(\d+)", output, re.MULTILINE)}
