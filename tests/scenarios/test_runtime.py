"""A release on a host whose distribution has none of its Pythons, and installations that get in each other's way.

The host is Debian 13 (Python 3.13); the cpu release is locked for 3.11. The interpreter that the wheelhouse carries is
made here from the lab's Debian 12 tree, since python-build-standalone cannot be fetched everywhere: everything but the
origin of the archive is the real path. Only the router's environment is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import tarfile
from collections.abc import Callable, Iterator

import own_lab
import pytest
from own_lab import PLAYS, OwnLab

LAB = OwnLab("rt")
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "pdstack"
HOUSE = "wheelhouse/cpu-0.5.23-py311"
NAME = "cpython-3.11.99+20260101-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz"
pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    file = tmp_path_factory.mktemp("runtime") / "connection.yml"
    LAB.up(file, "newer:trixie", "tree")
    yield file
    LAB.down()


def run(command: str, check: bool = True) -> str:
    return LAB.on("newer", command, check=check)


@pytest.fixture(scope="module")
def cache(connection: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A cache of its own, with the wheels that this machine has already and with the interpreter's archive."""
    own = tmp_path_factory.mktemp("cache") / "pdstack"
    (own / HOUSE).mkdir(parents=True)
    for wheel in (CACHE / HOUSE).glob("*.whl"):
        os.link(wheel, own / HOUSE / wheel.name)
    (own / "python").mkdir()
    left_out = "--exclude=sitecustomize.py --exclude=__pycache__ --exclude=test"
    content = LAB.read("exec", "tree", "--", f"tar c -C /usr {left_out} bin/python3.11 lib/python3.11")
    (own / "python/plain.tar").write_bytes(content)
    with (
        tarfile.open(own / "python/plain.tar") as source,
        tarfile.open(own / "python" / NAME, "w:gz", compresslevel=1) as target,
    ):
        for member in source:
            stream = source.extractfile(member) if member.isreg() else None
            member.name = f"python/{member.name}"
            target.addfile(member, stream)
    return own


@pytest.fixture(scope="module")
def play(connection: pathlib.Path, cache: pathlib.Path) -> Callable[..., tuple[int, str]]:
    lock = cache / "python.txt"
    digest = hashlib.sha256((cache / "python" / NAME).read_bytes()).hexdigest()
    lock.write_text(f"cpython==3.11.99+20260101 --hash=sha256:{digest}  # {NAME}\n")

    def run_play(*options: str, **variables: object) -> tuple[int, str]:
        given = {"sglang_runtime_interpreters": str(lock), **variables}
        more = {"XDG_CACHE_HOME": str(cache.parent)}
        return LAB.play(connection, PLAYS / "runtime.yml", "-l", "newer", *options, more=more, **given)

    return run_play


def test_without_an_interpreter_in_its_lock_the_host_is_refused(play, tmp_path):
    (tmp_path / "python.txt").write_text("")
    status, output = play(sglang_runtime_interpreters=str(tmp_path / "python.txt"))
    words = " ".join(output.split())
    assert status != 0
    assert "python3.13" in words
    assert "Python 3.11, which cpu-0.5.23 is locked for" in words
    assert run("ls /opt/pdstack 2>/dev/null || true") == ""


def test_a_disk_that_cannot_hold_it_is_refused_before_a_wheel_is_copied(play):
    run("mkdir -p /opt/pdstack && mount -t tmpfs -o size=24m tmpfs /opt/pdstack")
    status, output = play()
    words = " ".join(output.split())
    assert status != 0
    assert "cpu-0.5.23 needs" in words
    assert "Nothing was copied" in words
    assert run("find /opt/pdstack -mindepth 1") == ""
    run("umount /opt/pdstack && rmdir /opt/pdstack")


def test_a_host_without_the_releases_python_gets_the_carried_one(play):
    status, output = play("--diff")
    assert status == 0, output[-3000:]
    assert run("ls /opt/pdstack/python") == "cpython-3.11.99+20260101-x86_64-unknown-linux-gnu"
    python = "/opt/pdstack/current/router/bin/python"
    version = run(f"{python} -c 'import sglang_router.sglang_router_rs, sys; print(sys.version_info[:2])'")
    assert version == "(3, 11)"
    assert run(f"readlink -f {python}").startswith("/opt/pdstack/python/")
    assert run("stat -c %U /opt/pdstack/python/*/lib/python3.11/os.py") == "root"
    status, output = play()
    assert (status, own_lab.changed(output)) == (0, {"newer": 0}), output[-3000:]


def test_a_second_installation_is_told_who_holds_the_first(play):
    """The lock is the kernel's: it goes with its holder, whatever became of it."""
    run("rm -rf /opt/pdstack/releases/*")
    signed = json.dumps({"pid": 4711, "what": "another release", "since": 0})
    run(f"echo '{signed}' > /run/holder")
    hold = "flock /opt/pdstack/.installing sh -c 'cp /run/holder /opt/pdstack/.installing; sleep 300'"
    run(f"systemd-run -q --unit=other-install {hold}")
    run("for i in $(seq 50); do grep -q 4711 /opt/pdstack/.installing && break; sleep 0.1; done")
    status, output = play(sglang_runtime_wait=1)
    words = " ".join(output.split())
    assert status != 0
    assert "held by process 4711 (another release) since 1970-01-01" in words
    assert " s for it" in words
    assert run("ls -A /opt/pdstack/releases") == ""
    run("systemctl kill -s KILL other-install; systemctl stop other-install", check=False)
    # The next run finishes it, from a wheel that was altered on the host meanwhile: rsync compares contents.
    damage = "printf x | dd bs=1 seek=5000 conv=notrunc status=none"
    run(f"{damage} of=$(ls /opt/pdstack/wheelhouse/*/sglang_router*.whl)")
    status, output = play()
    assert status == 0, output[-2000:]


def test_absent_takes_the_interpreter_too(play):
    assert play(sglang_runtime_state="absent")[0] == 0
    assert run("ls -A /opt/pdstack").split() in ([], ["current"])
