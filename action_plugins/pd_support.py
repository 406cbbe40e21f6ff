"""Write a host's documents on the controller (see library/pd_support.py)."""

from __future__ import annotations

import os
from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """The documents do not stay in the task's result: they are long."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        found: dict[str, Any] = self._execute_module(module_name="pd_support", task_vars=task_vars)
        documents = found.pop("documents", {})
        folder = os.path.join(str(self._task.args["folder"]), str((task_vars or {})["inventory_hostname"]))
        for name, text in documents.items():
            path = os.path.normpath(os.path.join(folder, name))
            if not path.startswith(folder + os.sep):  # the names come from the host
                return {"failed": True, "msg": f"the host named a document {name!r}"}
            try:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                with open(path, "w", encoding="utf-8") as stream:
                    stream.write(text)
            except OSError as error:
                return {
                    "failed": True,
                    "msg": f"Not written on the controller. Found: {error.strerror} ({path}). Needed: some ten MB for "
                    "each host there, and the right to write. Do: name another place with -e pd_bundle=PATH.tar.gz",
                }
        return found
