"""Every command of docs/operations.md: of a kind that is known here, and one that its program takes.

Playbooks are parsed with --syntax-check against the lab's inventory and a copy of the example's, their options and
extra variables must be known, and `make` says what it would do. On a lab host tests/drift/test_docs.py runs what only
looks, and tests/drift/test_walk.py the page from top to bottom (PDSTACK_LONG=1).
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.cli.playbook import PlaybookCLI
from pdstack import settings

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


@functools.cache
def known_variables() -> set[str]:
    names = set(settings.variable_names())
    for path in ROOT.glob("roles/*/meta/argument_specs.yml"):
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            names |= set(entry.get("options", {}))
    return names


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


@pytest.mark.parametrize("command", PLAYBOOKS)
def test_a_playbook_is_there_and_its_variables_are_known(command: str) -> None:
    parser = PlaybookCLI(["ansible-playbook"])
    parser.init_parser()
    given = parser.parser.parse_args(words_of(command))  # SystemExit for what it does not take
    assert all((ROOT / path).is_file() for path in given.args)
    extra = [json.loads(text) if text.startswith("{") else [text.split("=")[0]] for text in given.extra_vars]
    assert {name for names in extra for name in names} <= known_variables()


def test_every_playbook_of_the_page_parses(mine: Path) -> None:
    paths = sorted({word for command in PLAYBOOKS for word in words_of(command) if word.endswith(".yml")})
    program = str(Path(sys.executable).parent / "ansible-playbook")
    for inventory in (ROOT / "inventory/lab", mine):
        words = [program, "-i", str(inventory), "--syntax-check", *paths]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert all(f"playbook: {path}" in done.stdout for path in paths)


@pytest.mark.parametrize("command", MAKES)
def test_make_knows_what_to_do(command: str) -> None:
    words = ["make", "--dry-run", *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deploy_pd.yml" in done.stdout or "wheelhouse" in done.stdout


def test_every_playbook_for_operators_is_on_the_page() -> None:
    text = PAGE.read_text()
    parts = {"lock", "unlock", "host", "runtime", "checkpoint", "lab_up", "lab_down"}  # of others, or of make
    there = {path.stem for path in ROOT.glob("playbooks/*.yml")} - parts
    elsewhere = {"benchmark", "ab", "advise", "profile"}  # their own page
    assert {name for name in there - elsewhere if f"{name}.yml" not in text} == set()
