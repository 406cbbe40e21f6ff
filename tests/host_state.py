"""All of a host that a deployment might leave something in, and how two such looks differ."""

from __future__ import annotations

import json
from typing import Any

import scenario

LISTS = ("users", "units", "failed", "timers", "packages", "firewall", "sysctl", "ports", "processes")


def snapshot(host: Any) -> dict[str, Any]:
    """Return what tests/fixtures/host_snapshot.py finds on the host, by its own Python."""
    program = (scenario.ROOT / "tests/fixtures/host_snapshot.py").read_text()
    return json.loads(host.check_output("python3 -c %s", program))


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, list[str]]:
    """Return, by part of the host, what is gone (-), what came (+) and which files changed; {} where nothing did."""
    found = {}
    for part in LISTS:
        found[part] = [f"- {line}" for line in old[part] if line not in new[part]]
        found[part] += [f"+ {line}" for line in new[part] if line not in old[part]]
    paths = sorted({*old["files"], *new["files"]})
    found["files"] = [
        f"{path}: {old['files'].get(path, 'nothing')} -> {new['files'].get(path, 'nothing')}"
        for path in paths
        if old["files"].get(path) != new["files"].get(path)
    ]
    return {part: lines for part, lines in found.items() if lines}
