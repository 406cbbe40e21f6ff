"""Tests of a deployed GPU runner; what they find is kept for the results where PDSTACK_GPU_FOUND names a file."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest


@pytest.fixture(scope="session")
def found():
    """What the tests found, by name."""
    values: dict[str, Any] = {}
    yield values
    if os.environ.get("PDSTACK_GPU_FOUND"):
        pathlib.Path(os.environ["PDSTACK_GPU_FOUND"]).write_text(json.dumps(values, indent=1) + "\n")


@pytest.fixture(scope="module")
def plan(host) -> dict[str, Any]:
    """The plan as it lies on the host."""
    return json.loads(host.file("/etc/pdstack/plan.json").content_string)


@pytest.fixture(scope="module")
def instances(host, plan) -> list[dict[str, Any]]:
    """The engines of this host."""
    found = [item for item in plan["instances"] if item["host"] == host.backend.get_hostname()]
    assert found, "the plan puts no engine on this host"
    return found
