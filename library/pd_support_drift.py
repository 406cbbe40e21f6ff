#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Look for drift as this run was called. The work is in action_plugins/pd_support_drift.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_support_drift
short_description: Run drift.yml with the inventory and the variables of this run
description:
  - A run of its own, since C(drift.yml) ends with an exit code of its own. It gets this run's inventories, extra
    variables, vault passwords' files and connection options; passwords that were typed in cannot be passed on.
  - The variables go through a file in memory (C(/dev/shm)) that its owner alone may read, and that is removed
    afterwards.
  - Runs once for all hosts, on the controller.
version_added: "0.1.0"
options:
  playbook:
    description: The path of C(drift.yml).
    type: path
    required: true
attributes:
  check_mode:
    description: Looks only, in either mode.
    support: full
  diff_mode:
    description: Changes nothing, so there is nothing to show.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Look for drift
  pd_support_drift:
    playbook: "{{ playbook_dir }}/drift.yml"
"""

RETURN = r"""
rc:
  description: How the look ended (0 none, 2 drift, 1 error).
  returned: always
  type: int
stdout:
  description: The report as JSON.
  returned: always
  type: str
stderr:
  description: What was said beside it.
  returned: always
  type: str
"""
