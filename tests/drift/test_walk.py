"""docs/operations.md from top to bottom: every command as it stands there, on the lab host. Last: it ends retired.

Names that stand for the reader's own (inventory/mine, gpu2, NAME) become those of the lab. PDSTACK_RECORD: see
test_repair.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import scenario
from drift.test_docs import NO_GPU
from drift.test_repair import record
from unit.test_operations_docs import blocks

OTHER_RELEASE = "cpu-0.5.22"
# The default loads, such as 96 requests of 512 tokens at each step, are for GPUs: a quarter of an hour here.
LOAD = json.dumps(
    {
        "pd_benchmark": {"concurrency": [1, 4], "requests": 8, "output_len": 16, "repeats": 2},
        "pd_trace": {"steps": 3, "concurrency": 2},
    }
)
# drift.yml behind a line that changed the host has to say so.
DIFFERS = {"systemctl stop pd.target"}


def walk() -> list[tuple[str, str, int]]:
    """Return (prompt, command, exit status) in the page's order, but for retirement, which comes last."""
    last = [block for block in blocks() if any("retire.yml" in command for _, command in block)]
    found = []
    for block in [block for block in blocks() if block not in last] + last:
        differs = False
        for prompt, command in block:
            if command in NO_GPU:
                continue
            if command.startswith("make deploy") and any("pd_release=NAME" in before for _, before in block):
                command += " ANSIBLE_ARGS='-e pd_release=NAME'"  # the page says: with it in the inventory
            found.append((prompt, command, 2 if differs and "drift.yml" in command else 0))
            differs = (differs or command in DIFFERS) and "make deploy" not in command
    return found


def on_the_lab(command: str, name: str, folder: Path) -> str:
    """Return a command of the controller with the lab's names."""
    inventory = scenario.inventory()
    if command.startswith("make deploy"):
        command = re.sub(r" INVENTORY=\S+", "", command) + f" INVENTORY={inventory}"
    else:
        command = command.replace(" -i inventory/mine", "").replace(
            "ansible-playbook", f"ansible-playbook -i {inventory}"
        )
    command = command.replace("inventory/mine", f"{folder}/mine").replace("reports/", f"{folder}/reports/")
    command = command.replace("pd_retire=mine", f"pd_retire={inventory.name}")
    command = re.sub(r"(pd_drain|pd_resume|pd_retire)=gpu\d", rf"\1={name}", command)
    if "drain.yml" in command:
        command += " -e pd_drain_outage=true"  # the only host there is
    if "benchmark.yml" in command or "profile.yml" in command:
        command += f" -e '{LOAD}'"
    if "support_bundle.yml" in command and "pd_bundle" not in command:
        command += f" -e pd_bundle={folder}/default.tar.gz"
    # What can be fetched in a lab's time.
    return command.replace("=NAME", f"={OTHER_RELEASE}").replace("RELEASE=sglang-0.5.23", "RELEASE=cpu-0.5.23")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("walk")


@pytest.mark.skipif(not os.environ.get("PDSTACK_LONG"), reason="PDSTACK_LONG is not set: the whole page")
@pytest.mark.parametrize(("prompt", "command", "status"), walk())
def test_a_command_of_the_page(host: Any, folder: Path, prompt: str, command: str, status: int) -> None:
    began = time.monotonic()
    if prompt == "#":
        line = command.replace("journalctl -fu", "journalctl -n 20 --no-pager -u")
        done = host.run(f"export SYSTEMD_PAGER=cat; {line}")
        assert done.rc in ((0, 3) if line.startswith("systemctl status") else (0,)), done
        said = done.stdout
    else:
        line = on_the_lab(command, host.backend.get_hostname(), folder)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ran = subprocess.run(
            line, shell=True, cwd=scenario.ROOT, env=scenario.env(PATH=path), capture_output=True, text=True
        )
        said = ran.stdout + ran.stderr
        assert ran.returncode == status, f"{line}\n{ran.stdout[-6000:]}{ran.stderr[-2000:]}"
    seconds = time.monotonic() - began
    record("command", prompt=prompt, command=command, seconds=seconds, status=status, said=said[-3000:])
