#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Complete golden prompts with a reference implementation of the same weights, once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_reference
short_description: Complete golden prompts with a reference implementation of the same weights, once
description:
  - Runs a script under a release's Python that completes each prompt greedily, and keeps the answers on the host.
  - Asks again only for another model, other prompts or another script.
version_added: "0.1.0"
options:
  python:
    description: The interpreter that has the reference implementation.
    type: path
    default: /opt/pdstack/current/venv/bin/python
  script:
    description:
      - The script's text. It is called with the model's folder and a JSON list of cases, and prints the same list with
        C(expect) filled in.
    type: str
    required: true
  model:
    description: The model's folder. Its name must change with its contents, as C(<repo>@<commit>) does.
    type: path
    required: true
  cases:
    description: The prompts, each with C(prompt) and C(max_tokens).
    type: list
    elements: dict
    required: true
  cache:
    description: The folder that keeps answers.
    type: path
    default: /var/lib/pdstack/golden
attributes:
  check_mode:
    description: Returns kept answers. Without them it computes nothing and returns no case.
    support: partial
  diff_mode:
    description: The answers are a result, not a setting.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Compute what the same weights give
  pd_reference:
    script: "{{ lookup('ansible.builtin.file', 'transformers_reference.py') }}"
    model: /var/lib/pdstack/models/org--tiny@0123
    cases:
      - prompt: the quick brown fox
        max_tokens: 16
  register: reference
"""

RETURN = r"""
cases:
  description: The cases with C(expect), the reference's greedy completion.
  returned: always
  type: list
  elements: dict
"""

import hashlib
import json
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import runner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path", "default": "/opt/pdstack/current/venv/bin/python"},
            "script": {"type": "str", "required": True},
            "model": {"type": "path", "required": True},
            "cases": {"type": "list", "elements": "dict", "required": True},
            "cache": {"type": "path", "default": "/var/lib/pdstack/golden"},
        },
        supports_check_mode=True,
    )
    params = module.params
    wanted = json.dumps([params["script"], params["model"], params["cases"]], sort_keys=True)
    path = os.path.join(params["cache"], hashlib.sha256(wanted.encode()).hexdigest()[:16] + ".json")
    try:
        with open(path, encoding="utf-8") as handle:
            module.exit_json(changed=False, cases=json.load(handle))
    except (OSError, ValueError):
        pass  # not there, or cut short: compute it
    if module.check_mode:
        module.exit_json(changed=True, cases=[])
    done = runner.run([params["python"], "-c", params["script"], params["model"], json.dumps(params["cases"])], 900)
    try:
        cases = json.loads(done.out.strip().splitlines()[-1]) if done.rc == 0 else None
    except (ValueError, IndexError):
        cases = None
    if not cases:
        module.fail_json(
            msg=f"the reference implementation gave no answer (exit {done.rc}): {done.err.strip()[-1500:]}"
        )
    os.makedirs(params["cache"], exist_ok=True)
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as handle:
        json.dump(cases, handle, indent=1)
    os.replace(temporary, path)
    module.exit_json(changed=True, cases=cases)


if __name__ == "__main__":
    main()
