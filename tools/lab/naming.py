"""Names, addresses and host specifications: pure functions, no I/O."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from typing import Iterable

from .errors import LabError

DEFAULT_SUITE = "bookworm"  # Python 3.11: the CPU torch wheel of the functional profile is cp311
SUITES = ("bookworm", "trixie")
PYTHONS = ("full", "minimal", "none")
SUBNETS = ipaddress.IPv4Network("10.99.0.0/16")
FIRST_HOST = 11  # 1 is the bridge, 2 to 10 stand for the mirrors, 254 is this machine's end
MACHINE_END = 254

_ID = re.compile(r"[a-z0-9]{1,8}")
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


@dataclass(frozen=True)
class HostSpec:
    """What the user asked for: ``NAME[:SUITE[:PYTHON]]``."""

    name: str
    suite: str = DEFAULT_SUITE
    python: str = "full"


def parse_spec(text: str, suite: str = DEFAULT_SUITE, python: str = "full") -> HostSpec:
    """Return the host that ``NAME[:SUITE[:PYTHON]]`` asks for; raises LabError for anything else."""
    name, *rest = text.split(":")
    if len(rest) > 2:
        raise LabError(f"{text!r} is not a host; write NAME[:SUITE[:PYTHON]], such as lab2:trixie")
    suite = rest[0] if rest and rest[0] else suite
    python = rest[1] if len(rest) == 2 else python
    if not _NAME.fullmatch(name):
        raise LabError(f"{name!r} is not a host name: lower-case letters, digits and hyphens, 32 at most")
    if suite not in SUITES:
        raise LabError(f"suite {suite!r} of host {name} is unknown; known: {', '.join(SUITES)}")
    if python not in PYTHONS:
        raise LabError(f"python {python!r} of host {name} is unknown; known: {', '.join(PYTHONS)}")
    return HostSpec(name, suite, python)


def lab_id(checkout: str, chosen: str | None) -> str:
    """Return the lab's id: LAB_ID if given, else six hex digits of the checkout's path."""
    if chosen:
        if not _ID.fullmatch(chosen):
            raise LabError(f"LAB_ID {chosen!r} cannot be used: one to eight lower-case letters or digits")
        return chosen
    return hashlib.sha256(checkout.encode()).hexdigest()[:6]


def pick_subnet(identity: str, routed: Iterable[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """Return the first free /24 of 10.99.0.0/16, starting at a place that the id decides.

    ``routed`` holds every network that this machine already has a route to, the default excluded.
    """
    taken = list(routed)
    start = int(hashlib.sha256(identity.encode()).hexdigest()[:2], 16)
    candidates = list(SUBNETS.subnets(new_prefix=24))
    for step in range(len(candidates)):
        candidate = candidates[(start + step) % len(candidates)]
        if not any(candidate.overlaps(network) for network in taken):
            return candidate
    raise LabError(f"every /24 of {SUBNETS} is routed elsewhere on this machine; set LAB_SUBNET to a free /24")


def parse_subnet(text: str) -> ipaddress.IPv4Network:
    """Return LAB_SUBNET as a network; only a private /24 is accepted."""
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise LabError(f"LAB_SUBNET {text!r} is not a network: {error}") from None
    if network.prefixlen != 24 or not network.is_private or network.is_loopback:
        raise LabError(f"LAB_SUBNET {text!r} must be a private /24, such as 10.99.0.0/24")
    return network


def address(subnet: ipaddress.IPv4Network, number: int) -> str:
    """Return the subnet's address with that last octet."""
    return str(subnet.network_address + number)


def mirror_address(subnet: str, known: int) -> str:
    """Return the bridge's address that stands in for one more mirror, when ``known`` have one."""
    number = 2 + known
    if number >= FIRST_HOST:
        raise LabError(f"this machine's apt sources name more than {FIRST_HOST - 2} mirrors")
    return address(ipaddress.IPv4Network(subnet), number)


def next_number(used: Iterable[int]) -> int:
    """Return the lowest free last octet for a host."""
    taken = set(used)
    for number in range(FIRST_HOST, MACHINE_END):
        if number not in taken:
            return number
    raise LabError("the lab's subnet is full")


@dataclass(frozen=True)
class Names:
    """Every name that a lab leaves on the machine; all start with pdlab and hold the lab's id."""

    lab: str

    @property
    def namespace(self) -> str:
        return f"pdlab-{self.lab}"

    @property
    def machine_link(self) -> str:
        """The veth end in this machine's own namespace (15 characters at most)."""
        return f"pdl-{self.lab}"

    def host(self, name: str) -> str:
        """The network namespace, the machine name and the cgroup of one host."""
        return f"pdlab-{self.lab}-{name}"

    def port(self, number: int) -> str:
        """The bridge's port for the host with that last octet."""
        return f"h{number}"


def hosts_file(subnet: ipaddress.IPv4Network, hosts: dict[str, int], mirrors: dict[str, str], own: str) -> str:
    """Return /etc/hosts of the host ``own``: every host of the lab, and the mirrors' stand-in addresses."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    for name, number in sorted(hosts.items(), key=lambda item: (item[0] != own, item[1])):
        lines.append(f"{address(subnet, number)} {name}")
    lines += [f"{where} {mirror}" for mirror, where in sorted(mirrors.items())]
    return "\n".join(lines) + "\n"
