"""Releases: hash locks, the wheelhouse they come from, and the environments that are installed from it.

A release is a folder of locks (``releases/<name>/engine-py311.txt``, ``router-py311.txt``). One line pins one wheel::

    torch==2.13.0+cpu --hash=sha256:6746...  # torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl

which pip and uv read as a requirement and this module reads as a file. The release's id names the installed folder and
follows from the pins alone, so the same locks give the same folder everywhere and another pin gives another folder.

Pure comparisons first, then the few functions that read a disk; nothing here writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Mapping, Optional, Tuple

from . import codec
from .refusal import Refusal, Refused

#: The environment whose folder and lock have the short names in an installed release.
ENGINE = "engine"
#: File of the engine's site-packages that names the folder of packages which the host provides.
BASE_FILE = "pdstack-base.pth"

_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.+!_-]+)"
    r" --hash=sha256:(?P<sha256>[0-9a-f]{64})  # (?P<file>[A-Za-z0-9][A-Za-z0-9._+!-]*\.whl)"
)


_INTERPRETER = re.compile(
    r"(?P<name>cpython)==(?P<version>(?P<python>\d+\.\d+)\.\d+\+\d+)"
    r" --hash=sha256:(?P<sha256>[0-9a-f]{64})  # (?P<file>cpython-[A-Za-z0-9._+-]+\.tar\.gz)"
)


class ReleaseRefused(Refused):
    """The release cannot be installed as asked; nothing on the host was changed."""

    title = "The release was refused; this host has not been changed"


@dataclass(frozen=True)
class Pin:
    """One locked wheel: normalised project name, exact version, file name and its sha256 (hex)."""

    name: str
    version: str
    file: str
    sha256: str

    @property
    def line(self) -> str:
        """The pin as the lock writes it."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}  # {self.file}"


@dataclass(frozen=True)
class Spec:
    """``release.yml``: what a release is made of. Read on the controller only."""

    profile: str  # gpu | cpu
    engine: str  # sglang's version
    router: str  # sglang-router's version
    pythons: List[str]  # such as ["3.11", "3.12"]
    platform: str  # uv's name, such as x86_64-manylinux_2_34: the glibc that a host needs at least
    imports: Dict[str, List[str]]  # environment -> modules that prove an installation
    imports_gpu: Dict[str, List[str]] = field(default_factory=dict)  # further ones that need the driver
    torch_index: str = ""  # index that has what pip's own sources do not
    local_packages: Dict[str, List[str]] = field(default_factory=dict)  # environment -> project folders built here
    exclude: Dict[str, List[str]] = field(default_factory=dict)  # "all" or a Python -> dependencies left out
    components: Dict[str, str] = field(default_factory=dict)  # package -> version that the documents speak of
    provided: Dict[str, str] = field(default_factory=dict)  # package -> version that the host's own Python has
    left_out: Dict[str, str] = field(default_factory=dict)  # package of the full lock -> why nothing has it
    warm_up: Dict[str, List[str]] = field(default_factory=dict)  # compute capability -> generators of JIT modules


@dataclass(frozen=True)
class Wheel:
    """A file of the wheelhouse. ``size`` and ``unpacked`` (what it takes on a disk when installed) are bytes."""

    file: str
    sha256: str
    size: int
    unpacked: int


@dataclass(frozen=True)
class Wheelhouse:
    """``manifest.json`` of a wheelhouse: the wheels of one release for one Python, that of uv, perhaps the Python."""

    release: str
    id: str
    python: str  # such as "3.11"
    platform: str  # such as x86_64-manylinux_2_34
    uv: str  # file name of uv's wheel
    wheels: List[Wheel]
    interpreter: Optional[Wheel] = None  # the archive of an interpreter, for hosts that have none
    created_by: str = ""
    schema: int = 1


@dataclass(frozen=True)
class Environment:
    """What an installed environment was when it was finished and proven."""

    packages: Dict[str, str]  # normalised name -> version
    files: Dict[str, str]  # entry of site-packages -> digest over the names, sizes and times of what lies below
    imports: Dict[str, str]  # module that was imported -> its version, "" where it has none


@dataclass(frozen=True)
class Manifest:
    """``manifest.json`` of an installed release, written last: without it a folder is not a release."""

    release: str
    id: str
    python: str
    interpreter: str  # what the environments' python links to
    built: str  # UTC, ISO 8601
    environments: Dict[str, Environment]
    seconds: Dict[str, float] = field(default_factory=dict)
    schema: int = 1


@dataclass(frozen=True)
class Drift:
    """How an environment differs from its lock."""

    missing: Tuple[str, ...] = ()  # "torch 2.13.0+cpu"
    extra: Tuple[str, ...] = ()  # "leftpad 1.0"
    different: Tuple[str, ...] = ()  # "numpy 2.4.6 -> 2.4.5", locked first
    edited: Tuple[str, ...] = ()  # entries of site-packages whose files changed after the installation

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.different or self.edited)

    def lines(self) -> List[str]:
        """One readable line per difference."""
        return (
            [f"{item}: not installed" for item in self.missing]
            + [f"{item}: not in the lock" for item in self.extra]
            + [f"{item}: another version" for item in self.different]
            + [f"{item}: files changed since the installation" for item in self.edited]
        )


def normal_name(name: str) -> str:
    """Return a project's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_lock(text: str, source: str = "lock") -> List[Pin]:
    """Return the pins of a lock, sorted by name. Raises ReleaseRefused for any line that is not exactly a pin."""
    pins: Dict[str, Pin] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _PIN.fullmatch(line)
        if match is None:
            raise ReleaseRefused([_lock_refusal(f"{source}, line {number}", f"{line[:100]!r}")])
        name = normal_name(match["name"])
        if name in pins:
            raise ReleaseRefused([_lock_refusal(f"{source}, line {number}", f"{name} pinned a second time")])
        pins[name] = Pin(name, match["version"], match["file"], match["sha256"])
    if not pins:
        raise ReleaseRefused([_lock_refusal(source, "no pin at all")])
    return [pins[name] for name in sorted(pins)]


def parse_interpreters(text: str, source: str = "python.txt") -> Dict[str, Pin]:
    """Return the carried interpreters by their Python, such as "3.12". Raises ReleaseRefused for any other line."""
    pins: Dict[str, Pin] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _INTERPRETER.fullmatch(line)
        if match is None or match["python"] in pins:
            raise ReleaseRefused([_lock_refusal(f"{source}, line {number}", f"{line[:100]!r}")])
        pins[match["python"]] = Pin(match["name"], match["version"], match["file"], match["sha256"])
    return pins


def _lock_refusal(subject: str, found: str) -> Refusal:
    needed = "lines 'name==version --hash=sha256:HEX  # FILE.whl', each name once"
    return Refusal(subject, found, needed, "make the locks again: make lock")


def release_id(name: str, python: str, locks: Mapping[str, Iterable[Pin]], base: str = "") -> str:
    """Return ``<name>-<12 hex>``: a digest over the Python version, every environment's pins and the base, if any."""
    digest = hashlib.sha256(f"python {python}\n".encode())
    if base:
        digest.update(f"base {base}\n".encode())
    for environment in sorted(locks):
        digest.update(f"[{environment}]\n".encode())
        for pin in sorted(locks[environment], key=lambda item: item.name):
            digest.update(f"{pin.name}=={pin.version} {pin.sha256}\n".encode())
    return f"{name}-{digest.hexdigest()[:12]}"


def folder_of(environment: str) -> str:
    """Return an environment's folder in an installed release."""
    return "venv" if environment == ENGINE else environment


def lock_of(environment: str) -> str:
    """Return the name of an environment's lock in an installed release."""
    return "lock.txt" if environment == ENGINE else f"{environment}.lock.txt"


def compare(
    pins: Iterable[Pin],
    installed: Mapping[str, str],
    foreign: Iterable[str] = (),
    recorded: Optional[Mapping[str, str]] = None,
    files: Optional[Mapping[str, str]] = None,
) -> Drift:
    """Compare an environment with its lock and, where given, its files with what was recorded when it was finished.

    ``foreign`` names packages that other roles install into it; they are neither extra nor edited.
    """
    locked = {pin.name: pin.version for pin in pins}
    others = {normal_name(name) for name in foreign}
    edited: List[str] = []
    if recorded is not None and files is not None:
        for entry in sorted(set(recorded) | set(files)):
            if recorded.get(entry) == files.get(entry) or _belongs(entry, others):
                continue
            edited.append(entry)
    return Drift(
        missing=tuple(f"{name} {version}" for name, version in sorted(locked.items()) if name not in installed),
        extra=tuple(
            f"{name} {version}"
            for name, version in sorted(installed.items())
            if name not in locked and name not in others
        ),
        different=tuple(
            f"{name} {version} -> {installed[name]}"
            for name, version in sorted(locked.items())
            if name in installed and installed[name] != version
        ),
        edited=tuple(edited),
    )


def _belongs(entry: str, names: Iterable[str]) -> bool:
    """Whether an entry of site-packages is a foreign package's folder, module or dist-info."""
    stem = entry[: -len(".dist-info")].rsplit("-", 1)[0] if entry.endswith(".dist-info") else entry.split(".", 1)[0]
    return normal_name(stem) in set(names)


def compare_base(base: str, provided: Mapping[str, str]) -> Drift:
    """How a folder of packages that a host provides differs from what a release counts on (package -> version)."""
    found = installed_packages(base)
    wanted = sorted((normal_name(name), version) for name, version in provided.items())
    return Drift(
        missing=tuple(f"{name} {version} (of {base})" for name, version in wanted if name not in found),
        different=tuple(
            f"{name} {version} -> {found[name]} (of {base})"
            for name, version in wanted
            if name in found and found[name] != version
        ),
    )


def site_packages(environment: str, python: str) -> str:
    """Return the path of an environment's site-packages."""
    return os.path.join(environment, "lib", f"python{python}", "site-packages")


def installed_packages(folder: str) -> Dict[str, str]:
    """Return the packages of a site-packages folder, by their dist-info folders: no file is opened."""
    try:
        entries = os.listdir(folder)
    except OSError:
        return {}
    found = {}
    for entry in entries:
        if entry.endswith(".dist-info"):
            name, _dash, version = entry[: -len(".dist-info")].partition("-")
            found[normal_name(name)] = version
    return found


def fingerprints(folder: str) -> Dict[str, str]:
    """Return a digest per entry of a site-packages folder over the names, sizes and times of its code.

    Only what Python executes or loads counts (.py, .pth, shared objects). An editor, a patch or a second installation
    cannot leave all three as they were; a bit that flipped on the disk can, and is not what this is for.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return {}
    result = {}
    for entry in entries:
        if entry.name == "__pycache__":
            continue
        items: List[str] = []
        if entry.is_dir(follow_symlinks=False):
            _collect(entry.path, "", items)
        elif _is_code(entry.name):
            items.append(_stat_line("", entry))
        if items:
            result[entry.name] = hashlib.sha256("\n".join(items).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return result


def _is_code(name: str) -> bool:
    return name.endswith((".py", ".pth", ".so")) or ".so." in name


def _stat_line(prefix: str, entry: os.DirEntry[str]) -> str:
    status = entry.stat(follow_symlinks=False)
    return f"{prefix}{entry.name} {status.st_size} {status.st_mtime_ns}"


def _collect(folder: str, prefix: str, items: List[str]) -> None:
    with os.scandir(folder) as iterator:
        entries = sorted(iterator, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if entry.name != "__pycache__":
                _collect(entry.path, f"{prefix}{entry.name}/", items)
        elif _is_code(entry.name):
            items.append(_stat_line(prefix, entry))


def read_wheelhouse(folder: str) -> Wheelhouse:
    """Return a wheelhouse's manifest. Raises ReleaseRefused where it is missing or unreadable."""
    path = os.path.join(folder, "manifest.json")
    remedy = "build it on the controller with `make wheelhouse RELEASE=...` and run the playbook again"
    try:
        with open(path, encoding="utf-8") as stream:
            return codec.load(Wheelhouse, json.load(stream))
    except FileNotFoundError:
        raise ReleaseRefused([Refusal("wheelhouse", f"no {path}", "the release's wheels beside it", remedy)]) from None
    except (OSError, ValueError) as error:
        raise ReleaseRefused([Refusal("wheelhouse", f"{path}: {error}", "a readable manifest", remedy)]) from None


def read_manifest(release: str) -> Optional[Manifest]:
    """Return an installed release's manifest, or None where the folder is not a finished release."""
    return codec.kept(Manifest, os.path.join(release, "manifest.json"))


def sha256_of(path: str) -> str:
    """Return a file's sha256 in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while True:
            block = stream.read(1 << 20)
            if not block:
                return digest.hexdigest()
            digest.update(block)


def check_wheels(folder: str, wheels: Iterable[Wheel], hashes: bool) -> List[Refusal]:
    """Compare a wheelhouse's files with their sizes and, when ``hashes``, with their sha256.

    Returns one refusal per wheel that is missing or altered, by name.
    """
    problems = []
    for wheel in wheels:
        path = os.path.join(folder, wheel.file)
        try:
            size = os.stat(path).st_size
        except OSError:
            problems.append(_wheel_refusal(wheel, f"it is missing from {folder}"))
            continue
        if size != wheel.size:
            problems.append(_wheel_refusal(wheel, f"{size} bytes in {folder}", f"{wheel.size} bytes"))
        elif hashes:
            found = sha256_of(path)
            if found != wheel.sha256:
                problems.append(_wheel_refusal(wheel, f"sha256 {found} in {folder}", f"sha256 {wheel.sha256}"))
    return problems


def _wheel_refusal(wheel: Wheel, found: str, needed: str = "the file that the lock names") -> Refusal:
    return Refusal(f"wheel {wheel.file}", found, needed, "run the playbook again: it copies the wheel anew")


def match_locks(wheelhouse: Wheelhouse, pins: Iterable[Pin]) -> List[Refusal]:
    """Return a refusal per pin that the wheelhouse's manifest does not hold with that very hash."""
    held = {wheel.file: wheel.sha256 for wheel in wheelhouse.wheels}
    problems = []
    for pin in pins:
        if held.get(pin.file) != pin.sha256:
            found = f"sha256 {held[pin.file]}" if pin.file in held else f"no such wheel among {len(held)}"
            problems.append(
                Refusal(
                    f"wheel {pin.file}",
                    f"{found} in the wheelhouse's manifest",
                    f"sha256 {pin.sha256}",
                    "the wheelhouse belongs to other locks: build it again with `make wheelhouse RELEASE=...`",
                )
            )
    return problems
