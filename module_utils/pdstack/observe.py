"""Prometheus and Grafana for a plan: scrape configuration, targets, rules, dashboard. Pure; all text is JSON.

JSON is YAML, so Prometheus reads it, and nothing here can be quoted wrongly. Metric names are those that router and
engines of the pinned releases really expose; a test compares them with recorded scrapes.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

FOLDER = "/etc/pdstack/observability"
UNIT = "/etc/systemd/system/pd-prometheus.service"
# A bound of the engine's own histogram; the reference's slowest median at C=64 was 5.4 s.
TTFT_BOUND_S = "10.0"
# Of 1% slow requests a month may have; 14.4 times that rate spends two days' worth in an hour (SRE workbook, ch. 5).
TTFT_BUDGET, FAST_BURN = 0.01, 14.4
SCRUB_DAYS, CERTIFICATE_DAYS, DRIFT_DAYS = 14, 21, 7


def _rule(record: str, expression: str) -> Dict[str, str]:
    return {"record": record, "expr": expression}


def _alert(name: str, expression: str, wait: str, severity: str, summary: str, action: str) -> Dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": wait,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "action": action},
    }


def _slow(window: str) -> str:
    good = f'sum(rate(sglang_time_to_first_token_seconds_bucket{{le="{TTFT_BOUND_S}"}}[{window}]))'
    return f"1 - {good} / sum(rate(sglang_time_to_first_token_seconds_count[{window}]))"


def rules() -> Dict[str, Any]:
    """Return recording and alert rules."""
    burn = TTFT_BUDGET * FAST_BURN
    recording = [
        _rule("pdstack:output_tokens:rate1m", "sum(rate(sglang_generation_tokens_total[1m]))"),
        _rule("pdstack:prompt_tokens:rate1m", 'sum(rate(sglang_prompt_tokens_total{role!="decode"}[1m]))'),
        *(
            _rule(f"pdstack:{short}_seconds:{name}_5m", _quantile(share, metric))
            for short, metric in (("ttft", "time_to_first_token"), ("itl", "inter_token_latency"))
            for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
        ),
        _rule("pdstack:ttft_slow:ratio_5m", _slow("5m")),
        _rule("pdstack:ttft_slow:ratio_1h", _slow("1h")),
        _rule("pdstack:kv_usage:max", "max by (name, role) (sglang_token_usage)"),
        _rule("pdstack:decode_workers:up", 'sum(up{job="pdstack-engine",role="decode"})'),
    ]
    alerts = [
        _alert(
            "PdNoDecodeWorker",
            "pdstack:decode_workers:up == 0",
            "15s",
            "critical",
            "No decode worker answers: every request fails",
            "systemctl status 'pd-decode@*' and journalctl -u pd-decode@0 on the decode hosts",
        ),
        _alert(
            "PdEngineDown",
            'up{job="pdstack-engine"} == 0',
            "1m",
            "critical",
            "{{ $labels.name }} does not answer",
            "systemctl status and journalctl of its unit; playbooks/deploy_pd.yml repairs what drifted",
        ),
        _alert(
            "PdRouterDown",
            'up{job="pdstack-router"} == 0',
            "30s",
            "critical",
            "The router on {{ $labels.host }} does not answer",
            "systemctl status pd-router and journalctl -u pd-router",
        ),
        _alert(
            "PdWorkerUnhealthy",
            "smg_worker_health == 0",
            "1m",
            "warning",
            "The router takes {{ $labels.worker }} for unhealthy",
            "look at that engine; the router returns it by itself once it answers",
        ),
        _alert(
            "PdTtftBurn",
            f"pdstack:ttft_slow:ratio_5m > {burn:g} and pdstack:ttft_slow:ratio_1h > {burn:g}",
            "2m",
            "critical",
            f"More than {burn:.0%} of requests wait longer than {float(TTFT_BOUND_S):g} s for their first token",
            "queues (num_queue_reqs) say whether prefill is the bound; playbooks/advise.yml says which ratio is not",
        ),
        _alert(
            "PdKvPoolFull",
            "sglang_token_usage > 0.95",
            "5m",
            "warning",
            "{{ $labels.name }} has used {{ $value | humanizePercentage }} of its KV pool",
            "requests queue or are retracted: more decode instances, or a shorter context_length",
        ),
        _alert(
            "PdTransferFailures",
            "increase(sglang_num_transfer_failed_reqs_total[5m]) > 0"
            " or increase(sglang_num_bootstrap_failed_reqs_total[5m]) > 0",
            "0s",
            "warning",
            "{{ $labels.name }} could not hand over the KV cache of some requests",
            "nixl lane and peer: playbooks/verify.yml, then the journals of both engines of the pair",
        ),
        _alert(
            "PdXid",
            "DCGM_FI_DEV_XID_ERRORS > 0",
            "0s",
            "critical",
            "GPU {{ $labels.gpu }} of {{ $labels.host }} reported Xid {{ $value }}",
            "dmesg of the host; NVIDIA's list of Xids says whether a reset is due; playbooks/probe.yml",
        ),
        _alert(
            "PdEccUncorrectable",
            "increase(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL[1h]) > 0 or DCGM_FI_DEV_ROW_REMAP_FAILURE > 0",
            "0s",
            "critical",
            "GPU {{ $labels.gpu }} of {{ $labels.host }} has memory errors that ECC could not correct",
            "drain the host, name the GPU in pd_excluded_gpus, and have it replaced",
        ),
        _alert(
            "PdGpuThermal",
            "DCGM_FI_DEV_GPU_TEMP > 88 or increase(DCGM_FI_DEV_THERMAL_VIOLATION[5m]) > 0",
            "2m",
            "warning",
            "GPU {{ $labels.gpu }} of {{ $labels.host }} is hot or slows itself down",
            "airflow and fans of the host",
        ),
        _alert(
            "PdScrubOverdue",
            f"pdstack_scrub_oldest_proof_age_seconds > {SCRUB_DAYS * 86400}",
            "1h",
            "warning",
            f"Files of the checkpoint on {{{{ $labels.host }}}} have not been proven for {SCRUB_DAYS} days",
            "systemctl status pd-scrub.timer pd-scrub.service",
        ),
        _alert(
            "PdCheckpointCorrupt",
            "pdstack_scrub_corrupt_files > 0",
            "0s",
            "critical",
            "The scrub found damaged files of the checkpoint on {{ $labels.host }}",
            "playbooks/checkpoint.yml fetches them again; then look at the disk",
        ),
        _alert(
            "PdDriftFound",
            "pdstack_drift_findings > 0",
            "0s",
            "warning",
            "{{ $value }} differences between intent and hosts",
            "playbooks/drift.yml names them, playbooks/deploy_pd.yml repairs them",
        ),
        _alert(
            "PdDriftUnknown",
            f"time() - pdstack_drift_timestamp_seconds > {DRIFT_DAYS * 86400}",
            "1h",
            "warning",
            f"No drift check has run for {DRIFT_DAYS} days",
            "the cron entry that runs playbooks/drift.yml",
        ),
        _alert(
            "PdCertificateExpiring",
            f"pdstack_certificate_expiry_timestamp_seconds - time() < {CERTIFICATE_DAYS * 86400}",
            "1h",
            "warning",
            f"The router's certificate on {{{{ $labels.host }}}} ends in less than {CERTIFICATE_DAYS} days",
            "give a new one, and run playbooks/serve.yml",
        ),
    ]
    return {
        "groups": [
            {"name": "pdstack-recording", "rules": recording},
            {"name": "pdstack-alerts", "rules": alerts},
        ]
    }


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share:g}, sum by (le) (rate(sglang_{metric}_seconds_bucket[5m])))"


def targets(plan: Mapping[str, Any], node_port: int = 0, gpu_port: int = 0) -> Dict[str, List[Dict[str, Any]]]:
    """Return file_sd targets by job: engines and routers of the plan, and exporters on its hosts where asked for."""

    def one(address: str, port: int, **labels: str) -> Dict[str, Any]:
        host = f"[{address}]" if ":" in address else address
        return {"targets": [f"{host}:{port}"], "labels": labels}

    engines = [
        one(item["address"], item["ports"]["http"], name=item["name"], role=item["role"], host=item["host"])
        for item in plan["instances"]
    ]
    routers = [
        one(item["address"], item["ports"]["metrics"], name=item["name"], host=item["host"]) for item in plan["routers"]
    ]
    addresses = {item["host"]: item["address"] for item in [*plan["routers"], *plan["instances"]]}
    gpus = sorted({item["host"] for item in plan["instances"]})
    found = {"pdstack-engine": engines, "pdstack-router": routers}
    if node_port:
        found["pdstack-node"] = [one(address, node_port, host=host) for host, address in sorted(addresses.items())]
    if gpu_port:
        found["pdstack-gpu"] = [one(addresses[host], gpu_port, host=host) for host in gpus]
    return found


def scrape_config(jobs: Sequence[str], interval_s: int) -> Dict[str, Any]:
    """Return prometheus.yml: every job reads its targets from a file, which a re-run of the role rewrites."""
    return {
        "global": {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"},
        "rule_files": [f"{FOLDER}/rules.json"],
        "scrape_configs": [
            {
                "job_name": job,
                # Engine metrics carry their own labels; ours win over equal names of theirs.
                "file_sd_configs": [{"files": [f"{FOLDER}/targets/{job}.json"]}],
                # An engine says sglang:x or sglang_x, after what the asking Prometheus accepts: here it is sglang_x.
                "metric_relabel_configs": [
                    {
                        "source_labels": ["__name__"],
                        "regex": "sglang:(.+)",
                        "target_label": "__name__",
                        "replacement": "sglang_$1",
                    }
                ],
            }
            for job in jobs
        ],
    }


Panel = Tuple[str, str, str, Sequence[Tuple[str, str]]]
PANELS: Sequence[Panel] = (
    (
        "Output tokens",
        "tok/s",
        "short",
        [("pdstack:output_tokens:rate1m", "output"), ("pdstack:prompt_tokens:rate1m", "prompt")],
    ),
    (
        "Time to first token",
        "quantiles over 5 minutes",
        "s",
        [(f"pdstack:ttft_seconds:{name}_5m", name) for name in ("p50", "p95", "p99")],
    ),
    (
        "Time between tokens",
        "quantiles over 5 minutes",
        "s",
        [(f"pdstack:itl_seconds:{name}_5m", name) for name in ("p50", "p95", "p99")],
    ),
    ("Requests running", "by instance", "short", [("sum by (name) (sglang_num_running_reqs)", "{{name}}")]),
    ("Requests queued", "by instance", "short", [("sum by (name) (sglang_num_queue_reqs)", "{{name}}")]),
    (
        "Requests in hand-over",
        "prefill waits for decode, decode waits for KV",
        "short",
        [
            ("sum by (name) (sglang_num_prefill_inflight_queue_reqs)", "{{name}} in flight"),
            ("sum by (name) (sglang_num_decode_transfer_queue_reqs)", "{{name}} transfer"),
            ("sum by (name) (sglang_num_decode_prealloc_queue_reqs)", "{{name}} preallocation"),
        ],
    ),
    ("KV pool", "used share", "percentunit", [("pdstack:kv_usage:max", "{{name}}")]),
    (
        "KV transfer",
        "GB/s, median over 5 minutes",
        "GBs",
        [("histogram_quantile(0.5, sum by (le) (rate(sglang_kv_transfer_speed_gb_s_bucket[5m])))", "speed")],
    ),
    ("Prefix cache", "hit rate", "percentunit", [("sglang_cache_hit_rate", "{{name}}")]),
    (
        "Router answers",
        "a second by status",
        "reqps",
        [("sum by (status_code) (rate(smg_http_responses_total[1m]))", "{{status_code}}")],
    ),
    ("Workers", "1 is healthy, by the router", "short", [("smg_worker_health", "{{worker}}")]),
    (
        "Retries",
        "a second by the router",
        "reqps",
        [("sum by (worker_type) (rate(smg_worker_retries_total[5m]))", "{{worker_type}}")],
    ),
    ("GPU temperature", "DCGM exporter", "celsius", [("DCGM_FI_DEV_GPU_TEMP", "{{host}} GPU {{gpu}}")]),
    ("GPU power", "DCGM exporter", "watt", [("DCGM_FI_DEV_POWER_USAGE", "{{host}} GPU {{gpu}}")]),
)


def dashboard() -> Dict[str, Any]:
    """Return the Grafana dashboard, two panels a row, with the data source as a variable."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = []
    for number, (title, description, unit, queries) in enumerate(PANELS):
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": title,
                "description": description,
                "datasource": source,
                "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
                "targets": [
                    {"refId": chr(65 + index), "expr": expression, "legendFormat": legend, "datasource": source}
                    for index, (expression, legend) in enumerate(queries)
                ],
            }
        )
    return {
        "uid": "pdstack",
        "title": "pdstack",
        "tags": ["pdstack"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}]
        },
        "panels": panels,
    }


_WORD = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_FUNCTIONS = "and or unless by on ignoring without offset sum max min rate increase histogram_quantile time"
_LANGUAGE = frozenset(_FUNCTIONS.split())


def metrics_of(expression: str) -> FrozenSet[str]:
    """Return the names of the series that an expression reads, without labels, functions and our own recordings."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(by|on|without|ignoring)\s*\([^)]*\)", " ", expression)
    return frozenset(word for word in _WORD.findall(bare) if word not in _LANGUAGE and not word.startswith("pdstack:"))


def expressions() -> List[str]:
    """Return every expression of rules and dashboard."""
    found = [rule["expr"] for group in rules()["groups"] for rule in group["rules"]]
    return found + [query["expr"] for panel in dashboard()["panels"] for query in panel["targets"]]


def files(
    plan: Mapping[str, Any], interval_s: int = 15, node_port: int = 0, gpu_port: int = 0, unit: Optional[str] = None
) -> List[Dict[str, Any]]:
    """Return the monitoring host's files, as pd_files takes them; ``unit`` is the text of pd-prometheus.service."""
    jobs = targets(plan, node_port, gpu_port)
    documents: Dict[str, Any] = {
        "prometheus.json": scrape_config(list(jobs), interval_s),
        "rules.json": rules(),
        "grafana-dashboard.json": dashboard(),
        **{f"targets/{job}.json": found for job, found in jobs.items()},
    }
    found: List[Dict[str, Any]] = [{"path": f"{FOLDER}/targets", "mode": "0755"}]
    found += [
        {"path": f"{FOLDER}/{name}", "content": json.dumps(document, indent=1) + "\n"}
        for name, document in documents.items()
    ]
    return found + ([{"path": UNIT, "content": unit}] if unit else [])
