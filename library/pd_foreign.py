#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Stop named processes of a former deployment that hold our ports."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_foreign
short_description: Stop named processes of a former deployment that hold our ports
description:
  - Looks again at who listens, and stops only what is the same process as it was when the plan was made.
  - A systemd service is stopped and disabled, any other process gets SIGTERM and later SIGKILL.
version_added: "0.1.0"
options:
  holders:
    description: The processes, as M(pd_plan) returns them in RV(pd_plan#module:foreign) for this host.
    type: list
    elements: dict
    required: true
  timeout:
    description: Seconds until they must have let go of their ports.
    type: int
    default: 60
attributes:
  check_mode:
    description: Lists what would be stopped.
    support: full
  diff_mode:
    description: Shows each process with pid, command, unit and since when.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Stop what the operator has named
  pd_foreign:
    holders: "{{ pd_planned.foreign[inventory_hostname] | default([]) }}"
"""

RETURN = r"""
holders:
  description: The processes in words, before they were stopped.
  returned: always
  type: list
  elements: str
done:
  description: What was done, a line each.
  returned: always
  type: list
  elements: str
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, facts, foreign, ports, runner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "holders": {"type": "list", "elements": "dict", "required": True},
            "timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    named = [codec.load(facts.Port, item) for item in module.params["holders"]]
    holders = foreign.still_there(named, ports.listening())
    told, done = [foreign.words(holder) for holder in holders], []
    try:
        if holders and not module.check_mode:
            done = foreign.stop(
                holders, runner.run, ports.listening, time.monotonic, time.sleep, timeout_s=module.params["timeout"]
            )
    except (runner.CommandFailed, TimeoutError, PermissionError) as error:
        module.fail_json(
            msg=f"{error}; needed: that it lets go of the port; do: stop it by hand, then run again", holders=told
        )
    module.exit_json(
        changed=bool(holders),
        holders=told,
        done=done,
        diff={
            "before": "".join(f"{line}\n" for line in told),
            "after": "",
            "before_header": "processes that hold our ports",
            "after_header": "after pd_stop_foreign",
        },
    )


if __name__ == "__main__":
    main()
