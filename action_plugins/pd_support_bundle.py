"""Add the controller's part and pack the bundle (see library/pd_support_bundle.py)."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.pdstack import inventory, redact, settings
from ansible.plugins.action import ActionBase
from ansible.release import __version__ as ansible_version

ROOT = Path(__file__).resolve().parent.parent


class ActionModule(ActionBase):
    """One run for all hosts, without a connection."""

    BYPASS_HOST_LOOP = True
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        args = inventory.builtin(self._task.args)
        folder, dest = Path(args["folder"]), Path(args["dest"])
        intent = variables(task_vars or {})
        redactor = redact.Redactor(redact.secrets_in(intent))
        documents = {
            "inventory.json": json.dumps(intent, indent=1, sort_keys=True) + "\n",
            "versions.txt": versions(),
            **{str(name): str(text) for name, text in args.get("documents", {}).items()},
        }
        clean = {name: redactor.text(text) for name, text in documents.items()}
        clean["removed.json"] = json.dumps(redactor.counts, indent=1, sort_keys=True) + "\n"
        try:
            (folder / "controller").mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, text in clean.items():
                (folder / "controller" / name).write_text(text)
            count = pack(folder, dest)
        except OSError as error:
            return {**result, "failed": True, "msg": cannot_be_written(dest, error)}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return {**result, "changed": False, "dest": str(dest), "count": count, "bytes": dest.stat().st_size}


def cannot_be_written(dest: Path, error: OSError) -> str:
    return (
        f"The bundle was not written, and nothing is left of it. Found: {error.strerror or error} "
        f"({error.filename or dest}). Needed: some ten MB for each host in {dest.parent}, and the right to write "
        f"there. Do: name another place with -e pd_bundle=PATH.tar.gz"
    )


def variables(task_vars: Mapping[str, Any]) -> dict[str, Any]:
    """Return our variables of every host, templated; one that cannot be says why."""
    prefixes = (settings.PREFIX, *inventory.ROLE_PREFIXES, "ansible_host", "ansible_port", "ansible_user")
    found: dict[str, Any] = {"groups": inventory.builtin(task_vars["groups"])}
    for host in sorted({name for members in task_vars["groups"].values() for name in members}):
        hostvars = task_vars["hostvars"][host]
        mine = {}
        for name in hostvars:
            if not name.startswith(prefixes):
                continue
            try:
                value = inventory.builtin(hostvars[name])
            except Exception as error:  # whatever a template can raise: the bundle says so
                value = f"cannot be told: {error}"
            if not (isinstance(value, dict) and {"changed", "failed"} <= set(value)):  # a task's result
                mine[str(name)] = value
        found[str(host)] = mine
    return found


def versions() -> str:
    lines = [f"ansible-core {ansible_version}", f"Python {platform.python_version()}", platform.platform()]
    for words in (["describe", "--tags", "--always", "--dirty"], ["status", "--short"]):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        lines.append(f"git {words[0]}: {(done.stdout or done.stderr).strip()[:4000]}")
    return "\n".join(lines) + "\n"


def pack(folder: Path, dest: Path) -> int:
    """Write the folder as one file, by another name until it is whole; return how many documents are in it."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    draft = dest.with_name(f".{dest.name}.{os.getpid()}")
    name = dest.name.removesuffix(".tar.gz")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as archive:
            archive.add(folder, arcname=name, filter=owned_by_nobody)
        draft.replace(dest)
    except OSError:
        draft.unlink()
        raise
    return sum(1 for path in folder.rglob("*") if path.is_file())


def owned_by_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
