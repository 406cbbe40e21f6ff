"""Small facts of a host: disks, packages, the distribution, links."""

from __future__ import annotations

import json
import os
import pwd
import shlex
from typing import Any, Dict, List, Sequence

from .facts import Disk
from .runner import Runner


def disk(path: str) -> Disk:
    """Return the file system that holds ``path``, or would hold it once it exists."""
    existing = path
    while not os.path.exists(existing):
        existing = os.path.dirname(existing) or "/"
    space = os.statvfs(existing)
    return Disk(path=path, free_bytes=space.f_bavail * space.f_frsize, total_bytes=space.f_blocks * space.f_frsize)


def link_target(path: str) -> str:
    """Return what a symbolic link points to, "" when there is no such link."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def json_document(path: str) -> Dict[str, Any]:
    """Return a JSON object from a file, {} when there is none that can be read."""
    try:
        with open(path, encoding="utf-8") as handle:
            document = json.load(handle)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def os_release(path: str = "/etc/os-release") -> Dict[str, str]:
    """Return the fields of os-release(5)."""
    fields = {}
    try:
        with open(path, encoding="utf-8") as handle:
            for line in handle:
                key, equals, value = line.strip().partition("=")
                if equals and not key.startswith("#"):
                    fields[key] = "".join(shlex.split(value))
    except OSError:
        pass
    return fields


def missing_packages(runner: Runner, names: Sequence[str]) -> List[str]:
    """Return the packages that dpkg or rpm does not know as installed."""
    if not names:
        return []
    listed = runner(["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n", *names])
    if listed.rc != 127:
        present = {line.split()[1] for line in listed.out.splitlines() if line.startswith("installed ")}
        return [name for name in names if name not in present]
    return [name for name in names if runner(["rpm", "-q", "--whatprovides", name]).rc != 0]


def installed_packages(runner: Runner) -> List[str]:
    """Return the names of all packages that dpkg or rpm has installed."""
    listed = runner(["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n"])
    if listed.rc != 127:
        return sorted({line.split()[1] for line in listed.out.splitlines() if line.startswith("installed ")})
    return sorted(set(runner(["rpm", "-qa", "--qf", "%{NAME}\n"]).out.split()))


def user(name: str) -> Dict[str, str]:
    """Return name, home and shell of a user, {} when there is none."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        return {}
    return {"name": found.pw_name, "home": found.pw_dir, "shell": found.pw_shell}


def lines(path: str) -> List[str]:
    """Return the lines of a file that say something, [] when there is no such file."""
    try:
        with open(path, encoding="utf-8") as handle:
            return [line.strip() for line in handle if line.strip()]
    except OSError:
        return []
