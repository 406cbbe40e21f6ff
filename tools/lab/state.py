"""What a lab has made, written down before it is made: `down` removes what this file names."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import LabError
from .process import Process

SCHEMA = 1


@dataclass
class Host:
    """One host; ``number`` is the last octet of its address."""

    name: str
    number: int
    suite: str
    python: str
    engine: str
    supervisor: Process | None = None
    cgroups: list[str] = field(default_factory=list)
    host_key: str = ""  # the public ssh host key, type and base64


@dataclass
class State:
    """One lab."""

    lab: str
    subnet: str
    mirrors: dict[str, str] = field(default_factory=dict)  # mirror host -> its stand-in address
    apt_proxy: str | None = None  # URL that apt in the hosts must use, where this machine's apt uses one
    proxies: dict[str, Process] = field(default_factory=dict)  # mirror:port -> who forwards to it
    hosts: dict[str, Host] = field(default_factory=dict)
    inventories: list[str] = field(default_factory=list)  # generated files to remove


def _process(value: Any) -> Process | None:
    return Process(**value) if value else None


def load(folder: Path) -> State | None:
    """Return the lab's state, None when there is no lab."""
    try:
        data = json.loads((folder / "state.json").read_text())
    except FileNotFoundError:
        return None
    if data.pop("schema", None) != SCHEMA:
        raise LabError(f"{folder} is of another version of the lab; take it down with that version")
    hosts = {n: Host(**{**h, "supervisor": _process(h["supervisor"])}) for n, h in data.pop("hosts").items()}
    proxies = {where: Process(**value) for where, value in data.pop("proxies").items()}
    return State(**data, hosts=hosts, proxies=proxies)


def save(folder: Path, state: State) -> None:
    """Write the state whole or not at all."""
    fresh = folder / "state.json.new"
    fresh.write_text(json.dumps({"schema": SCHEMA, **asdict(state)}, indent=1) + "\n")
    os.replace(fresh, folder / "state.json")
