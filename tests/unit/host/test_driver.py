"""What the driver's judgement says of real and simulated hosts."""

from __future__ import annotations

import json
import pathlib
import runpy
from dataclasses import replace

import pytest
import yaml
from pdstack import codec, driver, facts, flags

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent
PINS = codec.load(driver.Pins, yaml.safe_load((ROOT / "releases/cuda-13.0/host.yml").read_text()), "host.yml")
KERNEL = "6.8.0-87-generic"


def host(name: str, **system: object) -> facts.HostFacts:
    found = codec.load(facts.HostFacts, json.loads((ROOT / f"tests/fixtures/facts/{name}.json").read_text()))
    return replace(found, system=replace(found.system, **system)) if system else found


def state(**values: object) -> driver.HostState:
    return driver.HostState(**{"kernel": KERNEL, "next_kernel": KERNEL, **values})  # type: ignore[arg-type]


def packages(version: str, *more: str) -> dict[str, str]:
    names = ("nvidia-open-580", "libnvidia-compute-580", "nvidia-kernel-common-580", *more)
    return dict.fromkeys(names, f"{version}-0ubuntu1")


def actions(decision: driver.Decision) -> list[str]:
    return [step.action for step in decision.steps]


def items(decision: driver.Decision, action: str) -> list[str]:
    return next(step.items for step in decision.steps if step.action == action)


SERVING = ["rtx-pro-6000-8", "rtx-4090-8", "h200-vm-2", "five-gpus", "busy", "gb200-4", "nvswitch-8"]


@pytest.mark.parametrize("name", SERVING)
def test_a_driver_that_serves_is_left_alone(name):
    found = host(name)
    decision = driver.decide(found, state(), PINS)
    assert driver.needed(found, 580) == ""
    assert (decision.steps, decision.refusals, decision.reboot) == ([], [], "")
    assert decision.version == found.driver.loaded_version
    assert decision.branch == int(found.driver.loaded_version.split(".")[0])  # a 595 is not pinned to 580


def test_its_packages_are_held_and_its_daemon_enabled():
    have = {**packages("580.95.05"), "cuda-toolkit-13-0": "13.0.2-1", "nvidia-container-toolkit": "1.17.8-1"}
    found = host("rtx-4090-8")
    seen = state(packages=have, held=["nvidia-open-580"], units=[driver.PERSISTENCED])
    decision = driver.decide(found, seen, PINS)
    assert items(decision, "hold") == ["libnvidia-compute-580", "nvidia-kernel-common-580"]
    assert items(decision, "enable") == [driver.PERSISTENCED]
    done = replace(seen, held=sorted(packages("580.95.05")), enabled=[driver.PERSISTENCED])
    assert driver.decide(found, done, PINS).steps == []


@pytest.mark.parametrize("name", ["wedged", "gpu-lost", "no-access", "cgroup-blocked", "stub-library", "compat-804"])
def test_what_no_installation_mends_is_not_touched(name):
    decision = driver.decide(host(name), state(), PINS)
    assert (decision.steps, decision.reboot) == ([], "")


def test_a_host_without_gpus_needs_no_driver():
    decision = driver.decide(host("no-gpu"), state(), PINS)
    assert (decision.steps, decision.refusals) == ([], [])
    assert "no NVIDIA GPU" in decision.notes[0]


BARE = {"secure_boot": False}


def test_a_bare_host_gets_the_pinned_branch_with_open_modules_and_a_reboot_for_nouveau():
    decision = driver.decide(host("no-driver", **BARE), state(), PINS)
    assert actions(decision) == ["key", "repository", "install", "initramfs"]
    assert items(decision, "install") == [f"linux-headers-{KERNEL}", "nvidia-open-580"]
    assert "nouveau" in decision.reboot


def test_without_nouveau_the_driver_is_loaded_without_a_reboot():
    found = host("no-driver", **BARE)
    found = replace(found, driver=replace(found.driver, nouveau_loaded=False))
    decision = driver.decide(found, state(), PINS)
    assert actions(decision)[-1] == "load"
    assert decision.reboot == ""


@pytest.mark.parametrize(
    ("system", "wanted", "stream"),
    [
        ({"os_id": "debian", "os_version": "12"}, [f"linux-headers-{KERNEL}", "nvidia-open"], []),
        ({"os_id": "debian", "os_version": "13"}, [f"linux-headers-{KERNEL}", "nvidia-open"], []),
        ({"os_id": "ubuntu", "os_version": "22.04"}, [f"linux-headers-{KERNEL}", "nvidia-open-580"], []),
        (
            {"os_id": "rocky", "os_version": "9.5"},
            [f"kernel-devel-{KERNEL}", "kernel-headers", "nvidia-open"],
            ["nvidia-driver:580-open"],
        ),
        ({"os_id": "rhel", "os_version": "10.0"}, [f"kernel-devel-{KERNEL}", "kernel-headers", "nvidia-open"], []),
    ],
)
def test_each_distribution_has_its_packages(system, wanted, stream):
    decision = driver.decide(host("no-driver", **BARE, **system), state(), PINS)
    assert items(decision, "install") == wanted
    assert items(decision, "repository") == stream


def test_another_distribution_is_refused_with_what_to_do():
    decision = driver.decide(host("no-driver", os_id="arch", os_version=""), state(), PINS)
    assert decision.steps == []
    assert "debian12" in decision.refusals[0].needed
    assert "by hand" in decision.refusals[0].remedy


def test_an_old_branch_is_replaced_its_holds_first_and_needs_a_reboot():
    seen = state(packages={"nvidia-driver-535": "535.183.01-0ubuntu1"}, held=["nvidia-driver-535"])
    decision = driver.decide(host("p4-1"), seen, PINS)
    assert actions(decision) == ["unhold", "key", "repository", "install"]
    assert items(decision, "unhold") == ["nvidia-driver-535"]
    assert "535.183.01 is loaded" in decision.reboot


def test_gpus_in_use_are_not_taken_from_their_processes():
    found, busy = host("p4-1"), host("busy")
    process = next(p for gpu in busy.gpus for p in gpu.processes)
    used = replace(found, gpus=[replace(found.gpus[0], processes=[process])])
    decision = driver.decide(used, state(packages={"nvidia-driver-535": "535.183.01-1"}), PINS)
    assert decision.steps == []
    assert f"pid {process.pid}" in decision.refusals[0].found


@pytest.mark.parametrize("name", ["bash", "cuda-toolkit-13-0", "nvidia-container-toolkit", "libnvidia-container1"])
def test_a_driver_from_the_run_file_is_not_overlaid_with_packages(name):
    decision = driver.decide(host("p4-1"), state(packages={name: "1.0-1"}), PINS)
    assert decision.steps == []
    assert "nvidia-uninstall" in decision.refusals[0].remedy


def test_keep_refuses_instead_of_installing():
    decision = driver.decide(host("no-driver", **BARE), state(), PINS, install=False)
    assert decision.steps == []
    assert decision.refusals[0].subject == "gpu_host_driver"


@pytest.mark.parametrize("seen", [state(), state(packages=packages("595.71.05")), state(mok_enrolled=False)])
def test_library_and_module_that_differ_need_a_reboot_and_no_installation(seen):
    decision = driver.decide(host("mismatch"), seen, PINS)
    assert "install" not in actions(decision)
    assert "595.58.03 is loaded" in decision.reboot


def test_a_driver_that_is_installed_and_not_loaded_is_loaded():
    decision = driver.decide(host("not-loaded", **BARE), state(packages=packages("580.95.05")), PINS)
    assert actions(decision) == ["hold", "load"]
    assert decision.reboot == ""


def test_closed_modules_on_blackwell_are_replaced_and_elsewhere_left():
    blackwell, ada = host("rtx-pro-6000-8"), host("rtx-4090-8")
    closed = [replace(item, driver=replace(item.driver, open_modules=False)) for item in (blackwell, ada)]
    seen = state(packages=packages("595.58.03"))
    assert "install" in actions(driver.decide(closed[0], seen, PINS))
    assert "install" not in actions(driver.decide(closed[1], seen, PINS))


def test_fabric_manager_comes_only_with_nvswitches_and_at_the_drivers_version():
    found = host("nvswitch-802")
    have = packages("580.95.05")
    decision = driver.decide(found, state(packages={**have, "nvidia-fabricmanager-580": "580.82.07-1"}), PINS)
    assert items(decision, "fabric_manager") == ["nvidia-fabricmanager-580"]
    assert decision.version == "580.95.05"
    right = {**have, "nvidia-fabricmanager-580": "580.95.05-1"}
    stopped = state(packages=right, held=sorted(right), units=[driver.FABRIC_MANAGER], enabled=[driver.FABRIC_MANAGER])
    assert [(s.action, s.items) for s in driver.decide(found, stopped, PINS).steps] == [
        ("enable", [driver.FABRIC_MANAGER])
    ]
    for name in ("rtx-4090-8", "no-driver"):
        assert "fabric_manager" not in actions(driver.decide(host(name, **BARE), state(packages=have), PINS))


def test_an_idle_fabric_manager_is_mended_before_the_plan():
    assert "Fabric Manager inactive" in driver.needed(host("nvswitch-802"), 580)
    assert driver.needed(host("nvswitch-8"), 580) == ""


def test_secure_boot_without_an_enrolled_key_stops_before_the_installation():
    decision = driver.decide(host("no-driver", secure_boot=True), state(mok_enrolled=False), PINS)
    assert decision.steps == []
    assert "mokutil --import" in decision.refusals[0].remedy


def test_secure_boot_wants_a_signed_module_for_the_running_and_the_next_kernel():
    found = host("not-loaded", secure_boot=True)
    signed, unsigned = driver.KernelModule("580.95.05", "Dual MIT/GPL", "DKMS"), driver.KernelModule("580.95.05")
    have = {"packages": packages("580.95.05"), "next_kernel": "6.8.0-90-generic"}
    both = state(**have, modules={KERNEL: signed, "6.8.0-90-generic": signed})
    assert driver.decide(found, both, PINS).refusals == []
    one = state(**have, modules={KERNEL: signed})
    assert [item.subject for item in driver.decide(found, one, PINS).refusals] == ["kernel 6.8.0-90-generic"]
    bad = state(**have, modules={KERNEL: unsigned, "6.8.0-90-generic": signed})
    assert "unsigned" in driver.decide(found, bad, PINS).refusals[0].found


def test_the_floor_is_the_releases_own():
    floors = {release.engine.minimum_driver for release in flags.RELEASES.values() if release.profile == "gpu"}
    assert floors == {PINS.driver.floor}
    assert PINS.driver.branch >= PINS.driver.floor


def test_every_distribution_has_packages_and_a_repository():
    assert set(PINS.packages) == set(PINS.repositories)
    for name, place in PINS.repositories.items():
        assert place.fingerprint is None or len(place.fingerprint) == 40
        assert place.fingerprint is None or place.fingerprint.endswith(place.key.split(".")[0].upper()), name


def test_a_repository_without_a_confirmed_fingerprint_is_refused_until_one_is_given():
    with pytest.raises(driver.DriverRefused, match="gpu_host_key_fingerprint"):
        driver.repository(PINS, "rhel10")
    given = driver.repository(PINS, "rhel10", "http://mirror/rhel10", "", "ab" * 20)
    assert given == ("http://mirror/rhel10/", "http://mirror/rhel10/CDF6BA43.pub", "AB" * 20)


def test_decisions_pass_through_the_filters():
    filters = runpy.run_path(str(ROOT / "filter_plugins/pd_host.py"))["FilterModule"]().filters()
    pins = yaml.safe_load((ROOT / "releases/cuda-13.0/host.yml").read_text())
    found = codec.dump(host("no-driver", **BARE))
    taken = filters["pd_driver_decision"](found, codec.dump(state()), pins)
    assert taken["actions"]["install"][-1] == "nvidia-open-580"
    assert taken["lines"][-1].startswith("reboot: nouveau")
    installed = codec.dump(state(packages=packages("580.95.05")))
    after = filters["pd_driver_after"](found, installed, taken, pins)
    assert after["version"] == "580.95.05"
    assert after["actions"]["hold"] == sorted(packages("580.95.05"))
    hostvars = {"a": {"pd_gpu": {"facts": found}}, "b": {"pd_gpu": {"facts": codec.dump(host("busy"))}}}
    assert filters["pd_undriven"](["a", "b"], hostvars, pins) == {"a": "no driver (no driver library)"}
