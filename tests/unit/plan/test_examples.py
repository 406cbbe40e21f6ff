"""The inventories to copy: what they say is valid, plans on the hosts they are for, and names no unknown variable."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import yaml
from pdstack import intent, inventory, plan, refusal, settings
from pdstack.facts import Nic
from unit.plan import inventories as inv
from unit.plan.recorded import recorded

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLES = ["example", "example-cluster"]


def variables(name: str) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Return the variables of each host and the groups, as ansible reads the folder."""
    done = subprocess.run(
        [pathlib.Path(sys.executable).with_name("ansible-inventory"), "-i", ROOT / "inventory" / name, "--list"],
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    found = json.loads(done.stdout)
    groups = {group: found[group]["hosts"] for group in ("gpu_hosts", "router_hosts")}
    return found["_meta"]["hostvars"], groups


def read(name: str, **changes: Any) -> intent.Intent:
    hosts, groups = variables(name)
    for host in hosts.values():
        host["pd_model"] = {**host["pd_model"], **changes}
    return intent.parse(hosts, groups, known_role_variables=(), role_prefixes=inventory.ROLE_PREFIXES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_commit_must_be_chosen(name: str) -> None:
    with pytest.raises(refusal.IntentError) as error:
        read(name)
    (item,) = error.value.refusals
    assert (item.subject, "placeholder" in item.found) == ("pd_model.revision", True)


def test_the_example_is_the_reference() -> None:
    facts = replace(recorded()["rtx-pro-6000-8"], host="gpu1")
    made = plan.plan(read("example", revision=inv.COMMIT), {"gpu1": facts})
    assert [(i.name, [g.position for g in i.gpus], i.numa_nodes) for i in made.instances] == [
        ("decode-0", [4, 5, 6, 7], [1]),
        ("prefill-0", [0, 1, 2, 3], [0]),
    ]


def test_the_cluster_spreads_two_groups_over_three_hosts() -> None:
    facts = replace(recorded()["rtx-pro-6000-8"], nics=[Nic("ib0", up=True, rdma="mlx5_0")])
    wanted = read("example-cluster", revision=inv.COMMIT)
    names = [host.name for host in (*wanted.gpu_hosts, *wanted.router_hosts)]
    made = plan.plan(wanted, {name: replace(facts, host=name) for name in names})
    assert sorted((i.set, i.role) for i in made.instances) == [
        (f"group-{g}", role) for g in (0, 1) for role in ("decode", "prefill", "prefill")
    ]
    assert not [note for note in made.notes if "idle" in note]
    (router,) = made.routers
    assert (router.address, len(router.workers["prefill"]), len(router.workers["decode"])) == ("10.0.0.10", 4, 2)
    with pytest.raises(refusal.PlanRefused) as error:
        plan.plan(wanted, {name: replace(facts, host=name, nics=[]) for name in names})
    assert "RDMA" in error.value.refusals[0].needed


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_commented_out_is_known_and_valid(name: str) -> None:
    """A reader takes the # away: then it must still be YAML and only known variables."""
    text = (ROOT / "inventory" / name / "group_vars/all.yml").read_text()
    offered = re.findall(r"^# (pd_\w+):", text, re.MULTILINE)
    assert offered
    assert set(offered) <= set(settings.variable_names())
    for block in re.findall(r"^# (pd_\w+:.*(?:\n#   .*)*)", text, re.MULTILINE):
        lines = [line.removeprefix("# ") for line in block.splitlines()]
        data = yaml.safe_load("\n".join(lines).replace("{{ vault_pd_api_key }}", "key"))
        inv.read("gpu1", **data)
