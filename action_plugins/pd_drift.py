"""Compare hosts with what they were deployed for, on the controller (see library/pd_drift.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

from ansible.module_utils.pdstack import codec, drift, facts, inventory, plan, refusal, report
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """One run for all hosts, without a connection."""

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
                "previous": {"type": "dict", "required": True},
                "baselines": {"type": "dict", "required": True},
            }
        )
        try:
            found = {host: facts.merge([document]) for host, document in inventory.builtin(args["facts"]).items()}
            in_force = plan.recorded(inventory.builtin(args["previous"]))
            items = [
                item
                for host, baseline in sorted(inventory.builtin(args["baselines"]).items())
                for item in drift.hardware(found[host], baseline)
            ]
        except (codec.CodecError, facts.FactsError) as error:
            return {**result, "failed": True, "msg": f"pd_drift: a document has the wrong shape: {error}"}
        try:
            intended = inventory.read_intent(task_vars or {})
        except refusal.IntentError as error:
            return {**result, "failed": True, "msg": str(error)}
        try:
            wanted = plan.plan(intended, found, in_force)
        except refusal.PlanRefused as error:
            if in_force is None:
                return {**result, "failed": True, "msg": str(error)}
            wanted = in_force  # what runs is still compared with what it was deployed for
            items += drift.of_refusals("plan", error.refusals, sorted(found))
        # A deployment stops whom pd_stop_foreign names; whoever else holds a port or a GPU of ours is for a person.
        others = plan.foreign_ports(wanted, found, intended.settings.stop_foreign)
        named = [one for one in plan.foreign_ports(wanted, found) if one not in others]
        items += drift.of_refusals("in use", others + plan.foreign_processes(wanted, found), sorted(found))
        items += [
            dataclasses.replace(item, repair=drift.DEPLOY) for item in drift.of_refusals("in use", named, sorted(found))
        ]
        return {
            **result,
            "changed": False,
            "drift": codec.dump(items),
            "plan": codec.dump(wanted),
            "report": report.plan_text(wanted),
        }
