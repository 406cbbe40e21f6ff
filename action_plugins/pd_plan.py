"""Make the plan on the controller from the inventory and the probes' facts (see library/pd_plan.py)."""

from __future__ import annotations

import json
import os
from typing import Any

from ansible.module_utils.pdstack import codec, facts, inventory, plan, refusal, report
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
                "facts": {"type": "dict", "required": True},
                "previous": {"type": "raw"},
                "release": {"type": "str", "default": ""},
                "check_use": {"type": "bool", "default": True},
                "variables": {"type": "dict", "default": {}},
            }
        )
        try:
            found = read_facts(inventory.builtin(args["facts"]))
            before = read_previous(inventory.builtin(args["previous"]))
            intended = inventory.read_intent(task_vars or {}, release=args["release"], instead=args["variables"])
            wanted, stopped = plan.plan(intended, found, before), intended.settings.stop_foreign
            if args["check_use"]:
                held = plan.foreign_ports(wanted, found, stopped) + plan.foreign_processes(wanted, found)
                if held:
                    raise refusal.PlanRefused(held)
        except refusal.Refused as error:
            return {**result, "failed": True, "msg": str(error)}
        except (codec.CodecError, facts.FactsError) as error:
            return {**result, "failed": True, "msg": f"pd_plan: a document has the wrong shape: {error}"}
        document = codec.dump(wanted)
        old = codec.dump(before) if before is not None else {}
        return {
            **result,
            "changed": args["previous"] is not None and document != old,
            "plan": document,
            "foreign": codec.dump(plan.foreign_stops(wanted, found, stopped)),
            "report": report.plan_text(wanted),
            "msg": report.plan_text(wanted),
            "diff": {
                "before": _text(old),
                "after": _text(document),
                "before_header": "previous plan",
                "after_header": "plan",
            },
        }


def read_facts(documents: dict[str, Any]) -> dict[str, facts.HostFacts]:
    """Return the facts by host; a host may have several partial documents."""
    found: dict[str, facts.HostFacts] = {}
    for host, parts in documents.items():
        # A machine's own name for itself may differ from the inventory's, which is the one that counts.
        found[host] = facts.merge([{**part, "host": host} for part in (parts if isinstance(parts, list) else [parts])])
    return found


def read_previous(previous: Any) -> plan.Plan | None:
    """Return the previous plan: from a document, a file, or the document of each host."""
    if isinstance(previous, str) and previous:
        if not os.path.exists(previous):
            return None
        with open(previous, encoding="utf-8") as file:
            previous = json.load(file)
    if not previous:
        return None
    return plan.readable(previous) if "instances" in previous else plan.recorded(previous)


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=True) + "\n" if document else ""
