"""What no file of the project may hold, and what the files that hold it together must."""

import re
import subprocess
import sys
import tomllib

import pytest
from policy import tree

LONGEST = 500
# Longer, and better off so.
LONG_FILES = {"docs/reference/modules.md": "written from the modules"}
SOURCE = (".py", ".yml", ".yaml", ".j2", ".md", ".sh", ".toml", ".cfg", ".cu", ".cuh", ".cpp", ".h", ".c")
# Written in pieces, so that this file does not hold what it forbids.
REGISTRIES = re.compile(
    "|".join(
        [
            r"pypi\.(?:org|io)",
            r"pythonhosted\.(?:org|com)",
            r"npmjs\.(?:org|com)",
            r"(?:deb|security|ftp)\.debian\.org",
            r"(?:archive|security)\.ubuntu\.com",
            r"galaxy\.ansible\.com",
            r"download\.pytorch\.org",
            r"crates\.(?:io)",
            r"proxy\.golang\.org",
            r"(?:docker|quay|ghcr)\.io",
        ]
    )
)
# (file, address) -> why it has to stand there. An entry that matches nothing fails too.
REGISTRY_REASONS = {
    ("releases/cpu-0.5.23/release.yml", "download.pytorch." + "org"): "torch for CPUs is on its own index; a variable",
    ("releases/cpu-0.5.22/release.yml", "download.pytorch." + "org"): "the same",
}
# Below root's home only what lies there on a developer's machine; a test may well write a file there on a lab host.
MACHINE_PATHS = re.compile(r"(?<![\w.}~/-])/(?:work/(?=[\w.])|root/\.)")
UNCHECKED_HOSTS = re.compile(r"host_key_checking\s*[=:]\s*(?:false|no|0)\b|StrictHostKeyChecking[ =](?:no|off)", re.I)
LOCK_OPTION = re.compile(r"^\s*--(?!hash=)|://", re.M)
PINNED = re.compile(r"^[A-Za-z0-9._-]+(?:\[[\w,-]+\])?==\S+")


def forbidden(text):
    """Line and words of each thing that no file may hold."""
    for pattern in (REGISTRIES, MACHINE_PATHS, UNCHECKED_HOSTS):
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, match.group(0)


def lock_problems(text):
    """What keeps a lock file from meaning the same files everywhere."""
    if option := LOCK_OPTION.search(text):
        yield f"an index, a source or an option: {option.group(0)}"
    entries = re.split(r"\n(?=\S)", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    for entry in filter(str.strip, entries):
        if not PINNED.match(entry):
            yield f"not an exact version: {entry.splitlines()[0]}"
        elif "--hash=sha256:" not in entry:
            yield f"no hash: {entry.splitlines()[0]}"


def text_of(path):
    """The file's text; None for a binary one."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return None


TEXTS = [(path, text) for path in tree.files() if (text := text_of(path)) is not None]


def test_no_registry_no_machine_path_no_unchecked_host():
    found = {(tree.relative(path), what): line for path, text in TEXTS for line, what in forbidden(text)}
    assert len(TEXTS) > 50
    assert {place: line for place, line in found.items() if place not in REGISTRY_REASONS} == {}
    assert [place for place in REGISTRY_REASONS if place not in found] == []


def test_files_are_short_enough_to_read():
    lengths = {tree.relative(path): text.count("\n") for path, text in TEXTS if path.suffix in SOURCE}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST and name not in LONG_FILES} == {}
    assert [name for name in LONG_FILES if lengths.get(name, 0) <= LONGEST] == []


LOCKS = tree.matching("requirements/*.txt", "releases/*/*lock*.txt")


@pytest.mark.parametrize("path", LOCKS, ids=tree.relative)
def test_lock_is_exact(path):
    assert list(lock_problems(path.read_text())) == []


def test_each_group_has_its_lock():
    groups = tomllib.loads((tree.ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert {f"requirements/{group}.txt" for group in groups} == {
        tree.relative(path) for path in tree.matching("requirements/*.txt")
    }


def test_no_lock_carries_index_addresses_by_design():
    assert [path.name for path in tree.files() if path.name in ("uv.lock", "package-lock.json", "poetry.lock")] == []


def test_collections_are_pinned_exactly():
    pins = tree.load(tree.ROOT / "requirements.yml")["collections"]
    assert pins
    assert [pin for pin in pins if not re.fullmatch(r"\d+\.\d+\.\d+", str(pin.get("version")))] == []


def make_targets(makefile):
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.M))


def unknown_targets(text, targets):
    """`make x` in prose or commands where the Makefile has no x."""
    called = re.findall(r"(?:`|^    |\$ )(?:[A-Z_]+=\S+ )*make ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)*)", text, re.M)
    return sorted({word for call in called for word in call.split()} - targets)


def test_documented_make_targets_exist():
    targets = make_targets((tree.ROOT / "Makefile").read_text())
    assert {"setup", "deploy", "test", "check", "lab-up", "lab-down", "bench", "bench-rerun", "docs"} <= targets
    documents = [(path, text) for path, text in TEXTS if path.suffix == ".md"]
    assert [(path.name, found) for path, text in documents if (found := unknown_targets(text, targets))] == []


def test_reference_is_current():
    command = [sys.executable, "-B", tree.ROOT / "tools/reference", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_quick_start_is_two_commands():
    readme = (tree.ROOT / "README.md").read_text()
    block = re.search(r"## Quick start\n.*?```\w*\n(.*?)```", readme, re.S)
    assert block
    assert [line.split("#")[0].strip() for line in block[1].splitlines()] == ["$ make deploy", "$ make test"]


def test_ci_runs_what_people_run():
    lines = (tree.ROOT / ".ci/run").read_text().splitlines()
    assert [line for line in lines if "make" in line.split("#")[0]] == ["exec make test"]


@pytest.mark.parametrize(
    "text",
    [
        "https://py" + "pi.org/simple",
        "deb http://deb." + "debian.org/debian bookworm main",
        "image: quay" + ".io/x/y",
        "/wo" + "rk/main/x",
        "HOME=/ro" + "ot/.cache",
        "host_key_checking" + " = False",
        "ssh -o StrictHostKeyChecking" + "=no",
    ],
)
def test_forbidden_text_is_found(text):
    assert [line for line, _ in forbidden(f"a\n{text}\n")] == [2]


def test_harmless_text_passes():
    assert list(forbidden("host_key_checking = True\n/var/lib/work/x ./work/x {{ base }}/root/.x /root/kept\n")) == []


GOOD_LOCK = "# title\na==1 ; python_version < '3' \\\n    --hash=sha256:00\nb[c]==2 \\\n    --hash=sha256:01\n"


def test_a_good_lock_passes():
    assert list(lock_problems(GOOD_LOCK)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a==1", "a>=1"),
        (" \\\n    --hash=sha256:00", ""),
        ("# title", "--index-url x"),
        ("# title", "    --find-links x"),
        ("a==1", "a @ https://x/a.whl"),
    ],
)
def test_a_bad_lock_fails(old, new):
    assert list(lock_problems(GOOD_LOCK.replace(old, new)))


def test_an_unknown_target_is_found():
    assert unknown_targets("run `make nothing` or\n    make test\n", {"test"}) == ["nothing"]


def link_problems(links, root):
    """Links that lead out of the tree or nowhere: on another machine they are broken, or name a path of this one."""
    for path in links:
        target = (path.parent / path.readlink()).resolve()
        if path.readlink().is_absolute() or not target.is_relative_to(root.resolve()) or not target.exists():
            yield f"{path.relative_to(root)} -> {path.readlink()}"


def test_links_stay_in_the_tree():
    listed = subprocess.run(["git", "ls-files", "-s", "-z"], cwd=tree.ROOT, check=True, capture_output=True, text=True)
    entries = [entry.partition("\t") for entry in listed.stdout.split("\0") if entry.startswith("120000")]
    links = [tree.ROOT / path for _, _, path in entries]
    assert links
    assert list(link_problems(links, tree.ROOT)) == []


def test_links_that_lead_elsewhere_are_found(tmp_path):
    (tmp_path / "kept").mkdir()
    targets = {"good": "kept", "absolute": str(tmp_path / "kept"), "outside": "../elsewhere", "nowhere": "missing"}
    for name, target in targets.items():
        (tmp_path / name).symlink_to(target)
    found = [words.split(" -> ")[0] for words in link_problems([tmp_path / name for name in targets], tmp_path)]
    assert found == ["absolute", "outside", "nowhere"]
