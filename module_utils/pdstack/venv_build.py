"""Build the environments of a release in a staging folder, prove them, and give the folder its final name."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import time
import zipfile
from dataclasses import dataclass
from typing import Dict, List, Mapping, Sequence, Tuple

from . import release
from .release import Environment, Pin
from .runner import Runner

#: Runs in an environment's own Python; the last line of its output is the answer.
_IMPORT_TEST = """
import importlib, json, sys
answer = {}
for name in json.loads(sys.argv[1]):
    print("importing", name, file=sys.stderr, flush=True)
    try:
        answer[name] = [True, str(getattr(importlib.import_module(name), "__version__", "") or "")]
    except BaseException as error:
        answer[name] = [False, f"{type(error).__name__}: {error}"]
print(json.dumps(answer))
"""


class InstallFailed(RuntimeError):
    """A step failed while the release was being built; what was installed before is as it was."""


@dataclass(frozen=True)
class Source:
    """What environments are made from."""

    wheelhouse: str  # folder
    uv: str  # uv's wheel in it
    python: str  # such as "3.11"
    interpreter: str


def build(
    staging: str,
    source: Source,
    locks: Mapping[str, Sequence[Pin]],
    imports: Mapping[str, List[str]],
    variables: Mapping[str, str],
    runner: Runner,
    base: str = "",
) -> Tuple[Dict[str, Environment], Dict[str, float]]:
    """Make every environment in a new ``staging`` folder; return what they are and how long the steps took.

    ``locks`` and ``imports`` are by environment, ``variables`` is the environment of the import test, ``base`` the
    folder of packages that the engine sees behind its own. Raises InstallFailed.
    """
    shutil.rmtree(staging, ignore_errors=True)
    tools = os.path.join(staging, "tools")
    os.makedirs(tools)
    uv = _extract_uv(os.path.join(source.wheelhouse, source.uv), tools)
    environments: Dict[str, Environment] = {}
    seconds: Dict[str, float] = {}
    for name, pins in sorted(locks.items()):
        target = os.path.join(staging, release.folder_of(name))
        lock = os.path.join(staging, release.lock_of(name))
        with open(lock, "w", encoding="utf-8") as stream:
            stream.writelines(pin.line + "\n" for pin in pins)
        started = time.monotonic()
        _install(uv, tools, target, lock, source, runner)
        if base and name == release.ENGINE:
            packages = release.site_packages(target, source.python)
            with open(os.path.join(packages, release.BASE_FILE), "w", encoding="utf-8") as stream:
                stream.write(base + "\n")
        seconds[f"install {name}"] = round(time.monotonic() - started, 1)
        started = time.monotonic()
        versions = _prove(target, imports.get(name, []), tools, variables, runner)
        seconds[f"import {name}"] = round(time.monotonic() - started, 1)
        packages = release.site_packages(target, source.python)
        installed = release.installed_packages(packages)
        drift = release.compare(pins, installed)
        if drift:
            raise InstallFailed(f"{name}: after the installation {'; '.join(drift.lines()[:5])}")
        environments[name] = Environment(installed, release.fingerprints(packages), versions)
    shutil.rmtree(tools)
    return environments, seconds


def _extract_uv(path: str, folder: str) -> str:
    """Unpack the uv program from its wheel; its hash was checked with the others."""
    target = os.path.join(folder, "uv")
    with zipfile.ZipFile(path) as archive:
        inside = [name for name in archive.namelist() if name.endswith(".data/scripts/uv")]
        if len(inside) != 1:
            raise InstallFailed(f"{path}: no uv program inside")
        with archive.open(inside[0]) as source, open(target, "wb") as stream:
            shutil.copyfileobj(source, stream)
    os.chmod(target, 0o755)
    return target


def _install(uv: str, tools: str, target: str, lock: str, source: Source, runner: Runner) -> None:
    common = ["--quiet", "--no-config", "--offline", "--cache-dir", os.path.join(tools, "cache")]
    # Relocatable, since the folder is renamed when it is done; links in place of copies, since the cache goes away.
    venv = [
        uv,
        "venv",
        *common,
        "--no-project",
        "--relocatable",
        "--no-python-downloads",
        "--python",
        source.interpreter,
    ]
    install = [
        uv,
        "pip",
        "install",
        *common,
        "--no-index",
        "--find-links",
        source.wheelhouse,
        "--no-deps",
        "--no-build",
    ]
    install += ["--require-hashes", "--link-mode", "hardlink", "--python", os.path.join(target, "bin", "python")]
    for argv in ([*venv, target], [*install, "--requirement", lock]):
        answer = runner(argv)
        if answer.rc != 0:
            raise InstallFailed(
                f"uv {argv[1]} failed with status {answer.rc}: {(answer.err or answer.out).strip()[-2000:]}"
            )


def _prove(
    target: str, modules: List[str], scratch: str, variables: Mapping[str, str], runner: Runner
) -> Dict[str, str]:
    """Import every named module in the environment's own Python; return their versions. Raises InstallFailed."""
    if not modules:
        return {}
    home = os.path.join(scratch, "home")
    os.makedirs(home, exist_ok=True)
    settings = {"HOME": home, "XDG_CACHE_HOME": home, "HF_HUB_OFFLINE": "1", **variables}
    argv = ["env", *(f"{key}={value}" for key, value in sorted(settings.items()))]
    answer = runner([*argv, os.path.join(target, "bin", "python"), "-c", _IMPORT_TEST, json.dumps(modules)])
    lines = answer.out.strip().splitlines()
    if answer.rc != 0 or not lines:
        raise InstallFailed(f"the import test ended with status {answer.rc}: {answer.err.strip()[-2000:]}")
    result: Mapping[str, Tuple[bool, str]] = json.loads(lines[-1])
    broken = [f"{name}: {words}" for name, (good, words) in result.items() if not good]
    if broken:
        raise InstallFailed(f"installed, but not importable: {'; '.join(broken)[:2000]}")
    return {name: words for name, (_good, words) in result.items()}


def place(staging: str, final: str) -> None:
    """Give a finished folder its final name; what was there is exchanged in one step and removed."""
    if not os.path.lexists(final):
        os.rename(staging, final)
        return
    if not _exchange(staging, final):
        # A file system without exchange: two renames. A kill between them leaves ``final`` missing and both folders
        # beside it; the next run builds it again.
        aside = f"{final}.old.partial"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
        os.rename(staging, final)
        staging = aside
    shutil.rmtree(staging, ignore_errors=True)


def place_beside(staging: str, final: str, environments: Sequence[str]) -> None:
    """Give finished environments their names in a release that lacks them, its manifest last.

    The manifest keeps its time, by which units tell whether their release was built anew under them: what was there
    is as it was, and what runs from it need not restart.
    """
    for name in environments:
        target = os.path.join(final, release.folder_of(name))
        shutil.rmtree(target, ignore_errors=True)  # left by a kill before the manifest named it: nobody runs it
        os.rename(os.path.join(staging, release.folder_of(name)), target)
        os.replace(os.path.join(staging, release.lock_of(name)), os.path.join(final, release.lock_of(name)))
    manifest = os.path.join(staging, "manifest.json")
    before = os.stat(os.path.join(final, "manifest.json"))
    os.utime(manifest, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(manifest, os.path.join(final, "manifest.json"))
    shutil.rmtree(staging, ignore_errors=True)


def _exchange(first: str, second: str) -> bool:
    """Swap two paths atomically (renameat2 with RENAME_EXCHANGE); False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_fdcwd, exchange = -100, 2
    return int(renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), exchange)) == 0
