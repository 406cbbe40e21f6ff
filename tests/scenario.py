"""What the tests of a molecule scenario share that run playbooks themselves: against the scenario's own inventory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def inventory() -> Path:
    return Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"]) / "inventory"


def playbook(name: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a playbook to its end, whatever that is."""
    return subprocess.run(command(name, *words), cwd=ROOT, env=env(**environment), capture_output=True, text=True)


def command(name: str, *words: str) -> list[str]:
    return [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(inventory()), f"playbooks/{name}", *words]


def env(**more: str) -> dict[str, str]:
    plain = {"ANSIBLE_FORCE_COLOR": "0", "ANSIBLE_NOCOLOR": "1"}  # molecule asks for colours
    return {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), **plain, **more}


def changed(done: subprocess.CompletedProcess[str]) -> int:
    """Return the changes of all hosts by the recap, which must be there."""
    counts = re.findall(r"\bchanged=(\d+)", done.stdout)
    assert counts, done.stdout + done.stderr
    return sum(map(int, counts))
