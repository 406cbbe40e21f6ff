"""Retired with keys, certificate and firewall; with the checkpoint kept by choice (PDSTACK_LONG=1). After test_retire,
whose host is bare by then.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import scenario
from host_state import differences, snapshot
from retire.test_retire import before

SECURED = {
    "pd_security": {"api_key": "of-the-clients-1", "tls": "own", "client_networks": ["10.0.0.0/8"]},
    "pd_canary": {"enabled": True},
}
MODELS = "/var/lib/pdstack/models"

pytestmark = pytest.mark.skipif(not os.environ.get("PDSTACK_LONG"), reason="PDSTACK_LONG is not set: three deployments")


def deploy(*words: str) -> None:
    done = scenario.playbook("deploy_pd.yml", *words)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def retire(host: Any, *words: str) -> None:
    done = scenario.playbook("retire.yml", "-e", f"pd_retire={host.backend.get_hostname()}", *words)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_keys_certificate_and_firewall_go_too(host: Any) -> None:
    """The inventory does not know of them any more when the host is retired."""
    assert differences(before(), snapshot(host)) == {}
    deploy("-e", json.dumps(SECURED))
    found = differences(before(), snapshot(host))
    text = "\n".join(line for lines in found.values() for line in lines)
    for name in ("api_key", "admin_key", "tls_cert", "tls_key"):
        assert f"/etc/pdstack/credentials/{name}" in text
    assert any("pdstack" in line for line in found["firewall"])
    assert "10.0.0.0/8" in host.check_output("nft list table inet pdstack")
    retire(host)
    assert differences(before(), snapshot(host)) == {}


def test_a_checkpoint_stays_by_choice_and_serves_again(host: Any) -> None:
    deploy()
    look = f"find {MODELS} -path '*@*' -type f ! -name '.*' -printf '%i %T@ %s %P\\n' | sort"
    files = host.check_output(look)
    assert "safetensors" in files
    retire(host, "-e", '{"pd_retire_keep": ["checkpoint"]}')
    found = differences(before(), snapshot(host))
    assert set(found) == {"files"}
    assert [line for line in found["files"] if not line.startswith((f"{MODELS}", "/var/lib/pdstack: "))] == []
    assert host.check_output(look) == files
    deploy()
    assert host.check_output(look) == files  # the same inodes: verified, and not fetched again
    retire(host)
    assert differences(before(), snapshot(host)) == {}
