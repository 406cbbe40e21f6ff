"""Say which candidate of ab.yml wins, and write one page that sets them side by side (see library/pd_ab_report.py)."""

from __future__ import annotations

import os
from typing import Any

from ansible.module_utils.pdstack import codec, inventory
from ansible.module_utils.pdstack.bench import ab, archive, page
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """One run for all hosts, on the controller, without a connection."""

    BYPASS_HOST_LOOP = True
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            {
                "results": {"type": "list", "elements": "path", "required": True},
                "page": {"type": "path", "required": True},
                "noise_floor": {"type": "float", "default": 0.05},
            }
        )
        args = inventory.builtin(args)
        if self._task.check_mode or not args["results"]:
            return {**result, "changed": False, "msg": "nothing was measured"}
        try:
            found = [archive.read(path) for path in args["results"]]
        except (codec.CodecError, OSError) as error:
            return {**result, "failed": True, "msg": f"a result cannot be read: {error}"}
        verdicts = ab.verdicts(found, args["noise_floor"])
        os.makedirs(os.path.dirname(os.path.abspath(args["page"])), exist_ok=True)
        with open(args["page"], "w", encoding="utf-8") as stream:
            stream.write(page.page(found, verdict=ab.text(verdicts)))
        return {
            **result,
            "changed": True,
            "verdicts": codec.dump(verdicts),
            "page": args["page"],
            "msg": ab.text(verdicts),
        }
