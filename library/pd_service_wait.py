#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Wait until services answer, and explain when they do not."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_service_wait
short_description: Wait until services answer, and explain when they do not
description:
  - Polls each unit and its health address until all answer 200.
  - Fails at once when a unit has failed, is restarting over and over, or does not take this host's key, with the last
    lines of its journal and the likely cause.
  - A healthy engine is not yet a serving pair; M(pd_verify) proves that.
version_added: "0.1.0"
options:
  targets:
    description: What to wait for.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: The name in the report.
        type: str
        required: true
      unit:
        description: The systemd unit.
        type: str
        required: true
      url:
        description: An address that answers 200 once the service is up.
        type: str
        required: true
      alive_url:
        description: A cheaper address to ask of a process that was ready before.
        type: str
        default: ""
      base:
        description: Scheme, address and port; what other modules build on.
        type: str
        default: ""
      key_file:
        description: File on the host with the key to send. A key itself is never an argument.
        type: str
        default: ""
      admin_key_file:
        description: File on the host with the key of endpoints that change the server; not used here.
        type: str
        default: ""
      ca_file:
        description: File on the host with the one certificate that is trusted.
        type: str
        default: ""
  timeout:
    description: Seconds to wait at most. Loading 146 GB from a cold disk takes minutes.
    type: int
    default: 1800
  setting:
    description: The name of the variable that O(timeout) comes from. Whoever has waited in vain is told it.
    type: str
    default: ""
  slice:
    description:
      - Seconds after which to return what is so far, to be called again with RV(progress) as O(progress). The action
        plugin of the same name does so, and shows what each instance is doing. 0 waits to the end.
    type: int
    default: 0
  progress:
    description: What an earlier slice returned.
    type: dict
    default: {}
  marks:
    description: Folder that keeps how long each process took, for later reports. It vanishes at a reboot.
    type: path
    default: /run/pdstack/ready
attributes:
  check_mode:
    description: Looks once and does not wait, since nothing was started.
    support: partial
  diff_mode:
    description: Changes nothing, so there is nothing to show.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Wait for the decode server
  pd_service_wait:
    targets:
      - name: decode-0
        unit: pd-decode@0.service
        url: http://127.0.0.1:30100/health
"""

RETURN = r"""
instances:
  description: Per target its name, unit, whether it is ready, its state and its time to ready in seconds.
  returned: always
  type: list
  elements: dict
pending:
  description: Whether the wait goes on, since O(slice) ended before it.
  returned: always
  type: bool
waited:
  description: Seconds since the wait began.
  returned: always
  type: int
progress:
  description: For the next slice.
  returned: always
  type: dict
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, http, runner, waiter


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "targets": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "name": {"type": "str", "required": True},
                    "unit": {"type": "str", "required": True},
                    "url": {"type": "str", "required": True},
                    "alive_url": {"type": "str", "default": ""},
                    "base": {"type": "str", "default": ""},
                    "key_file": {"type": "str", "default": "", "no_log": False},
                    "admin_key_file": {"type": "str", "default": "", "no_log": False},
                    "ca_file": {"type": "str", "default": ""},
                },
            },
            "timeout": {"type": "int", "default": 1800},
            "setting": {"type": "str", "default": ""},
            "slice": {"type": "int", "default": 0},
            "progress": {"type": "dict", "default": {}},
            "marks": {"type": "path", "default": "/run/pdstack/ready"},
        },
        supports_check_mode=True,
    )
    targets = [codec.load(waiter.Target, dict(item)) for item in module.params["targets"]]
    progress = codec.load(waiter.Progress, dict(module.params["progress"]))
    try:
        results = waiter.wait(
            targets,
            runner.run,
            http.look,
            time.monotonic,
            time.sleep,
            0 if module.check_mode else module.params["timeout"],
            module.params["marks"],
            progress=progress,
            slice_s=module.params["slice"] or None,
            setting=module.params["setting"],
        )
    except runner.CommandFailed as error:
        module.fail_json(msg=str(error))
    instances = [codec.dump(result) for result in results]
    late = [result for result in results if not result.ready]
    pending = bool(late) and not any(result.detail for result in results)
    if late and not pending and not module.check_mode:
        module.fail_json(
            msg="\n\n".join(f"{item.name} ({item.unit}) is {item.state}.\n{item.detail}".rstrip() for item in late),
            instances=[dict(instance, detail="") for instance in instances],  # the message has it
        )
    waited = int(time.monotonic() - (progress.begin or time.monotonic()))
    module.exit_json(changed=False, instances=instances, pending=pending, waited=waited, progress=codec.dump(progress))


if __name__ == "__main__":
    main()
