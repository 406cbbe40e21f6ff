# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Doors from templates to the pure package: each filter is one function of module_utils/pdstack."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Mapping

from ansible.module_utils.pdstack import (
    codec,
    drift,
    facts,
    firewall,
    inventory,
    nixl,
    plan,
    plan_types,
    report,
    rollback,
    rolling,
    service,
    support,
    warm_up,
)


def facts_of(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the facts document of each host, from what playbooks/tasks/plan.yml and probe.yml have registered.

    What probe.yml has measured counts before the last measurement, which pd_gpu holds.
    """
    found = {}
    for host in hosts:
        parts = [dict(hostvars[host][name]["facts"], host=host) for name in ("pd_gpu", "pd_host")]
        measured = hostvars[host].get("pd_fabric", {}).get("facts")
        if measured and measured["p2p"]["measured_at"]:
            parts.append(dict(measured, host=host))
        found[host] = codec.dump(facts.merge(parts))
    return found


def plan_in_force(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the plan that is deployed, on hosts beyond these too; {} where none has one that can be read."""
    looks = {host: hostvars[host].get("pd_host", {}).get("plan") for host in hosts}
    found = plan.everywhere(inventory.builtin(looks))
    return codec.dump(found) if found else {}


def hardware(document: Mapping[str, Any]) -> Dict[str, Any]:
    """Return what of a host's facts is its hardware, to be recorded at a deployment."""
    return drift.hardware_of(facts.merge([inventory.builtin(document)]))


def addresses_of(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> Dict[str, str]:
    """Return the address of each host on the service network, as its peers reach it."""
    return {host: str(hostvars[host].get("pd_service_address") or hostvars[host]["ansible_host"]) for host in hosts}


def table(plan: Mapping[str, Any], readiness: Iterable[Mapping[str, Any]]) -> str:
    """Return what runs where, with each instance's state and its time to ready."""
    states = {}
    for item in readiness:
        seconds = item["seconds"]
        states[item["name"]] = {
            "state": "ready" if item["ready"] else item["state"],
            "time to ready": "-" if seconds is None else f"{seconds:.1f} s",
        }
    return report.plan_table(codec.load(plan_types.Plan, plan), states)


def nixl_pairs(plan: Mapping[str, Any], host: str, document: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """Return the transfers that prove the transport of a host, as pd_nixl_check takes them."""
    found: List[Dict[str, Any]] = codec.dump(nixl.pairs(plan, host, facts.merge([inventory.builtin(document)])))
    return found


def architectures_of(plan: Mapping[str, Any], host: str, document: Mapping[str, Any]) -> List[str]:
    """Return the compute capabilities of the GPUs that serve on a host, each once; none in the cpu profile."""
    return warm_up.architectures(plan, host, facts.merge([inventory.builtin(document)]))


def way_back(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the release to go back to and its id on each host, from what pd_release has said of them."""
    states = {host: {key: hostvars[host]["pd_releases"][key] for key in ("current", "previous")} for host in hosts}
    try:
        found: Dict[str, Any] = codec.dump(rollback.way_back(states))
    except rollback.NoWayBack as error:
        return {"release": "", "ids": {}, "words": str(error)}
    return {**found, "words": rollback.table(states)}


def switched(hosts: Iterable[str], hostvars: Mapping[str, Any], serves: bool = False) -> Dict[str, Any]:
    """Return the way back to what was proven last, in words too; empty where there is none, as after no change.

    With ``serves`` the run has begun to restart what serves.
    """
    states = {}
    for host in hosts:
        looked, venv = hostvars[host].get("pd_host", {}), hostvars[host].get("sglang_runtime_switched", {})
        found = looked.get("current_release", "")
        now = venv["id"] if venv.get("changed") else found
        states[host] = rollback.HostState(looked.get("plan", {}), looked.get("proven", {}), found, now)
    # checkpoint.yml alone makes no plan
    planned = hostvars[next(iter(states))].get("pd_planned", {}).get("plan", {}) if states else {}
    way = rollback.switched(states, planned, serves)
    return {**codec.dump(way), **rollback.words(way, planned)} if way else {}


def failures(hosts: Iterable[str], hostvars: Mapping[str, Any]) -> str:
    """Return what failed on which host, from the results that a rescue sees."""
    found = {host: hostvars[host].get("ansible_failed_result") for host in hosts}
    return "\n".join(f"{host}: {result.get('msg', result)}" for host, result in found.items() if result)


def step_failures(
    hosts: Iterable[str], hostvars: Mapping[str, Any], steps: Iterable[Mapping[str, str]]
) -> Dict[str, Dict[str, str]]:
    """Return which of a playbook's steps failed on each host, and why; {} for a host where all went well.

    A step has its ``name``, the name of the variable that its ``result`` is registered as, and what it ``returns``
    where it went well.
    """
    known = list(steps)
    signs = {step["name"]: step["returns"] for step in known}
    return {
        host: support.failures({step["name"]: hostvars[host].get(step["result"]) for step in known}, signs)
        for host in hosts
    }


class FilterModule:
    """The filters that the roles use."""

    def filters(self) -> Dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "pd_firewall_ruleset": firewall.ruleset,
            "pd_firewall_wanted": firewall.wanted,
            "pd_addresses_of": addresses_of,
            "pd_architectures_of": architectures_of,
            "pd_facts_of": facts_of,
            "pd_hardware": hardware,
            "pd_instances_of": service.instances_of,
            "pd_plan_in_force": plan_in_force,
            "pd_nixl_pairs": nixl_pairs,
            "pd_routers_of": service.routers_of,
            "pd_credential_names": service.credential_names,
            "pd_service_batches": rolling.batches,
            "pd_service_credentials": service.credentials,
            "pd_service_engine_targets": service.engine_targets,
            "pd_service_files": service.files,
            "pd_service_live": service.live,
            "pd_service_outage": rolling.outage,
            "pd_service_probes": service.probes,
            "pd_service_router_lag": service.router_lag_s,
            "pd_service_router_probes": service.router_probes,
            "pd_service_router_workers": service.router_workers,
            "pd_service_router_targets": service.router_targets,
            "pd_service_selection": rolling.selection,
            "pd_service_targets": service.targets,
            "pd_step_failures": step_failures,
            "pd_table": table,
            "pd_service_units": service.units,
            "pd_failures": failures,
            "pd_proven": rollback.record,
            "pd_switched": switched,
            "pd_way_back": way_back,
        }
