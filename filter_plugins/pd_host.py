# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Doors from the host roles to the pure package: each filter is one function of driver.py."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Mapping

from ansible.errors import AnsibleFilterError
from ansible.module_utils.pdstack import codec, driver, facts, inventory, refusal


def _facts(document: Any) -> facts.HostFacts:
    return facts.merge([inventory.builtin(document)])


def _state(document: Any) -> driver.HostState:
    return codec.load(driver.HostState, inventory.builtin(document))


def _pins(document: Any) -> driver.Pins:
    return codec.load(driver.Pins, inventory.builtin(document), "host.yml")


def decision(found: Any, state: Any, pins: Any, install: bool = True) -> Dict[str, Any]:
    """Return what the driver needs, with ``lines`` to read, ``actions`` and, where it is refused, a ``message``."""
    result = driver.decide(_facts(found), _state(state), _pins(pins), install)
    return {
        **codec.dump(result),
        "lines": driver.lines(result),
        "actions": {step.action: list(step.items) for step in result.steps},
        "message": refusal.render(driver.DriverRefused.title, result.refusals) if result.refusals else "",
    }


def after(found: Any, state: Any, taken: Mapping[str, Any], pins: Any) -> Dict[str, Any]:
    """Return the driver's version once the steps were taken, what to hold and enable, and unsigned modules."""
    here, there = _facts(found), _state(state)
    name = driver.system_name(here.system.os_id, here.system.os_version)
    fields = {
        key: inventory.builtin(taken[key]) for key in ("branch", "version", "steps", "refusals", "reboot", "notes")
    }
    version = driver.driver_version(there, codec.load(driver.Decision, fields), _pins(pins), name)
    steps = driver.after(here, there, version)
    unsigned = driver.unsigned_modules(here, there) if taken["steps"] and version else []
    return {
        "version": version,
        "actions": {step.action: list(step.items) for step in steps},
        "message": refusal.render("The driver would not load", unsigned) if unsigned else "",
    }


def undriven(hosts: Iterable[str], hostvars: Mapping[str, Any], pins: Any) -> Dict[str, str]:
    """Return the hosts whose driver has to be mended before a plan can be made, each with the reason."""
    floor = _pins(pins).driver.floor
    reasons = {host: driver.needed(_facts(hostvars[host]["pd_gpu"]["facts"]), floor) for host in hosts}
    return {host: reason for host, reason in reasons.items() if reason}


def repository(found: Any, pins: Any, url: str = "", key_url: str = "", fingerprint: str = "") -> Dict[str, str]:
    """Return url, key_url and fingerprint of the vendor's repository for a host."""
    system = _facts(found).system
    try:
        values = driver.repository(
            _pins(pins), driver.system_name(system.os_id, system.os_version), url, key_url, fingerprint
        )
    except driver.DriverRefused as error:
        raise AnsibleFilterError(str(error)) from None
    return dict(zip(("url", "key_url", "fingerprint"), values))


def package_manager(found: Any) -> str:
    """Return apt or dnf."""
    return "apt" if _facts(found).system.os_id in ("debian", "ubuntu") else "dnf"


class FilterModule:
    """The filters that gpu_host and cuda_toolkit use."""

    def filters(self) -> Dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "pd_driver_after": after,
            "pd_driver_decision": decision,
            "pd_package_manager": package_manager,
            "pd_undriven": undriven,
            "pd_vendor_repository": repository,
        }
