"""Every command of docs/operations.md is of a kind that is known here, and every playbook for operators is there.

Playbooks are parsed with --syntax-check against the lab's inventory and a copy of the example's. What they are given
is judged by test_commands_in_docs.py, on all pages. On a lab host tests/drift/test_docs.py runs what only looks, and
tests/drift/test_walk.py the page from top to bottom (PDSTACK_LONG=1).
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/operations.md"


def blocks() -> list[list[tuple[str, str]]]:
    """Return the page's console blocks, each a list of (prompt, command): $ on the controller, # on a host."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL):
        lines = []
        for line in block.splitlines():
            assert line.startswith(("$ ", "# ")), f"neither on the controller ($) nor on a host (#): {line}"
            lines.append((line[0], re.sub(r"\s{2,}#.*|\s#\s.*", "", line[2:]).strip()))
        found.append(lines)
    return found


def commands(prompt: str) -> list[str]:
    """Return the page's commands behind a prompt, each once."""
    return list(dict.fromkeys(command for block in blocks() for found, command in block if found == prompt))


CONTROLLER = commands("$")
PLAYBOOKS = [command for command in CONTROLLER if "ansible-playbook" in command]
MAKES = [command for command in CONTROLLER if re.match(r"(\w+=\S+ )*make ", command)]


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """inventory/mine as the page makes it."""
    copy = tmp_path_factory.mktemp("inventory") / "mine"
    shutil.copytree(ROOT / "inventory/example", copy)
    return copy


def test_the_page_has_commands_and_each_is_of_a_kind_that_is_tested() -> None:
    assert len(PLAYBOOKS) > 12
    assert len(MAKES) > 3
    assert [command for command in CONTROLLER if command not in PLAYBOOKS + MAKES] == [
        "cp -r inventory/example inventory/mine"
    ]
    assert len(commands("#")) > 5


def words_of(command: str) -> list[str]:
    """Return what a command hands to its program, without the program and the environment before it."""
    words = shlex.split(command)
    while "=" in words[0]:
        words.pop(0)
    return words[1:]


def test_every_playbook_of_the_page_parses(mine: Path) -> None:
    paths = sorted({word for command in PLAYBOOKS for word in words_of(command) if word.endswith(".yml")})
    program = str(Path(sys.executable).parent / "ansible-playbook")
    for inventory in (ROOT / "inventory/lab", mine):
        words = [program, "-i", str(inventory), "--syntax-check", *paths]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert all(f"playbook: {path}" in done.stdout for path in paths)


def test_every_playbook_for_operators_is_on_the_page() -> None:
    text = PAGE.read_text()
    parts = {"lock", "unlock", "host", "runtime", "checkpoint", "lab_up", "lab_down"}  # of others, or of make
    there = {path.stem for path in ROOT.glob("playbooks/*.yml")} - parts
    elsewhere = {"benchmark", "ab", "advise", "profile"}  # their own page
    assert {name for name in there - elsewhere if f"{name}.yml" not in text} == set()
