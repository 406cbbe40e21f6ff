#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Gather what a bug report needs of a host, without secrets."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_support
short_description: Gather what a bug report needs of a host, without secrets
description:
  - Units, their journals, configuration, plan, metrics and the engines' own account, versions, processes, messages of
    the kernel. What cannot be read is said in its place.
  - Secrets are removed on the host, before anything leaves it, by their values (the host's credential files) and by
    their shape. C(removed.json) counts what was removed.
  - The action plugin writes the documents below O(folder) on the controller.
version_added: "0.1.0"
options:
  folder:
    description: Folder on the controller. The documents go to a folder of the host's name in it.
    type: str
    required: true
  targets:
    description: Engines and routers of this host, as the filter C(pd_service_targets) gives them.
    type: list
    elements: dict
    default: []
  engines:
    description: The names of those that are engines.
    type: list
    elements: str
    default: []
  info_path:
    description: The path at which an engine of this release tells its configuration.
    type: str
    default: /server_info
  hours:
    description: How far back journals go.
    type: int
    default: 48
  lines:
    description: Lines of each journal at most.
    type: int
    default: 2000
attributes:
  check_mode:
    description: Reads only, and the documents are written on the controller in either mode.
    support: full
  diff_mode:
    description: Changes nothing on the host, so there is nothing to show.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Gather
  pd_support:
    folder: /tmp/bundle
"""

RETURN = r"""
documents:
  description: The documents by name. The action plugin writes them and leaves their number.
  returned: from the module itself
  type: dict
count:
  description: The number of documents.
  returned: always
  type: int
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import http, runner, support


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "folder": {"type": "str", "required": True},
            "targets": {"type": "list", "elements": "dict", "default": []},
            "engines": {"type": "list", "elements": "str", "default": []},
            "info_path": {"type": "str", "default": "/server_info"},
            "hours": {"type": "int", "default": 48},
            "lines": {"type": "int", "default": 2000},
        },
        supports_check_mode=True,
    )
    params = module.params
    documents = support.collect(
        lambda argv: runner.run(argv, 60.0),
        lambda url, access: http.request("GET", url, timeout_s=15.0, access=access),
        support.endpoints_of(params["targets"], params["info_path"], params["engines"]),
        support.Limits(hours=params["hours"], lines=params["lines"]),
    )
    module.exit_json(changed=False, documents=documents, count=len(documents))


if __name__ == "__main__":
    main()
