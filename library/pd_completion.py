#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Prove that engines complete a request."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_completion
short_description: Prove that engines complete a request, the KV cache's way included
description:
  - Sends one small completion to each server named. A decode server is asked together with a prefill server, as a
    router asks a pair, so that exactly this pair must hand a KV cache over.
  - An engine's own C(/health) does not show that, M(pd_verify) shows it for whichever workers the router chooses.
version_added: "0.1.0"
options:
  probes:
    description: The completions to send.
    type: list
    elements: dict
    required: true
    suboptions:
      through:
        description: The server that answers, with C(name), C(base), C(key_file) and C(ca_file).
        type: dict
        required: true
      prefill:
        description: The prefill server that works with it, with C(bootstrap_host) and C(bootstrap_port) as well.
        type: dict
      words:
        description: Words of the prompt. 0 is a few.
        type: int
        default: 0
  model:
    description: The name that the model is served by.
    type: str
    required: true
  timeout:
    description: Seconds that each completion may take.
    type: int
    default: 120
attributes:
  check_mode:
    description: Sends nothing, since nothing was started.
    support: partial
  diff_mode:
    description: Changes nothing, so there is nothing to show.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Prove the pair
  pd_completion:
    model: tiny
    probes:
      - through: {name: decode-0, base: "http://10.0.0.2:30100"}
        prefill: {name: prefill-0, base: "http://10.0.0.1:30000", bootstrap_host: 10.0.0.1, bootstrap_port: 8998}
"""

RETURN = r"""
outcomes:
  description: Per probe its name, whether it was completed, the seconds it took, and what came instead.
  returned: always
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, completion


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "probes": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "through": {"type": "dict", "required": True},
                    "prefill": {"type": "dict"},
                    "words": {"type": "int", "default": 0},
                },
            },
            "model": {"type": "str", "required": True},
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    model, timeout = module.params["model"], module.params["timeout"]
    outcomes = []
    for probe in [] if module.check_mode else module.params["probes"]:
        through = codec.load(completion.Endpoint, probe["through"])
        name, prefill = through.name, None
        if probe["prefill"]:
            prefill = codec.load(completion.Endpoint, probe["prefill"])
            name = f"{through.name} with {prefill.name}"
        name += f", {probe['words']} words" if probe["words"] else ""
        words = probe["words"]
        if prefill:
            outcome = completion.pair(prefill, through, model, timeout, words=words)
        else:
            outcome = completion.through(through, model, timeout, words=words)
        outcomes.append({"name": name, **codec.dump(outcome)})
    failed = [item for item in outcomes if not item["ok"]]
    if failed:
        lines = "\n".join(f"- {item['name']}: {item['detail']} after {item['seconds']} s" for item in failed)
        module.fail_json(
            msg=f"completions failed:\n{lines}\nneeded: status 200 and the tokens asked for; do: look at the journals "
            "of these units, mend the cause and run again. What did not restart goes on serving",
            outcomes=outcomes,
        )
    module.exit_json(changed=False, outcomes=outcomes)


if __name__ == "__main__":
    main()
