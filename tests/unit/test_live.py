"""Whether a process is the one that its unit describes: from a /proc laid out here."""

from __future__ import annotations

from pathlib import Path

import pytest
from pdstack import live

UNIT = "pd-decode@0.service"
COMMAND = "/opt/pdstack/current/venv/bin/python -m sglang.launch_server --config x.yaml"
ENGINE = live.Intended(UNIT, cpus="0-1", memory_nodes="0", env={"OMP_NUM_THREADS": "1"})


@pytest.fixture
def process(tmp_path: Path) -> Path:
    """The folder of process 7, as that of an intact engine."""
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "cgroup").write_text(f"0::/system.slice/{UNIT}\n")
    (folder / "status").write_text("Name:\tpython\nCpus_allowed_list:\t0-1\n")
    (folder / "numa_maps").write_text("55d bind:0 file=/x\n")
    (folder / "maps").write_text("7f0-7f1 r-xp 0 0:0 0 /opt/pdstack/releases/new-1/venv/lib/x.so\n")
    (folder / "cmdline").write_text(COMMAND.replace(" ", "\0") + "\0")
    (folder / "environ").write_text("INVOCATION_ID=a\0OMP_NUM_THREADS=1\0LANG=C\0")
    return folder


def reason(process: Path, wanted: live.Intended = ENGINE, current: str = "/opt/pdstack/releases/new-1") -> str | None:
    return live.reason(wanted, 7, COMMAND, current, str(process.parent))


def test_an_intact_process_is_left_alone(process: Path) -> None:
    assert reason(process) is None


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("maps", "new-1", "old-1", "the process runs old-1, current is new-1"),
        ("cmdline", "x.yaml", "y.yaml", "was started as"),
        ("environ", "OMP_NUM_THREADS=1", "OMP_NUM_THREADS=8", "has OMP_NUM_THREADS=8, the unit says 1"),
        ("environ", "OMP_NUM_THREADS=1\0", "", "has OMP_NUM_THREADS=(unset)"),
        ("status", "0-1", "0-3", "CPUs of 1 processes: 0-3 (pid 7), planned 0-1"),
        ("numa_maps", "bind:0", "default", "memory policy of 1 processes: default (pid 7), planned bind:0"),
    ],
)
def test_each_difference_is_told(process: Path, name: str, old: str, new: str, expected: str) -> None:
    text = (process / name).read_text()
    (process / name).write_text(text.replace(old, new))
    assert expected in str(reason(process))


def test_a_process_with_a_title_of_its_own_is_not_compared_by_its_arguments(process: Path) -> None:
    """sglang-router calls itself sglang::router and overwrites its environment by that."""
    (process / "cmdline").write_text("sglang::router" + " " * 40)
    (process / "environ").write_text("\0" * 40)
    assert reason(process) is None


def test_what_cannot_be_read_is_no_finding(process: Path) -> None:
    for name in ("maps", "cmdline", "environ"):
        (process / name).unlink()
    assert reason(process) is None
