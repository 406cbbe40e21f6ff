"""Tests against deployed hosts, over ssh. A test of a service that fails prints the journals of that host's units."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

FOLLOWED = ("pd-prefill@0.service", "pd-decode@0.service", "pd-router.service")


@pytest.fixture(scope="module")
def plan(host) -> dict[str, Any]:
    """The plan as it lies on the host."""
    return json.loads(host.file("/etc/pdstack/plan.json").content_string)


@pytest.fixture(scope="module")
def instances(host, plan) -> list[dict[str, Any]]:
    """The engines that the plan puts on this host."""
    return [item for item in plan["instances"] if item["host"] == host.backend.get_hostname()]


@pytest.fixture(scope="module")
def units(host, plan, instances) -> list[str]:
    """The units that the plan puts on this host; each host of a scenario has some."""
    routers = [item for item in plan["routers"] if item["host"] == host.backend.get_hostname()]
    found = [item["unit"] for item in instances + routers]
    assert found, "the plan puts nothing on this host"
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call) -> Iterator[None]:
    report = yield
    if report.when == "call" and report.failed and "host" in item.funcargs:
        host = item.funcargs["host"]
        for unit in FOLLOWED:
            journal = host.run(f"journalctl --no-pager -o short-precise -n 40 -u '{unit}'")
            report.sections.append((f"journal of {unit}", journal.stdout))
    return report
