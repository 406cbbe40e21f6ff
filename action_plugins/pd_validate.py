"""Check the inventory's variables before any connection: the door to pdstack.intent (see library/pd_validate.py)."""

from __future__ import annotations

import os
import ssl
from typing import Any

import yaml
from ansible import constants
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
            unread = unread_files(task_vars or {})
            if unread:
                raise refusal.IntentError(unread)
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


def unread_files(task_vars: dict[str, Any]) -> list[refusal.Refusal]:
    """Return the files of variables that Ansible leaves out in silence: others of their name hide them.

    Of group_vars/all, all.yml, all.yaml and all.json it reads the first that is there (find_vars_files of its loader).
    """
    sources = [str(source) for source in task_vars.get("ansible_inventory_sources", [])]
    tops = {
        source if os.path.isdir(source) else os.path.dirname(source) for source in sources if os.path.exists(source)
    }
    endings = ["", *constants.YAML_FILENAME_EXTENSIONS]
    problems = []
    for folder in [os.path.join(top, kind) for top in sorted(tops) for kind in ("group_vars", "host_vars")]:
        there = os.listdir(folder) if os.path.isdir(folder) else []
        for name in sorted({name.removesuffix(ending) for name in there for ending in endings}):
            read, *left_out = [name + ending for ending in endings if name + ending in there] or [""]
            way = f"into {read}/, under any name" if os.path.isdir(os.path.join(folder, read)) else f"into {read}"
            problems += [
                refusal.Refusal(
                    os.path.join(folder, file),
                    f"{read} beside it, which is all that Ansible reads of the two",
                    "variables where they are read",
                    f"move it, or what it holds, {way}",
                )
                for file in left_out
            ]
    return problems


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
