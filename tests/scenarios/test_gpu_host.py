"""The driver on real Debian 12 and 13 hosts: signed apt repository of stub packages, simulated GPUs, real apt and dpkg.

Both hosts take every step together, as in one run of an operator, and must answer alike.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import own_lab
import pytest
import yaml
from fixtures.apt_repository import DRIVER, Repository
from own_lab import PLAYS, ROOT, OwnLab

LAB = OwnLab("gh")
SUITES = {"gbookw": "bookworm", "gtrixi": "trixie"}
STORE = "/srv/vendor"
GUARDS = [
    "/etc/modprobe.d/pdstack-nouveau.conf",
    "/etc/apt/preferences.d/pdstack-nvidia",
    "/etc/apt/apt.conf.d/52pdstack-nvidia",
    "/etc/apt/sources.list.d/pdstack-cuda.sources",
    "/etc/apt/keyrings/pdstack-cuda.asc",
    "/etc/pdstack/held-packages",
    "/etc/pdstack/driver-packages",
]
NEWER = "580.105.08"  # a later release of the same branch
OTHER = "615.71.09"  # a later branch
pytestmark = pytest.mark.lab


@dataclass
class Hosts:
    """The lab hosts, their inventory, and the repository that lies on each."""

    inventory: pathlib.Path
    repository: Repository

    def run(self, command: str, data: bytes = b"") -> list[str]:
        """Run a command on each host at the same time; return what each said."""
        with ThreadPoolExecutor() as pool:
            return list(pool.map(lambda name: LAB.on(name, command, data), SUITES))

    def ask(self, command: str) -> str:
        """Return what all hosts answer alike."""
        answers = dict(zip(SUITES, self.run(command), strict=True))
        assert len(set(answers.values())) == 1, f"{command}: {answers}"
        return next(iter(answers.values()))

    def play(self, book: str | pathlib.Path, *options: str, **variables: object) -> tuple[int, str]:
        given = {
            "gpu_host_repository_url": f"file://{STORE}/",
            "gpu_host_key_url": f"file://{STORE}/key.asc",
            "gpu_host_key_fingerprint": self.repository.fingerprint,
            "pd_sysfs_root": "/opt/bare",
            **variables,
        }
        return LAB.play(self.inventory, PLAYS / book, *options, **given)

    def push(self) -> None:
        """Sign the repository and lay it on the hosts."""
        self.repository.sign()
        self.run(f"rm -rf {STORE}; mkdir -p {STORE}; tar -C {STORE} -x", self.repository.archive())

    def version(self, package: str) -> str:
        return self.ask(f"dpkg-query -W -f '${{db:Status-Status}} ${{Version}}' {package} 2>/dev/null || true")

    def held(self) -> list[str]:
        return self.ask("apt-mark showhold").split()

    def files(self) -> list[str]:
        return self.ask(f"ls -d {' '.join(GUARDS)} 2>/dev/null || true").split()

    def status(self) -> list[str]:
        """Packages with their selections and versions, and every file that the role could write."""
        return self.run("dpkg-query -W -f '${Package} ${Version} ${Status}\n'; find /etc -newer /srv/mark -type f")


def changed(output: str) -> set[int]:
    """The changes of each host by the recap; one number where they did the same."""
    counts = own_lab.changed(output)
    assert set(counts) == set(SUITES), output
    return set(counts.values())


def said(words: str, output: str) -> bool:
    """Whether each host said it, however lines were broken."""
    return re.sub(r"\s+", " ", output).count(words) >= len(SUITES)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Hosts whose GPUs have no driver (/opt/bare), and after a reboot would have one (/opt/driven)."""
    folder = tmp_path_factory.mktemp("hosts")
    LAB.up(folder / "connection.yml", *(f"{name}:{suite}" for name, suite in SUITES.items()))
    repository = Repository(folder / "vendor")
    try:
        here = Hosts(folder / "connection.yml", repository)
        here.run(
            "cp -a /opt/pdstack-lab /opt/bare && cd /opt/bare && rm -r sys/module/nvidia proc/driver/nvidia"
            " && echo '{}' > pdstack-simulated.json && cp -a /opt/pdstack-lab /opt/driven"
            f" && grep -rlF 595.58.03 /opt/driven | xargs sed -i 's/595[.]58[.]03/{DRIVER}/'"
            " && apt-get update -q"
        )
        repository.driver(DRIVER)
        repository.driver(OTHER)
        repository.package(f"linux-headers-{here.ask('uname -r')}", "1")
        here.push()
        here.run("touch /srv/mark; sleep 0.1")
        yield here
    finally:
        repository.close()
        LAB.down()


def test_a_key_with_another_fingerprint_is_refused_before_anything_changes(hosts):
    before = hosts.status()
    status, output = hosts.play("driver.yml", gpu_host_key_fingerprint="AB" * 20)
    assert status != 0
    assert said(f"found {hosts.repository.fingerprint}", output)
    assert said(f"needed {'AB' * 20} alone", output)
    assert said("second channel", output)
    assert hosts.status() == before


def test_check_mode_shows_the_steps_and_changes_nothing(hosts):
    before = hosts.status()
    key = hosts.repository.folder / "key.asc"  # from the controller, as for a host that reaches no key server
    status, output = hosts.play(
        "driver.yml", "--check", "--diff", gpu_host_key_file=str(key), gpu_host_key_url="file:///nowhere"
    )
    assert status == 0, output
    assert said("install linux-headers-", output)
    assert said("no driver", output)
    assert min(changed(output)) > 0
    assert hosts.status() == before


def test_the_playbook_brings_the_pinned_branch_and_says_that_a_reboot_is_due(hosts):
    """The real playbooks/host.yml, on an inventory as an operator writes it."""
    folder = hosts.inventory.parent / "whole"
    folder.mkdir()
    (folder / "connection.yml").write_text(hosts.inventory.read_text())
    (folder / "hosts.yml").write_text(
        yaml.safe_dump({group: {"hosts": {name: {} for name in SUITES}} for group in ("gpu_hosts", "router_hosts")})
    )
    (folder / "group_vars").symlink_to(ROOT / "inventory/example/group_vars")
    hosts.run("mkdir -p /opt/bare/sys/module/nouveau")
    whole = Hosts(folder, hosts.repository)
    status, output = whole.play(ROOT / "playbooks/preflight.yml")
    assert (status, "placeholder of the example" in output) == (2, True), output
    model = {"repo": "deepseek-ai/DeepSeek-V4-Flash", "revision": "1" * 40}
    status, output = whole.play(ROOT / "playbooks/preflight.yml", pd_model=model)
    assert status == 0, output
    words = re.sub(r"\s+", " ", output)
    assert all(f"{name}: no driver" in words.partition("first mends:")[2] for name in SUITES), words
    status, output = whole.play(ROOT / "playbooks/host.yml", "--check", pd_model=model)
    assert status != 0
    assert "nothing after this phase can be rehearsed" in re.sub(r"\s+", " ", output)
    status, output = whole.play(ROOT / "playbooks/host.yml", pd_model=model)
    assert status != 0
    assert said("needs a reboot before it can serve: nouveau is loaded", output)
    assert hosts.version("nvidia-open") == f"installed {DRIVER}-1"  # and not the newest branch
    assert hosts.files() == sorted(GUARDS)
    assert hosts.held() == sorted([*held_by_us(hosts)])
    assert {"libcuda1", "nvidia-open", "nvidia-persistenced"} <= set(hosts.held())
    assert hosts.ask("systemctl is-enabled nvidia-persistenced") == "enabled"


def test_the_reboot_is_done_where_it_is_allowed(hosts):
    before = hosts.run("cat /proc/sys/kernel/random/boot_id")
    status, output = hosts.play("driver.yml", gpu_host_reboot_allowed=True)
    assert status == 0, output
    after = hosts.run("cat /proc/sys/kernel/random/boot_id")
    assert all(now != then for now, then in zip(after, before, strict=True))
    assert said("reboot required: none", output)
    assert hosts.ask("systemctl is-active nvidia-persistenced") == "active"  # enabled, so it came with the boot
    hosts.run("rmdir /opt/bare/sys/module/nouveau")


def held_by_us(hosts: Hosts) -> list[str]:
    return hosts.ask("cat /etc/pdstack/held-packages").split()


def test_once_the_driver_runs_nothing_changes(hosts):
    status, output = hosts.play("driver.yml", pd_sysfs_root="/opt/driven")
    assert status == 0, output
    assert changed(output) == {0}, output
    assert said("reboot required: none", output)


def test_an_upgrade_leaves_what_is_held(hosts):
    hosts.repository.driver(NEWER)
    hosts.push()
    hosts.run("apt-get update -q")
    assert all(NEWER in listed for listed in hosts.run("apt-cache policy nvidia-open"))
    hosts.run("DEBIAN_FRONTEND=noninteractive apt-get -qy dist-upgrade")
    assert hosts.version("nvidia-open") == f"installed {DRIVER}-1"
    assert hosts.version("libcuda1") == f"installed {DRIVER}-1"


def test_unattended_upgrades_would_not_touch_them(hosts):
    listed = hosts.ask("apt-config dump Unattended-Upgrade::Package-Blacklist")
    assert '"^nvidia-.*"' in listed
    assert '"^cuda-.*"' in listed


def test_a_hold_that_was_taken_off_by_hand_comes_back(hosts):
    hosts.run("apt-mark unhold libcuda1")
    status, output = hosts.play("driver.yml", pd_sysfs_root="/opt/driven")
    assert status == 0, output
    assert changed(output) == {2}  # shown, and done
    assert "libcuda1" in hosts.held()


def test_the_fabric_manager_comes_with_an_nvswitch_at_the_drivers_version(hosts):
    for version in (DRIVER, NEWER):
        hosts.repository.package("nvidia-fabricmanager", f"{version}-1")
    hosts.push()
    hosts.play("driver.yml", pd_sysfs_root="/opt/driven")
    assert hosts.version("nvidia-fabricmanager") == ""  # no NVSwitch
    hosts.run(
        "cp -a /opt/driven /opt/switched && cd /opt/switched/sys/bus/pci/devices && mkdir 0000:e1:00.0"
        " && cd 0000:e1:00.0 && echo 0x10de > vendor && echo 0x068000 > class"
    )
    status, output = hosts.play("driver.yml", pd_sysfs_root="/opt/switched")
    assert status == 0, output
    assert hosts.version("nvidia-fabricmanager") == f"installed {DRIVER}-1"  # though a newer one is there
    assert "nvidia-fabricmanager" in hosts.held()
    assert hosts.ask("systemctl is-enabled nvidia-fabricmanager") == "enabled"
    assert hosts.ask("systemctl is-active nvidia-fabricmanager") == "active"


def test_an_old_branch_that_is_held_is_replaced(hosts):
    """Field report: pins that block an upgrade. The old driver is loaded, so the host needs a reboot."""
    old = "535.183.01"
    hosts.run(
        f"cp -a /opt/driven /opt/old && grep -rlF {DRIVER} /opt/old | xargs sed -i 's/{DRIVER}/{old}/'"
        " && apt-mark unhold $(apt-mark showhold)"
        " && DEBIAN_FRONTEND=noninteractive apt-get -qy purge libcuda1 nvidia-persistenced nvidia-kernel-open-dkms"
        " nvidia-fabricmanager"
    )
    hosts.repository.driver(old)
    hosts.push()
    hosts.run(f"apt-get update -q && apt-get -qy install libcuda1={old}-1 && apt-mark hold libcuda1")
    status, output = hosts.play("driver.yml", pd_sysfs_root="/opt/old")
    assert status == 0, output
    assert said(f"driver {old} is loaded", output)
    assert hosts.version("libcuda1").split("-")[0] in (f"installed {DRIVER}", f"installed {NEWER}")
    assert "libcuda1" in hosts.held()


def test_absent_takes_away_what_was_placed_and_leaves_the_driver(hosts):
    status, output = hosts.play("host.yml")
    assert status == 0, output
    assert "pdstack - memlock unlimited" in hosts.ask("cat /etc/security/limits.d/pdstack.conf")
    assert all(uid.isdigit() for uid in hosts.run("id -u pdstack"))
    status, output = hosts.play("host.yml")
    assert (status, changed(output)) == (0, {0}), output
    driver = hosts.version("libcuda1")
    status, output = hosts.play("host.yml", gpu_host_state="absent")
    assert status == 0, output
    assert hosts.files() == []
    assert hosts.ask("ls /etc/apt/preferences.d") == ""
    assert hosts.held() == []
    assert hosts.version("libcuda1") == driver != ""
    assert hosts.ask("ls -d /etc/security/limits.d/pdstack.conf /opt/pdstack /etc/pdstack 2>/dev/null || true") == ""
    status, output = hosts.play("host.yml", gpu_host_state="absent")
    assert (status, changed(output)) == (0, {0}), output


@pytest.mark.skipif(not os.environ.get("PDSTACK_LONG"), reason="PDSTACK_LONG is not set: a minute")
def test_absent_takes_the_driver_too_where_it_is_asked_to(hosts):
    """Of what this role brought, nothing stays: packages, what came with them, holds, files."""
    hosts.run(
        "export DEBIAN_FRONTEND=noninteractive;"
        " apt-get -qy purge $(dpkg-query -W -f '${Package} ' 'libcuda*' 'nvidia-*' 'linux-headers-*' 2>/dev/null)"
        " && apt-get -qy autoremove --purge"
    )
    before = hosts.run("dpkg-query -W -f '${Package} ${Status}\n'")
    status, output = hosts.play("driver.yml", gpu_host_reboot_allowed=True)
    assert status == 0, output
    assert hosts.version("libcuda1").startswith("installed ")
    status, output = hosts.play("host.yml", gpu_host_state="absent", gpu_host_remove_driver=True)
    assert status == 0, output
    assert hosts.run("dpkg-query -W -f '${Package} ${Status}\n'") == before
    assert (hosts.held(), hosts.files()) == ([], [])
