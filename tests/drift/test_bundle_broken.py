"""The support bundle where something is broken: an engine that does not start, full disks, a host out of reach."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scenario

KEY = "Qz7-vX9_kLm-of-the-broken"
FAILS = f"""
set -e
mkdir -p /etc/systemd/system/pd-decode@0.service.d
printf '[Service]\\nExecStartPre=/bin/sh -c "echo no room for api_key={KEY}; exit 7"\\n' \\
  > /etc/systemd/system/pd-decode@0.service.d/broken.conf
systemctl daemon-reload
systemctl stop pd-decode@0
systemctl start pd-decode@0 || true
for second in $(seq 120); do
  [ "$(systemctl is-failed pd-decode@0)" = failed ] && exit 0
  sleep 1
done
exit 1
"""
# Every folder that Python would take for its temporary files: as on a host whose only file system is full.
FULL = """
set -e
cp -a ~/.ssh /run/kept-ssh
for folder in /tmp /var/tmp /root; do mount -t tmpfs -o size=64k,mode=$(stat -c %a $folder) full $folder; done
cp -a /run/kept-ssh ~/.ssh
for folder in /tmp /var/tmp /root; do dd if=/dev/zero of=$folder/fill bs=1k status=none 2>/dev/null || true; done
"""
EMPTY = "umount --lazy /tmp /var/tmp /root; rm -rf /run/kept-ssh"


def bundle(folder: Path, status: int, *words: str) -> tuple[str, Path]:
    """Ask for a bundle; return what was said and the unpacked folder."""
    done = scenario.playbook("support_bundle.yml", "-e", f"pd_bundle={folder}/b.tar.gz", *words)
    assert done.returncode == status, done.stdout + done.stderr
    with tarfile.open(folder / "b.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return " ".join(done.stdout.split()), folder / "b"


@pytest.fixture(scope="module")
def broken(deployment: Any) -> Iterator[str]:
    """The host with a decode engine that has given up."""
    deployment.run(FAILS)
    yield deployment.host.backend.get_hostname()
    deployment.converge()


def test_an_engine_that_does_not_start_is_told_whole(broken: str, tmp_path: Path) -> None:
    _, found = bundle(tmp_path, 0)
    assert json.loads((found / "controller/hosts.json").read_text()) == {broken: {}}
    told = found / broken
    assert "pd-decode@0.service" in (told / "system/failed-units.txt").read_text()
    journal = (told / "journal/pd-decode@0.service.txt").read_text()
    assert "no room for api_key=<removed:" in journal
    assert "status=7" in journal
    assert "broken.conf" in (told / "units/pd-decode@0.service.txt").read_text()
    assert "Result=" in (told / "units/pd-decode@0.service.properties.txt").read_text()
    assert (told / "answers/decode-0-server_info.txt").read_text().startswith("status 0: ")
    assert (told / "answers/prefill-0-metrics.txt").read_text().count("sglang:") > 10
    items = json.loads((found / "controller/drift.json").read_text())["items"]
    assert any("pd-decode@0.service" in item["item"] for item in items), items
    assert not [path for path in found.rglob("*") if path.is_file() and KEY in path.read_text()]


def test_a_host_whose_disks_are_full_is_told_too(deployment: Any, broken: str, tmp_path: Path) -> None:
    deployment.run(FULL)
    try:
        look = scenario.playbook("preflight.yml")
        assert look.returncode == 2, "disks are full, so that other playbooks cannot run there"
        assert "usable temporary directory" in " ".join(look.stdout.split())
        _, found = bundle(tmp_path, 0)
    finally:
        deployment.run(EMPTY)
    disks = [line.split() for line in (found / broken / "system/disks.txt").read_text().splitlines()]
    assert {words[-1] for words in disks if words[0] == "full" and "100%" in words} == {"/tmp", "/var/tmp", "/root"}
    assert (found / broken / "journal/pd-decode@0.service.txt").read_text()
    assert json.loads((found / "controller/facts.json").read_text())[broken]["facts"]["gpus"]
    assert "temporary directory" in (found / "controller/drift.json").read_text()


def test_a_host_out_of_reach_is_named_and_the_controller_is_told(broken: str, tmp_path: Path) -> None:
    said, found = bundle(tmp_path, 2, "-e", "ansible_port=1")
    assert "Not all of these hosts could be read. The bundle has the rest." in said
    assert "Connection refused" in json.loads((found / "controller/hosts.json").read_text())[broken]["connection"]
    assert json.loads((found / "controller/inventory.json").read_text())[broken]["pd_profile"] == "cpu"
