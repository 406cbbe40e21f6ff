"""Check the inventory's variables before any connection: the door to pdstack.intent (see library/pd_validate.py)."""

from __future__ import annotations

import os
import ssl
from typing import Any

import yaml
from ansible.module_utils.pdstack import intent, inventory, refusal, settings
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
        _, args = self.validate_argument_spec({"only": {"type": "list", "elements": "str", "default": []}})
        try:
            if args["only"]:
                inventory.check_only(task_vars or {}, args["only"], role_variables(ROLES))
                return {**result, "changed": False, "msg": f"fine: {', '.join(args['only'])}"}
            wanted = inventory.read_intent(task_vars or {}, role_variables(ROLES))
            problems = certificate_problems(wanted.settings.security)
            if problems:
                raise refusal.IntentError(problems)
        except refusal.IntentError as error:
            return {**result, "failed": True, "msg": str(error)}
        return {**result, "changed": False, "msg": intent.summary(wanted), "intent": intent.public(wanted)}


def certificate_problems(security: settings.Security) -> list[refusal.Refusal]:
    """Return why the files of a given certificate cannot serve, tried as a server would load them."""
    if security.tls != "given" or not (security.tls_cert_file and security.tls_key_file):
        return []
    cert, key = (os.path.expanduser(path) for path in (security.tls_cert_file, security.tls_key_file))
    for name, path in (("tls_cert_file", cert), ("tls_key_file", key)):
        if not os.access(path, os.R_OK):
            found = f"{path}: no such file here, or none that you may read"
            return [refusal.Refusal(f"pd_security.{name}", found, "a PEM file on the controller", "correct the path")]
    try:
        # An empty password instead of a question at the terminal for a key that has one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        return [
            refusal.Refusal(
                "pd_security.tls_cert_file",
                f"{cert} with {key}: {error}",
                "a certificate and its own key, PEM, the key without a password",
                "give the router's certificate first in the chain, and the key that belongs to it",
            )
        ]
    return []


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
