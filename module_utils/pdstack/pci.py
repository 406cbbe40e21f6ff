"""PCI ids: one spelling for sysfs (4-digit domains), NVML (8-digit) and the driver API (numbers)."""

from __future__ import annotations

import re
from typing import List

_ID = re.compile(r"^([0-9a-fA-F]{1,8}):([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.([0-7]))?$")
_COMPONENT = re.compile(r"^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_ROOT = re.compile(r"^pci[0-9a-f]{4,}:[0-9a-f]{2}$")


def normalise(text: str) -> str:
    """Return a PCI id as sysfs writes it: ``00000000:06:00.0`` becomes ``0000:06:00.0``.

    Domains above ffff keep their five or more digits (VMD: ``10000:01:00.0``). Raises ValueError.
    """
    match = _ID.match(text.strip())
    if not match:
        raise ValueError(f"not a PCI id: {text!r}")
    domain, bus, device, function = match.groups()
    return compose(int(domain, 16), int(bus, 16), int(device, 16), int(function or "0"))


def compose(domain: int, bus: int, device: int, function: int = 0) -> str:
    """Return the sysfs spelling of a PCI address."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def nvml(pci: str) -> str:
    """Return the spelling that NVML's look-up by bus id takes (8-digit domain)."""
    domain, rest = pci.split(":", 1)
    return f"{int(domain, 16):08X}:{rest.upper()}"


def sort_key(pci: str) -> List[int]:
    """Order PCI ids by number (``0000:`` before ``10000:``)."""
    domain, bus, rest = pci.split(":")
    device, function = rest.split(".")
    return [int(domain, 16), int(bus, 16), int(device, 16), int(function)]


def bridges(device_path: str) -> List[str]:
    """Return the bridges above a device, root port first, from its resolved sysfs path."""
    return [part for part in device_path.split("/") if _COMPONENT.match(part)][:-1]


def root(device_path: str) -> str:
    """Return the host bridge (``pci0000:00``) in a resolved sysfs path, or ``""``."""
    return next((part for part in device_path.split("/") if _ROOT.match(part)), "")
