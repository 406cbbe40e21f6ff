"""The driver on real Debian hosts: signed apt repository of stub packages, simulated GPUs, real apt, dpkg, systemd."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml
from fixtures.apt_repository import DRIVER, Repository

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PLAYS = ROOT / "tests/fixtures/host_plays"
BIN = pathlib.Path(sys.executable).parent
LAB_ENVIRONMENT = {**os.environ, "LAB_ID": f"gh{os.getpid() % 100000}", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
STORE = "/srv/vendor"
GUARDS = [
    "/etc/modprobe.d/pdstack-nouveau.conf",
    "/etc/apt/preferences.d/pdstack-nvidia",
    "/etc/apt/apt.conf.d/52pdstack-nvidia",
    "/etc/apt/sources.list.d/pdstack-cuda.sources",
    "/etc/apt/keyrings/pdstack-cuda.asc",
    "/etc/pdstack/held-packages",
]
NEWER = "580.105.08"  # a later release of the same branch
OTHER = "615.71.09"  # a later branch
pytestmark = pytest.mark.lab


@dataclass
class Host:
    """One lab host, its inventory, and the repository that lies on it."""

    name: str
    inventory: pathlib.Path
    repository: Repository

    def run(self, command: str, data: bytes | None = None) -> str:
        argv = [sys.executable, ROOT / "tools/lab/lab", "exec", self.name, "--", command]
        done = subprocess.run(argv, env=LAB_ENVIRONMENT, input=data, capture_output=True, check=False)
        assert done.returncode == 0, command + "\n" + done.stdout.decode() + done.stderr.decode()
        return done.stdout.decode().strip()

    def play(self, book: str | pathlib.Path, *options: str, **variables: object) -> tuple[int, str]:
        given = {
            "gpu_host_repository_url": f"file://{STORE}/",
            "gpu_host_key_url": f"file://{STORE}/key.asc",
            "gpu_host_key_fingerprint": self.repository.fingerprint,
            "pd_sysfs_root": "/opt/bare",
            **variables,
        }
        extra = [word for key, value in given.items() for word in ("-e", yaml.safe_dump({key: value}).strip())]
        extra = [f"{{{word}}}" if word != "-e" else word for word in extra]
        command = [BIN / "ansible-playbook", "-i", self.inventory, PLAYS / book, *extra, *options]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=LAB_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def push(self) -> None:
        """Sign the repository and lay it on the host."""
        self.repository.sign()
        self.run(f"rm -rf {STORE}; mkdir -p {STORE}; tar -C {STORE} -x", self.repository.archive())

    def version(self, package: str) -> str:
        return self.run(f"dpkg-query -W -f '${{db:Status-Status}} ${{Version}}' {package} 2>/dev/null || true")

    def held(self) -> list[str]:
        return self.run("apt-mark showhold").split()

    def files(self) -> list[str]:
        return self.run(f"ls -d {' '.join(GUARDS)} 2>/dev/null || true").split()

    def status(self) -> str:
        """Packages with their selections and versions, and every file that the role could write."""
        return self.run("dpkg-query -W -f '${Package} ${Version} ${Status}\n'; find /etc -newer /srv/mark -type f")


def changed(output: str) -> int:
    return int(re.search(r"changed=(\d+)", output)[1])


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host whose GPUs have no driver (/opt/bare), and after a reboot would have one (/opt/driven)."""
    folder = tmp_path_factory.mktemp(request.param)
    name = f"g{request.param[:6]}"
    lab = [sys.executable, ROOT / "tools/lab/lab"]
    up = [*lab, "up", "--inventory", folder / "connection.yml", f"{name}:{request.param}"]
    subprocess.run(up, env=LAB_ENVIRONMENT, check=True, capture_output=True)
    repository = Repository(folder / "vendor")
    try:
        here = Host(name, folder / "connection.yml", repository)
        here.run(
            "cp -a /opt/pdstack-lab /opt/bare && cd /opt/bare && rm -r sys/module/nvidia proc/driver/nvidia"
            " && echo '{}' > pdstack-simulated.json && cp -a /opt/pdstack-lab /opt/driven"
            f" && grep -rlF 595.58.03 /opt/driven | xargs sed -i 's/595[.]58[.]03/{DRIVER}/'"
            " && apt-get update -q"
        )
        repository.driver(DRIVER)
        repository.driver(OTHER)
        repository.package(f"linux-headers-{here.run('uname -r')}", "1")
        here.push()
        here.run("touch /srv/mark; sleep 0.1")
        yield here
    finally:
        repository.close()
        subprocess.run([*lab, "down"], env=LAB_ENVIRONMENT, check=True, capture_output=True)


def test_a_key_with_another_fingerprint_is_refused_before_anything_changes(host):
    before = host.status()
    status, output = host.play("driver.yml", gpu_host_key_fingerprint="AB" * 20)
    assert status != 0
    words = re.sub(r"\s+", " ", output)
    assert f"found {host.repository.fingerprint}" in words
    assert f"needed {'AB' * 20} alone" in words
    assert "second channel" in words
    assert host.status() == before


def test_check_mode_shows_the_steps_and_changes_nothing(host):
    before = host.status()
    key = host.repository.folder / "key.asc"  # from the controller, as for a host that reaches no key server
    status, output = host.play(
        "driver.yml", "--check", "--diff", gpu_host_key_file=str(key), gpu_host_key_url="file:///nowhere"
    )
    assert status == 0, output
    assert "install linux-headers-" in output
    assert "no driver" in output
    assert changed(output) > 0
    assert host.status() == before


def test_the_playbook_brings_the_pinned_branch_and_says_that_a_reboot_is_due(host):
    """The real playbooks/host.yml, on an inventory as an operator writes it."""
    folder = host.inventory.parent / "whole"
    folder.mkdir()
    (folder / "connection.yml").write_text(host.inventory.read_text())
    (folder / "hosts.yml").write_text(
        yaml.safe_dump({group: {"hosts": {host.name: {}}} for group in ("gpu_hosts", "router_hosts")})
    )
    (folder / "group_vars").symlink_to(ROOT / "inventory/example/group_vars")
    host.run("mkdir -p /opt/bare/sys/module/nouveau")
    whole = Host(host.name, folder, host.repository)
    status, output = whole.play(ROOT / "playbooks/preflight.yml")
    assert status == 0, output
    assert f"first mends: {host.name}: no driver" in re.sub(r"\s+", " ", output)
    status, output = whole.play(ROOT / "playbooks/host.yml", "--check")
    assert status != 0
    assert "nothing after this phase can be rehearsed" in re.sub(r"\s+", " ", output)
    status, output = whole.play(ROOT / "playbooks/host.yml")
    words = re.sub(r"\s+", " ", output)
    assert status != 0
    assert "needs a reboot before it can serve: nouveau is loaded" in words
    assert host.version("nvidia-open") == f"installed {DRIVER}-1"  # and not the newest branch
    assert host.files() == sorted(GUARDS)
    assert host.held() == sorted([*held_by_us(host)])
    assert {"libcuda1", "nvidia-open", "nvidia-persistenced"} <= set(host.held())
    assert host.run("systemctl is-enabled nvidia-persistenced") == "enabled"


def test_the_reboot_is_done_where_it_is_allowed(host):
    before = host.run("cat /proc/sys/kernel/random/boot_id")
    status, output = host.play("driver.yml", gpu_host_reboot_allowed=True)
    assert status == 0, output
    assert host.run("cat /proc/sys/kernel/random/boot_id") != before
    assert "reboot required: none" in output
    assert host.run("systemctl is-active nvidia-persistenced") == "active"  # enabled, so it came with the boot
    host.run("rmdir /opt/bare/sys/module/nouveau")


def held_by_us(host: Host) -> list[str]:
    return host.run("cat /etc/pdstack/held-packages").split()


def test_once_the_driver_runs_nothing_changes(host):
    status, output = host.play("driver.yml", pd_sysfs_root="/opt/driven")
    assert status == 0, output
    assert changed(output) == 0, output
    assert "reboot required: none" in output


def test_an_upgrade_leaves_what_is_held(host):
    host.repository.driver(NEWER)
    host.push()
    host.run("apt-get update -q")
    assert NEWER in host.run("apt-cache policy nvidia-open")
    host.run("DEBIAN_FRONTEND=noninteractive apt-get -qy dist-upgrade")
    assert host.version("nvidia-open") == f"installed {DRIVER}-1"
    assert host.version("libcuda1") == f"installed {DRIVER}-1"


def test_unattended_upgrades_would_not_touch_them(host):
    listed = host.run("apt-config dump Unattended-Upgrade::Package-Blacklist")
    assert '"^nvidia-.*"' in listed
    assert '"^cuda-.*"' in listed


def test_a_hold_that_was_taken_off_by_hand_comes_back(host):
    host.run("apt-mark unhold libcuda1")
    status, output = host.play("driver.yml", pd_sysfs_root="/opt/driven")
    assert status == 0, output
    assert changed(output) == 2  # shown, and done
    assert "libcuda1" in host.held()


def test_the_fabric_manager_comes_with_an_nvswitch_at_the_drivers_version(host):
    for version in (DRIVER, NEWER):
        host.repository.package("nvidia-fabricmanager", f"{version}-1")
    host.push()
    host.play("driver.yml", pd_sysfs_root="/opt/driven")
    assert host.version("nvidia-fabricmanager") == ""  # no NVSwitch
    host.run(
        "cp -a /opt/driven /opt/switched && cd /opt/switched/sys/bus/pci/devices && mkdir 0000:e1:00.0"
        " && cd 0000:e1:00.0 && echo 0x10de > vendor && echo 0x068000 > class"
    )
    status, output = host.play("driver.yml", pd_sysfs_root="/opt/switched")
    assert status == 0, output
    assert host.version("nvidia-fabricmanager") == f"installed {DRIVER}-1"  # though a newer one is there
    assert "nvidia-fabricmanager" in host.held()
    assert host.run("systemctl is-enabled nvidia-fabricmanager") == "enabled"
    assert host.run("systemctl is-active nvidia-fabricmanager") == "active"


def test_an_old_branch_that_is_held_is_replaced(host):
    """Field report: pins that block an upgrade. The old driver is loaded, so the host needs a reboot."""
    old = "535.183.01"
    host.run(
        f"cp -a /opt/driven /opt/old && grep -rlF {DRIVER} /opt/old | xargs sed -i 's/{DRIVER}/{old}/'"
        " && apt-mark unhold $(apt-mark showhold)"
        " && DEBIAN_FRONTEND=noninteractive apt-get -qy purge libcuda1 nvidia-persistenced nvidia-kernel-open-dkms"
        " nvidia-fabricmanager"
    )
    host.repository.driver(old)
    host.push()
    host.run(f"apt-get update -q && apt-get -qy install libcuda1={old}-1 && apt-mark hold libcuda1")
    status, output = host.play("driver.yml", pd_sysfs_root="/opt/old")
    assert status == 0, output
    assert f"driver {old} is loaded" in re.sub(r"\s+", " ", output)
    assert host.version("libcuda1").split("-")[0] in (f"installed {DRIVER}", f"installed {NEWER}")
    assert "libcuda1" in host.held()


def test_absent_takes_away_what_was_placed_and_leaves_the_driver(host):
    status, output = host.play("host.yml")
    assert status == 0, output
    assert "pdstack - memlock unlimited" in host.run("cat /etc/security/limits.d/pdstack.conf")
    assert host.run("id -u pdstack").isdigit()
    status, output = host.play("host.yml")
    assert (status, changed(output)) == (0, 0), output
    driver = host.version("libcuda1")
    status, output = host.play("host.yml", gpu_host_state="absent")
    assert status == 0, output
    assert host.files() == []
    assert host.run("ls /etc/apt/preferences.d") == ""
    assert host.held() == []
    assert host.version("libcuda1") == driver != ""
    assert host.run("ls -d /etc/security/limits.d/pdstack.conf /opt/pdstack /etc/pdstack 2>/dev/null || true") == ""
    status, output = host.play("host.yml", gpu_host_state="absent")
    assert (status, changed(output)) == (0, 0), output
