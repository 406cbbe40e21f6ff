"""Every command of docs/operations.md: of a kind that is known here, and one that its program takes.

Playbooks are parsed with --syntax-check against copies of the example inventories, their extra variables must be known,
and `make` says what it would do. The commands that a lab host can show are run there, by tests/drift/test_docs.py;
those that need a GPU host (probe, wheelhouse of a GPU release, deployments to inventory/mine) are parsed alone.
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
from pdstack import settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/operations.md"


def commands(prompt: str) -> list[str]:
    """Return the commands of the page's console blocks behind a prompt: $ on the controller, # on a host."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL):
        for line in block.splitlines():
            assert line.startswith(("$ ", "# ")), f"neither on the controller ($) nor on a host (#): {line}"
            if line.startswith(f"{prompt} "):
                found.append(re.sub(r"\s{2,}#.*|\s#\s.*", "", line[2:]).strip())
    return list(dict.fromkeys(found))


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


@pytest.mark.parametrize("command", PLAYBOOKS)
def test_a_playbook_is_there_and_parses(command: str, mine: Path) -> None:
    words = shlex.split(command)
    while "=" in words[0]:
        words.pop(0)
    extra = [words[at + 1] for at, word in enumerate(words) if word == "-e"]
    names = {name for text in extra for name in (json.loads(text) if text.startswith("{") else [text.split("=")[0]])}
    assert names <= known_variables()
    words = [str(mine) if word == "inventory/mine" else word for word in words]
    program = str(Path(sys.executable).parent / words[0])
    done = subprocess.run(
        [program, *words[1:], "--syntax-check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
