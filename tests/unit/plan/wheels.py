"""Real wheels of each release, fetched once by their locked hash, and their argument parsers."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from typing import Any

from pdstack import release

ROOT = pathlib.Path(__file__).resolve().parents[3]
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "pdstack"
# All that the engine's argument parser needs beside the standard library and PyYAML.
ENGINE = ["sglang", "msgspec", "typing-extensions"]


def ask(kind: str, name: str, requests: list[Any]) -> dict[str, Any]:
    """Return what the parser of an engine or a router (``kind``) of a release says to these requests."""
    folder = unpacked(name, kind, {"engine": ENGINE, "router": ["sglang-router"], "smg": ["smg"]}[kind])
    script = pathlib.Path(__file__).with_name("real_parser.py")
    done = subprocess.run(
        [sys.executable, "-I", str(script), kind, str(folder)],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"the parser of {name} cannot be loaded:\n{done.stderr[-3000:]}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def unpacked(name: str, kind: str, projects: list[str]) -> pathlib.Path:
    """Return a folder with the locked wheels of these projects unpacked; fetched over the network the first time.

    Of sglang only the Python files are used, so that a release which is locked for another Python will do for it.
    """
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    lock = ROOT / "releases" / name / f"{kind}-{python}.txt"
    pins = {}
    if not lock.exists():
        pins = {pin.name: pin for pin in _pins(ROOT / "releases/sglang-0.5.23" / lock.name)}
        (lock,) = lock.parent.glob(f"{kind}-py*.txt")
    pins.update({pin.name: pin for pin in _pins(lock) if pin.name == "sglang" or pin.name not in pins})
    wanted = [pins[project] for project in projects]
    key = hashlib.sha256("".join(pin.sha256 for pin in wanted).encode()).hexdigest()[:16]
    folder = CACHE / "parsers" / f"{kind}-{key}"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        for pin in wanted:
            with zipfile.ZipFile(fetched(pin)) as wheel:
                members = [item for item in wheel.namelist() if pin.name != "sglang" or item.endswith(".py")]
                wheel.extractall(partial, members)
        try:
            partial.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(partial)
    return folder


def _pins(lock: pathlib.Path) -> list[release.Pin]:
    return release.parse_lock(lock.read_text(), str(lock))


def fetched(pin: release.Pin) -> pathlib.Path:
    """Return the wheel's file, by hash; pip looks where this machine's own configuration says."""
    path = CACHE / "wheels" / pin.sha256 / pin.file
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        requirement = path.parent / "requirement.txt"
        requirement.write_text(f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        other = re.search(r"-cp(3)(\d+)-cp", pin.file)
        if other:  # a wheel for one Python, perhaps not this one
            command += ["--python-version", ".".join(other.groups())]
        command += ["--require-hashes", "--dest", str(path.parent), "--requirement", str(requirement)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == pin.sha256, f"{path} was altered: remove it"
    return path
