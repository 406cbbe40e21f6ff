"""Drift that no deployment may put right by itself: it is seen, named, and nothing is done about it."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest


def items(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(item["kind"], item["item"]) for item in report["items"]]


def test_another_gpu_is_seen(deployment: Any) -> None:
    path = "/etc/pdstack/baseline.json"
    kept = json.loads(deployment.run(f"cat {path}"))
    old = {**kept, "gpus": [{**kept["gpus"][0], "uuid": "GPU-of-the-last-deployment"}, *kept["gpus"][1:]]}
    text = json.dumps(old, indent=2, sort_keys=True)
    deployment.run(f"cat > {path} <<'END'\n{text}\nEND")
    code, report = deployment.look()
    (item,) = report["items"]
    assert code == 2
    assert (item["kind"], item["item"]) == ("hardware", f"GPU {kept['gpus'][0]['pci']} uuid")
    assert item["found"] == kept["gpus"][0]["uuid"]
    assert "GPU-of-the-last-deployment" in item["why"]


def test_somebody_on_our_port_is_seen_and_left_alone(deployment: Any) -> None:
    """And the hand-made unit that he runs in is named."""
    plan = json.loads(deployment.run("cat /etc/pdstack/plan.json"))
    decode = next(item for item in plan["instances"] if item["role"] == "decode")
    serve = f"python3 -m http.server {decode['ports']['http']} --bind {decode['address']} --directory /var/empty"
    deployment.run(f"mkdir -p /var/empty; systemctl stop {decode['unit']}; systemd-run --unit=by-hand {serve}; sleep 1")
    try:
        code, report = deployment.look()
        assert code == 2
        (item,) = [item for item in report["items"] if item["kind"] == "in use"]
        assert item["item"] == f"port {decode['ports']['http']}"
        assert "by-hand.service" in item["found"]
        assert "systemctl disable --now by-hand.service" in item["repair"]
        assert ("unit", decode["unit"]) in items(report)
        assert deployment.run("systemctl is-active by-hand") == "active"
    finally:
        deployment.run("systemctl stop by-hand; rmdir /var/empty 2>/dev/null; true")


@pytest.mark.skipif(not os.environ.get("PDSTACK_LONG"), reason="PDSTACK_LONG is not set: two restarts of an engine")
def test_an_engine_that_runs_something_else_than_its_files_say_is_seen(deployment: Any) -> None:
    """Its file was changed, it was started, and the file was put back with its old time: only the engine knows."""
    path = "/etc/pdstack/instances/decode-0.yaml"
    plan = json.loads(deployment.run("cat /etc/pdstack/plan.json"))
    decode = next(item for item in plan["instances"] if item["name"] == "decode-0")
    health = f"http://{decode['address']}:{decode['ports']['http']}/health"
    # Back only when the engine answers: systemd calls it started long before it has read its file.
    deployment.run(
        f"cp --preserve=all {path} /root/kept; sed -i 's/^watchdog-timeout:.*/watchdog-timeout: 77/' {path}; "
        f"grep -q 'watchdog-timeout: 77' {path} && systemctl restart {decode['unit']} && "
        f"timeout 180 sh -c 'until curl -sf -m 5 -o /dev/null {health}; do sleep 1; done'; mv /root/kept {path}"
    )
    deployment.converge("--skip-tags", "verify")
    code, report = deployment.look()
    assert code == 2
    found = {item["item"]: (item["kind"], item["found"]) for item in report["items"]}
    assert found == {"decode-0 watchdog-timeout": ("process", "77")} or found == {
        "decode-0 watchdog-timeout": ("process", "77.0")
    }
    deployment.run("systemctl restart pd-decode@0")
    deployment.converge()
    assert deployment.look()[0] == 0
