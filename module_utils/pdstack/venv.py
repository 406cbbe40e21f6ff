"""Install a release on this host, from its wheelhouse and without network.

An environment is never edited in place. A release is built beside its final folder, proven by importing it there, and
put in place by one rename; a damaged one is built anew and exchanged the same way. So ``current`` names a whole, proven
release at every moment, whenever the installation is killed, and repair is the same code path as installation.

Layout below the root (``/opt/pdstack``)::

    releases/<id>/{venv,router,lock.txt,router.lock.txt,manifest.json}
    releases/.<id>.<pid>.partial/    under construction; removed by the next run
    current -> releases/<id>         previous -> releases/<the one before>
    wheelhouse/<name>-py<XY>/        what it is installed from
    python/<build>/                  an interpreter from the wheelhouse, where the host has none of the locked ones
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import sys
import tarfile
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from . import codec, pythons, release, space, venv_build, venv_prune
from .folders import JIT_DIR
from .refusal import Refusal
from .release import Drift, Manifest, Pin, ReleaseRefused, Wheelhouse
from .runner import Runner
from .venv_links import LOCK, activate, linked, turn

#: What an installed release takes beyond its unpacked wheels: bytecode and the file system's rounding.
SPACE_FACTOR = 1.25


@dataclass(frozen=True)
class Request:
    """What the operator wants on this host."""

    name: str
    locks: Dict[str, Dict[str, List[Pin]]]  # Python, such as "3.11" -> environment -> pins
    imports: Dict[str, List[str]]  # environment -> modules
    root: str = "/opt/pdstack"
    wheelhouse: str = ""  # "" is <root>/wheelhouse/<name>-py<XY>
    interpreter: str = ""  # "" looks for one of the locked Pythons
    environment: Dict[str, str] = field(default_factory=dict)  # of the import test
    foreign: Dict[str, List[str]] = field(default_factory=dict)  # environment -> packages that other roles bring
    activate: bool = True
    keep: int = 2
    spared: Sequence[str] = ()  # ids that are not pruned, beside those that are linked or in use
    wanted: bool = True  # False: take the release away
    environments: Sequence[str] = ()  # those that this host needs; () is all of them
    carried: Dict[str, Pin] = field(default_factory=dict)  # Python -> archive that the wheelhouse can bring
    base: str = ""  # site-packages of the host's own Python that the engine sees behind its environment's
    provided: Dict[str, str] = field(default_factory=dict)  # package -> version that the base must have
    wait_s: float = 0.0  # for another installation on this host
    caches: str = JIT_DIR  # folder of the engines' JIT caches, one for each release's name

    def pins(self, python: str) -> Dict[str, List[Pin]]:
        """Return the pins that this host needs, by environment. The release's id follows from all of them."""
        locks = self.locks[python]
        return {name: pins for name, pins in locks.items() if not self.environments or name in self.environments}


@dataclass(frozen=True)
class Host:
    """The world outside the root, so that tests can answer instead."""

    runner: Runner
    search: Sequence[str] = ("/usr/bin", "/usr/local/bin")
    free: Callable[[str], int] = lambda path: shutil.disk_usage(path).free
    glibc: Callable[[], str] = lambda: (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2]
    machine: Callable[[], str] = platform.machine
    in_use: Callable[[str], List[str]] = lambda folder: releases_in_use(folder)
    sync: Callable[[], None] = os.sync
    hidden: Sequence[str] = ("/home", "/root", "/run/user")  # what ProtectHome=yes in the units hides


@dataclass
class Observation:
    """What is on the host."""

    id: str
    python: str
    interpreter: str
    path: str
    wheelhouse: str
    state: str  # absent | unfinished | damaged | incomplete (what is there is intact, environments lack) | intact
    drift: Dict[str, Drift]
    installed: Dict[str, Dict[str, str]]  # environment -> package -> version
    current: str  # id, "" where nothing is active
    partial: List[str]  # folders that an interrupted run left
    carried: str = ""  # the archive of the interpreter, where the host has none of its own
    manifest: Optional[Manifest] = None
    surplus: Sequence[Tuple[str, str]] = ()  # what to prune, in this order, with the reason


@dataclass(frozen=True)
class Step:
    """One thing to do. ``action`` is unpack, build, repair, activate, clean, prune or remove."""

    action: str
    subject: str
    why: str

    def __str__(self) -> str:
        return f"{self.action} {self.subject}: {self.why}"


def observe(request: Request, host: Host) -> Observation:
    """Look at the host without changing it and without starting a process. Raises ReleaseRefused."""
    python, interpreter, carried = _choose_python(request, host)
    pins = request.pins(python)
    identity = release.release_id(request.name, python, request.locks[python], request.base)
    path = os.path.join(request.root, "releases", identity)
    manifest = release.read_manifest(path)
    drift: Dict[str, Drift] = {}
    installed: Dict[str, Dict[str, str]] = {}
    for environment in sorted(pins):
        packages = release.site_packages(os.path.join(path, release.folder_of(environment)), python)
        installed[environment] = release.installed_packages(packages)
        recorded = manifest.environments.get(environment) if manifest else None
        difference = release.compare(
            pins[environment],
            installed[environment],
            request.foreign.get(environment, ()),
            recorded.files if recorded else {},
            release.fingerprints(packages),
        )
        if environment == release.ENGINE and request.base and not difference:
            difference = release.compare_base(request.base, request.provided)
        # What the manifest lacks was never proven: an installation that was killed may have left it.
        unproven = manifest is not None and recorded is None
        program = os.path.join(path, release.folder_of(environment), "bin", "python")
        if difference or unproven or not os.path.exists(program):
            drift[environment] = difference
    if not os.path.isdir(path):
        state = "absent"
    elif manifest is None:
        state = "unfinished"
    elif set(drift) & set(manifest.environments):
        state = "damaged"
    else:
        state = "incomplete" if drift else "intact"
    suffix = "py" + python.replace(".", "")
    return Observation(
        id=identity,
        python=python,
        interpreter=interpreter,
        path=path,
        wheelhouse=request.wheelhouse or os.path.join(request.root, "wheelhouse", f"{request.name}-{suffix}"),
        state=state,
        drift=drift,
        installed=installed,
        current=linked(request.root, "current"),
        partial=_partial(request.root),
        carried=carried,
        manifest=manifest,
        surplus=venv_prune.surplus(request.root, request.caches, request.keep, _claim(request, identity), host.in_use),
    )


def plan(seen: Observation, request: Request) -> List[Step]:
    """Return what is to be done, in order; empty when the host is as requested."""
    steps: List[Step] = [Step("clean", path, "an installation was interrupted here") for path in seen.partial]
    if not request.wanted:
        for identity in _ids_of(request.root, request.name):
            steps.append(Step("remove", identity, "the release is not wanted on this host"))
        for path in (seen.wheelhouse, os.path.join(request.caches, request.name)):
            if os.path.isdir(path):
                steps.append(Step("remove", path, "the release is not wanted on this host"))
        return steps
    if seen.carried and not os.path.exists(seen.interpreter):
        steps.append(Step("unpack", seen.carried, f"this host has no Python that {request.name} is locked for"))
    if seen.state == "absent":
        steps.append(Step("build", seen.id, "it is not installed"))
    elif seen.state == "unfinished":
        steps.append(Step("repair", seen.id, "its manifest is missing, so it was never proven"))
    elif seen.state == "incomplete":
        steps.append(Step("build", seen.id, f"it has no {', '.join(sorted(seen.drift))} yet; the rest stays as it is"))
    elif seen.state == "damaged":
        lines = [f"{name}: {line}" for name, drift in sorted(seen.drift.items()) for line in drift.lines()]
        shown = "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else "")
        steps.append(Step("repair", seen.id, shown or "an environment has no interpreter"))
    if request.activate and seen.current != seen.id:
        steps.append(Step("activate", seen.id, f"current is {seen.current}" if seen.current else "nothing is active"))
    return steps + [Step("prune", subject, why) for subject, why in seen.surplus]


def diff(seen: Observation, request: Request) -> Tuple[str, str]:
    """Return the host's packages before and after, one line each, as ``--diff`` shows them."""
    before, after = [], []
    for environment, pins in sorted(request.pins(seen.python).items()):
        before += [f"{environment}: {name} {version}" for name, version in sorted(seen.installed[environment].items())]
        foreign = {release.normal_name(name) for name in request.foreign.get(environment, ())}
        kept = [(name, version) for name, version in seen.installed[environment].items() if name in foreign]
        wanted = sorted([(pin.name, pin.version) for pin in pins] + kept) if request.wanted else []
        after += [f"{environment}: {name} {version}" for name, version in wanted]
        drift = seen.drift.get(environment, Drift())
        if seen.state == "damaged":
            before += [f"{environment}: {entry} (files changed since the installation)" for entry in drift.edited]
    if request.wanted and request.activate:
        before.append(f"current -> {seen.current or 'nothing'}")
        after.append(f"current -> {seen.id}")
    if request.wanted:
        before += [f"{subject} ({why})" for subject, why in seen.surplus]
    return "".join(f"{line}\n" for line in before), "".join(f"{line}\n" for line in after)


def check(seen: Observation, request: Request, host: Host, hashes: bool = True) -> Wheelhouse:
    """Refuse what cannot work before anything is touched; return the wheelhouse. Raises ReleaseRefused."""
    wheelhouse = release.read_wheelhouse(seen.wheelhouse)
    pins = {pin.file: pin for items in request.pins(seen.python).values() for pin in items}
    problems = release.match_locks(wheelhouse, pins.values())
    problems += _check_system(wheelhouse, host)
    if not problems:
        needed = [wheel for wheel in wheelhouse.wheels if wheel.file in pins or wheel.file == wheelhouse.uv]
        problems += release.check_wheels(seen.wheelhouse, needed, hashes)
    if seen.carried:
        problems += _check_carried(seen, request, wheelhouse, hashes)
    else:
        problems += _check_interpreter(seen.interpreter, seen, request, host)
    problems += _check_places(seen, request, host) + _check_base(request)
    problems += _check_space(request, wheelhouse, seen, host)
    if problems:
        raise ReleaseRefused(problems)
    return wheelhouse


def delivered(seen: Observation, request: Request) -> bool:
    """Whether the host's wheelhouse holds every wheel that the release needs, byte for byte."""
    try:
        wheelhouse = release.read_wheelhouse(seen.wheelhouse)
    except ReleaseRefused:
        return False
    pins = {pin.file: pin for items in request.pins(seen.python).values() for pin in items}
    needed = [wheel for wheel in wheelhouse.wheels if wheel.file in pins or wheel.file == wheelhouse.uv]
    return not release.match_locks(wheelhouse, pins.values()) and not release.check_wheels(
        seen.wheelhouse, needed, hashes=True
    )


def apply(request: Request, host: Host) -> List[Step]:
    """Do what the plan says, under the host's lock; return the steps done. Raises ReleaseRefused, InstallFailed."""
    os.umask(0o022)
    os.makedirs(os.path.join(request.root, "releases"), exist_ok=True)
    with turn(request.root, f"pd_venv for {request.name}", request.wait_s):
        seen = observe(request, host)  # again: another run may have finished while this one waited for its turn
        steps = plan(seen, request)
        if not request.wanted:
            _remove(steps, request)
            return steps
        for step in steps:
            if step.action == "clean":
                shutil.rmtree(step.subject, ignore_errors=True)
            elif step.action == "unpack":
                check(seen, request, host)
                _unpack(seen, request, host)
            elif step.action in ("build", "repair"):
                _build(request, seen, check(seen, request, host), host)
            elif step.action == "activate":
                activate(request.root, seen.id)
            elif step.action == "prune":
                venv_prune.remove(request.root, step.subject)
        venv_prune.drop_interpreters(request.root)
        return steps


def releases_in_use(folder: str) -> List[str]:
    """Return the ids below ``folder`` that some process has mapped a library of."""
    found = set()
    pattern = re.compile(re.escape(folder) + r"/([^/.][^/]*)/")
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/maps", encoding="utf-8", errors="replace") as stream:
                    found.update(pattern.findall(stream.read()))
            except OSError:
                continue  # it ended, or it is not ours to read
    return sorted(found)


def _choose_python(request: Request, host: Host) -> Tuple[str, str, str]:
    """Return (version, path, archive) of the interpreter to use.

    The named one, Ansible's own version, the first there is, or one whose archive the wheelhouse can bring.
    """
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    order = sorted(request.locks, key=lambda version: (version != own, [int(part) for part in version.split(".")]))
    if request.interpreter:
        match = re.search(r"(\d+\.\d+)$", os.path.basename(os.path.realpath(request.interpreter)))
        if match and match.group(1) in request.locks and os.path.exists(request.interpreter):
            return match.group(1), request.interpreter, ""
    else:
        for version in order:
            for folder in host.search:
                path = os.path.join(folder, f"python{version}")
                if os.path.exists(path):
                    return version, path, ""
        for version in order:
            if version in request.carried:
                file = request.carried[version].file
                return version, os.path.join(_carried_folder(request.root, file), "bin", f"python{version}"), file
    wanted = " or ".join(order)
    names = sorted({name for folder in host.search if os.path.isdir(folder) for name in os.listdir(folder)})
    here = [name for name in names if re.fullmatch(r"python3\.\d+", name)]
    found = request.interpreter or ", ".join(here) or "no python3 at all"
    remedy = f"install Python {wanted} from the distribution, or choose a release that is locked for this host's Python"
    raise ReleaseRefused([Refusal("python", found, f"Python {wanted}, which {request.name} is locked for", remedy)])


def _carried_folder(root: str, archive: str) -> str:
    return os.path.join(root, "python", re.sub(r"(-install_only.*)?\.tar\.gz$", "", archive))


def _partial(root: str) -> List[str]:
    found = []
    for folder in (os.path.join(root, "releases"), os.path.join(root, "python")):
        with contextlib.suppress(OSError):
            found += [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".partial")]
    return sorted(found)


def _ids_of(root: str, name: str) -> List[str]:
    """The installed releases of this name, whatever their hash."""
    try:
        entries = os.listdir(os.path.join(root, "releases"))
    except OSError:
        return []
    return sorted(item for item in entries if re.fullmatch(re.escape(name) + r"-[0-9a-f]{12}", item))


def _check_system(wheelhouse: Wheelhouse, host: Host) -> List[Refusal]:
    match = re.fullmatch(r"(\w+?)-manylinux_(\d+)_(\d+)", wheelhouse.platform)
    if match is None:
        return [Refusal("wheelhouse", f"platform {wheelhouse.platform}", "a manylinux platform", "make wheelhouse")]
    problems = []
    if host.machine() != match[1]:
        problems.append(Refusal("processor", host.machine(), match[1], "use a host of that architecture"))
    glibc = host.glibc()
    if [int(part) for part in re.findall(r"\d+", glibc)] < [int(match[2]), int(match[3])]:
        problems.append(
            Refusal(
                "glibc",
                glibc or "none (musl?)",
                f"{match[2]}.{match[3]} or later",
                "use Debian 12, Ubuntu 22.04, RHEL 9 or a later release of them",
            )
        )
    return problems


def _check_places(seen: Observation, request: Request, host: Host) -> List[Refusal]:
    """Refuse what the installer reads and the service would not find: it ended with status 203/EXEC."""
    remedy = "leave sglang_runtime_python out (a Python of the distribution, or one that the wheelhouse brings)"
    places = {"python": (seen.interpreter, remedy), "root": (request.root, "choose a folder elsewhere, such as /opt")}
    if request.base:
        places["base"] = (request.base, "install these packages where the service user can read them")
    needed = f"a place outside {', '.join(host.hidden)} (ProtectHome of the units)"
    return [
        Refusal(name, os.path.realpath(path), needed, words)
        for name, (path, words) in places.items()
        if any(os.path.realpath(path).startswith(f"{folder}/") for folder in host.hidden)
    ]


def _check_interpreter(program: str, seen: Observation, request: Request, host: Host) -> List[Refusal]:
    pins = [pin.name for items in request.pins(seen.python).values() for pin in items]
    return pythons.check(program, seen.python, pins, host.runner)


def _check_carried(seen: Observation, request: Request, wheelhouse: Wheelhouse, hashes: bool) -> List[Refusal]:
    """Hold the archive of the interpreter against its lock, unless it is unpacked already."""
    pin = request.carried[seen.python]
    if os.path.exists(seen.interpreter):
        return []
    held = wheelhouse.interpreter
    if held is None or (held.file, held.sha256) != (pin.file, pin.sha256):
        found = f"{held.file} with sha256 {held.sha256}" if held else "none"
        remedy = "build it again: tools/wheelhouse RELEASE --python VERSION --with-python"
        return [Refusal("interpreter of the wheelhouse", found, f"{pin.file} with sha256 {pin.sha256}", remedy)]
    return release.check_wheels(seen.wheelhouse, [held], hashes)


def _check_base(request: Request) -> List[Refusal]:
    if not request.base:
        return []
    found = release.compare_base(request.base, request.provided)
    needed = "the versions that the release was put together for"
    remedy = "give the host's Python these versions, or pack the release anew for it"
    return [Refusal("the host's own packages", line, needed, remedy) for line in found.lines()]


def _check_space(request: Request, wheelhouse: Wheelhouse, seen: Observation, host: Host) -> List[Refusal]:
    unpacked = {wheel.file: wheel.unpacked for wheel in wheelhouse.wheels}
    needed = sum(unpacked.get(pin.file, 0) for pins in request.pins(seen.python).values() for pin in pins)
    needed += unpacked.get(wheelhouse.uv, 0)
    if seen.carried and wheelhouse.interpreter and not os.path.exists(seen.interpreter):
        needed += wheelhouse.interpreter.unpacked
    needed = int(needed * SPACE_FACTOR)
    free = host.free(request.root)
    if free >= needed:
        return []
    kept = {seen.id, linked(request.root, "current"), linked(request.root, "previous"), *request.spared}
    others = space.words(space.removable(f"{request.root}/releases", kept), "none")
    remedy = f"free {(needed - free) / 1e9:.2f} GB; releases that are neither current nor previous: {others}"
    found, wanted = f"{free / 1e9:.2f} GB free", f"{needed / 1e9:.2f} GB for {request.name}"
    return [Refusal(f"disk space at {request.root}", found, wanted, remedy)]


def _unpack(seen: Observation, request: Request, host: Host) -> None:
    """Unpack the carried interpreter beside its final folder, start it, and give it its name by one rename."""
    final = os.path.dirname(os.path.dirname(seen.interpreter))
    draft = f"{final}.{os.getpid()}.partial"
    shutil.rmtree(draft, ignore_errors=True)
    os.makedirs(draft)
    # Its hash is the lock's; a member that would leave the folder is refused all the same.
    with tarfile.open(os.path.join(seen.wheelhouse, seen.carried)) as archive:
        for member in archive.getmembers():
            if os.path.isabs(member.name) or ".." in member.name.split("/"):
                raise venv_build.InstallFailed(f"{seen.carried}: a member named {member.name!r}")
            member.uid = member.gid = 0
            member.uname = member.gname = ""
        # Pythons differ in whether they know filters; "data" would also refuse links that lead outside.
        options: Dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(draft, **options)
    inside = os.path.join(draft, "python")
    found = _check_interpreter(os.path.join(inside, "bin", f"python{seen.python}"), seen, request, host)
    if found:
        raise ReleaseRefused(found)
    host.sync()
    shutil.rmtree(final, ignore_errors=True)
    os.rename(inside, final)
    shutil.rmtree(draft, ignore_errors=True)


def _build(request: Request, seen: Observation, wheelhouse: Wheelhouse, host: Host) -> None:
    # A name of its own: a killed run may leave a uv behind that still writes into the old one for a moment.
    staging = os.path.join(request.root, "releases", f".{seen.id}.{os.getpid()}.partial")
    source = venv_build.Source(seen.wheelhouse, wheelhouse.uv, seen.python, seen.interpreter)
    pins = request.pins(seen.python)
    before = seen.manifest if seen.state == "incomplete" else None
    if before:
        pins = {name: pins[name] for name in seen.drift}
    environments, seconds = venv_build.build(
        staging, source, pins, request.imports, request.environment, host.runner, request.base
    )
    manifest = Manifest(
        release=request.name,
        id=seen.id,
        python=seen.python,
        interpreter=seen.interpreter,
        built=before.built if before else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        environments={**(before.environments if before else {}), **environments},
        seconds={**(before.seconds if before else {}), **seconds},
    )
    with open(os.path.join(staging, "manifest.json"), "w", encoding="utf-8") as stream:
        json.dump(codec.dump(manifest), stream, indent=1)
        stream.write("\n")
    # All of it is on the disk before its name is: a machine that loses power does not come back with a hollow release.
    host.sync()
    if before:
        venv_build.place_beside(staging, seen.path, sorted(pins))
    else:
        venv_build.place(staging, seen.path)


def _claim(request: Request, identity: str) -> venv_prune.Claim:
    """What this run leaves linked or is to spare, so that nothing of it is pruned."""
    current = linked(request.root, "current")
    switching = request.activate and bool(current) and current != identity
    previous = current if switching else linked(request.root, "previous")
    return venv_prune.Claim(request.name, identity, {identity, current, previous, *request.spared})


def _remove(steps: List[Step], request: Request) -> None:
    gone = {step.subject for step in steps if step.action == "remove"}
    for name in ("current", "previous"):
        if linked(request.root, name) in gone:
            os.unlink(os.path.join(request.root, name))
    for step in steps:
        path = step.subject if os.path.isabs(step.subject) else os.path.join(request.root, "releases", step.subject)
        shutil.rmtree(path, ignore_errors=True)
    venv_prune.drop_interpreters(request.root)
    for name in ("releases", "wheelhouse"):
        with contextlib.suppress(OSError):  # not there, or another release is in it
            os.rmdir(os.path.join(request.root, name))
    if not os.path.exists(os.path.join(request.root, "releases")):
        os.unlink(os.path.join(request.root, LOCK))
