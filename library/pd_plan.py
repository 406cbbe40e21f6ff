#!/usr/bin/python
"""Documentation of the action plugin pd_plan, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_plan
short_description: Make the plan of the whole inventory from its variables and the probes' facts
description:
  - Decides which instance runs on which host, GPUs, CPUs and ports, with which arguments and environment, and gives the
    reason of each decision.
  - Refuses what cannot work, with what was found, what is needed, and what would allow it.
  - Runs on the controller and contacts no host. Deterministic; with O(previous) a re-run keeps GPUs and ports.
author:
  - pdstack contributors (@pdstack)
options:
  facts:
    description:
      - Maps every host of the group C(gpu_hosts), and router hosts where known, to its facts.
      - A host's value is one facts document or a list of partial ones, of which the later wins key by key.
    type: dict
    required: true
  previous:
    description:
      - The plan in force, as a document, as the path of a JSON file on the controller, or as a mapping of hosts to the
        document that each of them has.
      - A file that does not exist, an empty value, or a plan of another schema counts as none.
    type: raw
  release:
    description: Plan with this release whatever C(pd_release) says; what a rollback goes back to.
    type: str
    default: ""
  check_use:
    description: Refuse planned ports and GPUs that the facts show in use by processes that are not ours.
    type: bool
    default: true
  variables:
    description: Variables that win over the inventory's, such as C(pd_topology) of a candidate that is only measured.
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Nothing is ever changed; RV(plan) is the same with and without check mode.
  diff_mode:
    support: full
    description: Shows the plan against O(previous).
"""

EXAMPLES = r"""
- name: Make the plan
  pd_plan:
    facts: "{{ dict(groups['gpu_hosts'] | zip(groups['gpu_hosts'] | map('extract', hostvars, 'pd_facts'))) }}"
    previous: /srv/pdstack/plan.json
  register: pd_planned

- name: Show what runs where and why
  ansible.builtin.debug:
    msg: "{{ pd_planned.report }}"
"""

RETURN = r"""
plan:
  description: The plan document, as written to C(/etc/pdstack/plan.json).
  type: dict
  returned: success
foreign:
  description: By host, the processes that hold planned ports and that C(pd_stop_foreign) names.
  returned: always
  type: dict
report:
  description: A table of what runs where, the reasons and the notes.
  type: str
  returned: success
msg:
  description: The report; on failure everything that forbids the plan, with the remedy.
  type: str
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    """Say that the work is the action plugin's: this file is reached only without action_plugins set."""
    module = AnsibleModule(
        argument_spec={
            "facts": {"type": "dict", "required": True},
            "previous": {"type": "raw"},
            "release": {"type": "str", "default": ""},
            "check_use": {"type": "bool", "default": True},
            "variables": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    module.fail_json(msg="pd_plan runs on the controller: run it with the bundle's ansible.cfg (action_plugins)")


if __name__ == "__main__":
    main()
