#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Compare hosts with what they were deployed for. The work is in action_plugins/pd_drift.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_drift
short_description: Say what of the hosts has changed that no role can put right
description:
  - Makes the plan as M(pd_plan) does. Where it is refused, such as for a GPU that is gone, the refusal is drift, and
    the plan in force is what the hosts are compared with.
  - Compares GPUs, driver and NUMA nodes with what the last deployment recorded, and names processes of others on our
    ports and GPUs. A deployment stops those that C(pd_stop_foreign) names; the rest is for a person.
  - Runs on the controller, opens no connection and changes nothing.
version_added: "0.1.0"
options:
  facts:
    description: The facts document of each host, by host.
    type: dict
    required: true
  previous:
    description: The plan in force on each host, empty for a host without one.
    type: dict
    required: true
  baselines:
    description: The hardware that the last deployment recorded on each host, empty for a host without it.
    type: dict
    required: true
attributes:
  check_mode:
    description: Changes nothing in either mode.
    support: full
  diff_mode:
    description: Changes nothing, so there is nothing to show.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Compare with what was deployed
  pd_drift:
    facts: "{{ ansible_play_hosts | pd_facts_of(hostvars) }}"
    previous: {}
    baselines: {}
"""

RETURN = r"""
drift:
  description: What differs, each with host, kind, item, found, why and repair.
  returned: success
  type: list
  elements: dict
plan:
  description: The plan that the hosts are compared with.
  returned: success
  type: dict
report:
  description: That plan for people.
  returned: success
  type: str
"""
