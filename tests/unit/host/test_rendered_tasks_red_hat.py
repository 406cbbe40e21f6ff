"""RHEL and Rocky 9 and 10: the role's tasks as they are rendered. No dnf ran: no such host can be had where these run.

What is shown: each task's condition, module and arguments for a decision of the real judgement. What is not: that dnf
and the vendor's repository take them.
"""

from __future__ import annotations

import json
import pathlib
import runpy

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from pdstack import codec, driver, facts

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent
ROLE = ROOT / "roles/gpu_host"
FILTERS = runpy.run_path(str(ROOT / "filter_plugins/pd_host.py"))["FilterModule"]().filters()
PINS = yaml.safe_load((ROOT / "releases/cuda-13.0/host.yml").read_text())


def load(path: pathlib.Path):
    """A role's YAML file, its strings trusted as templates, as ansible itself loads it."""
    return DataLoader().load_from_file(str(path), trusted_as_template=True)


def decided(version: str, held: list[str], **fields: object) -> dict:
    """The judgement on a host of that version whose driver, if any, is what `fields` say."""
    document = json.loads((ROOT / "tests/fixtures/facts/no-driver.json").read_text())
    document["system"].update(os_id="rocky", os_version=version, secure_boot=False)
    document["driver"].update(nouveau_loaded=False, **fields)
    state = driver.HostState(kernel="5.14.0-1.el9.x86_64", held=held, packages=dict.fromkeys(held, "550.1-1"))
    return FILTERS["pd_driver_decision"](codec.dump(codec.load(facts.HostFacts, document)), codec.dump(state), PINS)


def rendered(file: str, decision: dict, first: int = 99, **more: object) -> dict[str, tuple[str, dict]]:
    """Task name -> module and arguments, of the first tasks of a file whose condition holds."""
    variables = {
        "__gpu_host_decision": decision,
        "__gpu_host_apt": False,
        "__gpu_host_key": "/etc/pki/rpm-gpg/pdstack-cuda.asc",
        "__gpu_host_repository": {"url": "http://mirror/rhel/", "key_url": "http://mirror/k", "fingerprint": "AB" * 20},
        "gpu_host_key_file": "",
        "omit": "(omitted)",
        **more,
    }
    result = {}
    for task in load(ROLE / f"tasks/{file}.yml")[:first]:
        local = {**variables, **task.get("vars", {})}
        templar = Templar(loader=DataLoader(), variables=local)
        when = task.get("when", [])
        if not all(templar.evaluate_conditional(item) for item in ([when] if isinstance(when, str) else when)):
            continue
        module = next((key for key in task if "." in key or key.startswith("pd_")), "block")
        result[task["name"].split(" | ")[1]] = (module, templar.template(task.get(module)))
    return result


def test_rendered_rhel_9_chooses_the_stream_and_installs_the_open_driver():
    decision = decided("9.5", [])
    tasks = rendered("install_dnf", decision)
    assert tasks["Choose the driver's branch by its stream"] == (
        "ansible.builtin.command",
        {"argv": ["dnf", "--assumeyes", "module", "enable", "nvidia-driver:580-open"]},
    )
    assert tasks["Install the driver"][1]["name"] == [
        "kernel-devel-5.14.0-1.el9.x86_64",
        "kernel-headers",
        "nvidia-open",
    ]
    assert list(tasks) == [
        "Know the vendor's repository",
        "Bring the plugin that locks versions",
        "Choose the driver's branch by its stream",
        "Install the driver",
    ]


def test_rendered_rhel_10_has_no_stream_and_locks_the_branch_first():
    tasks = rendered("install_dnf", decided("10.0", []))
    assert "Choose the driver's branch by its stream" not in tasks
    assert tasks["Choose the driver's branch by a lock"][1]["argv"][-1] == "*nvidia*580.*"
    assert list(tasks)[-1] == "Install the driver"


def test_rendered_locks_of_an_old_branch_are_released_before():
    decision = decided("9.5", ["nvidia-driver"], state="ok", loaded_version="550.1", open_modules=True)
    tasks = rendered("install_dnf", decision)
    assert next(iter(tasks)) == "Release the locks that stand in the way"
    assert tasks["Release the locks that stand in the way"][1]["argv"][-2:] == ["delete", "nvidia-driver"]


def test_rendered_repository_checks_signatures_against_the_key_that_was_checked():
    tasks = rendered("repository", decided("9.5", []))
    key = tasks["Trust the vendor's key if it is the pinned one"][1]
    assert (key["path"], key["fingerprint"]) == ("/etc/pki/rpm-gpg/pdstack-cuda.asc", "AB" * 20)
    module, source = tasks["Tell dnf"]
    assert module == "ansible.builtin.yum_repository"
    assert source["gpgcheck"] is True
    assert source["gpgkey"] == "file:///etc/pki/rpm-gpg/pdstack-cuda.asc"
    assert "Tell apt" not in tasks
    assert next(iter(tasks)) == "Trust the vendor's key if it is the pinned one"


def test_rendered_holds_are_version_locks():
    now = {"actions": {"hold": ["nvidia-open", "libnvidia-ml"]}, "version": "580.95.05"}
    seen = {"state": {"recorded_holds": []}}
    tasks = rendered("hold_dnf", decided("9.5", []), __gpu_host_now=now, __gpu_host_seen=seen, __gpu_host_record="/r")
    assert tasks["Lock each package"][1]["argv"] == [
        *["dnf", "--assumeyes", "versionlock", "add"],
        *now["actions"]["hold"],
    ]
    assert tasks["Remember which locks are ours"][1]["files"][0]["content"] == "libnvidia-ml\nnvidia-open\n"


@pytest.mark.parametrize("system", ["rhel9", "rhel10"])
def test_rendered_fabric_manager_has_the_drivers_version(system):
    decision = {"actions": {"fabric_manager": [PINS["packages"][system]["fabric_manager"]]}}
    tasks = rendered("fabric_manager_dnf", decision, 1, __gpu_host_now={"version": "580.95.05"})
    module, arguments = tasks["Install the Fabric Manager"]
    assert module == "ansible.builtin.dnf"
    assert arguments == {"name": "nvidia-fabricmanager-580.95.05", "allow_downgrade": True}


def test_rendered_packages_are_looked_up_before_any_host_installs():
    (block,) = load(ROLE / "tasks/obtainable.yml")
    found = {}
    for task in block["block"] + block["rescue"]:
        templar = Templar(
            loader=DataLoader(),
            variables={
                "__gpu_host_apt": False,
                "__gpu_host_wanted": ["numactl", "ninja-build"],
                "ansible_failed_result": {"msg": "No package ninja-build available."},
                "inventory_hostname": "gpu1",
            },
        )
        if templar.evaluate_conditional(task.get("when", True)):
            module = next(key for key in task if "." in key)
            found[module] = templar.template(task[module])
    assert found["ansible.builtin.dnf"] == {"name": ["numactl", "ninja-build"], "download_only": True}
    assert "ansible.builtin.apt" not in found
    words = found["ansible.builtin.fail"]["msg"]
    for word in ("gpu1 lacks numactl, ninja-build", "No package ninja-build available", "dnf download --resolve"):
        assert word in words
