"""Locks, ids and comparisons; and the committed locks themselves."""

import hashlib
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
import yaml
from pdstack import codec, release, wheel

ROOT = pathlib.Path(__file__).resolve().parents[3]
RELEASES = sorted(path.parent for path in (ROOT / "releases").glob("*/release.yml"))
HASH = "a" * 64
LINE = f"torch==2.13.0+cpu --hash=sha256:{HASH}  # torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"


def spec(folder):
    return codec.load(release.Spec, yaml.safe_load((folder / "release.yml").read_text()))


def locks(folder):
    """(environment, Python, path) of every lock that the release must have."""
    described = spec(folder)
    return [
        (environment, python, folder / f"{environment}-py{python.replace('.', '')}.txt")
        for environment in described.imports
        for python in described.pythons
    ]


ALL = [(folder, *entry) for folder in RELEASES for entry in locks(folder)]


def test_a_pin_survives_writing_and_reading():
    (pin,) = release.parse_lock(f"# title\n\n{LINE}\n")
    assert (pin.name, pin.version, pin.sha256) == ("torch", "2.13.0+cpu", HASH)
    assert pin.line == LINE


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("torch==2.13.0", "line 2"),
        ("torch>=2.13.0 --hash=sha256:" + HASH + "  # torch-2.13.0-py3-none-any.whl", "line 2"),
        (LINE.replace(HASH, HASH[:-1]), "line 2"),
        (LINE.split("  #")[0], "line 2"),
        ("-r other.txt", "line 2"),
        ("--index-url https://index.example/simple", "line 2"),
        (LINE.replace("# torch", "# ../torch"), "line 2"),
        (LINE + "\n" + LINE, "pinned a second time"),
    ],
)
def test_a_line_that_is_not_exactly_a_pin_is_refused(line, words):
    with pytest.raises(release.ReleaseRefused, match=words):
        release.parse_lock(f"# title\n{line}\n")


def test_an_empty_lock_is_refused():
    with pytest.raises(release.ReleaseRefused, match="no pin at all"):
        release.parse_lock("# nothing\n")


def test_the_id_follows_from_the_pins_alone():
    pin = release.parse_lock(LINE)[0]
    other = release.Pin("alpha", "1.0", "alpha-1.0-py3-none-any.whl", "b" * 64)
    identity = release.release_id("cpu", "3.11", {"engine": [pin, other], "router": [other]})
    assert re.fullmatch(r"cpu-[0-9a-f]{12}", identity)
    assert release.release_id("cpu", "3.11", {"router": [other], "engine": [other, pin]}) == identity
    changed = {
        release.release_id("cpu", "3.12", {"engine": [pin, other], "router": [other]}),
        release.release_id("cpu", "3.11", {"engine": [pin], "router": [other]}),
        release.release_id("cpu", "3.11", {"engine": [pin, other], "router": [pin]}),
        release.release_id(
            "cpu",
            "3.11",
            {"engine": [release.Pin("torch", "2.13.0+cpu", pin.file, "c" * 64), other], "router": [other]},
        ),
    }
    assert len(changed) == 4
    assert identity not in changed


def test_compare():
    pins = [release.Pin(name, "1.0", f"{name}-1.0-py3-none-any.whl", HASH) for name in ("a", "b", "c")]
    drift = release.compare(pins, {"a": "1.0", "b": "2.0", "x": "1", "ours": "1"}, ["Ours"], {"a": "1"}, {"a": "2"})
    assert drift.lines() == [
        "c 1.0: not installed",
        "x 1: not in the lock",
        "b 1.0 -> 2.0: another version",
        "a: files changed since the installation",
    ]
    assert not release.compare(pins, {"a": "1.0", "b": "1.0", "c": "1.0"})


def test_fingerprints_see_size_time_and_name_and_nothing_else(tmp_path):
    (tmp_path / "pkg/sub").mkdir(parents=True)
    code = tmp_path / "pkg/sub/mod.py"
    code.write_text("x = 1\n")
    (tmp_path / "pkg/data.txt").write_text("data")
    first = release.fingerprints(str(tmp_path))
    assert set(first) == {"pkg"}
    (tmp_path / "pkg/data.txt").write_text("other data")
    (tmp_path / "pkg/__pycache__").mkdir()
    (tmp_path / "pkg/__pycache__/mod.py").write_text("")
    assert release.fingerprints(str(tmp_path)) == first
    before = code.stat()
    code.write_text("x = 2\n")
    os.utime(code, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert release.fingerprints(str(tmp_path)) != first
    assert release.fingerprints(str(tmp_path / "absent")) == {}


def test_wheels_are_the_same_bytes_on_every_python(tmp_path):
    """The shim's hash stands in a lock: any Python at hand must build exactly that file."""
    program = "import sys, hashlib; sys.path.insert(0, sys.argv[1])\nfrom pdstack import wheel\n"
    program += "print(hashlib.sha256(wheel.build(sys.argv[2])[1]).hexdigest())"
    project = ROOT / "engine/cpu_shim"
    expected = hashlib.sha256(wheel.build(str(project))[1]).hexdigest()
    for python in (sys.executable, "/usr/bin/python3"):
        if os.path.exists(python):
            command = [python, "-c", program, ROOT / "module_utils", project]
            assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == expected


def test_there_are_releases():
    assert {folder.name for folder in RELEASES} >= {"cpu-0.5.22", "cpu-0.5.23", "sglang-0.5.23", "sglang-0.5.13.post1"}
    assert len(ALL) >= 14


@pytest.mark.parametrize(
    ("folder", "environment", "python", "path"), ALL, ids=lambda value: getattr(value, "name", value)
)
def test_lock_is_exact(folder, environment, python, path):
    text = path.read_text()
    assert "://" not in text
    pins = release.parse_lock(text, str(path))
    assert text.splitlines()[1:] == [pin.line for pin in pins]
    abi = "cp" + python.replace(".", "")
    for pin in pins:
        name, version, tags = re.fullmatch(r"([^-]+)-([^-]+)-(?:\d[^-]*-)?([^-]+-[^-]+-[^-]+)\.whl", pin.file).groups()
        assert release.normal_name(name) == pin.name
        assert version == pin.version or pin.version.replace("post", "") in version.replace("post", "")
        _interpreter, binary, platform = tags.split("-")
        assert abi in binary.split(".") or "abi3" in binary or binary == "none"
        assert platform == "any" or "x86_64" in platform


@pytest.mark.parametrize("folder", RELEASES, ids=lambda folder: folder.name)
def test_the_components_that_documents_speak_of_are_locked(folder):
    described = spec(folder)
    assert described.pythons
    for python in described.pythons:
        locked = {}
        for _environment, version, path in locks(folder):
            if version == python:
                locked.update({pin.name: pin.version for pin in release.parse_lock(path.read_text())})
        assert described.components.items() <= locked.items()
        assert (locked["sglang"], locked["sglang-router"]) == (described.engine, described.router)
        assert locked["nixl"] == locked["nixl-cu13"]
        assert "nixl-cu12" not in locked


@pytest.mark.parametrize("name", ["cpu-0.5.22", "cpu-0.5.23"])
def test_the_committed_shim_is_the_locked_one(name):
    """Fails when the shim was changed and `make lock` forgotten."""
    file, data = wheel.build(str(ROOT / "engine/cpu_shim"))
    pins = {
        pin.file: pin.sha256 for pin in release.parse_lock((ROOT / f"releases/{name}/engine-py311.txt").read_text())
    }
    assert pins[file] == hashlib.sha256(data).hexdigest(), "run: make lock"


@pytest.mark.skipif(
    not os.environ.get("PDSTACK_CHECK_INDEX"), reason="asks the package index; PDSTACK_CHECK_INDEX=1 runs it"
)
@pytest.mark.parametrize(
    ("folder", "environment", "python", "path"), ALL, ids=lambda value: getattr(value, "name", value)
)
def test_every_wheel_exists_in_the_index(folder, environment, python, path, tmp_path):
    """With that very hash, without a download: uv compares with what the index publishes."""
    described = spec(folder)
    tool = runpy.run_path(str(ROOT / "tools/lock-releases"))
    environ = {**os.environ, **tool["uv_settings"](), "UV_INDEX": ""}
    for project in described.local_packages.get(environment, []):
        file, data = wheel.build(str(ROOT / project))
        (tmp_path / file).write_bytes(data)
        environ["UV_FIND_LINKS"] = f"{tmp_path},{environ.get('UV_FIND_LINKS', '')}".rstrip(",")
    if described.torch_index and not tool["held_locally"](folder / f"{environment}.in", environ):
        environ.update(UV_INDEX=described.torch_index, UV_INDEX_STRATEGY="unsafe-best-match")
    command = [sys.executable, ROOT / "tools/uv", "pip", "install", "--dry-run", "--no-deps", "--no-build"]
    command += ["--require-hashes", "--target", tmp_path / "nothing", "--python-version", python]
    command += ["--python-platform", described.platform, "--requirement", path]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert f"Would install {len(release.parse_lock(path.read_text()))} packages" in done.stderr
