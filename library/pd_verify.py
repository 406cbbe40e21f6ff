#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Prove that the running service is the planned one."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_verify
short_description: Prove that the running service is the planned one
description:
  - Reads CPUs and memory policy of every process of each unit from C(/proc), compares each engine's own account
    of its configuration with the plan, reads which kernels of the extension its ranks run, and sends golden completions
    through the router, plain and streamed.
  - Reads only, and reports every check that failed, not just the first.
version_added: "0.1.0"
options:
  targets:
    description:
      - Units that must answer at an address, as M(pd_service_wait) takes them. They are asked once.
      - Say how the instances and routers of the same names are reached.
    type: list
    elements: dict
    default: []
  instances:
    description: The instances of this host, as the plan has them.
    type: list
    elements: dict
    default: []
  routers:
    description: The routers of this host, as the plan has them.
    type: list
    elements: dict
    default: []
  model:
    description: The name that the model is served by.
    type: str
    required: true
  info_path:
    description: The path at which an engine of this release tells its configuration.
    type: str
    default: /server_info
  ignore_args:
    description: Engine arguments that an engine does not report as they were given.
    type: list
    elements: str
    default: []
  cases:
    description: Golden prompts. Each has C(prompt), C(max_tokens), and C(expect) (exact text) or C(pattern).
    type: list
    elements: dict
    default: []
  cases_file:
    description: A JSON file on the host with more cases, such as those of a reference implementation.
    type: path
  timeout:
    description: Seconds that a completion may take.
    type: int
    default: 120
  marks:
    description: The folder in which M(pd_service_wait) keeps how long each process took.
    type: path
    default: /run/pdstack/ready
  current:
    description: The link that names the release in use.
    type: path
    default: /opt/pdstack/current
attributes:
  check_mode:
    description: Reads only. Where the service does not run yet, a rehearsal proves nothing and does not fail.
    support: partial
  diff_mode:
    description: Changes nothing, so there is nothing to show.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Prove the service
  pd_verify:
    targets: "{{ plan | pd_service_targets(inventory_hostname) }}"
    instances: "{{ plan.instances }}"
    routers: "{{ plan.routers }}"
    model: tiny
    cases:
      - prompt: "The capital of France is"
        max_tokens: 8
        pattern: Paris
"""

RETURN = r"""
instances:
  description: Per target its name, unit, whether it is ready, its state and its time to ready in seconds.
  returned: always
  type: list
  elements: dict
checks:
  description: Every check with its subject, whether it held, what was found and what was wanted.
  returned: always
  type: list
  elements: dict
release:
  description: The id of the release that O(current) points to.
  returned: when everything held
  type: str
"""

import json
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, http, runner, verify, waiter


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "targets": {"type": "list", "elements": "dict", "default": []},
            "instances": {"type": "list", "elements": "dict", "default": []},
            "routers": {"type": "list", "elements": "dict", "default": []},
            "model": {"type": "str", "required": True},
            "info_path": {"type": "str", "default": "/server_info"},
            "ignore_args": {"type": "list", "elements": "str", "default": []},
            "cases": {"type": "list", "elements": "dict", "default": []},
            "cases_file": {"type": "path"},
            "timeout": {"type": "int", "default": 120},
            "marks": {"type": "path", "default": "/run/pdstack/ready"},
            "current": {"type": "path", "default": "/opt/pdstack/current"},
        },
        supports_check_mode=True,
    )
    params = module.params
    report = verify.Report()

    targets = [codec.load(waiter.Target, target) for target in params["targets"]]
    reached = {target.name: target for target in targets}

    def asking(name):  # type: ignore[no-untyped-def]
        access = reached[name].access
        return lambda method, url, body: http.request(method, url, body, params["timeout"], access)

    answers = waiter.look(targets, runner.run, http.look, params["marks"])
    if module.check_mode and not all(item.ready for item in answers):
        # A rehearsal has started nothing: what would run cannot be proven, and that is no fault.
        module.exit_json(changed=False, checks=[], instances=[dict(codec.dump(item), detail="") for item in answers])
    report.checks += [
        verify.Check(f"{item.unit}", item.ready, f"{item.state}. {item.detail}", "an answer with status 200")
        for item in answers
    ]
    for instance in params["instances"]:
        report.checks += verify.check_pinning(instance["unit"], instance["cpus"], instance["memory_nodes"])
        report.checks += verify.check_kernels(instance["unit"], instance["env"])
        name = instance["name"]
        url = reached[name].base + params["info_path"]
        report.checks += verify.check_configuration(name, url, instance["args"], asking(name), params["ignore_args"])
    cases = [codec.load(verify.GoldenCase, case) for case in params["cases"]]
    if params["cases_file"]:
        with open(params["cases_file"], encoding="utf-8") as handle:
            cases += [codec.load(verify.GoldenCase, case) for case in json.load(handle)]
    if params["routers"] and not cases:
        module.fail_json(msg="there is no golden prompt to try: set cases or cases_file")
    for router in params["routers"]:
        base, ask = reached[router["name"]].base, asking(router["name"])
        for case in cases:
            for stream in (False, True):
                report.checks.append(verify.check_completion(base, params["model"], case, ask, stream))
    checks = [codec.dump(check) for check in report.checks]
    if report.failures:
        module.fail_json(
            msg=f"{len(report.failures)} of {len(report.checks)} checks failed:\n{report.text()}",
            checks=checks,
            instances=codec.dump(answers),
        )
    release = os.path.basename(os.path.realpath(params["current"]))
    module.exit_json(changed=False, checks=checks, instances=codec.dump(answers), release=release)


if __name__ == "__main__":
    main()
