#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Say which releases a host has, and point ``current`` at one of them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_release
short_description: Say which releases a host has, and point current at one of them
description:
  - Reads the manifests of the installed releases behind the links C(current) and C(previous).
  - With O(activate) it points C(current) at an installed release by one rename, and C(previous) at the one before.
    A release that is not whole is refused, with what differs from its own lock.
version_added: "0.1.0"
options:
  activate:
    description: Id of the installed release to point C(current) at. Without it nothing is changed.
    type: str
    default: ""
  root:
    description: Folder of releases and links.
    type: path
    default: /opt/pdstack
  wait:
    description: Seconds to wait for an installation on this host that has the releases in hand; then it is refused.
    type: float
    default: 120.0
  foreign:
    description: Packages that other roles add, by environment; they are no difference. The default is the role's.
    type: dict
    default: {engine: [pdstack-kernels]}
attributes:
  check_mode:
    description: Says whether C(current) would change.
    support: full
  diff_mode:
    description: Shows C(current) before and after.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Read which releases the host has
  pd_release:
  register: releases

- name: Go back to the release before
  pd_release:
    activate: "{{ releases.previous.id }}"
"""

RETURN = r"""
current:
  description: The release that C(current) points at (id, release, python, built, problems); null where there is none.
  returned: success
  type: dict
previous:
  description: The same of C(previous).
  returned: success
  type: dict
"""

from typing import Dict, List

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, release, venv_links


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "activate": {"type": "str", "default": ""},
            "root": {"type": "path", "default": "/opt/pdstack"},
            "wait": {"type": "float", "default": 120.0},
            "foreign": {"type": "dict", "default": {"engine": ["pdstack-kernels"]}},
        },
        supports_check_mode=True,
    )
    root, wanted = module.params["root"], module.params["activate"]
    foreign = codec.load(Dict[str, List[str]], module.params["foreign"], "foreign")
    current = venv_links.linked(root, "current")
    changed = bool(wanted) and wanted != current
    if changed:
        try:
            venv_links.switch(root, wanted, foreign, module.check_mode, module.params["wait"])
        except (release.ReleaseRefused, OSError) as error:
            module.fail_json(msg=str(error), refusals=codec.dump(getattr(error, "refusals", [])))
    module.exit_json(
        changed=changed,
        current=codec.dump(venv_links.installed(root, venv_links.linked(root, "current"), foreign)),
        previous=codec.dump(venv_links.installed(root, venv_links.linked(root, "previous"), foreign)),
        diff={"before": f"current -> {current}\n", "after": f"current -> {wanted or current}\n"},
    )


if __name__ == "__main__":
    main()
