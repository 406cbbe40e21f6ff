"""Check the inventory's variables before any connection: the door to pdstack.intent (see library/pd_validate.py)."""

from __future__ import annotations

import os
from typing import Any

import yaml
from ansible.module_utils.pdstack import intent, inventory, refusal
from ansible.plugins.action import ActionBase

ROLES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "roles")


class ActionModule(ActionBase):
    """One run for all hosts, on the controller, without a connection."""

    BYPASS_HOST_LOOP = True
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        self.validate_argument_spec({})
        try:
            wanted = inventory.read_intent(task_vars or {}, role_variables(ROLES))
        except refusal.IntentError as error:
            return {**result, "failed": True, "msg": str(error)}
        return {**result, "changed": False, "msg": intent.summary(wanted), "intent": intent.public(wanted)}


def role_variables(roles: str) -> list[str]:
    """Return the names of all options in the argument specifications of our roles."""
    names: set[str] = set()
    for role in sorted(os.listdir(roles)) if os.path.isdir(roles) else []:
        path = os.path.join(roles, role, "meta", "argument_specs.yml")
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                specs = (yaml.safe_load(file) or {}).get("argument_specs", {})
            for entry in specs.values():
                names.update(entry.get("options", {}))
    return sorted(names)
