#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Report what of a host is taken: ports, disks, packages, the current release."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_host_info
short_description: Report ports in use and by whom, free disk space, missing packages and the current release
description:
  - Reads C(/proc), the file systems and the package database. Changes nothing.
  - The RV(facts) it returns are the sections C(ports) and C(disks) of the host's facts document.
version_added: "0.1.0"
options:
  paths:
    description: Paths whose file systems are reported. A path need not exist yet.
    type: list
    elements: str
    default: []
  packages:
    description: Distribution packages whose presence is reported, by the names of this host's distribution.
    type: list
    elements: str
    default: []
  user:
    description: A user of the system that is reported.
    type: str
  list_packages:
    description: Whether to report every installed package.
    type: bool
    default: false
  record:
    description: The packages that this bundle has installed on the host, one name a line.
    type: path
    default: /etc/pdstack/installed-packages
  current:
    description: The link that names the release in use.
    type: path
    default: /opt/pdstack/current
  plan:
    description: The plan that this host was deployed with.
    type: path
    default: /etc/pdstack/plan.json
  proven:
    description: The record of what was proven last.
    type: path
    default: /etc/pdstack/proven.json
  baseline:
    description: The hardware that this host was deployed on.
    type: path
    default: /etc/pdstack/baseline.json
  lock:
    description: The lock of M(pd_lock).
    type: path
    default: /run/pdstack/deploy.lock
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
- name: Look at the host
  pd_host_info:
    paths: [/opt/pdstack, /var/lib/pdstack]
    packages: [numactl]
  register: host_info
"""

RETURN = r"""
facts:
  description: Sections C(ports) and C(disks) of the facts document.
  returned: always
  type: dict
packages_missing:
  description: Those of O(packages) that are not installed.
  returned: always
  type: list
  elements: str
packages_installed:
  description: Every installed package.
  returned: when O(list_packages=true)
  type: list
  elements: str
user:
  description: C(name), C(home) and C(shell) of O(user), empty when there is no such user.
  returned: always
  type: dict
packages_recorded:
  description: The packages that this bundle has installed, empty when there is no record.
  returned: always
  type: list
  elements: str
current_release:
  description: The id of the release that O(current) points to, empty when there is none.
  returned: always
  type: str
plan:
  description: The plan that this host was deployed with last, empty when there is none.
  returned: always
  type: dict
proven:
  description: >-
    Release, its id on this host and commit of the model that a deployment or a rollback proved last, empty when there
    is no record.
  returned: always
  type: dict
baseline:
  description: GPUs, driver and NUMA nodes as the last deployment recorded them, empty when there is no record.
  returned: always
  type: dict
lock:
  description: >-
    Who holds the host for a deployment, C(holder), null where nobody does, and the host's time C(now). Read before
    all else; M(pd_lock) says whether the holder lives.
  returned: always
  type: dict
distribution:
  description: C(ID) of C(/etc/os-release).
  returned: always
  type: str
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, facts, hostinfo, ports, runlock, runner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "str", "default": []},
            "packages": {"type": "list", "elements": "str", "default": []},
            "user": {"type": "str"},
            "list_packages": {"type": "bool", "default": False},
            "record": {"type": "path", "default": "/etc/pdstack/installed-packages"},
            "current": {"type": "path", "default": "/opt/pdstack/current"},
            "plan": {"type": "path", "default": "/etc/pdstack/plan.json"},
            "proven": {"type": "path", "default": "/etc/pdstack/proven.json"},
            "baseline": {"type": "path", "default": "/etc/pdstack/baseline.json"},
            "lock": {"type": "path", "default": runlock.PATH},
        },
        supports_check_mode=True,
    )
    params = module.params
    lock = runlock.Outcome(False, runlock.read(params["lock"]), time.time())
    module.exit_json(
        changed=False,
        facts={
            "host": "",
            "schema": facts.SCHEMA,
            "ports": codec.dump(ports.listening()),
            "disks": [codec.dump(hostinfo.disk(path)) for path in params["paths"]],
        },
        packages_missing=hostinfo.missing_packages(runner.run, params["packages"]),
        packages_installed=hostinfo.installed_packages(runner.run) if params["list_packages"] else [],
        user=hostinfo.user(params["user"]) if params["user"] else {},
        packages_recorded=hostinfo.lines(params["record"]),
        plan=hostinfo.json_document(params["plan"]),
        proven=hostinfo.json_document(params["proven"]),
        baseline=hostinfo.json_document(params["baseline"]),
        current_release=os.path.basename(hostinfo.link_target(params["current"])),
        lock=codec.dump(lock),
        distribution=hostinfo.os_release().get("ID", ""),
    )


if __name__ == "__main__":
    main()
