"""What the lab needs on this machine, installed through apt when a command is absent."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from .errors import LabError
from .process import attempt

# command (or file) -> Debian and Ubuntu package
COMMON = {
    "ip": "iproute2",
    "ssh": "openssh-client",
    "nsenter": "util-linux",
    "mmdebstrap": "mmdebstrap",
    "/lib/systemd/systemd-socket-proxyd": "systemd",
    "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
}
NSPAWN = {"systemd-nspawn": "systemd-container"}
PODMAN = {"podman": "podman", "crun": "crun", "conmon": "conmon"}


def missing(needed: dict[str, str]) -> list[str]:
    """Return the packages whose command or file is not here."""
    there = {name: Path(name).exists() if name.startswith("/") else shutil.which(name) is not None for name in needed}
    return sorted({package for name, package in needed.items() if not there[name]})


def ensure(needed: dict[str, str]) -> bool:
    """Install what is missing; True when something was installed."""
    packages = missing(needed)
    if not packages:
        return False
    if shutil.which("apt-get") is None:
        raise LabError(f"missing: {', '.join(packages)}; this machine has no apt-get, so install them by hand")
    options = ["-q", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3"]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for argv in (["apt-get", *options, "update"], ["apt-get", *options, "install", "-y", "--no-install-recommends"]):
        if "install" in argv:
            argv += packages
        done = attempt(["env", f"DEBIAN_FRONTEND={env['DEBIAN_FRONTEND']}", *argv], timeout=900)
        if done.returncode:
            raise LabError(f"`{' '.join(argv)}` failed: {(done.stderr or done.stdout).strip()[-1500:]}")
    still = missing(needed)
    if still:
        raise LabError(f"installed, and still not found: {', '.join(still)}")
    return True
