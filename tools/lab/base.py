"""The base tree: a small Debian with systemd and sshd, built once by mmdebstrap and kept in the cache.

It is keyed by everything that decides its content, so a changed package list makes a new one, and
it is only ever read: each host has an overlay over it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Callable, Iterable

from . import sources
from .errors import LabError
from .process import attempt, run

RECIPE = 1  # raise it when the steps below change the tree

PACKAGES = (
    "ca-certificates",
    "curl",
    "dbus",
    "iproute2",
    "kmod",
    "less",
    "libnuma1",
    "libpam-systemd",
    "nftables",
    "numactl",
    "openssh-server",
    "procps",
    "rsync",
    "sudo",
    "systemd",
    "systemd-sysv",
    "util-linux",
)
PYTHON = {
    "full": ("python3", "python3-apt"),
    "minimal": ("python3-minimal",),  # has no ctypes: what a probe must notice
    "none": (),
}

# Run by mmdebstrap with the tree as $1. Keys and ids are each host's own; resolv.conf and hostname
# were copied from this machine. Package lists are dated long ago, so that cache_valid_time refreshes them.
FINISH = r"""set -e
rm -f "$1"/etc/ssh/ssh_host_* "$1"/etc/hostname "$1"/etc/resolv.conf "$1"/var/lib/dbus/machine-id
: > "$1/etc/machine-id"
: > "$1/etc/resolv.conf"
chmod 0644 "$1/etc/machine-id" "$1/etc/resolv.conf"
cat > "$1/etc/ssh/sshd_config.d/pdstack-lab.conf" <<'END'
HostKey /etc/ssh/ssh_host_ed25519_key
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UseDNS no
END
rm -rf "$1"/var/lib/apt/lists/*
echo LANG=C.UTF-8 > "$1/etc/default/locale"
touch -d @0 "$1/var/lib/apt/lists"
"""


def packages(python: str) -> tuple[str, ...]:
    return tuple(sorted((*PACKAGES, *PYTHON[python])))


def key(suite: str, python: str, lines: list[str]) -> str:
    """Return twelve hex digits of everything that decides the tree's content."""
    content = json.dumps([RECIPE, suite, packages(python), lines, FINISH])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def machine_sources(etc_apt: Path = Path("/etc/apt")) -> list[sources.Source]:
    """Return this machine's own apt archives."""
    found: list[sources.Source] = []
    parts = etc_apt / "sources.list.d"
    for path in [etc_apt / "sources.list", *(sorted(parts.iterdir()) if parts.is_dir() else [])]:
        if path.suffix == ".list" and path.is_file():
            found += sources.parse_one_line(path.read_text(errors="replace"))
        elif path.suffix == ".sources" and path.is_file():
            found += sources.parse_deb822(path.read_text(errors="replace"))
    return found


def tree(cache: Path, suite: str, python: str, say: Callable[[str], None]) -> Path:
    """Return the base tree; what the cache lacks is built (some 30 to 90 seconds)."""
    lines = sources.debian_lines(machine_sources(), suite)
    where = cache / "base" / f"{suite}-{python}-{key(suite, python, lines)}"
    if where.is_dir():
        return where
    where.parent.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two labs must not build the same tree
        if where.is_dir():
            return where
        fresh = where.with_name(f".{where.name}")
        shutil.rmtree(fresh, ignore_errors=True)  # a build that was cut short
        say(f"building the {suite} base tree (once; kept in {where.parent})")
        _build(fresh, suite, python, lines)
        os.replace(fresh, where)
    return where


def _build(fresh: Path, suite: str, python: str, lines: list[str]) -> None:
    argv = [
        "mmdebstrap",
        "--quiet",
        "--mode=root",
        "--variant=minbase",
        '--aptopt=APT::Sandbox::User "root"',  # the cache may lie in a home that _apt cannot enter
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        f"--include={','.join(packages(python))}",
        f"--customize-hook={FINISH}",
        suite,
        str(fresh),
    ]
    proxy = sources.proxy_endpoint(run(["apt-config", "dump"]))
    if proxy:
        argv.insert(1, f'--aptopt=Acquire::http::Proxy "http://{proxy[0]}:{proxy[1]}"')
    done = attempt([*argv, *(["-"] if lines else [])], stdin="\n".join(lines) + "\n", timeout=1200)
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-1500:]
        raise LabError(f"mmdebstrap could not build {suite}; are this machine's apt sources reachable?\n{words}")
    (fresh / "etc/apt/apt.conf.d/99mmdebstrap").unlink(
        missing_ok=True
    )  # this machine's proxy and sandbox, not a host's


def endpoints(roots: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return mirror host -> ports of the archives that the trees' own apt uses."""
    return sources.endpoints(source for root in roots for source in machine_sources(root / "etc" / "apt"))
