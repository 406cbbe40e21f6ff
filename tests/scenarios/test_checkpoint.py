"""The checkpoint on real systemd hosts: reboot half-way, a token that nobody sees, neighbours, scrub, retirement."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import pathlib
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml
from hub import repository
from own_lab import BIN, PLAYS, ROOT, OwnLab, changed

LAB = OwnLab("cp")
on = LAB.on
NAME = "org--toy@" + "a" * 40
MODELS = "/var/lib/pdstack/models"
FOLDER = f"{MODELS}/{NAME}"
UNIT = f"pd-checkpoint@{NAME}.service"
PORT = 8080
WORKERS = 4
TOKEN = "hf_tokenThatNobodyMaySee"
TRACES = "/etc /var/lib /usr/local /opt /root /home /tmp /run/systemd/system"
pytestmark = pytest.mark.lab


def files_of(host: str) -> set[str]:
    return set(on(host, f"find {TRACES} -xdev ! -path '*/.ansible*' ! -path '/tmp/*' 2>/dev/null").splitlines())


@dataclass
class Place:
    """Two hosts; ``one`` runs the hub. ``play`` runs the role on some of them."""

    connection: pathlib.Path
    toy: repository.Repository
    url: str
    before: dict[str, set[str]]

    def stats(self) -> dict[str, int]:
        ask = f"import urllib.request as r; print(r.urlopen('{self.url}/__stats').read().decode())"
        return json.loads(on("one", f'python3 -c "{ask}"'))

    @property
    def size(self) -> int:
        return sum(map(self.toy.size, self.toy.paths()))

    def variables(self, **variables: object) -> dict[str, object]:
        return {
            "checkpoint_endpoint": self.url,
            "checkpoint_token_file": "/etc/hub-token",
            "checkpoint_workers": WORKERS,
            "checkpoint_min_free": "1M",
            **variables,
        }

    def play(self, *options: str, **variables: object) -> str:
        status, output = LAB.play(self.connection, PLAYS / "checkpoint.yml", *options, **self.variables(**variables))
        assert status == 0, output
        return output

    def would_restart(self, *names: str) -> list[str]:
        """Return which of these units, which read the checkpoint, pd_units would restart on host two."""
        units = [{"name": f"{name}.service", "checkpoint": FOLDER} for name in names]
        command = [BIN / "ansible", "-i", self.connection, "two", "-m", "pd_units"]
        command += ["-a", json.dumps({"units": units, "observe": True}), "-o"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=LAB.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.partition("=> ")[2])["actions"]["restart"]

    def right(self, host: str) -> bool:
        """True where every byte is there, by the host's own sha256sum."""
        wanted = {f"{self.toy.digests(path)['sha256']}  {path}" for path in self.toy.paths()}
        found = on(host, f"cd {FOLDER} && find . -type f ! -name '.pdstack*' -printf '%P\\n' | xargs sha256sum")
        return set(found.splitlines()) == wanted


def programs() -> bytes:
    """Pack this machine's rclone and hf_xet as a host would have them, the latter where a release keeps it."""
    packed = io.BytesIO()
    found, rclone = importlib.util.find_spec("hf_xet"), shutil.which("rclone")
    assert found is not None
    assert rclone is not None
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(rclone, "usr/local/bin/rclone")
        archive.add(pathlib.Path(found.origin or "").parent, "usr/lib/python3/dist-packages/hf_xet")
        python = tarfile.TarInfo("opt/pdstack/current/venv/bin/python")
        python.type, python.linkname = tarfile.SYMTYPE, "/usr/bin/python3"
        archive.addfile(python)
    return packed.getvalue()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    connection = tmp_path_factory.mktemp("checkpoint") / "connection.yml"
    toy = repository.make(tmp_path_factory.mktemp("toy") / "toy", shards=6, shard_bytes=4 << 20)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(toy.folder, "toy")
        archive.add(ROOT / "tests/hub", "hub", filter=lambda item: None if "__pycache__" in item.name else item)
    LAB.up(connection, "one", "two")
    try:
        address = yaml.safe_load(connection.read_text())["all"]["hosts"]["one"]["ansible_host"]
        on("one", "tar -xC /", programs())
        before = {host: files_of(host) for host in ("one", "two")}
        on("one", "mkdir /srv/hub && tar -xC /srv/hub", packed.getvalue())
        for host in ("one", "two"):
            on(host, f"umask 077; echo {TOKEN} >/etc/hub-token")
        serve = f"python3 -m hub.server toy --address {address} --port {PORT} --rate 600000 --token {TOKEN} --xet"
        on("one", f"systemd-run -q --unit=hub --working-directory=/srv/hub {serve}")
        found = Place(connection, toy, f"http://{address}:{PORT}", before)
        wait_for(found.stats)
        yield found
    finally:
        LAB.down()


def wait_for(look, seconds: float = 60.0):
    """Return what ``look`` returned once it is true."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(AssertionError):
            if found := look():
                return found
            assert time.monotonic() < end, "it did not come"
        if time.monotonic() >= end:
            raise AssertionError("it did not come in time")
        time.sleep(0.2)


def test_a_reboot_in_the_middle_and_a_token_that_nobody_sees(place, tmp_path):
    """Ansible's connection is lost, the unit goes on at boot where it was, and the token is found nowhere."""
    environment = {
        **LAB.environment,
        "ANSIBLE_HOME": str(tmp_path / "home"),
        "ANSIBLE_LOCAL_TEMP": str(tmp_path / "temp"),
        "ANSIBLE_KEEP_REMOTE_FILES": "1",
        "ANSIBLE_LOG_PATH": str(tmp_path / "log"),
    }
    output = tmp_path / "output"
    with output.open("w") as stream:
        options = ("--limit", "two", "--diff", "-vvvv")
        command = LAB.play_command(place.connection, PLAYS / "checkpoint.yml", *options, **place.variables())
        play = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: place.stats()["sent"] > place.size * 0.15)
        seen = on("two", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' ' '")
        assert "pdstack-checkpoint.pyz run" in seen
        boot = on("two", "cat /proc/sys/kernel/random/boot_id; systemctl show -P ExecMainPID " + UNIT)
        before = place.stats()["sent"]
        assert before < place.size, "it was finished before the reboot"
        LAB.call("reboot", "two")
    finally:
        play.kill()
        play.wait()

    wait_for(lambda: on("two", f"test -d {FOLDER} && echo yes || true"))

    assert on("two", "cat /proc/sys/kernel/random/boot_id; systemctl show -P ExecMainPID " + UNIT) != boot
    assert place.right("two")
    assert place.stats()["sent"] <= place.size + WORKERS * 1_000_000, "the reboot cost more than what was under way"
    where = f"{TRACES} --exclude=hub-token"
    assert on("two", f"grep -rlsF {TOKEN} {where} || true") == ""
    assert TOKEN not in seen
    assert TOKEN not in on("two", "journalctl --no-pager -o export | strings -n 8 || true")
    for path in (output, tmp_path / "log", *(tmp_path / "home").rglob("*"), *(tmp_path / "temp").rglob("*")):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    assert "LoadCredential=hub-token:/etc/hub-token" in on("two", f"systemctl cat {UNIT}")
    shown = r"two: fetching \d+/\d+ files  \d+\.\d+/0\.03 GB  \d+\.\d+ GB/s  ETA \d+m\d\ds"
    assert re.search(shown, output.read_text()), "no progress was shown"


def test_a_host_gets_it_from_its_neighbour(place):
    """``two`` has it: nothing but the listing comes from the hub."""
    sent = place.stats()["sent"]
    peers = "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'ansible_host'))) }}"

    output = place.play(checkpoint_peers=peers)

    assert changed(output) == {"one": 1, "two": 0}
    assert place.right("one")
    assert place.stats()["sent"] == sent
    status = json.loads(on("one", f"cat /var/lib/pdstack/checkpoint/results/{NAME}.json"))
    assert status["result"]["bytes_by_source"] == {"peer two": place.size}
    wait_for(lambda: "28999" not in on("two", "ss -ltnH"))
    assert changed(place.play(checkpoint_peers=peers)) == {"one": 0, "two": 0}
    assert on("two", f"systemctl is-active {UNIT} || true") == "inactive"


def test_the_unit_runs_rclone_and_hf_xet(place):
    """Within its sandbox, rclone's configuration by LoadCredential: one shard from a store, one from xet."""
    first, second = repository.shard_name(1, 6), repository.shard_name(2, 6)
    config = f"[store]\ntype = alias\nremote = /srv/store\n# {TOKEN}\n"
    on("one", f"mkdir /srv/store && mv {FOLDER}/{first} /srv/store/ && rm {FOLDER}/{second}")
    on("one", "umask 077; cat >/etc/rclone.conf", config.encode())
    sources = {"checkpoint_sources": ["rclone:store:", "hub"], "checkpoint_rclone_config": "/etc/rclone.conf"}

    place.play("--limit", "one", checkpoint_xet=True, **sources)

    assert place.right("one")
    found = json.loads(on("one", f"cat /var/lib/pdstack/checkpoint/results/{NAME}.json"))["result"]
    assert found["repaired"] == [first, second]
    wanted = {"rclone:store:": place.toy.size(first), f"xet of hub {place.url}": place.toy.size(second)}
    assert found["bytes_by_source"] == wanted
    assert on("one", f"grep -rlsF {TOKEN} {TRACES} --exclude=hub-token --exclude=rclone.conf || true") == ""


def test_the_scrub_finds_what_no_stat_shows_and_the_next_run_repairs_it(place):
    """A bit flips and the manifest is told that nothing did, as with bit rot; seven nights hash every byte."""
    shard = f"{FOLDER}/{repository.shard_name(3, 6)}"
    on("two", "systemd-run -q --unit=reader-before sleep 10000")
    on("two", f"printf X | dd of={shard} bs=1 seek=100000 conv=notrunc status=none; touch -d '2020-01-01' {shard}")
    on("two", f"python3 - <<'EOF'\n{FORGET}\nEOF".replace("SHARD", shard).replace("FOLDER", FOLDER))
    nights = "for night in $(seq 7); do systemctl start pd-scrub || break; done; systemctl show -P Result pd-scrub"
    assert on("two", nights) == "exit-code"

    assert "found corrupt by the scrub" in on("two", "journalctl -u pd-scrub --no-pager")
    shown = on("two", "systemctl show -p IOSchedulingClass -p CPUSchedulingPolicy -p Nice pd-scrub")
    assert {"IOSchedulingClass=3", "CPUSchedulingPolicy=5", "Nice=19"} == set(shown.splitlines())
    assert on("two", "systemctl is-enabled pd-scrub.timer") == "enabled"
    sent = place.stats()["sent"]
    planned = place.play("--limit", "two", "--check", "--diff")
    assert changed(planned) == {"two": 1}
    name, digest = repository.shard_name(3, 6), place.toy.digests(repository.shard_name(3, 6))["sha256"]
    assert f"-{name}: found corrupt by the scrub\n+{name}: sha256-{digest}\n" in planned
    assert place.stats()["sent"] == sent
    assert changed(place.play("--limit", "two")) == {"two": 1}
    assert place.right("two")
    assert place.stats()["sent"] - sent == place.toy.size(repository.shard_name(3, 6))
    on("two", "systemd-run -q --unit=reader-after sleep 10000")
    assert place.would_restart("reader-before", "reader-after") == ["reader-before.service"]


# Makes the manifest believe the file as it is now.
FORGET = """
import json, os, time
path = "FOLDER/.pdstack-manifest.json"
found = json.load(open(path))
stat = os.stat("SHARD")
entry = found["files"][os.path.basename("SHARD")]
entry.update(mtime_ns=stat.st_mtime_ns, ctime_ns=stat.st_ctime_ns, inode=stat.st_ino)
found["written_ns"] = time.time_ns()
json.dump(found, open(path, "w"))
"""


def test_retirement_takes_exactly_what_was_placed(place):
    on("two", f"echo mine > {FOLDER}/notes.txt")

    place.play(checkpoint_state="absent")

    for host in ("one", "two"):
        left = files_of(host) - place.before[host]
        mine = {"/var/lib/pdstack", MODELS, FOLDER, f"{FOLDER}/notes.txt"} if host == "two" else set()
        empty = {"/var/lib/pdstack", MODELS}
        assert left - {"/etc/hub-token", "/etc/rclone.conf"} - empty == mine - empty
        assert place.before[host] <= files_of(host)
    assert on("two", "systemctl list-unit-files 'pd-*' --no-legend || true") == ""
