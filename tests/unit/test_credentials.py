"""The folder of keys: made once, kept, renewed when unfit, and never seen by who may not."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from pdstack import credentials, files, runner

NAMES = ["c1", "10.0.0.2", "fd00::1", "pd.example"]


def write(folder: Path, given: dict[str, str], random: list[str], certificate: list[str]) -> dict[str, str]:
    wanted = credentials.entries(str(folder), given, random, certificate, runner.run)
    todo = files.plan(wanted, [f"{folder}/*"])
    files.apply(todo)
    return {os.path.basename(change.path): change.action for change in todo.changes}


def test_files_are_for_their_owner_alone_and_strays_go(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    assert write(folder, {"api_key": "k" * 20}, ["admin_key"], []) == {
        "credentials": "create",
        "api_key": "create",
        "admin_key": "create",
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    (folder / "old_key").write_text("x")
    os.chmod(folder / "api_key", 0o644)
    assert write(folder, {"api_key": "k" * 20}, ["admin_key"], []) == {"api_key": "attributes", "old_key": "remove"}


def test_a_random_key_is_kept_until_it_is_taken_away_and_differs_between_hosts(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    write(one, {}, ["admin_key"], [])
    kept = (one / "admin_key").read_text()
    assert len(kept) > 40
    assert write(one, {}, ["admin_key"], []) == {}
    write(other, {}, ["admin_key"], [])
    assert (other / "admin_key").read_text() != kept
    (one / "admin_key").write_text("short\n")
    assert write(one, {}, ["admin_key"], []) == {"admin_key": "update"}


def test_an_own_certificate_is_made_once_with_all_names_and_made_anew_when_they_change(tmp_path: Path) -> None:
    made = {"credentials": "create", "tls_cert": "create", "tls_key": "create", "tls_pin": "create"}
    folder = tmp_path / "credentials"
    assert write(folder, {}, [], NAMES) == made
    assert write(folder, {}, [], NAMES) == {}
    verify = ["openssl", "verify", "-CAfile", folder / "tls_pin", "-verify_hostname", "pd.example", folder / "tls_cert"]
    assert subprocess.run(verify, capture_output=True, check=False).returncode == 0
    assert write(folder, {}, [], [*NAMES, "other.example"]) == dict.fromkeys(
        ["tls_cert", "tls_key", "tls_pin"], "update"
    )


@pytest.mark.parametrize("spoilt", ["another key", "ends soon", "not a certificate"])
def test_an_unfit_certificate_is_made_anew(tmp_path: Path, spoilt: str) -> None:
    write(tmp_path, {}, [], NAMES)
    if spoilt == "not a certificate":
        (tmp_path / "tls_cert").write_text("x\n")
    elif spoilt == "another key":
        write(tmp_path / "other", {}, [], NAMES)
        (tmp_path / "tls_key").write_text((tmp_path / "other" / "tls_key").read_text())
        for path in (tmp_path / "other").iterdir():
            path.unlink()
        (tmp_path / "other").rmdir()
    else:
        argv = ["openssl", "x509", "-in", tmp_path / "tls_cert", "-signkey", tmp_path / "tls_key", "-days", "30"]
        subprocess.run([*argv, "-out", tmp_path / "tls_cert"], check=True, capture_output=True)
    assert "tls_cert" in write(tmp_path, {}, [], NAMES)
    assert credentials.own_certificate_fits(str(tmp_path), NAMES, runner.run)


def test_a_rehearsal_makes_nothing(tmp_path: Path) -> None:
    def never(argv: object) -> runner.Completed:
        raise AssertionError(argv)

    wanted = credentials.entries(str(tmp_path), {}, ["admin_key"], NAMES, never, make=False)
    assert {os.path.basename(item.path) for item in wanted[1:]} == {"admin_key", "tls_cert", "tls_key", "tls_pin"}
    assert list(tmp_path.iterdir()) == []


def test_only_the_routers_own_certificate_of_a_given_chain_is_trusted(tmp_path: Path) -> None:
    block = "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n"
    chain = {"tls_cert": "words\n" + block.format("own") + block.format("issuer"), "tls_key": "key"}
    wanted = credentials.entries(str(tmp_path), chain, [], [], runner.run)
    assert {os.path.basename(item.path): item.content for item in wanted}["tls_pin"] == block.format("own")
