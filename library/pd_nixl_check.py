#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Prove that NIXL moves bytes between two processes of a host, in both directions, and keep what was measured."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_nixl_check
short_description: Prove that NIXL moves bytes between two processes of a host, in both directions
description:
  - Makes two NIXL agents in two processes under the release's Python and the engines' environment, writes host memory
    from each to the other, compares the bytes, and records bandwidth and UCX's data lane.
  - Asks again only for another release, environment or script; the answer is kept on the host.
version_added: "0.1.0"
options:
  script:
    description: The transfer script's text.
    type: str
    required: true
  python:
    description: The release's interpreter.
    type: path
    default: /opt/pdstack/current/venv/bin/python
  environment:
    description: The engines' environment, with C(UCX_TLS) and C(UCX_NET_DEVICES).
    type: dict
    default: {}
  forbidden_lanes:
    description: UCX transports that the data lane must not be, such as C(tcp).
    type: list
    elements: str
    default: []
  bytes:
    description: Size of one transfer.
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
    description: Returns a kept result. Without one it transfers nothing and returns none.
    support: partial
  diff_mode:
    description: Shows the result that is recorded.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Prove the transport
  pd_nixl_check:
    script: "{{ lookup('ansible.builtin.file', 'nixl_transfer.py') }}"
    environment:
      UCX_TLS: posix,cma,self,tcp
      UCX_NET_DEVICES: lo
"""

RETURN = r"""
result:
  description: Bandwidth by direction (bytes per second), the data lane, all lanes of remote writes, and versions.
  returned: when there is one
  type: dict
"""

import hashlib
import json
import os
import shutil

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, nixl, refusal, runner


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "script": {"type": "str", "required": True},
            "python": {"type": "path", "default": "/opt/pdstack/current/venv/bin/python"},
            "environment": {"type": "dict", "default": {}},
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
    environment = {str(key): str(value) for key, value in params["environment"].items()}
    problems = nixl.check_environment(environment)
    if problems:
        refuse(module, problems)
    # The path behind `current` carries the release's id, so another release asks again.
    python = os.path.join(os.path.realpath(os.path.dirname(params["python"])), os.path.basename(params["python"]))
    question = json.dumps(
        [params["script"], python, environment, params["bytes"], params["repetitions"]], sort_keys=True
    )
    path = os.path.join(params["cache"], hashlib.sha256(question.encode()).hexdigest()[:16] + ".json")
    result = kept(path)
    measured = result is None
    if result is None:
        if module.check_mode:
            module.exit_json(changed=True)
        result = measure(module, python, environment)
    problems = nixl.check_lane(result["lane"], params["forbidden_lanes"])
    if problems:
        refuse(module, problems)
    if measured:
        keep(path, result)
    after = json.dumps(result, indent=1, sort_keys=True) + "\n" if measured else ""
    module.exit_json(changed=measured, result=result, diff={"before": "", "after": after, "after_header": path})


def refuse(module, problems):  # type: ignore[no-untyped-def]
    """End with what was found, needed and to do."""
    module.fail_json(msg=refusal.render("The transport was refused", problems), refusals=codec.dump(problems))


def kept(path):  # type: ignore[no-untyped-def]
    """Return the kept result, None where there is none or it was cut short."""
    try:
        with open(path, encoding="utf-8") as handle:
            return json.load(handle)
    except (OSError, ValueError):
        return None


def keep(path, result):  # type: ignore[no-untyped-def]
    """Record the result, atomically."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    draft = f"{path}.{os.getpid()}"
    with open(draft, "w", encoding="utf-8") as handle:
        json.dump(result, handle, indent=1, sort_keys=True)
    os.replace(draft, path)


def measure(module, python, environment):  # type: ignore[no-untyped-def]
    """Run the transfer and return its result; fail with UCX's own words where it does not come about."""
    params = module.params
    settings = [f"{key}={value}" for key, value in sorted({**environment, "UCX_PROTO_INFO": "y"}.items())]
    argv = ["env", *settings, python, "-c", params["script"], str(params["bytes"]), str(params["repetitions"])]
    done = runner.run(argv, 600)
    try:
        answer = json.loads(done.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        module.fail_json(msg=f"the NIXL transfer ended with status {done.rc}: {(done.err or done.out).strip()[-1500:]}")
    words = "\n".join(answer["ucx"].values())
    if answer["failure"]:
        said = "; ".join(nixl.complaints(words)[:4]) or done.err.strip()[-500:]
        problem = refusal.Refusal(
            "NIXL transfer",
            f"{answer['failure']}; UCX says: {said}",
            "a transfer between two processes in both directions",
            "check UCX_TLS and UCX_NET_DEVICES in the plan against the host's network devices (ip -br link)",
        )
        refuse(module, [problem])
    lanes = nixl.put_lanes(words)
    return {
        "directions": answer["directions"],
        "bytes": answer["bytes"],
        "lane": nixl.bulk_lane(lanes),
        "lanes": codec.dump(lanes),
        "versions": answer["versions"],
        "environment": environment,
        "python": python,
    }


if __name__ == "__main__":
    main()
