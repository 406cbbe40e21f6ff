#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Prove that NIXL moves bytes between two processes of a host, in both directions, and keep what was measured."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_nixl_check
short_description: Prove that NIXL moves bytes between two processes of a host, in both directions
description:
  - For each pair makes two NIXL agents in two processes under the release's Python and the engines' own environments,
    writes memory from each to the other, compares the bytes, and records bandwidth and UCX's data lane. The memory is
    the host's, or two GPUs'.
  - A lane that UCX names in no known form is C(unknown), its words are kept, and between GPUs that is a warning.
  - Refuses a pair whose data lane is a forbidden one, or which is below 80 % of the speed of the plain copy between
    its GPUs, where one was measured, 0.1 ms a block allowed. Where something else used the GPUs, low
    bandwidth is a warning.
  - Asks again only for another release, pair or script; the answer is kept on the host.
version_added: "0.1.0"
options:
  script:
    description: The transfer script's text.
    type: str
    required: true
  pairs:
    description: What to prove; the filter P(pd_nixl_pairs#filter) makes it from the plan.
    type: list
    elements: dict
    required: true
    suboptions:
      memory:
        description: The host's memory or a GPU's.
        type: str
        choices: [DRAM, VRAM]
        required: true
      sides:
        description:
          - The two processes, the one that writes in service first. Each has a C(name), an C(environment) and a
            C(device), which is a GPU's index among those that its C(CUDA_VISIBLE_DEVICES) shows.
        type: list
        elements: dict
        required: true
      copied:
        description: Bandwidth of a plain copy from the first GPU to the second, in bytes per second, if measured.
        type: float
      busy:
        description: What else uses the GPUs. Low bandwidth beside it is a warning and no refusal.
        type: str
        default: ""
  python:
    description: The release's interpreter.
    type: path
    default: /opt/pdstack/current/venv/bin/python
  forbidden_lanes:
    description: UCX transports that the data lane must not be, such as C(tcp).
    type: list
    elements: str
    default: []
  bytes:
    description: Size of the buffer. One transfer between GPUs writes it 16 times over, between processes' memory once.
    type: int
    default: 67108864
  repetitions:
    description: Transfers per direction.
    type: int
    default: 5
  cache:
    description: The folder that keeps results.
    type: path
    default: /var/lib/pdstack/nixl
  state:
    description: V(absent) removes the kept results.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    description: Returns kept results. What was never measured is not, and counts as a change.
    support: partial
  diff_mode:
    description: Shows the results that are recorded.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Prove the transport
  pd_nixl_check:
    script: "{{ lookup('ansible.builtin.file', 'nixl_transfer.py') }}"
    pairs:
      - memory: DRAM
        sides:
          - {name: prefill-0, environment: {UCX_TLS: 'posix,cma,self,tcp'}, device: 0}
          - {name: decode-0, environment: {UCX_TLS: 'posix,cma,self,tcp'}, device: 0}
"""

RETURN = r"""
results:
  description:
    - For each pair the bandwidth by direction (bytes per second), the data lane in the direction of service and back,
      all lanes of remote writes, and versions.
  returned: when there are some
  type: list
  elements: dict
"""

import functools
import hashlib
import json
import os
import shutil

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, nixl, runner

PAIR = {
    "memory": {"type": "str", "choices": ["DRAM", "VRAM"], "required": True},
    "sides": {"type": "list", "elements": "dict", "required": True},
    "copied": {"type": "float"},
    "busy": {"type": "str", "default": ""},
}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "script": {"type": "str", "required": True},
            "pairs": {"type": "list", "elements": "dict", "required": True, "options": PAIR},
            "python": {"type": "path", "default": "/opt/pdstack/current/venv/bin/python"},
            "forbidden_lanes": {"type": "list", "elements": "str", "default": []},
            "bytes": {"type": "int", "default": 67108864},
            "repetitions": {"type": "int", "default": 5},
            "cache": {"type": "path", "default": "/var/lib/pdstack/nixl"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    params = module.params
    if params["state"] == "absent":
        there = os.path.isdir(params["cache"])
        if there and not module.check_mode:
            shutil.rmtree(params["cache"])
        module.exit_json(changed=there)
    pairs = [codec.load(nixl.Pair, pair, "pairs") for pair in params["pairs"]]
    results, fresh, missing = [], {}, 0
    try:
        refuse([item for pair in pairs for side in pair.sides for item in nixl.check_environment(side.environment)])
        for pair in pairs:
            path = place(params, pair)
            result = codec.kept(nixl.Result, path)
            if result is None and module.check_mode:
                missing += 1
                continue
            if result is None:
                run = functools.partial(runner.run, timeout_s=600.0)
                python, size, times = params["python"], params["bytes"], params["repetitions"]
                result = nixl.measure(params["script"], python, pair, size, times, run)
                fresh[path] = result
            refuse(nixl.check_result(result, pair.copied, params["forbidden_lanes"]))
            for words in nixl.warnings(result, pair.copied):
                module.warn(words)
            results.append(result)
    except nixl.TransportRefused as error:
        module.fail_json(msg=str(error), refusals=codec.dump(error.refusals))
    texts = {path: json.dumps(codec.dump(result), indent=1, sort_keys=True) + "\n" for path, result in fresh.items()}
    for path, text in texts.items():
        keep(path, text)
    module.exit_json(
        changed=bool(fresh or missing),
        results=codec.dump(results),
        diff={"before": "", "after": "".join(texts.values()), "after_header": params["cache"]},
    )


def refuse(problems):  # type: ignore[no-untyped-def]
    """End with what was found, needed and to do, where there is something."""
    if problems:
        raise nixl.TransportRefused(problems)


def place(params, pair):  # type: ignore[no-untyped-def]
    """Return the file of a pair's result: another release, environment, script or size has another one."""
    # The path behind `current` carries the release's id, so another release asks again.
    python = os.path.join(os.path.realpath(os.path.dirname(params["python"])), os.path.basename(params["python"]))
    question = [params["script"], python, pair.memory, codec.dump(pair.sides), params["bytes"], params["repetitions"]]
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    return os.path.join(params["cache"], digest[:16] + ".json")


def keep(path, text):  # type: ignore[no-untyped-def]
    """Record a result, atomically."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    draft = f"{path}.{os.getpid()}"
    with open(draft, "w", encoding="utf-8") as handle:
        handle.write(text)
    os.replace(draft, path)


if __name__ == "__main__":
    main()
