"""What the planner's tests ask of a plan."""

from __future__ import annotations

from typing import Any

import pytest
from pdstack import plan, refusal
from pdstack.facts import HostFacts
from unit.plan import inventories as inv

SMALL = {"repo": "pdstack/tiny", "revision": inv.COMMIT, "heads": 64}


def named(made: plan.Plan, name: str) -> plan.Instance:
    return next(item for item in made.instances if item.name == name)


def positions(made: plan.Plan, name: str) -> list[int]:
    return [gpu.position for gpu in named(made, name).gpus]


def reasons(item: plan.Instance | plan.Router, decision: str) -> str:
    found = [why.reason for why in item.why if decision in why.decision]
    assert found, f"{item.name} has no reason for {decision}: {[why.decision for why in item.why]}"
    return " ".join(found)


def refusals(*facts: HostFacts, **changes: Any) -> list[refusal.Refusal]:
    with pytest.raises(refusal.PlanRefused) as error:
        inv.planned(*facts, **changes)
    return error.value.refusals
