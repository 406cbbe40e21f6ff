"""Monitoring: targets are the plan's, every metric that is asked for exists, every alert fires when it should."""

import importlib.util
import json
import re
import shutil
import subprocess
import time

import pytest
from pdstack import codec, observe
from unit.plan import inventories
from unit.plan.recorded import recorded

# Appear once something has happened; read in the engine's srt/observability/metrics_collector.py of both releases.
AFTER_AN_EVENT = {
    "sglang_num_transfer_failed_reqs_total",
    "sglang_num_bootstrap_failed_reqs_total",
    "smg_worker_retries_total",
}
# Of the DCGM exporter (its default counters), and of roles/observability/files/pd_metrics.py.
ELSEWHERE = re.compile(r"DCGM_FI_DEV_[A-Z_]+|pdstack_[a-z_]+")


def planned():
    return codec.dump(inventories.planned(recorded()["rtx-pro-6000-8"], pd_release="sglang-0.5.23"))


def scraped(root):
    folder = root / "tests/fixtures/metrics"
    return {name.replace("sglang:", "sglang_") for path in folder.glob("*.txt") for name in path.read_text().split()}


def test_targets_are_those_of_the_plan():
    plan = planned()
    found = observe.targets(plan, node_port=9100, gpu_port=9400)
    engines = {item["labels"]["name"]: item for item in found["pdstack-engine"]}
    assert set(engines) == {"prefill-0", "decode-0"}
    decode = next(item for item in plan["instances"] if item["role"] == "decode")
    assert engines["decode-0"]["targets"] == [f"{decode['address']}:{decode['ports']['http']}"]
    assert engines["decode-0"]["labels"]["role"] == "decode"
    assert found["pdstack-router"][0]["targets"] == [f"{plan['routers'][0]['address']}:29001"]
    assert len(found["pdstack-node"]) == len(found["pdstack-gpu"]) == 1
    assert set(observe.targets(plan)) == {"pdstack-engine", "pdstack-router"}


def test_addresses_of_ipv6_are_bracketed():
    plan = planned()
    plan["routers"][0]["address"] = "fd00::1"
    assert observe.targets(plan)["pdstack-router"][0]["targets"] == ["[fd00::1]:29001"]


def test_files_are_json_with_every_job_that_is_scraped():
    files = {item["path"]: item.get("content") for item in observe.files(planned(), 5, node_port=9100)}
    config = json.loads(files[f"{observe.FOLDER}/prometheus.json"])
    for job in config["scrape_configs"]:
        assert json.loads(files[job["file_sd_configs"][0]["files"][0]])
    assert config["global"]["scrape_interval"] == "5s"
    assert json.loads(files[config["rule_files"][0]]) == observe.rules()
    assert f"{observe.FOLDER}/targets" in files  # the folder itself, else pd_files would take it for a stray
    assert observe.UNIT not in files


def test_every_metric_of_rules_and_dashboard_exists(project_root):
    known = scraped(project_root) | AFTER_AN_EVENT | {"up"}
    assert len(known) > 100
    used = {name for expression in observe.expressions() for name in observe.metrics_of(expression)}
    assert {"sglang_token_usage", "smg_worker_health", "DCGM_FI_DEV_XID_ERRORS"} <= used
    assert {name for name in used if name not in known and not ELSEWHERE.fullmatch(name)} == set()


def test_recordings_that_are_used_exist():
    recorded_names = {
        rule["record"] for group in observe.rules()["groups"] for rule in group["rules"] if "record" in rule
    }
    used = {name for expression in observe.expressions() for name in re.findall(r"pdstack:[\w:]+", expression)}
    assert used <= recorded_names


def test_names_are_read_out_of_an_expression():
    expression = 'sum by (le) (rate(a:b_bucket{le="1", role!="x"}[5m])) / on(name) c_total > 3 and time() - d < 1'
    assert observe.metrics_of(expression) == {"a:b_bucket", "c_total", "d"}


def test_the_bound_of_slow_first_tokens_is_a_bucket_of_the_engine(project_root):
    buckets = (project_root / "tests/fixtures/metrics/ttft_buckets.txt").read_text().split()
    assert observe.TTFT_BOUND_S in buckets


def test_the_dashboard_has_a_panel_for_each_query_and_no_two_in_one_place():
    panels = observe.dashboard()["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) == len(observe.PANELS)
    assert all(panel["targets"] and panel["title"] and panel["description"] for panel in panels)


def test_every_alert_says_what_to_do_and_has_a_case():
    alerts = [rule for group in observe.rules()["groups"] for rule in group["rules"] if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 15
    assert all(rule["annotations"]["action"] for rule in alerts)
    assert {rule["alert"] for rule in alerts} == {name for name, *_ in ALERT_CASES}


# Alert, its series, when it is looked at, and whether it fires; each also with a healthy twin.
ALERT_CASES = [
    ("PdNoDecodeWorker", {'up{job="pdstack-engine",role="decode",name="d0"}': ("0x90", "1x90")}, "10m"),
    ("PdEngineDown", {'up{job="pdstack-engine",role="prefill",name="p0"}': ("0x90", "1x90")}, "10m"),
    ("PdRouterDown", {'up{job="pdstack-router",host="h"}': ("0x90", "1x90")}, "10m"),
    ("PdWorkerUnhealthy", {'smg_worker_health{worker="http://h:1"}': ("0x90", "1x90")}, "10m"),
    (
        "PdTtftBurn",
        {
            'sglang_time_to_first_token_seconds_bucket{le="10.0"}': ("0+80x90", "0+100x90"),
            "sglang_time_to_first_token_seconds_count": ("0+100x90", "0+100x90"),
        },
        "75m",
    ),
    ("PdKvPoolFull", {'sglang_token_usage{name="d0"}': ("0.97x90", "0.9x90")}, "10m"),
    ("PdTransferFailures", {'sglang_num_transfer_failed_reqs_total{name="d0"}': ("0+1x90", "3x90")}, "10m"),
    ("PdXid", {'DCGM_FI_DEV_XID_ERRORS{gpu="0"}': ("79x90", "0x90")}, "10m"),
    ("PdEccUncorrectable", {'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="0"}': ("0+1x90", "2x90")}, "10m"),
    ("PdGpuThermal", {'DCGM_FI_DEV_GPU_TEMP{gpu="0"}': ("91x90", "80x90")}, "10m"),
    ("PdScrubOverdue", {'pdstack_scrub_oldest_proof_age_seconds{host="h"}': ("1300000x90", "600000x90")}, "80m"),
    ("PdCheckpointCorrupt", {'pdstack_scrub_corrupt_files{host="h"}': ("1x90", "0x90")}, "10m"),
    ("PdDriftFound", {"pdstack_drift_findings": ("2x90", "0x90")}, "10m"),
    ("PdDriftUnknown", {"pdstack_drift_timestamp_seconds": ("-700000x90", "0x90")}, "80m"),
    ("PdCertificateExpiring", {"pdstack_certificate_expiry_timestamp_seconds": ("1000000x90", "9000000x90")}, "80m"),
]


def promtool_document():
    """The cases for `promtool test rules`: each alert fires on its bad series, and not on its good ones."""
    tests = []
    for name, series, when in ALERT_CASES:
        for place in (0, 1):
            inputs = [{"series": key, "values": values[place]} for key, values in series.items()]
            expression = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
            samples = [{"labels": "{}", "value": 1 - place}]
            tests.append(
                {
                    "interval": "1m",
                    "input_series": inputs,
                    "promql_expr_test": [{"expr": expression, "eval_time": when, "exp_samples": samples}],
                }
            )
    return {"rule_files": ["rules.json"], "evaluation_interval": "1m", "tests": tests}


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here; molecule/default runs this in its host")
def test_alerts_fire_and_stay_silent(tmp_path):
    (tmp_path / "rules.json").write_text(json.dumps(observe.rules()))
    (tmp_path / "test.json").write_text(json.dumps(promtool_document()))
    done = subprocess.run(["promtool", "test", "rules", "test.json"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def figures(project_root):
    path = project_root / "roles/observability/files/pd_metrics.py"
    spec = importlib.util.spec_from_file_location("pd_metrics", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_of_scrub_certificate_and_drift(figures, tmp_path):
    now = time.time()
    scrub = tmp_path / "var/lib/pdstack/models/.pdstack/scrub/a--b@c.json"
    scrub.parent.mkdir(parents=True)
    files = {
        "x": {"inode": 1, "ctime_ns": 2, "verified": now - 500, "corrupt": False},
        "y": {"inode": 1, "ctime_ns": 2, "verified": now - 90, "corrupt": False},
        "z": {"inode": 1, "ctime_ns": 2, "verified": 0.0, "corrupt": True},
    }
    scrub.write_text(json.dumps({"files": files}))
    certificate = tmp_path / "etc/pdstack/credentials/tls_cert"
    certificate.parent.mkdir(parents=True)
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", tmp_path / "key"),
            *("-out", certificate, "-days", "30", "-subj", "/CN=x"),
        ],
        check=True,
        capture_output=True,
    )
    drift = tmp_path / "var/lib/pdstack/drift.json"
    drift.write_text(json.dumps({"items": [{}, {}]}))
    output = tmp_path / "out.prom"
    figures.main(str(output), str(tmp_path))
    found = dict(line.rsplit(" ", 1) for line in output.read_text().splitlines())
    assert float(found['pdstack_scrub_oldest_proof_age_seconds{checkpoint="a--b@c"}']) == pytest.approx(500, abs=30)
    assert found['pdstack_scrub_corrupt_files{checkpoint="a--b@c"}'] == "1"
    ends = float(found["pdstack_certificate_expiry_timestamp_seconds"])
    assert ends == pytest.approx(now + 30 * 86400, abs=120)
    assert found["pdstack_drift_findings"] == "2"
    assert found['pdstack_metrics_source_failed{source="scrub"}'] == "0"


def test_a_source_that_cannot_be_read_is_a_figure_and_hides_no_other(figures, tmp_path):
    drift = tmp_path / "var/lib/pdstack/drift.json"
    drift.parent.mkdir(parents=True)
    drift.write_text("{")
    text = figures.render(str(tmp_path), time.time())
    assert 'pdstack_metrics_source_failed{source="drift"} 1' in text
    assert 'pdstack_metrics_source_failed{source="certificate"} 0' in text
