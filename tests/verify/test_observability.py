"""A real Prometheus over the running deployment: its targets, its rules, and the alert of a decode engine that died."""

from __future__ import annotations

import base64
import json
import time
import urllib.parse

import pytest
from pdstack import observe
from unit.test_observe import AFTER_AN_EVENT, promtool_document

API = "http://127.0.0.1:9090/api/v1"


@pytest.fixture
def prometheus(host):
    """Ask the host's Prometheus; scenarios and stages without one have nothing to test here."""
    if not host.file("/run/pdstack-test-observed").exists:
        pytest.skip("nothing watches here")
    assert host.service("pd-prometheus.service").is_running

    def ask(path: str, **query: str):
        url = f"{API}{path}?{urllib.parse.urlencode(query)}"
        answer = json.loads(host.check_output(f"curl -sS -m 20 '{url}'"))
        assert answer["status"] == "success", answer
        return answer["data"]

    return ask


def test_every_target_of_the_plan_is_up(prometheus, plan):
    wanted = len(plan["instances"]) + len(plan["routers"])
    until = time.monotonic() + 60
    while True:
        found = {item["labels"]["name"]: item["health"] for item in prometheus("/targets")["activeTargets"]}
        if (len(found) == wanted and set(found.values()) == {"up"}) or time.monotonic() > until:
            break
        time.sleep(1)
    assert found == dict.fromkeys([item["name"] for item in plan["instances"] + plan["routers"]], "up")


def test_metrics_of_rules_and_dashboard_are_scraped(prometheus):
    """Those of GPUs are not here, and those of failures not before one."""
    known = set(prometheus("/label/__name__/values"))
    used = {name for expression in observe.expressions() for name in observe.metrics_of(expression)}
    assert {name for name in used - AFTER_AN_EVENT if not name.startswith(("DCGM_", "pdstack_"))} <= known


def test_rules_are_loaded_and_evaluate(prometheus):
    groups = prometheus("/rules")["groups"]
    assert sum(len(group["rules"]) for group in groups) == sum(
        len(group["rules"]) for group in observe.rules()["groups"]
    )
    assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}
    assert [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")] == []


def test_promtool_holds_for_configuration_and_alerts(host, prometheus):
    cases = base64.b64encode(json.dumps(promtool_document()).encode()).decode()
    host.check_output(f"mkdir -p /tmp/rules && cp {observe.FOLDER}/rules.json /tmp/rules")
    host.check_output(f"echo {cases} | base64 -d > /tmp/rules/t.json")
    for command in (f"check config {observe.FOLDER}/prometheus.json", "test rules /tmp/rules/t.json"):
        done = host.run(f"promtool {command}")
        assert done.rc == 0, done.stdout + done.stderr


def test_the_death_of_decode_raised_the_alert(host, prometheus):
    record = host.file("/run/pdstack-test/record.json")
    if not record.exists or json.loads(record.content_string)["breakage"] != "SIGKILL of decode":
        pytest.skip("decode was not killed just now")
    query = 'max_over_time(ALERTS{alertname="PdNoDecodeWorker",alertstate="firing"}[15m])'
    assert [item["value"][1] for item in prometheus("/query", query=query)["result"]] == ["1"]


def test_figures_for_the_node_exporter_are_written(host, prometheus):
    host.check_output("systemctl start pd-metrics.service")
    text = host.file("/var/lib/prometheus/node-exporter/pdstack.prom").content_string
    assert 'pdstack_metrics_source_failed{source="scrub"} 0' in text
    assert 'pdstack_metrics_source_failed{source="certificate"} 0' in text
