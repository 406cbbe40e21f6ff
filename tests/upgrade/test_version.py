"""From an earlier version of the bundle itself, in place (PDSTACK_LONG=1). Last: from a bare host and back to one.

The earlier version is the latest tag, or what PDSTACK_FROM names: a tag or a commit, as far back as hosts were deployed
with it. It is set up and run by itself, by its own `make deploy`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scenario
from host_state import differences, snapshot
from upgrade.test_upgrade import NEW, answer, plan_of, running

RELEASE = ["-e", f"pd_release={NEW}"]
# A name that earlier versions had, and what it is called now.
FORMER, NOW = "nixl_ucx_environment", "nixl_ucx_pairs"


def earlier_version() -> str:
    """Return a commit or tag, "" where there is none."""
    command = ["git", "describe", "--tags", "--abbrev=0"]
    latest = subprocess.run(command, cwd=scenario.ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("PDSTACK_FROM", latest)


# Where two hosts of one version differ by right: what engines write while they run, what the canary found last, when a
# release was built, the list of wheels as it was when they were brought, the transport's proofs of former releases, and
# each host's own keys (their files must be there on both, with the same owner and mode).
OF_ITS_OWN = re.compile(
    r"/var/lib/pdstack/(jit|nixl)/.|/run/pdstack/canary.json$|/opt/pdstack/(releases|wheelhouse)/[^/]+/manifest.json$"
)
SECRETS = "/etc/pdstack/credentials/"


pytestmark = [
    pytest.mark.skipif(not os.environ.get("PDSTACK_LONG"), reason="PDSTACK_LONG is not set: three deployments"),
    pytest.mark.skipif(not earlier_version(), reason="no tag yet, and PDSTACK_FROM is not set"),
]


def deploy(*words: str) -> subprocess.CompletedProcess[str]:
    done = scenario.playbook("deploy_pd.yml", *RELEASE, *words)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done


def retire(host: Any) -> None:
    done = scenario.playbook("retire.yml", "-e", f"pd_retire={host.backend.get_hostname()}")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def processes(host: Any) -> dict[str, str]:
    """Return the main process of each unit that serves, told apart by its start too."""
    plan = plan_of(host)
    show = "systemctl show --value -p MainPID -p ExecMainStartTimestampMonotonic %s"
    units = [item["unit"] for item in plan["instances"] + plan["routers"]]
    return {unit: host.check_output(show, unit) for unit in units}


def mapped(host: Any) -> set[str]:
    """Return the ids of the releases that the processes of all units have mapped."""
    pids = [host.check_output("systemctl show --value -p MainPID %s", unit) for unit in processes(host)]
    paths = host.check_output(
        f"cat {' '.join(f'/proc/{pid}/maps' for pid in pids)} | grep -o 'releases/[^/]*' | sort -u"
    )
    return {path.partition("/")[2] for path in paths.split()}


def cache_of_its_own(folder: Path) -> Path:
    """Return a cache with this machine's wheels and models, and without what this version wrote there itself."""
    ours = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    (folder / "pdstack").mkdir(parents=True)
    known = [*ours.iterdir(), *(ours / "pdstack" / name for name in ("models", "wheels"))]
    for path in known:
        if path.exists() and path.name != "pdstack":
            (folder / path.relative_to(ours)).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def bare(host: Any) -> dict[str, Any]:
    """The host before either version was on it."""
    retire(host)
    return snapshot(host)


@pytest.fixture(scope="module")
def earlier(host: Any, bare: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The host as the earlier version has deployed it, with its plan and its answer."""
    folder = tmp_path_factory.mktemp("earlier")
    packed = subprocess.run(
        ["git", "archive", earlier_version()], cwd=scenario.ROOT, capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "--extract", f"--directory={folder}"], input=packed, check=True)
    # As an operator does it, with that version's own Ansible: none of this run's settings reaches it.
    ours = ("ANSIBLE_", "MOLECULE_", "PYTEST_", "VIRTUAL_ENV", "MAKE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment["XDG_CACHE_HOME"] = str(cache_of_its_own(folder / ".cache"))
    words = [f"INVENTORY={scenario.inventory()}", f"ANSIBLE_ARGS={' '.join(RELEASE)}"]
    done = subprocess.run(
        ["make", "deploy", *words],
        cwd=folder,
        env={**environment, "ANSIBLE_NOCOLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    plan = plan_of(host)
    return {
        "plan": plan,
        "said": answer(host, plan),
        "processes": processes(host),
        "host": snapshot(host),
        "cache": folder / ".cache",
    }


def test_a_former_name_is_refused_before_anything_is_touched(host: Any, earlier: dict[str, Any]) -> None:
    done = scenario.playbook("deploy_pd.yml", *RELEASE, "-e", json.dumps({FORMER: {"UCX_TLS": "cuda"}}))
    words = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2, words
    assert f"write {NOW} in its place" in words
    assert not re.search(r"^\S+ +: ok=.*changed=[1-9]", done.stdout, re.MULTILINE)
    assert processes(host) == earlier["processes"]
    assert differences(earlier["host"], snapshot(host)).get("files", []) == []


def test_the_controllers_cache_of_the_earlier_version_is_good_enough(earlier: dict[str, Any]) -> None:
    """Or is built anew; the operator has nothing to remove."""
    command = [sys.executable, str(scenario.ROOT / "tools/wheelhouse"), NEW, "--python=3.11"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(earlier["cache"])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_earlier_version_deployed_is_taken_over(host: Any, earlier: dict[str, Any]) -> None:
    look = scenario.playbook("drift.yml", *RELEASE, "-e", "pd_drift_report=-", ANSIBLE_STDOUT_CALLBACK="pd_quiet")
    assert look.returncode == 2, look.stdout + look.stderr
    print(f"from {earlier_version()}: {sorted({item['item'] for item in json.loads(look.stdout)['items']})}")
    assert scenario.changed(deploy()) > 0
    after = plan_of(host)
    assert running(host, after) == {NEW}
    assert answer(host, after) == earlier["said"]
    kept = ("name", "host", "gpus", "ports")
    assert [[item[key] for key in kept] for item in after["instances"]] == [
        [item[key] for key in kept] for item in earlier["plan"]["instances"]
    ]
    look = scenario.playbook("drift.yml", *RELEASE)
    assert look.returncode == 0, look.stdout
    before = processes(host)
    assert scenario.changed(deploy()) == 0
    assert processes(host) == before


def test_the_earlier_versions_release_serves_again_by_one_playbook(host: Any, earlier: dict[str, Any]) -> None:
    """Where the release's locks changed, both are there under one name, and the way back goes by the id."""
    ids = {link: host.run(f"readlink /opt/pdstack/{link}").stdout.strip() for link in ("current", "previous")}
    if not ids["previous"]:
        pytest.skip("the locks of both versions are the same")
    done = scenario.playbook("rollback.yml", *RELEASE)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert host.check_output("readlink /opt/pdstack/current") == ids["previous"]
    assert mapped(host) == {ids["previous"].rpartition("/")[2]}
    assert answer(host, plan_of(host)) == earlier["said"]
    deploy()
    assert host.check_output("readlink /opt/pdstack/current") == ids["current"]
    assert mapped(host) == {ids["current"].rpartition("/")[2]}


def comparable(found: dict[str, Any], plan: dict[str, Any], former: str) -> dict[str, Any]:
    """Return a snapshot without what is a host's own, and without the release that is kept to go back to."""
    kept = {f"/opt/pdstack/{name}" for name in ("previous", f"releases/{former}")}

    def stays(path: str) -> bool:
        return not OF_ITS_OWN.match(path) and not any(path == item or path.startswith(f"{item}/") for item in kept)

    files = {path: words for path, words in found["files"].items() if stays(path)}
    for path, words in files.items():
        if path.startswith(SECRETS) and words.startswith("-"):
            files[path] = words.rpartition(" ")[0]
    # Engines listen on some ports that they choose anew at each start.
    planned = {str(port) for item in plan["instances"] + plan["routers"] for port in item["ports"].values()}
    return {**found, "files": files, "ports": [port for port in found["ports"] if port.rpartition(":")[2] in planned]}


def test_it_is_as_if_this_version_alone_had_deployed_it_and_retires_to_nothing(
    host: Any, bare: dict[str, Any], earlier: dict[str, Any]
) -> None:
    """What only the earlier version wrote is gone, whoever removed it; and nothing is missing that a fresh host has."""
    assert {"files", "users", "units"} <= set(differences(bare, earlier["host"]))
    former = host.run("readlink /opt/pdstack/previous").stdout.strip().rpartition("/")[2]
    taken_over = comparable(snapshot(host), plan_of(host), former)
    retire(host)
    assert differences(bare, snapshot(host)) == {}
    deploy()
    fresh = comparable(snapshot(host), plan_of(host), "")
    found = [f"{part}: {line}" for part, lines in differences(fresh, taken_over).items() for line in lines]
    print(f"compared with a fresh host: {len(taken_over['files'])} files, {len(fresh['ports'])} ports")
    if found:
        pytest.fail(f"fresh -> taken over, {len(found)} differences:\n" + "\n".join(found[:200]), pytrace=False)
