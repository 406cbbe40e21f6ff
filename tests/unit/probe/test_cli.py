"""The probe by hand."""

import json

import pytest
from pdstack import codec, facts, p2p, probe_cli


def test_picture_facts_and_drawing(simulated, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(p2p, "BUFFER_BYTES", 1 << 20)
    request, _ = simulated("h200-vm-2")
    words = ["--root", request.root, "--library", request.library, "--ctypes", "--measure"]
    files = {name: str(tmp_path / name) for name in ("json", "svg")}
    status = probe_cli.main([*words, "--json", files["json"], "--svg", files["svg"]])
    assert status == 0
    assert "fabric_create          800" in capsys.readouterr().out
    with open(files["json"]) as stream:
        found = codec.load(facts.HostFacts, json.load(stream))
    assert found.p2p.data_ok is True
    assert found.probe_seconds["measure"] > 0
    with open(files["svg"]) as stream:
        assert stream.read().startswith("<svg")


def test_a_driver_that_is_not_ok_is_an_exit_status(simulated, capsys):
    request, _ = simulated("stub-library")
    assert probe_cli.main(["--root", request.root, "--library", request.library]) == 1
    assert "a stub library answered" in capsys.readouterr().out


def test_unknown_options_are_refused(capsys):
    with pytest.raises(SystemExit):
        probe_cli.main(["--mesure"])
    assert "--mesure" in capsys.readouterr().err
