"""What a host gives for a bug report: all that is asked for, bounded, and no secret."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pdstack import support
from pdstack.http import Access
from pdstack.redact import secrets_in
from pdstack.runner import Completed
from pdstack.verify import Reply

KNOWN = "the-clients-key-1"
LOADED = "of-another-unit-2"
ENGINE = support.Endpoint("decode-0", "http://10.0.0.1:30100", ["/metrics", "/server_info"], Access("/k"))


def run(argv: Sequence[str]) -> Completed:
    if argv[:2] == ["systemctl", "list-units"] and "--no-legend" in argv:
        return Completed(0, "pd-decode@0.service loaded active running x\n", "")
    if argv[:2] == ["systemctl", "list-unit-files"] and "--no-legend" in argv:
        return Completed(0, "pd-decode@.service disabled\npd-scrub.timer enabled\n", "")
    if argv[:2] == ["systemctl", "cat"]:
        return Completed(0, "LoadCredential=x:/srv/key\nEnvironment=API_KEY=by-its-name-3\n", "")
    if argv[0] == "journalctl" and "-u" in argv:
        return Completed(0, f"asked with {KNOWN}\nand {LOADED}\nhttp://me:in-an-address-4@proxy\n", "")
    if argv[0] == "nvidia-smi":
        return Completed(127, "", "nvidia-smi: command not found")
    return Completed(0, f"output of {argv[0]}\n", "")


def get(url: str, access: Access) -> Reply:
    assert access == ENGINE.access
    return Reply(200, "metric 1\n") if url.endswith("/metrics") else Reply(0, "refused")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in {
        "etc/pdstack/plan.json": '{"a": 1}',
        "etc/pdstack/instances/decode-0.env": "TOKEN=by-its-name-5",
        "etc/pdstack/credentials/api_key": KNOWN,
        "srv/key": f"{LOADED}\n",
        "var/lib/pdstack/checkpoint/secrets/x": "of-the-fan-out-6",
        "run/pdstack/deploy.lock": "of-the-fan-out-6 stands here too",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_everything_is_there_and_what_cannot_be_read_says_so(root: Path) -> None:
    found = support.collect(run, get, [ENGINE], support.Limits(), str(root))
    assert set(support.COMMANDS) <= set(found)
    assert found["files/etc/pdstack/plan.json"] == '{"a": 1}'
    assert found["answers/decode-0-metrics.txt"] == "metric 1\n"
    assert found["answers/decode-0-server_info.txt"] == "status 0: refused\n"
    assert "exit 127: nvidia-smi: command not found" in found["gpu/nvidia-smi.txt"]
    assert {"journal/pd-decode@0.service.txt", "units/pd-scrub.timer.txt", "journal/kernel.txt"} <= set(found)
    assert "/opt/pdstack/current -> (none)" in found["files/links.txt"]


def test_no_secret_leaves_the_host(root: Path) -> None:
    found = support.collect(run, get, [ENGINE], support.Limits(), str(root))
    text = json.dumps(found)
    for secret in (KNOWN, LOADED, "by-its-name-3", "in-an-address-4", "by-its-name-5", "of-the-fan-out-6"):
        assert secret not in text
    assert not [name for name in found if "credentials" in name or "secrets" in name]
    assert sum(json.loads(found["removed.json"]).values()) >= 6


def test_a_long_journal_is_cut_to_its_end(root: Path) -> None:
    def talkative(argv: Sequence[str]) -> Completed:
        if argv[0] == "journalctl":
            return Completed(0, "".join(f"line {number}\n" for number in range(1000)), "")
        return run(argv)

    found = support.collect(talkative, get, [], support.Limits(size=200), str(root))
    text = found["journal/kernel.txt"]
    assert text.startswith("(the first ")
    assert text.endswith("line 999\n")
    assert len(text) < 300


def test_journals_are_asked_for_within_bounds(root: Path) -> None:
    asked: list[list[str]] = []

    def remember(argv: Sequence[str]) -> Completed:
        asked.append(list(argv))
        return run(argv)

    support.collect(remember, get, [], support.Limits(hours=3, lines=77), str(root))
    journals = [argv for argv in asked if argv[0] == "journalctl"]
    assert journals
    assert all(argv[argv.index("-n") + 1] == "77" and argv[argv.index("--since") + 1] == "-3h" for argv in journals)


def test_secrets_of_an_inventory_are_known_by_their_keys() -> None:
    document = {
        "pd_security": {"api_key": "one-key", "admin_key": "random", "tls": "own"},
        "token_file": "/etc/x",
        "pd_router": {"tokens": ["two-key"], "max_tokens": "12"},
    }
    assert secrets_in(document) == ["one-key", "two-key"]
