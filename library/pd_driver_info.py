#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Report what of the NVIDIA driver lies on a host's disk."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_driver_info
short_description: Report the NVIDIA driver's packages, holds, kernel modules and units
description:
  - Reads the package database, C(modinfo) for the running and the newest kernel, C(mokutil) and systemd's unit files.
  - Changes nothing and judges nothing; the filter C(pd_driver_decision) does, together with M(pd_gpu_info)'s facts.
version_added: "0.1.0"
options:
  kernel:
    description: The running kernel. Without it, that of C(uname).
    type: str
attributes:
  check_mode:
    description: Reads only, so it does the same with and without check mode.
    support: full
  diff_mode:
    description: Changes nothing, so there is nothing to show.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Look at the driver's packages
  pd_driver_info:
  register: driver
"""

RETURN = r"""
state:
  description: The state, of the type C(HostState) in C(module_utils/pdstack/driver.py).
  returned: always
  type: dict
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, driver_state, runner


def main() -> None:
    module = AnsibleModule(argument_spec={"kernel": {"type": "str"}}, supports_check_mode=True)
    kernel = module.params["kernel"] or os.uname().release
    module.exit_json(changed=False, state=codec.dump(driver_state.observe(runner.run, kernel)))


if __name__ == "__main__":
    main()
