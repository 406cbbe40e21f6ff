"""The engines' command lines, control groups, processes and state."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from lab import cgroups, cli, engines, state
from lab.errors import LabError
from lab.process import Process, attempt, run

HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime shared:9 - cgroup cgroup rw,xattr,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
PURE = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"


def test_hierarchies_of_a_hybrid_and_of_a_pure_machine():
    found = [str(path) for path in cgroups.hierarchies(HYBRID)]
    assert found == ["/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"]
    assert [str(path) for path in cgroups.hierarchies(PURE)] == ["/sys/fs/cgroup"]
    assert cgroups.hierarchies("") == []


def test_podman_is_never_privileged_and_asks_only_for_what_this_process_has():
    words = engines.podman("pdlab-x-lab1", "lab1", pathlib.Path("/r"), pathlib.Path("/run/x"), 1 << 21 | 1 << 22)
    assert "--privileged" not in words
    assert "--cap-add=CAP_SYS_ADMIN,CAP_SYS_BOOT" in words
    assert words[-2:] == ["/r", "/sbin/init"]


def test_nspawn_takes_the_network_namespace_that_it_is_started_in():
    words = engines.nspawn("pdlab-x-lab1", "lab1", pathlib.Path("/r"))
    assert not [word for word in words if "network-namespace-path" in word or "private-network" in word]
    assert "--keep-unit" in words


def test_a_process_is_known_by_its_start_as_well():
    with subprocess.Popen(["sleep", "60"]) as child:
        process = Process.of(child.pid)
        assert process.alive()
        assert not Process(child.pid, process.start + 1, process.boot).alive()
        assert not Process(child.pid, process.start, "another boot").alive()
        child.kill()
        child.wait()
        assert not process.alive()


def test_a_command_that_fails_says_what_it_said():
    with pytest.raises(LabError, match="status 3: no luck"):
        run(["sh", "-c", "echo no luck >&2; exit 3"])
    with pytest.raises(LabError, match="could not be run"):
        attempt(["/nonexistent/command"])
    with pytest.raises(LabError, match="did not end within"):
        attempt(["sleep", "30"], timeout=0.1)


def test_state_survives_a_round_trip_and_refuses_another_version(tmp_path: pathlib.Path):
    me = Process.of(os.getpid())
    host = state.Host("lab1", 11, "bookworm", "full", "nspawn", supervisor=me, cgroups=["/sys/fs/cgroup/x"])
    kept = state.State("abc", "10.99.7.0/24", {"m.example": "10.99.7.2"}, None, {"m.example:80": me}, {"lab1": host})
    assert state.load(tmp_path) is None
    state.save(tmp_path, kept)
    assert state.load(tmp_path) == kept
    (tmp_path / "state.json").write_text('{"schema": 0}')
    with pytest.raises(LabError, match="another version"):
        state.load(tmp_path)


def test_the_command_line_refuses_with_words_and_status_1(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("LAB_ID", "none")
    assert cli.main(["exec", "lab1", "--", "true"]) == 1
    assert "there is no host 'lab1'" in capsys.readouterr().err
    assert cli.main(["inventory"]) == 1
    assert "lab up" in capsys.readouterr().err
    assert cli.main(["list", "--json"]) == 0
    assert '"hosts": []' in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_script_runs_without_any_package(tmp_path: pathlib.Path):
    script = pathlib.Path(cli.__file__).with_name("lab")
    done = subprocess.run([sys.executable, "-I", "-S", script, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    assert "LAB_ENGINE" in done.stdout
