#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Keep a declared set of files and folders, all or nothing."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_files
short_description: Keep a declared set of files and folders, all or nothing
description:
  - Compares the declared files with the disk, and writes those that differ. New contents are staged beside
    their targets and renamed once all of them lie on disk, so a full disk changes nothing.
  - A file of which only comments change (lines that start with C(#)) keeps its time, so that M(pd_units) does not
    restart a service for a reworded explanation.
  - What matches O(owned) and is not declared is removed, such as a drop-in that was added by hand.
  - Not for secrets, since contents appear in the diff.
version_added: "0.1.0"
options:
  files:
    description: The files and folders. A file has C(content), a folder has none.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Absolute path.
        type: path
        required: true
      content:
        description: The file's whole text.
        type: str
      mode:
        description: Permissions, as octal digits.
        type: str
        default: "0644"
      owner:
        description: Owning user.
        type: str
        default: root
      group:
        description: Owning group.
        type: str
        default: root
  owned:
    description: Glob patterns of paths that belong to the declared set alone.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Reports what would change.
    support: full
  diff_mode:
    description: Shows each file before and after.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Keep the configuration
  pd_files:
    files:
      - path: /etc/pdstack
        mode: "0755"
      - path: /etc/pdstack/router.env
        content: |
          RUST_LOG=info
    owned: ["/etc/pdstack/*.env"]
"""

RETURN = r"""
declared:
  description: The paths that were compared.
  returned: always
  type: list
  elements: str
effective:
  description: The paths of which more than comments or attributes differed.
  returned: always
  type: list
  elements: str
paths:
  description: The paths that differed, each with what was done (create, update, comments, attributes or remove).
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import files


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "files": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "path", "required": True},
                    "content": {"type": "str"},
                    "mode": {"type": "str", "default": "0644"},
                    "owner": {"type": "str", "default": "root"},
                    "group": {"type": "str", "default": "root"},
                },
            },
            "owned": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    entries = [
        files.Entry(
            path=item["path"],
            content=item["content"],
            mode=int(item["mode"], 8),
            owner=item["owner"],
            group=item["group"],
        )
        for item in module.params["files"]
    ]
    try:
        todo = files.plan(entries, module.params["owned"])
        if not module.check_mode:
            files.apply(todo)
    except files.FilesError as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=bool(todo.changes),
        declared=sorted(todo.entries),
        effective=files.effective(todo),
        paths={change.path: change.action for change in todo.changes},
        diff=files.diff(todo),
    )


if __name__ == "__main__":
    main()
