"""Every command of every page is of a program, a file, a scenario and options that there are.

A command of a kind that nothing here judges fails, and so does one outside a console block. What the commands of
docs/operations.md do is seen on a lab host (tests/drift/test_docs.py, test_walk.py).
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ansible.cli.playbook import PlaybookCLI
from pdstack import intent, inventory, settings

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/results/*.md", "roles/*/README.md", "kernels/*.md")
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Programs of the system: what they are given is no business of ours, but for systemd's units.
SYSTEM = {"$EDITOR", ".", "ansible-vault", "bash", "cat", "cd", "cp", "curl", "echo", "export", "grep", "mkdir"}
SYSTEM |= {"mokutil", "mv", "printf", "readlink", "reboot", "rm", "scp", "ssh"}
ON_A_HOST = {"systemctl", "journalctl"}
OURS = {"ansible-playbook", "make", "molecule", "pytest", "python", "python3", *ON_A_HOST}
ENDS = {";", "&&", "|", "(", ")"}
# What a page tells the refusal of.
REFUSED = {"ansible-playbook playbooks/deploy_pd.yml -e nixl_ucx_environment=..."}


def prompted(text: str) -> list[str]:
    """Return the commands of a page's console blocks, without their comments."""
    found = []
    for line in [line for kind, block in BLOCK.findall(text) if kind == "console" for line in block.splitlines()]:
        match = re.fullmatch(r"\w*[$#] +(.*?)(\s+#\s.*)?", line)
        assert match, f"no prompt, and so no command: {line}"
        found.append(match[1])
    return found


def in_prose(text: str) -> list[str]:
    """Return what stands in the text as code and starts one of our programs, or a playbook."""
    spans = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    calls = [re.sub(r"^(playbooks/)?(?=\w+\.yml -)", "ansible-playbook playbooks/", span) for span in spans]
    return [call for call in calls if " " in call and program(call) in OURS]


def program(command: str) -> str:
    words = [word for word in command.split() if not re.match(r"[A-Z_]+=", word)]
    return words[0].rpartition("/")[2] if words else ""


def simple(command: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield a line's simple commands: the environment that each is given, and its words."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=";&|()<>")
    lexer.commenters, lexer.whitespace_split = "", True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in ENDS:
            words.append(word)
            continue
        given = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, given[name] = words.pop(0).partition("=")
        if words or given:
            yield given, words
        words = []


@functools.cache
def code() -> str:
    """Return all that is read by a program, without the pages."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    there = [
        ROOT / name for name in listed.split("\0") if name and not name.endswith((".md", ".json", ".html", ".svg"))
    ]
    return "\n".join(path.read_text(errors="replace") for path in there if path.is_file() and path != Path(__file__))


@functools.cache
def role_options() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for path in ROOT.glob("roles/*/meta/argument_specs.yml"):
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            found.update(entry.get("options", {}))
    return found


def wrong(command: str) -> list[str]:
    """Return what is not there, of a line of commands."""
    return [said for given, words in simple(command) for said in [*wrong_environment(given), *wrong_words(words)]]


def wrong_environment(given: dict[str, str]) -> list[str]:
    ours = [name for name in given if name.startswith(("PDSTACK_", "LAB_"))]
    return [f"nothing reads {name}" for name in ours if not re.search(rf"\b{name}\b", code())]


def wrong_words(words: list[str]) -> list[str]:
    if not words:
        return []
    name, *rest = words
    stem = name.rpartition("/")[2]
    if stem == "ansible-playbook":
        return wrong_playbook(rest)
    if stem == "make":
        return wrong_make(rest)
    if stem == "molecule":
        scenario = next((rest[at + 1] for at, word in enumerate(rest) if word == "-s"), "default")
        there = (ROOT / "molecule" / scenario / "molecule.yml").is_file()
        return [] if there else [f"no scenario {scenario}"]
    if stem in ("python", "python3") and rest[0] == "-m":
        path = ROOT / "module_utils" / (rest[1].replace(".", "/") + ".py")
        return wrong_program(path, rest[2:])
    if stem in ("python", "python3"):
        return wrong_program(here(rest[0]), rest[1:])
    if stem == "pytest":
        return [f"no {word}" for word in rest if "/" in word and not here(word).exists()]
    if stem in ON_A_HOST:
        units = [re.split(r"[@.*]", word)[0] for word in rest if word.startswith("pd")]
        return [f"no unit {unit}" for unit in units if unit not in ("pd", "pd-") and f"{unit}" not in code()]
    if name.startswith("tools/"):
        return wrong_program(here(name), rest)
    return [] if stem in SYSTEM else [f"nothing judges {name}"]


def here(name: str) -> Path:
    """A file of the checkout, which the kernels' pages name from their own folder too."""
    beside = ROOT / "kernels" / name
    name = name.removeprefix("$C/pdstack/")
    return ROOT / name if (ROOT / name).exists() or not beside.exists() else beside


def wrong_program(path: Path, words: list[str]) -> list[str]:
    beside = path.is_dir() or path.with_suffix(".py").is_file()  # a package of its own
    sources = [path] * path.is_file() + sorted((path if path.is_dir() else path.parent).glob("*.py") if beside else [])
    if not sources:
        return [f"no {path.relative_to(ROOT)}"]
    text = "\n".join(source.read_text() for source in sources)
    options = [word for word in words[: words.index("--") if "--" in words else None] if word.startswith("--")]
    return [f"{path.name} knows no {option}" for option in options if f'"{option}"' not in text]


def wrong_make(words: list[str]) -> list[str]:
    ran = ["make", "--dry-run", *words]
    done = subprocess.run(ran, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ})
    said = [done.stderr.strip()] if done.returncode else []
    makefiles = (ROOT / "Makefile").read_text() + (ROOT / "kernels/Makefile").read_text()
    assigned = [word.partition("=") for word in words if re.match(r"[A-Z_]+=", word)]
    said += [f"no Makefile has {name}" for name, _, _ in assigned if name not in makefiles]
    for name, _, value in assigned:
        if name == "PYTEST_ARGS":
            said += [f"no test has {word!r} in its name" for word in selected(value) if not names_a_test(word)]
        if name == "RELEASE":
            said += [] if (ROOT / "releases" / value).is_dir() else [f"no release {value}"]
    return said


def selected(arguments: str) -> list[str]:
    words = shlex.split(arguments)
    return [word for word in re.findall(r"\w+", words[words.index("-k") + 1]) if word not in ("and", "or", "not")]


def names_a_test(word: str) -> bool:
    scenarios = [path.parent.name for path in ROOT.glob("molecule/*/molecule.yml")]
    return any(word in name for name in [*scenarios, *(path.name for path in ROOT.glob("tests/**/test_*.py"))])


def wrong_playbook(words: list[str]) -> list[str]:
    parser = PlaybookCLI(["ansible-playbook"])
    parser.init_parser()
    try:
        given = parser.parser.parse_args(words)
    except SystemExit:
        return [f"ansible-playbook does not take {words}"]
    said = [f"no {path}" for path in given.args if not (ROOT / path).is_file()]
    inventories = [path for path in given.inventory or [] if path != "inventory/mine" and not (ROOT / path).exists()]
    said += [f"no {path}" for path in inventories]
    for text in given.extra_vars:
        text = text.replace("pd_release=NAME", "pd_release=cpu-0.5.22")
        variables = json.loads(text) if text.startswith("{") else dict([text.split("=", 1)])
        said += [message for name, value in variables.items() for message in wrong_variable(name, value)]
    return said


def wrong_variable(name: str, value: object) -> list[str]:
    """Judge a variable as the playbooks do; a role's by the choices of its argument specification."""
    if name in role_options():
        choices = role_options()[name].get("choices")  # type: ignore[attr-defined]
        return [f"{name}: {value} is none of {choices}"] if choices and value not in choices else []
    try:
        intent.check_only({"gpu1": {name: value}}, [name], role_options(), inventory.ROLE_PREFIXES)
    except intent.IntentError as error:
        return [str(error)]
    return [] if name in settings.variable_names() else [f"no variable {name}"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_says_to_type_is_there(page: Path) -> None:
    text = page.read_text()
    assert [
        (command, said)
        for command in prompted(text) + in_prose(text)
        for said in wrong(command)
        if command not in REFUSED
    ] == []


def test_pages_have_commands_of_every_kind() -> None:
    found = [command for page in PAGES for command in prompted(page.read_text())]
    started = {words[0].rpartition("/")[2] for command in found for _, words in simple(command) if words}
    assert started >= OURS - {"python"} | {"lab", "gpu_host", "ssh"}
    assert len(found) > 100
    assert len([span for page in PAGES for span in in_prose(page.read_text())]) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_stand_in_console_blocks_where_they_are_judged(page: Path) -> None:
    plain = [
        line for kind, block in BLOCK.findall(page.read_text()) if kind != "console" for line in block.splitlines()
    ]
    plain += re.findall(r"^ {4,}(.*)", BLOCK.sub("", page.read_text()), re.MULTILINE)
    assert [line for line in plain if program(line.removeprefix("$ ")) in OURS - {"make"} | {"cp"}] == []
    assert [line for line in plain if re.match(r"([A-Z_]+=\S+ )*make \w+($| )", line.removeprefix("$ "))] == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("ansible-playbook playbooks/drif.yml", "no playbooks/drif.yml"),
        ("ansible-playbook playbooks/drift.yml --chek", "does not take"),
        ("ansible-playbook -i inventory/yours playbooks/drift.yml", "no inventory/yours"),
        ("ansible-playbook playbooks/drift.yml -e pd_drift_reprot=x", "pd_drift_reprot"),
        ("""ansible-playbook playbooks/benchmark.yml -e '{"pd_benchmark": {"rate": [1]}}'""", "rate"),
        ("ansible-playbook playbooks/observability.yml -e observability_state=gone", "none of"),
        ("echo && ansible-playbook playbooks/drif.yml | cat", "no playbooks/drif.yml"),
        ("make deploi", "deploi"),
        ("make deploy INVENTROY=x", "INVENTROY"),
        ("make wheelhouse RELEASE=sglang-0", "no release sglang-0"),
        ('make test PYTEST_ARGS="-k fualts"', "fualts"),
        ("PDSTACK_LOGN=1 molecule test -s drift", "nothing reads PDSTACK_LOGN"),
        ("molecule test -s drft", "no scenario drft"),
        ("pytest tests/scenarios/test_fault.py", "no tests/scenarios/test_fault.py"),
        ("python3 -m pdstack.prob_cli", "prob_cli"),
        ("python3 -m pdstack.probe_cli --mesure", "knows no --mesure"),
        ("tools/lab/lab down --prge", "knows no --prge"),
        ("tools/lab/lob down", "no tools/lab/lob"),
        ("systemctl start pd-scrubb", "no unit pd-scrubb"),
        ("frobnicate", "nothing judges frobnicate"),
    ],
)
def test_a_slip_is_found(command: str, said: str) -> None:
    assert said in "\n".join(wrong(command))
