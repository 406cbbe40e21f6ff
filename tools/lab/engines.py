"""How each engine boots a host: its command line, and what a host of it lacks. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from . import packages


@dataclass(frozen=True)
class Engine:
    """An engine's name, packages and the exit status by which a host asks for a reboot."""

    name: str
    packages: dict[str, str]
    reboot_status: int


NSPAWN = Engine("nspawn", packages.NSPAWN, 133)
PODMAN = Engine("podman", packages.PODMAN, 129)
BY_NAME = {engine.name: engine for engine in (NSPAWN, PODMAN)}

# Run before podman in a mount namespace of its own, at each boot: $0 is where the boot id goes, so that a host has
# its own and ansible.builtin.reboot sees that it rebooted (nspawn does that by itself).
BOOT = """set -e
cat /proc/sys/kernel/random/uuid > "$0"
[ -e /sys/fs/cgroup/cgroup.controllers ] || mount -t cgroup2 none /sys/fs/cgroup # podman wants it to be cgroup2 alone
exec "$@"
"""

# What systemd and the services in a host use beyond podman's own default (capability.h); SYS_BOOT is
# what lets a host reboot itself, and only itself.
CAPABILITIES = {
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_LINUX_IMMUTABLE": 9,
    "CAP_NET_BROADCAST": 11,
    "CAP_NET_ADMIN": 12,
    "CAP_NET_RAW": 13,
    "CAP_IPC_LOCK": 14,
    "CAP_IPC_OWNER": 15,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_BOOT": 22,
    "CAP_SYS_NICE": 23,
    "CAP_SYS_RESOURCE": 24,
    "CAP_SYS_TTY_CONFIG": 26,
    "CAP_MKNOD": 27,
    "CAP_LEASE": 28,
    "CAP_AUDIT_WRITE": 29,
    "CAP_AUDIT_CONTROL": 30,
}


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


def podman(machine: str, name: str, root: Path, runtime: Path, capabilities: int) -> list[str]:
    """Return the command that boots ``root`` as a container; ``capabilities`` is this process's bounding set.

    Not --privileged: /proc/sys and /sys stay read-only, so that a task in a host cannot change a
    sysctl of the real machine. It gets no control group from podman (whose device filter needs
    CAP_SYS_RESOURCE) and stays in the one that the supervisor put it in. Everything that podman writes
    lies in the host's own folders.
    """
    granted = [name for name, bit in CAPABILITIES.items() if capabilities >> bit & 1]
    boot_id = runtime / "boot_id"
    return [
        *("unshare", "--mount", "sh", "-c", BOOT, str(boot_id)),
        "env",
        f"CONTAINERS_CONF={runtime / 'containers.conf'}",
        "podman",
        f"--root={runtime / 'storage'}",
        f"--runroot={runtime / 'run'}",
        "--storage-driver=vfs",
        "run",
        "--rm",
        "--systemd=always",
        f"--name={machine}",
        f"--hostname={name}",
        f"--network=ns:/run/netns/{machine}",
        "--no-hosts",
        "--dns=none",
        "--cgroups=disabled",
        "--cgroupns=private",
        "--pids-limit=-1",
        "--shm-size=2g",
        f"--volume={boot_id}:/proc/sys/kernel/random/boot_id:ro",
        "--log-driver=none",
        "--security-opt=seccomp=unconfined",
        "--security-opt=apparmor=unconfined",
        "--security-opt=label=disable",
        f"--cap-add={','.join(granted)}",
        "--rootfs",
        str(root),
        "/sbin/init",
    ]


def containers_conf(runtime: Path, limits: dict[str, int]) -> str:
    """Return podman's configuration: nothing shared with other podman use of this machine, no network of its own.

    ``limits`` are this process's hard limits (-1: none); podman's own defaults may lie above them.
    """
    ulimits = json.dumps([f"{name}={value}:{value}" for name, value in limits.items()])
    return f"""[containers]
default_ulimits = {ulimits}
keyring = false

[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
runtime = "crun"
tmp_dir = "{runtime / "tmp"}"
volume_path = "{runtime / "volumes"}"
static_dir = "{runtime / "static"}"
"""
