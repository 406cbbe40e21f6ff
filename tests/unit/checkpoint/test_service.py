"""The units, the packed agent and the jobs, on a folder that stands for the host's root."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from pdstack import codec
from pdstack.checkpoint import agent, service
from pdstack.checkpoint.agent import Job, Outcome
from pdstack.checkpoint.errors import CheckpointError
from pdstack.checkpoint.service import AGENT, UNITS, Service

PACKAGE = pathlib.Path(service.__file__).parent


class Systemd:
    """Stands for systemctl: remembers the calls, makes the links of enable, says what is active."""

    def __init__(self, prefix: pathlib.Path) -> None:
        self.prefix = prefix
        self.calls: list[str] = []
        self.active = "inactive"
        self.broken = False
        self.stopped: set[str] = set()

    def __call__(self, argv: list[str]) -> tuple[int, str]:
        self.calls.append(" ".join(argv[1:]))
        if self.broken:
            return 1, "System has not been booted with systemd"
        if argv[1] == "is-active" and argv[-1].endswith(".timer"):
            return (3, "inactive") if argv[-1] in self.stopped else (0, "active")
        if argv[1] == "is-active":
            return (0 if self.active == "active" else 3), self.active
        if argv[1] == "enable":
            target = "timers" if argv[-1].endswith(".timer") else "multi-user"
            link = self.prefix / UNITS[1:] / f"{target}.target.wants" / argv[-1]
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to("x")
        if argv[1] == "disable":
            for folder in (self.prefix / UNITS[1:]).glob("*.wants"):  # before 3.13 glob passes over dangling links
                (folder / argv[-1]).unlink(missing_ok=True)
        return 0, ""


@pytest.fixture
def systemd(tmp_path) -> Systemd:
    return Systemd(tmp_path)


@pytest.fixture
def units(systemd, tmp_path) -> Service:
    return Service(systemd, "/usr/bin/python3", str(tmp_path))


def test_a_timer_stopped_by_hand_differs(units, systemd):
    units.install("/models")
    assert units.differing("/models") == []
    systemd.stopped.add("pd-scrub.timer")
    assert units.differing("/models") == ["pd-scrub.timer"]
    systemd.calls.clear()
    assert units.install("/models") == ["pd-scrub.timer"]
    assert "enable --now pd-scrub.timer" in systemd.calls


def test_drop_ins_and_masks_by_hand_go(units, tmp_path):
    units.install("/models")
    drop_in = tmp_path / UNITS[1:] / "pd-scrub.timer.d/x.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Timer]\nOnCalendar=\n")
    mask = tmp_path / "run/systemd/system/pd-scrub.service"
    mask.parent.mkdir(parents=True)
    mask.symlink_to("/dev/null")
    wanted = [f"{UNITS}/pd-scrub.timer.d", "/run/systemd/system/pd-scrub.service"]
    assert units.differing("/models") == units.install("/models") == wanted
    assert not drop_in.parent.exists()
    assert not mask.is_symlink()
    assert units.differing("/models") == []


def test_the_agent_holds_every_module():
    here = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert {name.partition(".")[2] for name in service.MODULES if name.startswith("checkpoint.")} == here


def test_the_packed_agent_runs_by_itself_and_is_always_the_same(tmp_path):
    packed = tmp_path / "agent.pyz"
    packed.write_bytes(service.pack_agent())
    assert packed.read_bytes() == service.pack_agent()
    done = subprocess.run([sys.executable, "-I", packed, "--help"], capture_output=True, text=True, check=True)
    assert "scrub" in done.stdout


def test_install_writes_once(units, systemd, tmp_path):
    assert f"{UNITS}/pd-checkpoint@.service" in units.install("/models")
    assert (tmp_path / AGENT[1:]).exists()
    assert systemd.calls == ["daemon-reload", "enable --now pd-scrub.timer"]

    assert units.install("/models") == []
    assert units.differing("/models") == []


def test_install_repairs_what_was_edited(units, tmp_path):
    units.install("/models")
    (tmp_path / UNITS[1:] / "pd-scrub.timer").write_text("[Timer]\n")

    assert units.install("/models") == [f"{UNITS}/pd-scrub.timer"]


def test_the_token_goes_by_credential_and_never_into_the_job(units, site, tmp_path):
    token = tmp_path / "token"
    token.write_text("hf_secret")
    name = site.folder.name

    units.start(site.request(token_file=str(token)), name)

    drop_in = tmp_path / UNITS[1:] / f"pd-checkpoint@{name}.service.d/credentials.conf"
    assert f"LoadCredential=hub-token:{token}" in drop_in.read_text()
    texts = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file() and path != token]
    assert not [text for text in texts if "hf_secret" in text]


def test_start_joins_a_job_under_way(units, systemd, site, tmp_path):
    name = site.folder.name
    assert units.start(site.request(), name)
    systemd.active = "active"

    assert not units.start(site.request(), name)
    with pytest.raises(CheckpointError, match="works below"):
        units.start(site.request(root=str(tmp_path / "elsewhere")), name)


def test_a_job_that_stopped_without_an_outcome_is_an_error(units, systemd, site):
    units.start(site.request(), site.folder.name)
    systemd.active = "activating"
    assert units.outcome(site.folder.name) is None
    systemd.active = "failed"
    with pytest.raises(CheckpointError, match="before it ended"):
        units.outcome(site.folder.name)


def test_no_systemd_is_said(units, systemd):
    systemd.broken = True
    with pytest.raises(CheckpointError, match="inline"):
        units.install("/models")


def test_remove_leaves_nothing(units, site, tmp_path):
    units.install(str(site.root))
    units.start(site.request(), site.folder.name)

    assert units.remove(site.folder.name, str(site.root))

    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()] == []
    assert units.remove(site.folder.name, str(site.root)) == []


class TestAgent:
    def run(self, site, state: pathlib.Path, **changes: object) -> tuple[int, Outcome]:
        path = state / "jobs" / f"{site.folder.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(codec.dump(Job(site.request(**changes)))))
        status = agent.main(["--state-dir", str(state), "run", site.folder.name])
        assert not path.exists()
        found = json.loads((state / "results" / f"{site.folder.name}.json").read_text())
        return status, codec.load(Outcome, found)

    def test_success(self, site, tmp_path):
        status, outcome = self.run(site, tmp_path / "state")

        assert status == 0
        assert outcome.result is not None
        assert outcome.result.changed
        assert site.wrong_files() == []

    def test_failure_says_why(self, site, tmp_path, capsys):
        status, outcome = self.run(site, tmp_path / "state", sources=["http://127.0.0.1:9/"], attempts=1)

        assert (status, outcome.code, outcome.result) == (1, "no-listing", None)
        assert "no listing" in capsys.readouterr().err

    def test_the_token_comes_from_the_credentials_folder(self, site, tmp_path, monkeypatch):
        site.hub.token = "hf_secret"
        (tmp_path / "credentials").mkdir()
        (tmp_path / "credentials/hub-token").write_text("hf_secret")
        monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))

        status, _ = self.run(site, tmp_path / "state")

        assert status == 0
        assert "hf_secret" not in (tmp_path / "state/results" / f"{site.folder.name}.json").read_text()

    def test_scrub_goes_through_all_roots_and_fails_on_rot(self, site, tmp_path, capsys):
        site.present()
        state = tmp_path / "state"
        state.mkdir()
        (state / "roots.json").write_text(json.dumps([str(site.root), str(tmp_path / "gone")]))
        command = ["--state-dir", str(state), "scrub", "--full"]
        assert agent.main(command) == 0
        shard = site.folder / "model-00001-of-00004.safetensors"
        before = shard.stat()
        shard.write_bytes(bytes(before.st_size))
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))

        assert agent.main(command) == 1
        assert "model-00001-of-00004.safetensors: found corrupt" in capsys.readouterr().err
        assert site.present().repaired == [shard.name]
