#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Keep systemd units enabled, running and running what their files say."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_units
short_description: Keep systemd units enabled, running, and running what their files say
description:
  - Enables and starts the units that are named, stops and disables those that match O(owned) and are not named.
  - Restarts a unit whose process started before one of its files last changed, and with it the other units of
    its set, since the two sides of a prefill-decode pair must agree. That rule also finishes the work of a run
    that was interrupted between writing a file and restarting.
  - Nothing else restarts.
version_added: "0.1.0"
options:
  units:
    description: The units that should run.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: The unit's full name.
        type: str
        required: true
      set:
        description: Units with the same set restart together. Empty for a unit of its own.
        type: str
        default: ""
      files:
        description:
          - Files, or globs of them, whose change makes the running process stale. A link counts by its own time.
        type: list
        elements: str
        default: []
      checkpoint:
        description:
          - The folder of M(pd_checkpoint) that the process loads. One that started after a file of it was last proven,
            and before that file was repaired, is stale.
        type: str
        default: ""
  owned:
    description: Patterns of units that belong to the declared set alone, as C(systemctl list-units) takes them.
    type: list
    elements: str
    default: []
  changed_files:
    description: Files that this run has written already. They make their units stale whatever the clock says.
    type: list
    elements: str
    default: []
  stale_sets:
    description: Sets that must restart because a member on another host does.
    type: list
    elements: str
    default: []
  sets:
    description:
      - Leave the units of all other sets as they are. Units without a set, and those that left the plan, are acted on.
      - All sets when it is not given.
    type: list
    elements: str
  marks:
    description: The folder in which M(pd_service_wait) keeps which processes were ready.
    type: path
    default: /run/pdstack/ready
  live:
    description:
      - What the plan says of the units' processes. A process that differs from its unit or from the plan is stale, such
        as one that somebody moved to other CPUs.
    type: list
    elements: dict
    default: []
    suboptions:
      unit:
        description: The unit's full name.
        type: str
        required: true
      cpus:
        description: CPUs of every process of the unit, as a kernel list. Empty compares nothing.
        type: str
        default: ""
      memory_nodes:
        description: Nodes that their memory is bound to, as a kernel list. Empty compares nothing.
        type: str
        default: ""
      env:
        description: Environment that the main process must have.
        type: dict
        default: {}
  observe:
    description: Only report what would be done, without counting it as a change.
    type: bool
    default: false
attributes:
  check_mode:
    description: Reports what would be done. Files that this run would have written count through O(changed_files).
    support: full
  diff_mode:
    description: Shows each unit's action and its reason.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Run the pair
  pd_units:
    units:
      - name: pd-prefill@0.service
        set: pair-0
        files: [/etc/systemd/system/pd-prefill@.service, /etc/pdstack/instances/prefill-0.yaml]
      - name: pd-decode@0.service
        set: pair-0
        files: [/etc/systemd/system/pd-decode@.service, /etc/pdstack/instances/decode-0.yaml]
    owned: ["pd-prefill@*.service", "pd-decode@*.service"]
"""

RETURN = r"""
declared:
  description: The units that were compared.
  returned: always
  type: list
  elements: str
actions:
  description: The units by verb (reload, enable, disable, stop, start, restart).
  returned: always
  type: dict
never_ready:
  description: Units whose present process M(pd_service_wait) has not seen ready yet.
  returned: always
  type: list
  elements: str
pending:
  description: Whether there is anything to do.
  returned: always
  type: bool
reasons:
  description: Why each of those units is acted on.
  returned: always
  type: dict
stale_sets:
  description: The sets of which a member is stale on this host.
  returned: always
  type: list
  elements: str
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, live, runner, units, waiter

UNIT_FOLDERS = ("/etc/systemd/", "/run/systemd/")


def patient(argv):  # type: ignore[no-untyped-def]
    """Run systemctl as long as it takes: each unit's own TimeoutStopSec bounds it, and an operator may raise that."""
    return runner.run(argv, 7200.0)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "units": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "name": {"type": "str", "required": True},
                    "set": {"type": "str", "default": ""},
                    "files": {"type": "list", "elements": "str", "default": []},
                    "checkpoint": {"type": "str", "default": ""},
                },
            },
            "owned": {"type": "list", "elements": "str", "default": []},
            "changed_files": {"type": "list", "elements": "str", "default": []},
            "stale_sets": {"type": "list", "elements": "str", "default": []},
            "sets": {"type": "list", "elements": "str"},
            "marks": {"type": "path", "default": "/run/pdstack/ready"},
            "live": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "unit": {"type": "str", "required": True},
                    "cpus": {"type": "str", "default": ""},
                    "memory_nodes": {"type": "str", "default": ""},
                    "env": {"type": "dict", "default": {}},
                },
            },
            "observe": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    params = module.params
    wanted = [
        units.WantedUnit(item["name"], item["set"], tuple(item["files"]), item["checkpoint"])
        for item in params["units"]
    ]
    try:
        todo, stale_sets, states = observe(wanted, params)
    except runner.CommandFailed as error:
        module.fail_json(msg=str(error))
    try:
        if not (module.check_mode or params["observe"]):
            units.apply(todo, patient)
    except runner.CommandFailed as error:
        said = waiter.why_not_running([*todo.restart, *todo.start], runner.run)
        module.fail_json(msg="\n\n".join(filter(None, [str(error), said])))
    lines = ["systemctl daemon-reload\n"] if todo.reload else []
    for verb, names in todo.actions.items():
        lines += [f"{verb} {name}: {todo.why.get(name, '')}\n" for name in names] if verb != "reload" else []
    module.exit_json(
        changed=todo.changed and not params["observe"],
        declared=[unit.name for unit in wanted],
        actions=todo.actions,
        pending=todo.changed,
        never_ready=waiter.never_ready(states, params["marks"]),
        reasons=todo.why,
        stale_sets=stale_sets,
        diff={"before": "", "after": "".join(lines), "before_header": "units", "after_header": "units"},
    )


def observe(wanted, params):  # type: ignore[no-untyped-def]
    """Return the plan for these units, the sets that are stale here, and the units as they are."""
    strays = [name for name in units.known(runner.run, params["owned"]) if name not in {unit.name for unit in wanted}]
    states = units.show(runner.run, [unit.name for unit in wanted] + strays)
    offset = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    stale = {}
    intended = {item["unit"]: codec.load(live.Intended, item) for item in params["live"]}
    for unit in wanted:
        state = states[unit.name]
        reason = units.stale_reason(unit, state, params["changed_files"], offset)
        if not reason and state.active == "active" and state.main_pid and unit.name in intended:
            reason = live.reason(intended[unit.name], state.main_pid, state.command)
        if reason:
            stale[unit.name] = reason
    here = {unit.set for unit in wanted if unit.name in stale}
    for unit in wanted:
        if unit.set in params["stale_sets"] and unit.set not in here:
            stale[unit.name] = f"a member of {unit.set} on another host restarts"
    stale_sets = sorted({unit.set for unit in wanted if unit.name in stale and unit.set})
    chosen = [unit for unit in wanted if params["sets"] is None or not unit.set or unit.set in params["sets"]]
    todo = units.plan(chosen, states, stale, strays)
    todo.reload = todo.reload or any(path.startswith(UNIT_FOLDERS) for path in params["changed_files"])
    return todo, stale_sets, [states[unit.name] for unit in wanted]


if __name__ == "__main__":
    main()
