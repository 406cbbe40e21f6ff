#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Keep the keys and the certificate that units get from systemd."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_credentials
short_description: Keep the keys and the certificate that units get from systemd
description:
  - Keeps a folder of credentials, one file each, for root alone. Units get them by C(LoadCredential=), and our own
    modules read them there.
  - Random keys and an own certificate are made once and kept; a certificate that ends within two months or lacks a
    name is made anew.
  - Returns and shows paths and actions, never a value. What is not declared is removed from the folder.
version_added: "0.1.0"
options:
  folder:
    description: The folder of the credentials.
    type: path
    default: /etc/pdstack/credentials
  given:
    description: The values by name.
    type: dict
    default: {}
  random:
    description: Names of keys that this host makes for itself.
    type: list
    elements: str
    default: []
  certificate:
    description: Names and addresses of a self-signed certificate (C(tls_cert), C(tls_key)); empty for none.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Reports which files would change.
    support: full
  diff_mode:
    description: Shows which files change and how, without their contents.
    support: partial
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Keep the keys
  pd_credentials:
    given:
      api_key: "{{ vault_api_key }}"
    random: [admin_key]
  no_log: true
"""

RETURN = r"""
effective:
  description: The files whose contents differed.
  returned: always
  type: list
  elements: str
paths:
  description: The paths that differed, each with what was done (create, update, attributes or remove).
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import credentials, files, runner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "folder": {"type": "path", "default": "/etc/pdstack/credentials"},
            "given": {"type": "dict", "default": {}, "no_log": True},
            "random": {"type": "list", "elements": "str", "default": []},
            "certificate": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    folder = params["folder"]
    try:
        wanted = credentials.entries(
            folder, params["given"], params["random"], params["certificate"], runner.run, make=not module.check_mode
        )
        todo = files.plan(wanted, [f"{folder}/*"])
        if not module.check_mode:
            files.apply(todo)
    except (files.FilesError, runner.CommandFailed) as error:
        module.fail_json(msg=str(error))
    paths = {change.path: change.action for change in todo.changes}
    module.exit_json(
        changed=bool(paths),
        effective=[path for path, action in paths.items() if action != "attributes" and path != folder],
        paths=paths,
        diff={"before": "", "after": "".join(f"{action} {path}\n" for path, action in paths.items())},
    )


if __name__ == "__main__":
    main()
