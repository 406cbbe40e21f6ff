"""Say who takes the lock, and whether whoever holds it still lives (see library/pd_lock.py)."""

from __future__ import annotations

import getpass
import multiprocessing
import os
import socket
from typing import Any

from ansible.module_utils.pdstack import codec, runlock
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()


def run_pid() -> int:
    """Return the process of ansible-playbook, whose child this one is, also when it has been killed a moment ago.

    Then the kernel's answer would be process 1, which lives for ever, and so would its lock.
    """
    parent = multiprocessing.parent_process()
    return parent.pid if parent is not None and parent.pid else os.getpid()


class ActionModule(ActionBase):
    """The owner is the ansible-playbook process: this one is its child, for one task on one host."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        who = f"{getpass.getuser()}@{socket.gethostname()}"
        what = f"inventory {os.path.basename(str(variables.get('inventory_dir') or '')) or '?'}"
        me = runlock.myself(run_pid(), who, what)
        args = {**self._task.args, "owner": codec.dump(me)}
        seen = args.get("seen")
        found = dict(seen, changed=False) if seen and args.get("state") == "asked" else self._lock(args, variables)
        holder = codec.load(runlock.Owner, found["holder"]) if found.get("holder") else None
        if holder is not None and not found["held"]:
            alive = runlock.lives(holder, me)
            if args.get("state") == "asked":
                return {**found, **_answer(str(variables.get("inventory_hostname")), found, holder, alive)}
            if alive is False:
                display.display(f"{variables.get('inventory_hostname')}: {holder.who}'s run {holder.pid} ended early")
                return self._lock({**args, "instead_of": codec.dump(holder)}, variables)
            outcome = runlock.Outcome(False, holder, found["now"])
            found["refusal"] = runlock.refusal(str(variables.get("inventory_hostname")), outcome, alive)
        return found

    def _lock(self, args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self._execute_module(module_name="pd_lock", module_args=args, task_vars=task_vars)
        return found


def _answer(host: str, found: dict[str, Any], holder: runlock.Owner, alive: bool | None) -> dict[str, Any]:
    """Return what state=asked adds; a dead holder is nobody."""
    if alive is False:
        return {"holder": None}
    return {"alive": alive, "told": runlock.told(host, runlock.Outcome(False, holder, found["now"]), alive)}
