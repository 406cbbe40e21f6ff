"""A retired host is what it was before the deployment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import scenario
from host_state import differences, snapshot

# As a kill leaves it: another commit of the checkpoint, half of its first file here.
UNFINISHED = """
import glob, json, os
(path,) = glob.glob("/var/lib/pdstack/models/*@*/.pdstack-manifest.json")
found = json.load(open(path))
found["listing"]["commit"], found["files"] = "b" * 40, {}
work = "/var/lib/pdstack/models/.pdstack/"
staging = work + "staging/" + os.path.basename(os.path.dirname(path)).split("@")[0] + "@" + "b" * 40
os.makedirs(staging)
json.dump(found, open(staging + "/.pdstack-manifest.json", "w"))
first = next(file for file in found["listing"]["files"] if file.get("sha256"))
open(work + "partial/sha256-" + first["sha256"], "wb").write(bytes(first["size"] // 2))
"""


def before() -> dict[str, Any]:
    return json.loads((Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "before.json").read_text())


def test_a_deployment_leaves_something_everywhere_that_is_compared(host: Any) -> None:
    """Otherwise the comparison below could not fail."""
    found = differences(before(), snapshot(host))
    assert {"files", "users", "units", "timers", "packages", "ports", "processes"} <= set(found)
    text = "\n".join(found["files"])
    for path in ("/etc/pdstack/plan.json", "/opt/pdstack/current", "/var/lib/pdstack", "/usr/local/lib/pdstack"):
        assert path in text


def test_without_the_right_name_nothing_is_changed(host: Any) -> None:
    name = host.backend.get_hostname()
    for words in ([], ["-e", "pd_retire=somebody"], ["-e", f"pd_retire={name}", "-e", '{"pd_retire_keep": ["x"]}']):
        done = scenario.playbook("retire.yml", *words)
        assert done.returncode == 2, done.stdout
        assert "Nothing was changed. Found: pd_retire=" in done.stdout
        assert scenario.changed(done) == 0


def test_a_retired_host_is_what_it_was(host: Any) -> None:
    # The service is deployed and intact, so that what is retired is a whole one.
    look = scenario.playbook("drift.yml")
    assert look.returncode == 0, look.stdout
    host.check_output("python3 -c %s", UNFINISHED)
    name = host.backend.get_hostname()
    done = scenario.playbook("retire.yml", "-e", f"pd_retire={name}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert scenario.changed(done) > 0
    assert differences(before(), snapshot(host)) == {}


def test_retiring_again_changes_nothing(host: Any) -> None:
    done = scenario.playbook("retire.yml", "-e", "pd_retire=inventory")
    assert (done.returncode, scenario.changed(done)) == (0, 0), done.stdout
    assert differences(before(), snapshot(host)) == {}
