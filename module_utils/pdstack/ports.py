"""Listening TCP sockets and their holders, read from /proc.

Source of the formats: proc(5), https://docs.kernel.org/networking/proc_net_tcp.html.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Dict, List, Optional, Set, Tuple

from .cgroup import unit_of
from .facts import Port

_LISTEN = "0A"


def listening(proc_root: str = "/proc") -> List[Port]:
    """Return every listening TCP socket, ascending by port.

    The holder's fields are None where this user may not look at the process, or where the socket
    belongs to a process outside this PID namespace.
    """
    sockets: Dict[str, Tuple[str, int]] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        sockets.update(_listening_inodes(os.path.join(proc_root, "net", name), family))
    holders = _holders(proc_root, set(sockets))
    boot = _boot_time(proc_root)
    found = []
    for inode, (address, port) in sockets.items():
        pid = holders.get(inode)
        found.append(
            Port(
                port=port,
                address=address,
                pid=pid,
                command=_command(proc_root, pid) if pid else None,
                unit=unit_of(proc_root, pid) if pid else None,
                since=_since(proc_root, pid, boot) if pid else None,
            )
        )
    return sorted(found, key=lambda item: (item.port, item.address))


def _listening_inodes(path: str, family: int) -> Dict[str, Tuple[str, int]]:
    found = {}
    try:
        with open(path, encoding="ascii") as handle:
            next(handle, "")
            for line in handle:
                fields = line.split()
                if len(fields) > 9 and fields[3] == _LISTEN:
                    raw, _, port = fields[1].rpartition(":")
                    found[fields[9]] = (_address(raw, family), int(port, 16))
    except OSError:
        return {}
    return found


def _address(raw: str, family: int) -> str:
    """The kernel prints each 32-bit word of the address in host byte order."""
    words = [bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)]
    return socket.inet_ntop(family, b"".join(words))


def _holders(proc_root: str, inodes: Set[str]) -> Dict[str, int]:
    """Map socket inodes to the lowest PID that has them open."""
    held: Dict[str, int] = {}
    try:
        pids = sorted(int(name) for name in os.listdir(proc_root) if name.isdigit())
    except OSError:
        return held
    for pid in pids:
        folder = os.path.join(proc_root, str(pid), "fd")
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            try:
                target = os.readlink(os.path.join(folder, name))
            except OSError:
                continue
            if target.startswith("socket:[") and target[8:-1] in inodes:
                held.setdefault(target[8:-1], pid)
    return held


def _command(proc_root: str, pid: int) -> Optional[str]:
    try:
        with open(os.path.join(proc_root, str(pid), "cmdline"), "rb") as handle:
            words = [word.decode(errors="replace") for word in handle.read().split(b"\0") if word]
    except OSError:
        return None
    return " ".join(words[:4])[:160] or None  # enough to know it by; arguments may hold secrets


def _boot_time(proc_root: str) -> Optional[int]:
    try:
        with open(os.path.join(proc_root, "stat"), encoding="ascii") as handle:
            for line in handle:
                if line.startswith("btime "):
                    return int(line.split()[1])
    except OSError:
        pass
    return None


def _since(proc_root: str, pid: int, boot: Optional[int]) -> Optional[str]:
    if boot is None:
        return None
    try:
        with open(os.path.join(proc_root, str(pid), "stat"), encoding="utf-8", errors="replace") as handle:
            ticks = int(handle.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    started = boot + ticks / os.sysconf("SC_CLK_TCK")
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started))
