#!/usr/bin/python
"""Documentation of the action plugin pd_validate, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_validate
short_description: Check all variables of the inventory before any connection
description:
  - Reads the variables of every host in the groups C(gpu_hosts) and C(router_hosts), whatever part of the inventory the
    play covers, and refuses unknown names (with the nearest known one), wrong types, values out of range, missing
    values, empty groups, and values that contradict each other, all of them in one message.
  - Before that, refuses files of group_vars and host_vars that Ansible leaves out in silence, since a folder or a file
    of the same name lies beside them.
  - Runs on the controller and contacts no host.
author:
  - pdstack contributors (@pdstack)
options:
  only:
    description:
      - Variables to judge alone, beside the names of all others. For playbooks that must work whatever the rest of the
        inventory is like. Empty judges all.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Nothing is ever changed.
  diff_mode:
    support: none
    description: There is nothing to compare.
"""

EXAMPLES = r"""
- name: Check the inventory
  hosts: gpu_hosts:router_hosts
  gather_facts: false
  tasks:
    - name: Refuse a wrong inventory before any connection
      pd_validate:
"""

RETURN = r"""
msg:
  description: What is asked for in one line; on failure everything that is wrong, with the remedy.
  type: str
  returned: always
intent:
  description: The settings with defaults filled in and the release resolved, without the security settings.
  type: dict
  returned: success, with an empty O(only)
"""

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    """Say that the work is the action plugin's: this file is reached only without action_plugins set."""
    spec = {"only": {"type": "list", "elements": "str", "default": []}}
    module = AnsibleModule(argument_spec=spec, supports_check_mode=True)
    module.fail_json(msg="pd_validate runs on the controller: run it with the bundle's ansible.cfg (action_plugins)")


if __name__ == "__main__":
    main()
