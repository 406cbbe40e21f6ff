"""How each engine boots a host: its command line, and what a host of it lacks. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import packages


@dataclass(frozen=True)
class Engine:
    """An engine's name, packages and the exit status by which a host asks for a reboot."""

    name: str
    packages: dict[str, str]
    reboot_status: int
    mounts_cgroup2: bool  # on a hybrid machine it needs /sys/fs/cgroup to be cgroup2 alone


NSPAWN = Engine("nspawn", packages.NSPAWN, 133, False)
PODMAN = Engine("podman", packages.PODMAN, 129, True)
BY_NAME = {engine.name: engine for engine in (NSPAWN, PODMAN)}


def nspawn(machine: str, name: str, root: Path) -> list[str]:
    """Return the command that boots ``root`` in the network namespace that it is run in.

    Started inside the namespace (no --network-namespace-path), so that the host's /sys/class/net
    is its own: UCX looks for its devices there.
    """
    return [
        "env",
        "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1",
        "systemd-nspawn",
        "--quiet",
        f"--directory={root}",
        f"--machine={machine}",
        f"--hostname={name}",
        "--boot",
        "--register=no",
        "--keep-unit",
        "--settings=no",
        "--link-journal=no",
        "--console=pipe",
        "--resolv-conf=off",
        "--timezone=off",
        "--capability=CAP_NET_ADMIN,CAP_IPC_LOCK",
    ]
