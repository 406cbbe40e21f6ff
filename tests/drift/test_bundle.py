"""The support bundle has what a bug report needs, and none of the secrets that are planted everywhere."""

from __future__ import annotations

import json
import re
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
import scenario

# Each stands for a secret at one place; the number tells which one got through.
S = {
    place: f"Qz7{number:02d}-vX9_kLm{number:02d}Tt"
    for number, place in enumerate(
        [
            "drop_in",
            "env_file",
            "journal_word",
            "journal_url",
            "journal_header",
            "journal_json",
            "hub_token",
            "process",
            "credential_file",
            "credential_in_journal",
            "loaded_file",
            "checkpoint_secret",
            "inventory_proxy",
            "inventory_key",
            "engine_env",
            "runtime_drop_in",
            "set_credential",
            "yaml",
            "state_file",
            "run_file",
            "facts",
        ]
    )
}
S["hub_token"] = "hf_" + S["hub_token"].replace("-", "x")
PLANTS = f"""
set -e
mkdir -p /etc/systemd/system/pd-router.service.d
printf '[Service]\\nEnvironment="HF_TOKEN={S["drop_in"]}" A=b\\nLoadCredential=x:/srv/key\\n' \\
  > /etc/systemd/system/pd-router.service.d/plant.conf
echo '{S["loaded_file"]}' > /srv/key
echo 'API_KEY={S["env_file"]}' > /etc/pdstack/instances/plant.env
echo 'OTHER_PASSWORD="{S["engine_env"]} with spaces"' >> /etc/pdstack/instances/decode-0.env
mkdir -p /etc/pdstack/credentials /var/lib/pdstack/checkpoint/secrets
echo '{S["credential_file"]}' > /etc/pdstack/credentials/plant
echo '{S["credential_in_journal"]}' > /etc/pdstack/credentials/plant2
echo '{S["checkpoint_secret"]}' > /var/lib/pdstack/checkpoint/secrets/plant
cat > /tmp/say <<'END'
login failed with password={S["journal_word"]} for bob
proxy http://bob:{S["journal_url"]}@proxy:3128/ refused
Authorization: Bearer {S["journal_header"]}
body: {{"api_key": "{S["journal_json"]}", "port": 1}}
the value {S["credential_in_journal"]} without a name, {S["loaded_file"]} too, and {S["checkpoint_secret"]}
downloading with {S["hub_token"]}
END
mkdir -p /run/systemd/system/pd-router.service.d
printf '[Service]\\nEnvironment=SMTP_PASSWORD={S["runtime_drop_in"]}\\nSetCredential=y:{S["set_credential"]}\\n' \\
  > /run/systemd/system/pd-router.service.d/plant-run.conf
printf 'api-key: {S["yaml"]}\\nport: 1\\n' > /etc/pdstack/instances/plant.yaml
echo '{{"url": "https://hub/x?token={S["state_file"]}&a=b"}}' > /var/lib/pdstack/checkpoint/plant.json
echo '{{"secret": "{S["run_file"]}"}}' > /run/pdstack/plant
# What the probe reads of the kernel's command line becomes a fact.
cp -p /opt/pdstack-lab/proc/cmdline /root/cmdline
sed -i '1s/$/ nvidia.api_key={S["facts"]}/' /opt/pdstack-lab/proc/cmdline
systemd-run --quiet --wait --unit=pd-plant --property=RemainAfterExit=no cat /tmp/say
systemd-run --quiet --unit=pd-plant2 sh -c 'cat /tmp/say; exec sleep 300'
systemd-run --quiet --unit=pd-plant3 python3 -c 'import time; time.sleep(300)' --api-key {S["process"]}
"""
CLEAR = """
systemctl stop pd-plant2 pd-plant3
mv /root/cmdline /opt/pdstack-lab/proc/cmdline
rm -rf /run/systemd/system/pd-router.service.d /etc/pdstack/instances/plant.yaml /var/lib/pdstack/checkpoint/plant.json
rm -rf /run/pdstack/plant /etc/systemd/system/pd-router.service.d /srv/key /etc/pdstack/instances/plant.env /tmp/say \\
  /etc/pdstack/credentials/plant* /var/lib/pdstack/checkpoint/secrets
sed -i /OTHER_PASSWORD/d /etc/pdstack/instances/decode-0.env
touch -d '2 hours ago' /etc/pdstack/instances/decode-0.env
systemctl daemon-reload
"""


@pytest.fixture(scope="module")
def bundle(deployment: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a host with secrets planted in it, unpacked."""
    folder = tmp_path_factory.mktemp("bundle")
    deployment.run(PLANTS)
    try:
        more = {"checkpoint_proxy": f"http://bob:{S['inventory_proxy']}@proxy:3128", "pd_bundle": f"{folder}/b.tar.gz"}
        keys = {"pd_security": {"api_key": S["inventory_key"]}}
        done = scenario.playbook("support_bundle.yml", "-e", json.dumps(more), "-e", json.dumps(keys))
        assert done.returncode == 0, done.stdout + done.stderr
        assert scenario.changed(done) == 0
        there = deployment.run("grep -ch . /etc/pdstack/credentials/plant /srv/key; journalctl -u pd-plant2 -o cat")
        assert S["journal_word"] in there, "what is looked for was there to be found"
    finally:
        deployment.run(CLEAR)
    assert not (folder / "b.tar.gz.d").exists()
    assert stat.S_IMODE((folder / "b.tar.gz").stat().st_mode) == 0o600
    with tarfile.open(folder / "b.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "b"


def test_it_has_what_a_bug_report_needs(bundle: Path, host: Any) -> None:
    name = host.backend.get_hostname()
    there = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    for wanted in (
        "controller/drift.json",
        "controller/facts.json",
        "controller/inventory.json",
        "controller/versions.txt",
        f"{name}/files/etc/pdstack/plan.json",
        f"{name}/files/etc/pdstack/baseline.json",
        f"{name}/files/etc/pdstack/instances/plant.yaml",
        f"{name}/files/var/lib/pdstack/checkpoint/plant.json",
        f"{name}/files/run/pdstack/plant",
        f"{name}/files/run/systemd/system/pd-router.service.d/plant-run.conf",
        f"{name}/files/etc/os-release",
        f"{name}/journal/pd-decode@0.service.txt",
        f"{name}/journal/pd-plant2.service.txt",
        f"{name}/units/pd-router.service.txt",
        f"{name}/answers/decode-0-metrics.txt",
        f"{name}/answers/decode-0-server_info.txt",
        f"{name}/answers/router-0-workers.txt",
        f"{name}/system/ports.txt",
        f"{name}/removed.json",
    ):
        assert wanted in there
    assert "sglang:" in (bundle / f"{name}/answers/decode-0-metrics.txt").read_text()
    facts = json.loads((bundle / "controller/facts.json").read_text())[name]["facts"]
    assert facts["gpus"]
    assert "nvidia.api_key=" in facts["system"]["kernel_cmdline"]
    drift = json.loads((bundle / "controller/drift.json").read_text())
    # The look got the variables of this run: it refuses the proxy with a password that -e brought.
    assert any("http://proxy:3128 with a user, a password" in failure["message"] for failure in drift["failures"])
    assert "ExecStart=" in (bundle / f"{name}/units/pd-decode@0.service.txt").read_text()


def test_none_of_the_planted_secrets_is_in_it(bundle: Path) -> None:
    texts = {str(path.relative_to(bundle)): path.read_text() for path in bundle.rglob("*") if path.is_file()}
    assert len(texts) > 40
    found = [(place, name) for name, text in texts.items() for place, secret in S.items() if secret in text]
    assert found == []
    # Each text that had one says so, and the planted lines are there otherwise.
    journal = next(text for name, text in texts.items() if name.endswith("journal/pd-plant2.service.txt"))
    assert journal.count("<removed:") >= 7
    assert "login failed with password=" in journal
    assert re.search(r"proxy http://<removed:\w+>@proxy:3128/ refused", journal)


def test_what_is_no_secret_is_still_there(bundle: Path, host: Any) -> None:
    name = host.backend.get_hostname()
    info = json.loads((bundle / f"{name}/answers/decode-0-server_info.txt").read_text())
    assert info["max_total_tokens"] == 8192
    plan = json.loads((bundle / f"{name}/files/etc/pdstack/plan.json").read_text())
    assert plan["model"]["revision"] == json.loads(host.check_output("cat /etc/pdstack/plan.json"))["model"]["revision"]
