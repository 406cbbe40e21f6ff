"""Tests against a deployed host, over ssh. A test of a service that fails prints that service's journal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

UNITS = ("pd-prefill@0.service", "pd-decode@0.service", "pd-router.service")


@pytest.fixture(scope="module")
def plan(host) -> dict[str, Any]:
    """The plan as it lies on the host."""
    return json.loads(host.file("/etc/pdstack/plan.json").content_string)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call) -> Iterator[None]:
    report = yield
    if report.when == "call" and report.failed and "host" in item.funcargs:
        host = item.funcargs["host"]
        for unit in UNITS:
            journal = host.run(f"journalctl --no-pager -o short-precise -n 40 -u '{unit}'")
            report.sections.append((f"journal of {unit}", journal.stdout))
    return report
