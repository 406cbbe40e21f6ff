"""Bad input on real hosts: refused with what was found, what is needed and what to do, before anything changes."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Iterator

import pytest
import yaml
from own_lab import ROOT, OwnLab

LAB = OwnLab("bad")
on = LAB.on
pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def connections(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """Three hosts: a whole one, one whose Python lacks its standard library, one without Python."""
    file = tmp_path_factory.mktemp("inventory") / "connection.yml"
    LAB.up(file, "whole", "thin:bookworm:minimal", "bare:bookworm:none")
    yield file
    LAB.down()


def play(connections: pathlib.Path, hosts: dict[str, dict], playbook: str, *options: str) -> tuple[int, str]:
    """Run a playbook against hosts (name -> more variables) with the lab's own variables; return status and output."""
    folder = connections.parent / "-".join(hosts)
    folder.mkdir(exist_ok=True)
    shutil.copy(connections, folder / "connection.yml")
    (folder / "hosts.yml").write_text(
        yaml.safe_dump({"gpu_hosts": {"hosts": hosts}, "router_hosts": {"hosts": dict.fromkeys(hosts)}})
    )
    if not (folder / "group_vars").exists():
        (folder / "group_vars").symlink_to(ROOT / "inventory/lab/group_vars")
    return LAB.play(folder, ROOT / "playbooks" / playbook, *options)


def untouched(host: str) -> bool:
    return on(host, "ls -d /etc/pdstack /opt/pdstack /var/lib/pdstack 2>/dev/null || true") == ""


def test_a_port_that_another_process_holds_is_refused_with_its_holder(connections):
    """The reference deployment met a stale router on its port; nothing may be changed or killed then."""
    on("whole", "systemd-run -q --unit=stale-router python3 -m http.server 8000")
    on("whole", "for i in $(seq 50); do ss -ltn | grep -q :8000 && break; sleep 0.1; done")
    pid = on("whole", "systemctl show --value -p MainPID stale-router")
    status, output = play(connections, {"whole": {}}, "deploy_pd.yml")
    on("whole", "systemctl stop stale-router")
    assert status != 0
    for word in ("8000", pid, "http.server", "stale-router.service"):
        assert word in output, f"{word!r} is missing in:\n{output[-3000:]}"
    assert untouched("whole")
    assert on("whole", "ls -A /run/pdstack") == "deploy.lock.guard", "a run that was refused holds nothing"


def test_an_unreachable_host_stops_the_run_before_any_host_changes(connections):
    known = yaml.safe_load(connections.read_text())["all"]["hosts"]["whole"]
    nobody = {**known, "ansible_host": known["ansible_host"].rpartition(".")[0] + ".250", "ansible_ssh_timeout": 3}
    status, output = play(connections, {"whole": {}, "gone": nobody}, "deploy_pd.yml")
    assert status != 0
    assert "unreachable=1" in output.replace(" ", "") or "UNREACHABLE" in output
    assert untouched("whole")
    assert on("whole", "ls -A /run/pdstack") == "deploy.lock.guard", "what is in reach is given back"


def test_a_rehearsal_passes_and_changes_nothing(connections):
    """What the README tells people to run first on their own servers."""
    look = "find /etc /opt -xdev -type f | sort | xargs -r sha256sum; id pdstack || true"
    before = on("whole", look)
    status, output = play(connections, {"whole": {}}, "deploy_pd.yml", "--check", "--diff")
    assert status == 0, output[-3000:]
    assert "CPUAffinity=" in output
    assert on("whole", look) == before
    assert untouched("whole")


@pytest.mark.parametrize(
    ("host", "words"),
    [("thin", ("preflight.yml", "-e", "pd_bootstrap_python=false")), ("bare", ("deploy_pd.yml", "--check"))],
)
def test_a_target_without_a_complete_python_is_refused_where_it_may_not_be_installed(connections, host, words):
    status, output = play(connections, {host: {}}, *words)
    assert status != 0
    assert "apt-get install python3" in output
    assert ("not in check mode" in output) is ("--check" in words)
    assert untouched(host)


@pytest.mark.parametrize(("host", "first"), [("thin", "preflight.yml"), ("bare", "lock.yml")])
def test_a_target_without_a_complete_python_gets_one(connections, host, first):
    """Alone a phase begins with the facts, a whole deployment with the lock: either needs Python. All stay in it."""
    status, output = play(connections, {"whole": {}, host: {}}, first)
    assert status == 0, output[-3000:]
    assert on(host, "python3 -c 'import ctypes, json; print(1)'") == "1"
    if first == "preflight.yml":
        assert "GPUs 0-7 of 8 left idle" in output, "the pair takes the GPUs of one host, and the plan knows both"
    else:
        assert ["deploy.lock" in on(name, "ls /run/pdstack").split() for name in ("whole", host)] == [True, True]


def test_a_full_disk_is_refused_before_the_release_is_touched(connections):
    on("whole", "mkdir -p /opt/pdstack && mount -t tmpfs -o size=64m tmpfs /opt/pdstack")
    try:
        status, output = play(connections, {"whole": {}}, "deploy_pd.yml")
        left = on("whole", "find /opt/pdstack -mindepth 2 | head")
    finally:
        on("whole", "umount /opt/pdstack")
    assert status != 0
    assert "/opt/pdstack" in output
    assert "free" in output.lower()
    assert left == ""


def test_packages_that_an_air_gapped_host_lacks_are_named_before_anything_is_touched(connections):
    """Last: the host's only way out is cut, and it stays without the packages."""
    on("whole", "DEBIAN_FRONTEND=noninteractive apt-get purge -qy numactl rsync >/dev/null")
    on("whole", "ip route add blackhole $(awk '$1 ~ /[.]2$/ {print $1; exit}' /etc/hosts)/32")
    on("whole", "rm -rf /etc/pdstack /opt/pdstack /var/lib/pdstack")
    status, output = play(connections, {"whole": {}}, "host.yml")
    assert status != 0
    assert "whole lacks numactl, rsync, and no package source of it has them" in " ".join(output.split())
    assert "--download-only numactl rsync" in " ".join(output.split())
    assert untouched("whole")
