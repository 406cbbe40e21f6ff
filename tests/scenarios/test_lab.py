"""The lab on this machine: up, again, reboot, down, and nothing left. Runs with the engine of LAB_ENGINE."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ENGINE = os.environ.get("LAB_ENGINE") or "nspawn"
LAB = f"t{os.getpid() % 10**7:07d}"
pytestmark = pytest.mark.lab


def lab(*words: str, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LAB_ID": LAB, "LAB_ENGINE": ENGINE, **environment}
    done = subprocess.run(
        [sys.executable, ROOT / "tools/lab/lab", *words], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def inside(host: str, line: str) -> str:
    return lab("exec", host, "--", line).stdout.strip()


def report(*words: str) -> dict:
    return json.loads(lab(*words, "--json").stdout)


def traces() -> dict[str, list[str]]:
    """Everything on this machine that bears the lab's id."""

    def lines(*argv: str) -> list[str]:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()

    processes = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                namespace = os.readlink(entry / "ns/net")
            except OSError:
                continue
            processes.append(f"{words} {namespace}")
    state = pathlib.Path(os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local/state") / "pdstack/lab"
    found = {
        "namespaces": lines("ip", "netns", "list"),
        "links": lines("ip", "-o", "link"),
        "routes": lines("ip", "route", "show", "table", "all"),
        "mounts": pathlib.Path("/proc/self/mountinfo").read_text().splitlines(),
        "processes": processes,
        "groups": [str(path) for path in pathlib.Path("/sys/fs/cgroup").rglob(f"*{LAB}*")],
        "run": [str(path) for path in pathlib.Path("/run").glob("**/*pdlab*")],
        "state": [str(path) for path in state.glob("*")],
    }
    return {kind: [line for line in all_lines if LAB in line] for kind, all_lines in found.items()}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[dict]:
    """Two hosts of two suites, and the inventory that they were written to."""
    inventory = tmp_path_factory.mktemp("inventory") / "connection.yml"
    assert not any(traces().values())
    locks = set(pathlib.Path("/run/systemd/nspawn/locks").glob("*"))
    try:
        lab("up", "lab1")  # builds or finds the base tree, so that the next call can be timed
        lab("down")
        up = report("up", "--inventory", str(inventory), "lab1", "lab2:trixie")
        yield {"up": up, "inventory": inventory}
    finally:
        lab("down")
        left = {kind: found for kind, found in traces().items() if found}
        assert left == {}
        assert not inventory.exists()
        assert set(pathlib.Path("/run/systemd/nspawn/locks").glob("*")) <= locks | _running_locks()
        lab("down")  # and again: nothing there is no error


def _running_locks() -> set[pathlib.Path]:
    """Locks that other labs of this machine took meanwhile: somebody holds them."""
    held = {line.split()[5].split(":")[2] for line in pathlib.Path("/proc/locks").read_text().splitlines()}
    return {path for path in pathlib.Path("/run/systemd/nspawn/locks").glob("*") if str(path.stat().st_ino) in held}


@pytest.fixture(scope="module")
def address(hosts) -> dict[str, str]:
    return {host["name"]: host["address"] for host in hosts["up"]["hosts"]}


def test_up_brings_every_host_to_running(hosts):
    assert hosts["up"]["changed"] is True
    found = {host["name"]: (host["suite"], host["state"], host["failed_units"]) for host in hosts["up"]["hosts"]}
    assert found == {"lab1": ("bookworm", "running", []), "lab2": ("trixie", "running", [])}
    assert {host["engine"] for host in hosts["up"]["hosts"]} == {ENGINE}


def test_up_again_changes_nothing(hosts):
    before = inside("lab1", "cut -d' ' -f22 /proc/1/stat")
    again = report("up", "--inventory", str(hosts["inventory"]), "lab1", "lab2:trixie")
    assert again["changed"] is False
    assert inside("lab1", "cut -d' ' -f22 /proc/1/stat") == before


def test_a_running_host_is_not_turned_into_another_kind(hosts):
    assert "lab down lab1" in lab("up", "lab1:trixie", status=1).stderr


def test_pid_1_is_systemd_and_the_python_is_the_suites(hosts):
    assert inside("lab1", "cat /proc/1/comm") == "systemd"
    assert inside("lab1", "python3 -c 'import ctypes, sys; print(sys.version_info[:2])'") == "(3, 11)"
    assert inside("lab2", "python3 -c 'import ctypes, sys; print(sys.version_info[:2])'") == "(3, 13)"


def test_sys_class_net_is_the_hosts_own(hosts):
    """UCX looks for its devices there."""
    assert inside("lab1", "ls /sys/class/net").split() == ["host0", "lo"]


def test_hosts_reach_each_other_by_name_and_nothing_beyond(hosts, address):
    assert inside("lab1", "getent hosts lab2").split()[0] == address["lab2"]
    banner = "import socket; print(socket.create_connection(('lab2', 22), 5).recv(7).decode())"
    assert inside("lab1", f'python3 -c "{banner}"') == "SSH-2.0"
    assert inside("lab1", "ip route show default") == ""


def test_this_machine_reaches_a_service_in_a_host(hosts, address):
    inside("lab1", "systemd-run --quiet --unit=web python3 -m http.server 8000 --directory /opt/pdstack-lab")
    url, end = f"http://{address['lab1']}:8000/sys/devices/system/node/online", time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert answer.read() == b"0-1\n"
            break
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.1)
    inside("lab1", "systemctl stop web")


def test_apt_works_through_this_machines_mirror(hosts):
    assert "Reading package lists" in inside("lab1", "apt-get update 2>&1")


def test_a_host_cannot_change_the_real_machine(hosts):
    assert "denied" in inside("lab1", "sysctl -w vm.swappiness=61 2>&1; true") or ENGINE == "nspawn"
    assert inside("lab1", "test -w /proc/sys/vm/swappiness && echo writable; true") == ""
    assert pathlib.Path("/proc/sys/vm/swappiness").read_text().strip() != "61"


def test_units_are_pinned_for_real(hosts):
    cpu = max(os.sched_getaffinity(0))
    unit = f"systemd-run --quiet --pipe --wait -p CPUAffinity={cpu} -p NUMAPolicy=bind -p NUMAMask=0 -p DynamicUser=yes"
    seen = inside("lab1", unit + " sh -c 'grep Cpus_allowed_list /proc/self/status; head -1 /proc/self/numa_maps'")
    assert f"Cpus_allowed_list:\t{cpu}\n" in seen
    assert " bind:0 " in seen


def test_the_simulated_machine_is_there(hosts):
    count = "cat /opt/pdstack-lab/sys/bus/pci/devices/*/class | grep -c 0x030200"
    assert inside("lab1", count) == "8"


def test_the_inventory_is_literal_and_right(hosts, address):
    values = yaml.safe_load(hosts["inventory"].read_text())["all"]["hosts"]
    assert {name: value["ansible_host"] for name, value in values.items()} == address
    assert "StrictHostKeyChecking=yes" in values["lab1"]["ansible_ssh_common_args"]


def test_a_host_key_that_is_not_the_hosts_is_refused(hosts, address, tmp_path):
    values = yaml.safe_load(hosts["inventory"].read_text())["all"]["hosts"]["lab1"]
    forged = tmp_path / "known_hosts"
    known = pathlib.Path(values["ansible_ssh_private_key_file"]).with_name("known_hosts").read_text().splitlines()
    keys = {line.split()[0].split(",")[0]: line.split()[1:] for line in known}
    forged.write_text(f"{address['lab1']} {' '.join(keys['lab2'])}\n")
    options = ["-F", "/dev/null", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "IdentityAgent=none"]
    key = values["ansible_ssh_private_key_file"]
    argv = ["ssh", *options, "-o", f"UserKnownHostsFile={forged}", "-i", key, f"root@{address['lab1']}", "true"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


def test_exec_keeps_words_apart_and_the_status(hosts):
    assert lab("exec", "lab1", "--", "printf", "%s|", "a b", "c").stdout == "a b|c|"
    lab("exec", "lab1", "--", "exit 7", status=7)


def test_reboot_keeps_files_and_starts_anew(hosts):
    inside("lab1", "touch /root/kept /run/gone")
    boot = "cat /proc/sys/kernel/random/boot_id"  # how ansible.builtin.reboot tells that a host rebooted
    before, booted = inside("lab1", "cut -d' ' -f22 /proc/1/stat"), inside("lab1", boot)
    again = report("reboot", "lab1")["hosts"]
    assert [(host["name"], host["state"]) for host in again] == [("lab1", "running")]
    assert inside("lab1", "cut -d' ' -f22 /proc/1/stat") != before
    assert inside("lab1", boot) != booted
    assert inside("lab1", "ls -d /root/kept /run/gone 2>/dev/null; true") == "/root/kept"


def test_a_dead_apt_proxy_comes_back(hosts):
    state = pathlib.Path(os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local/state") / "pdstack/lab" / LAB
    proxies = json.loads((state / "state.json").read_text())["proxies"]
    for proxy in proxies.values():
        os.kill(proxy["pid"], signal.SIGKILL)
    assert report("up", "lab1")["changed"] is True
    where, port = next(iter(proxies)).rsplit(":", 1)
    inside("lab1", f"curl --silent --max-time 20 --output /dev/null http://{where}:{port}/")


def test_a_host_that_died_is_started_again(hosts, address):
    inside("lab2", "systemd-run --quiet --on-active=1 systemctl poweroff")  # after this connection has ended
    end = time.monotonic() + 60
    while next(host for host in report("list")["hosts"] if host["name"] == "lab2")["state"] != "down":
        assert time.monotonic() < end
        time.sleep(0.2)
    up = report("up", "lab1", "lab2:trixie")
    assert up["changed"] is True
    assert {host["name"]: host["address"] for host in up["hosts"]} == address
    assert {host["state"] for host in up["hosts"]} == {"running"}


def test_one_host_can_go_alone(hosts):
    lab("up", "lab3:bookworm:none")
    assert "Python" not in inside("lab3", "python3 --version 2>&1; true")
    assert "lab3" in inside("lab1", "cat /etc/hosts")
    lab("down", "lab3")
    assert "lab3" not in inside("lab1", "cat /etc/hosts")
    assert [kind for kind, found in traces().items() if any("lab3" in line for line in found)] == []
    assert "lab3" not in hosts["inventory"].read_text()


def test_another_lab_does_not_collide(hosts, address):
    other = {"LAB_ID": f"u{LAB[1:]}"}
    try:
        lab("up", "lab1", **other)
        there = json.loads(lab("list", "--json", **other).stdout)["hosts"][0]["address"]
        assert there.rsplit(".", 1)[0] != address["lab1"].rsplit(".", 1)[0]
        with pytest.raises(ConnectionRefusedError), socket.create_connection((there, 1), timeout=5):
            pass
    finally:
        lab("down", **other)
    assert inside("lab1", "systemctl is-system-running") == "running"


def test_a_subnet_that_is_in_use_is_refused(hosts, address):
    taken = address["lab1"].rsplit(".", 1)[0] + ".0/24"
    said = lab("up", "lab1", status=1, LAB_ID=f"v{LAB[1:]}", LAB_SUBNET=taken).stderr
    assert "overlaps" in said
    lab("down", LAB_ID=f"v{LAB[1:]}")


def test_purge_waits_for_the_labs_that_use_the_trees(hosts):
    assert LAB in lab("down", "--purge", status=1, LAB_ID=f"w{LAB[1:]}").stderr
    assert inside("lab1", "cat /proc/1/comm") == "systemd"
