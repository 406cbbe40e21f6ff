"""The lab's network: a bridge in a namespace, a veth to each host, one veth to this machine.

No default route, no forwarding, no address on a real interface: traffic stays on this machine.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import socket
import threading
from pathlib import Path

from . import naming
from .errors import LabError
from .process import attempt, run

NAMESPACES = Path("/run/netns")
BRIDGE = "br0"
HOST_LINK = "host0"
_CLONE_NEWNET = 0x40000000


def routed() -> list[ipaddress.IPv4Network]:
    """Return every network that this machine has a route to, the default route excluded."""
    routes = json.loads(run(["ip", "-json", "-4", "route", "show", "table", "all"]))
    found = []
    for route in routes:
        if route.get("dst", "default") != "default" and route.get("type") not in ("broadcast", "multicast"):
            network = ipaddress.IPv4Network(route["dst"], strict=False)
            if network.prefixlen:
                found.append(network)
    return found


def exists(names: naming.Names) -> bool:
    return (NAMESPACES / names.namespace).exists() and Path("/sys/class/net", names.machine_link).exists()


def make(names: naming.Names, subnet: ipaddress.IPv4Network) -> None:
    """Make the namespace, its bridge and this machine's end of it."""
    space, link = names.namespace, names.machine_link
    run(["ip", "netns", "add", space])
    _batch(
        space,
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"addr add {naming.address(subnet, 1)}/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
        f"link add machine type veth peer name {link} netns {os.getpid()}",
        f"link set machine master {BRIDGE} up",
    )
    _batch(
        None,
        f"link set {link} addrgenmode none",
        f"addr add {naming.address(subnet, naming.MACHINE_END)}/24 dev {link}",
        f"link set {link} up",
    )


def add_address(names: naming.Names, where: str) -> None:
    """Give the bridge one more address: a mirror's stand-in."""
    _batch(names.namespace, f"addr replace {where}/24 dev {BRIDGE}")


def add_host(names: naming.Names, host: str, number: int, where: str) -> None:
    """Make a host's namespace with ``lo`` and ``host0``, and plug it into the bridge.

    The hardware address belongs to the number: a host that comes back is not sought at its old one.
    """
    space, port = names.host(host), names.port(number)
    run(["ip", "netns", "add", space])
    _batch(
        names.namespace,
        f"link add {port} type veth peer name {HOST_LINK} address 02:70:64:6c:61:{number:02x} netns {space}",
        f"link set {port} master {BRIDGE} up",
    )
    _batch(space, "link set lo up", f"addr add {where}/24 dev {HOST_LINK}", f"link set {HOST_LINK} up")


def remove_host(names: naming.Names, host: str, number: int) -> None:
    """Unplug a host and remove its namespace; nothing there is no error."""
    if (NAMESPACES / names.namespace).exists():
        attempt(["ip", "-n", names.namespace, "link", "del", names.port(number)])
    _remove_namespace(names.host(host))


def remove(names: naming.Names) -> None:
    """Remove the lab's namespace and this machine's end; nothing there is no error."""
    attempt(["ip", "link", "del", names.machine_link])
    _remove_namespace(names.namespace)


def listen(names: naming.Names, where: str, port: int) -> socket.socket:
    """Return a socket that listens inside the lab's namespace; this process stays where it is."""
    made: list[socket.socket] = []
    failed: list[BaseException] = []

    def enter() -> None:  # setns() moves the calling thread alone, and this one ends right after
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            with (NAMESPACES / names.namespace).open() as handle:
                if libc.setns(handle.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(socket.create_server((where, port), backlog=64))
        except BaseException as error:  # reported by the thread that asked
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if failed:
        raise LabError(f"could not listen on {where}:{port} in {names.namespace}: {failed[0]}")
    return made[0]


def _batch(namespace: str | None, *commands: str) -> None:
    run(["ip", *(["-n", namespace] if namespace else []), "-batch", "-"], stdin="\n".join(commands) + "\n")


def _remove_namespace(name: str) -> None:
    if (NAMESPACES / name).exists():
        run(["ip", "netns", "del", name])
