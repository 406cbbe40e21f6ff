#!/usr/bin/python
"""Ansible door to the fabric probe: how a host's GPUs reach each other, claimed and, when asked, measured."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: pd_fabric_info
short_description: Report P2P, NVLink and the cuMemCreate probe of a host's GPUs
description:
  - Returns the P2P matrices that the driver claims, the link types, and each step of the cuMemCreate probe with
    its return code in words. One step that fails says nothing about the others.
  - Never creates a multicast object (it asks for the granularity only) and never uses managed memory.
  - With O(measure) copies real data between all GPUs and compares every byte, each pair alone and all pairs
    between two sets at once. That loads the GPUs and the links for some seconds, and changes nothing on the host.
options:
  measure:
    description:
      - Measure. Refused on a GPU that is in use, and where an IOMMU translates and ACS request redirect is on.
      - A refusal is reported in C(facts.p2p.note), it does not fail the task.
    type: bool
    default: false
  force:
    description: Measure in spite of IOMMU and ACS. Copies can then hang the machine. A busy GPU is still refused.
    type: bool
    default: false
  measure_timeout:
    description: Seconds for the measurement, after which it is abandoned and reported.
    type: float
    default: 120.0
  baseline:
    description:
      - File on the host with an earlier RV(baseline), to compare with. A flow that lost more than a tenth is
        reported in C(facts.p2p.regressions).
      - The module reads this file and never writes it. A play keeps RV(baseline) with M(ansible.builtin.copy).
    type: path
  sysfs_root:
    description: As in M(pd_gpu_info).
    type: path
    default: /
  driver_library:
    description: As in M(pd_gpu_info).
    type: path
  timeout:
    description: Seconds for each driver library, after which it is reported as wedged.
    type: float
    default: 60.0
attributes:
  check_mode:
    support: full
    description: Changes nothing. A measurement that is asked for runs in check mode too.
  diff_mode:
    support: none
    description: Changes nothing, there is nothing to compare.
  idempotent:
    support: partial
    description: The host is left as it was. Measured figures vary from run to run.
author:
  - pdstack
"""

EXAMPLES = r"""
- name: Read what the driver claims
  pd_fabric_info:
  register: fabric_info

- name: Measure peer-to-peer on idle GPUs
  pd_fabric_info:
    measure: true
    baseline: /var/lib/pdstack/baseline/p2p.json
  register: fabric_info
"""

RETURN = r"""
facts:
  description: Partial facts document with the sections p2p and fabric, by position in the host's list of GPUs.
  returned: always
  type: dict
  sample:
    host: gpu1
    schema: 1
    p2p: {claimed: [[null, true], [true, null]], link_type: [[X, PIX], [PIX, X]], data_ok: null}
gpus:
  description: PCI ids of the positions.
  returned: always
  type: list
  elements: str
  sample: ["0000:06:00.0", "0000:07:00.0"]
baseline:
  description: What to keep of a measurement for later comparison, V(null) where none succeeded with right data.
  returned: always
  type: dict
kept:
  description:
    - What to keep of a measurement for M(pd_gpu_info), so that plans and profiles go by it, good or bad. V(null) where
      none was begun.
  returned: always
  type: dict
"""

from datetime import datetime, timezone

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, p2p, probe


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "measure": {"type": "bool", "default": False},
            "force": {"type": "bool", "default": False},
            "measure_timeout": {"type": "float", "default": 120.0},
            "baseline": {"type": "path"},
            "sysfs_root": {"type": "path", "default": "/"},
            "driver_library": {"type": "path"},
            "timeout": {"type": "float", "default": 60.0},
        },
        supports_check_mode=True,
    )
    given = module.params
    for name in ("timeout", "measure_timeout"):
        if given[name] <= 0:
            module.fail_json(msg=f"{name}: found {given[name]:g}, needed a positive number of seconds.")
    request = probe.Request(root=given["sysfs_root"], library=given["driver_library"] or None, timeout=given["timeout"])
    try:
        before = p2p.read_baseline(given["baseline"]) if given["baseline"] else None
    except ValueError as error:
        module.fail_json(msg=str(error))
    try:
        facts = probe.probe(request)
    except ValueError as error:
        module.fail_json(msg=f"{probe.SIMULATED_ANSWERS} or a file below {request.root} cannot be read: {error}")
    if given["measure"]:
        when = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        facts = probe.with_measurement(facts, request, given["force"], given["measure_timeout"], when, before)
    keep, last = p2p.baseline(facts), p2p.kept(facts)
    module.exit_json(
        changed=False,
        facts=probe.partial(facts, "fabric"),
        gpus=[gpu.pci for gpu in facts.gpus],
        baseline=None if keep is None else codec.dump(keep),
        kept=None if last is None else codec.dump(last),
    )


if __name__ == "__main__":
    main()
