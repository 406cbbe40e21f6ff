"""Where a lab keeps its things, read once from the environment and the checkout's path."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

from . import naming
from .errors import LabError

ENGINES = ("nspawn", "podman")


@dataclass(frozen=True)
class Settings:
    """One lab's settings. ``uid`` and ``gid`` own the ssh key and the state folder."""

    lab: str
    engine: str
    cache: Path
    state: Path
    subnet: str | None
    uid: int
    gid: int

    @property
    def names(self) -> naming.Names:
        return naming.Names(self.lab)


def checkout() -> Path:
    """The folder that holds tools/lab: its path decides the lab's id."""
    return Path(__file__).resolve().parent.parent.parent


def load(env: Mapping[str, str], root: Path | None = None) -> Settings:
    """Return the settings; under sudo, the home and the owner are those of the user who called it."""
    uid, gid = int(env.get("SUDO_UID", os.getuid())), int(env.get("SUDO_GID", os.getgid()))
    home = pwd.getpwuid(uid).pw_dir if "SUDO_UID" in env else env.get("HOME") or pwd.getpwuid(uid).pw_dir
    engine = env.get("LAB_ENGINE") or "nspawn"
    if engine not in ENGINES:
        raise LabError(f"LAB_ENGINE {engine!r} is unknown; known: {', '.join(ENGINES)}")
    lab = naming.lab_id(str(root or checkout()), env.get("LAB_ID"))
    cache = Path(env.get("XDG_CACHE_HOME") or f"{home}/.cache") / "pdstack" / "lab"
    state = Path(env.get("XDG_STATE_HOME") or f"{home}/.local/state") / "pdstack" / "lab" / lab
    return Settings(lab, engine, cache, state, env.get("LAB_SUBNET") or None, uid, gid)
