#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Let an engine write a Torch profiler trace of some steps."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_profile
short_description: Let an engine write a Torch profiler trace of some steps
description:
  - Waits until the engine has requests under way, asks its C(/start_profile) for so many steps, and waits until every
    rank has written its trace. Somebody must send load meanwhile, such as M(pd_benchmark).
  - The traces lie in a folder of their own below O(folder), which the engine's unit must be allowed to write.
version_added: "0.2.0"
options:
  target:
    description: The engine, as the filter P(pd_service_engine_targets#filter) gives it. Keys are read from its files.
    type: dict
    required: true
  ranks:
    description: Traces to wait for, one for each tensor-parallel rank.
    type: int
    default: 1
  steps:
    description: Forward steps to record.
    type: int
    default: 5
  folder:
    description: Folder on the host, below one that the engine may write.
    type: path
    default: /var/lib/pdstack/jit/profiles
  owner:
    description: The user that the engine runs as.
    type: str
    default: pdstack
  shapes:
    description: Record the shapes of operators, from which products' bytes are known where no CUDA graph runs them.
    type: bool
    default: true
  timeout:
    description: Seconds to wait for load, and then for the traces.
    type: int
    default: 180
attributes:
  check_mode:
    description: Asks nothing of the engine and returns no file.
    support: partial
  diff_mode:
    description: Traces are new files.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Record five steps of the decode engine
  pd_profile:
    target: "{{ plan | pd_service_engine_targets(inventory_hostname) | first }}"
    ranks: 4
"""

RETURN = r"""
folder:
  description: The folder with the traces, to be removed by whoever has fetched them.
  returned: success
  type: str
files:
  description: The traces, one for each rank.
  returned: success
  type: list
"""

import os
import pwd
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import http
from ansible.module_utils.pdstack.bench import profile


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "target": {"type": "dict", "required": True},
            "ranks": {"type": "int", "default": 1},
            "steps": {"type": "int", "default": 5},
            "folder": {"type": "path", "default": "/var/lib/pdstack/jit/profiles"},
            "owner": {"type": "str", "default": "pdstack"},
            "shapes": {"type": "bool", "default": True},
            "timeout": {"type": "int", "default": 180},
        },
        supports_check_mode=True,
    )
    given = module.params
    if module.check_mode:
        module.exit_json(changed=False, folder="", files=[])
    target = given["target"]
    folder = os.path.join(given["folder"], time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + target["name"])
    try:
        user = pwd.getpwnam(given["owner"])
        for path in (given["folder"], folder):
            os.makedirs(path, mode=0o700, exist_ok=True)
            os.chown(path, user.pw_uid, user.pw_gid)
    except (KeyError, OSError) as error:
        module.fail_json(msg=f"{folder} cannot be made for {given['owner']}: {error}")
    access = http.Access(target.get("admin_key_file", ""), target.get("ca_file", ""))
    job = profile.Job(target["base"], folder, given["steps"], given["ranks"], given["shapes"], given["timeout"])
    try:
        files = profile.record(
            job, lambda method, url, body: http.request(method, url, body, 60.0, access), time.monotonic, time.sleep
        )
    except profile.ProfileError as error:
        module.fail_json(msg=f"{target['name']}: {error}")
    module.exit_json(changed=True, folder=folder, files=files)


if __name__ == "__main__":
    main()
