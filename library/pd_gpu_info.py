#!/usr/bin/python
"""Ansible door to the probe: GPUs, NUMA, driver, and by default P2P and fabric, of one host."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: pd_gpu_info
short_description: Report a host's GPUs, NUMA nodes, driver, P2P and fabric state
description:
  - Reads the kernel (sysfs, procfs) and asks the NVIDIA driver's two libraries, joined by PCI id.
  - Each driver library is asked in a child process with a deadline, so a wedged driver is a result
    (C(facts.driver.state) is V(wedged)) and never hangs the play.
  - Changes nothing, needs nothing installed, and never makes a CUDA context, a multicast object or managed memory.
  - A host without a driver or without GPUs is reported, not failed. Judgement is the planner's.
options:
  fabric:
    description:
      - Also return the P2P matrices and each step of the cuMemCreate probe, as M(pd_fabric_info) does.
      - So one task fills everything that the planner reads.
    type: bool
    default: true
  sysfs_root:
    description:
      - Filesystem root that holds C(sys/) and C(proc/). Anything other than V(/) is reported as simulated.
      - Without O(driver_library) the driver's answers of such a root are replayed from its C(pdstack-simulated.json).
    type: path
    default: /
  driver_library:
    description:
      - Folder that holds C(libcuda.so.1) and C(libnvidia-ml.so.1), or one of the two files.
      - Empty means the system's own. A given one is reported as simulated.
    type: path
  measured:
    description:
      - File on the host with the last measurement of P2P (C(kept) of M(pd_fabric_info)), which
        C(playbooks/probe.yml) writes.
      - Its figures are among the facts while GPUs, driver, IOMMU and bridges are the same.
    type: path
    default: /var/lib/pdstack/baseline/p2p-last.json
  timeout:
    description:
      - Seconds for each driver library, after which it is reported as wedged.
      - Generous, since a driver without persistence initialises each GPU anew, which takes seconds.
    type: float
    default: 60.0
attributes:
  check_mode:
    support: full
    description: Reads only.
  diff_mode:
    support: none
    description: Reads only, there is nothing to compare.
  idempotent:
    support: full
    description: Reads only.
author:
  - pdstack
"""

EXAMPLES = r"""
- name: Probe the host
  pd_gpu_info:
  register: gpu_info

- name: Probe a simulated host
  pd_gpu_info:
    sysfs_root: /opt/pdstack-lab
  register: gpu_info
"""

RETURN = r"""
facts:
  description:
    - Partial facts document with the sections system, numa, gpus, driver, nics, and with O(fabric) p2p and fabric.
    - Its types are in module_utils/pdstack/facts.py. V(null) means not known.
  returned: always
  type: dict
  sample:
    host: gpu1
    schema: 1
    simulated: false
    gpus:
      - pci: "0000:06:00.0"
        index: 0
        name: NVIDIA RTX PRO 6000 Blackwell Server Edition
        compute_capability: "12.0"
        numa_node: 0
        numa_source: sysfs
    driver: {state: ok, loaded_version: 595.58.03}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, p2p, probe


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "fabric": {"type": "bool", "default": True},
            "sysfs_root": {"type": "path", "default": "/"},
            "driver_library": {"type": "path"},
            "measured": {"type": "path", "default": "/var/lib/pdstack/baseline/p2p-last.json"},
            "timeout": {"type": "float", "default": 60.0},
        },
        supports_check_mode=True,
    )
    given = module.params
    request = probe.Request(
        root=given["sysfs_root"],
        library=given["driver_library"] or None,
        timeout=given["timeout"],
        fabric=given["fabric"],
    )
    if request.timeout <= 0:
        module.fail_json(msg=f"timeout: found {request.timeout:g}, needed a positive number of seconds.")
    try:
        facts = probe.probe(request)
        if request.fabric:
            facts = p2p.recalled(facts, p2p.read_kept(given["measured"]))
    except (codec.CodecError, ValueError) as error:
        module.fail_json(msg=f"{probe.SIMULATED_ANSWERS} or a file below {request.root} cannot be read: {error}")
    groups = ("gpu", "fabric") if request.fabric else ("gpu",)
    module.exit_json(changed=False, facts=probe.partial(facts, *groups))


if __name__ == "__main__":
    main()
