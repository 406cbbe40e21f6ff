"""Read what of the NVIDIA driver lies on a host's disk: packages, holds, modules per kernel, units. Changes nothing."""

from __future__ import annotations

import os
import re
from typing import Dict, List, Optional, Tuple

from .driver import FABRIC_MANAGER, PERSISTENCED, VENDOR, HostState, KernelModule
from .runner import Runner

RECORD = "/etc/pdstack/held-packages"  # the holds that the bundle placed, one name a line
MOK = "/var/lib/dkms/mok.pub"
_TOOLKIT = re.compile(r"^cuda-|-\d+-\d+$")  # cuda-nvcc-13-0, libcublas-13-0
_LOCK_FILES = ("/etc/dnf/plugins/versionlock.list", "/etc/yum/pluginconf.d/versionlock.list")


def observe(runner: Runner, kernel: str, root: str = "/") -> HostState:
    """Return the state of this host. ``kernel`` is the running one; files are read below ``root``."""
    units = _units(runner)
    packages, held = _dpkg(runner) or _rpm(runner, root)
    following = newest(_names(os.path.join(root, "lib/modules"))) or kernel
    return HostState(
        packages=packages,
        held=held,
        recorded_holds=_lines(os.path.join(root, RECORD.lstrip("/"))),
        kernel=kernel,
        next_kernel=following,
        modules={name: found for name in sorted({kernel, following}) for found in _module(runner, name)},
        mok_enrolled=_mok(runner, root),
        enabled=sorted(name for name, state in units.items() if state != "disabled"),  # static ones need no enabling
        units=sorted(units),
        toolkits=_toolkits(root),
    )


def newest(kernels: List[str]) -> str:
    """Return the kernel that boots next: the highest version, numbers compared as numbers; "" for none."""
    return max(kernels, key=_order, default="")


def _order(version: str) -> List[Tuple[int, int, str]]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.findall(r"\d+|[A-Za-z]+", version)]


def _relevant(name: str) -> bool:
    return bool(VENDOR.match(name) or _TOOLKIT.search(name))


def _dpkg(runner: Runner) -> Optional[Tuple[Dict[str, str], List[str]]]:
    form = "${db:Status-Want} ${db:Status-Status} ${Package} ${Version}\n"
    done = runner(["dpkg-query", "-W", "-f", form])
    if done.rc == 127:
        return None
    packages: Dict[str, str] = {}
    held: List[str] = []
    for line in done.out.splitlines():
        want, status, name, version = line.split(" ", 3)
        if not _relevant(name):
            continue
        if status == "installed":
            packages[name] = version
        if want == "hold":
            held.append(name)
    return packages, sorted(held)


def _rpm(runner: Runner, root: str) -> Tuple[Dict[str, str], List[str]]:
    done = runner(["rpm", "-qa", "--qf", "%{NAME} %{VERSION}-%{RELEASE}\n"])
    packages = dict(line.split(" ", 1) for line in done.out.splitlines() if " " in line)
    packages = {name: version for name, version in packages.items() if _relevant(name)}
    locks = [line for path in _LOCK_FILES for line in _lines(os.path.join(root, path.lstrip("/")))]
    # Entries are [epoch:]name-version-release.arch, "!" before one that excludes.
    held = [name for name in packages if any(re.match(rf"(\d+:)?{re.escape(name)}-\d", line) for line in locks)]
    return packages, sorted(held)


def _module(runner: Runner, kernel: str) -> List[KernelModule]:
    """Return the nvidia module for a kernel, in a list that is empty where there is none."""
    done = runner(["modinfo", "-k", kernel, "nvidia"])
    if done.rc != 0:
        return []
    fields = dict(re.findall(r"^(version|license|signer):[ \t]*(.*)$", done.out, re.MULTILINE))
    return [KernelModule(fields.get("version", ""), fields.get("license", ""), fields.get("signer", ""))]


def _mok(runner: Runner, root: str) -> Optional[bool]:
    """Return whether the firmware trusts the key that DKMS signs with; None where that cannot be asked."""
    if not os.path.exists(os.path.join(root, "sys/firmware/efi")):
        return None
    if not os.path.exists(os.path.join(root, MOK.lstrip("/"))):
        return False
    done = runner(["mokutil", "--test-key", MOK])
    if done.rc == 127:
        return None
    return "already enrolled" in done.out + done.err


def _units(runner: Runner) -> Dict[str, str]:
    """Return the vendor's daemons that have a unit file, with its state. A masked one is somebody's decision."""
    command = ["systemctl", "list-unit-files", "--no-legend", "--plain", PERSISTENCED, FABRIC_MANAGER]
    found = [line.split() for line in runner(command).out.splitlines()]
    return {words[0]: words[1] for words in found if len(words) > 1 and words[1] != "masked"}


def _toolkits(root: str) -> List[str]:
    home = os.path.join(root, "usr/local")
    names = sorted(name for name in _names(home) if name.startswith("cuda-"))
    return [f"/usr/local/{name}" for name in names if os.path.exists(os.path.join(home, name, "bin/nvcc"))]


def _names(folder: str) -> List[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _lines(path: str) -> List[str]:
    try:
        with open(path, encoding="utf-8") as stream:
            return [line.strip() for line in stream if line.strip() and not line.startswith("#")]
    except OSError:
        return []
