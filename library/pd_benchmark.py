#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Measure a server once: so many requests at one concurrency or rate."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_benchmark
short_description: Measure a server once, at one concurrency or rate
description:
  - Streams completions through a router and returns tok/s, TTFT, TPOT and ITL. Tokens are counted by the server's
    C(usage), never by the client.
  - Warm-up requests go before and count nowhere. Prompts are new in each run, so that no prefix cache of an earlier
    run serves them.
  - One measurement a call, so that a playbook shows how far it is.
version_added: "0.2.0"
options:
  target:
    description: The router, as the filter P(pd_service_router_targets#filter) gives it. Keys are read from its files.
    type: dict
    required: true
  model:
    description: The name that the model is served by.
    type: str
    required: true
  client:
    description:
      - V(pdstack) is the client of this collection, which needs nothing but Python.
      - V(bench_serving) is the engine's own, from the release. Its TTFT is wrong for streams whose first chunk has no
        text.
    type: str
    choices: [pdstack, bench_serving]
    default: pdstack
  chat:
    description: Use C(/v1/chat/completions), else C(/v1/completions).
    type: bool
    default: true
  concurrency:
    description: Requests under way at once (closed loop).
    type: int
  rate:
    description: Requests a second (open loop, Poisson arrivals), instead of O(concurrency).
    type: float
  repeat:
    description: The number of this repetition; prompts differ between repetitions.
    type: int
    default: 1
  workload:
    description: The load, as C(pdstack.bench.workload.Workload) has it (dataset, input_len, output_len, requests, ...).
    type: dict
    default: {}
  dataset_lines:
    description: The lines of a JSONL dataset, where the workload's dataset is a file of the user.
    type: list
    elements: str
    default: []
  warmup:
    description: Requests before the measurement; by default 4 to 32 after the concurrency.
    type: int
  max_seconds:
    description: After this time no further request leaves.
    type: float
    default: 600
  timeout:
    description: Seconds that one request may take.
    type: float
    default: 600
  python:
    description: The Python of the release, for O(client=bench_serving).
    type: path
    default: /opt/pdstack/current/venv/bin/python
  tokenizer:
    description: Folder of the model on the host, for O(client=bench_serving).
    type: path
  environment:
    description: Environment of O(client=bench_serving).
    type: dict
    default: {}
attributes:
  check_mode:
    description: Sends nothing and returns no run.
    support: partial
  diff_mode:
    description: Changes nothing, so there is nothing to show.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Measure 16 at once
  pd_benchmark:
    target: "{{ plan | pd_service_router_targets(inventory_hostname) | first }}"
    model: tiny
    concurrency: 16
    workload: {input_len: 256, output_len: 128, requests: 96}
"""

RETURN = r"""
result:
  description: The result document with one run, as C(pdstack.bench.results.Result) has it.
  returned: when something was measured
  type: dict
summary:
  description: The run in one line.
  returned: when something was measured
  type: str
"""

import os
import shutil
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, http, runner
from ansible.module_utils.pdstack.bench import peer, results, session, stream
from ansible.module_utils.pdstack.bench.workload import Workload, WorkloadError, check


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "target": {"type": "dict", "required": True},
            "model": {"type": "str", "required": True},
            "client": {"type": "str", "choices": ["pdstack", "bench_serving"], "default": "pdstack"},
            "chat": {"type": "bool", "default": True},
            "concurrency": {"type": "int"},
            "rate": {"type": "float"},
            "repeat": {"type": "int", "default": 1},
            "workload": {"type": "dict", "default": {}},
            "dataset_lines": {"type": "list", "elements": "str", "default": []},
            "warmup": {"type": "int"},
            "max_seconds": {"type": "float", "default": 600},
            "timeout": {"type": "float", "default": 600},
            "python": {"type": "path", "default": "/opt/pdstack/current/venv/bin/python"},
            "tokenizer": {"type": "path"},
            "environment": {"type": "dict", "default": {}},
        },
        required_one_of=[("concurrency", "rate")],
        mutually_exclusive=[("concurrency", "rate")],
        supports_check_mode=True,
    )
    given = module.params
    if module.check_mode:
        module.exit_json(changed=False)
    target = given["target"]
    access = http.Access(target.get("key_file", ""), target.get("ca_file", ""))
    try:
        workload = codec.load(Workload, given["workload"], "workload")
        check(workload)
        request = session.Request(
            target["base"],
            [given["concurrency"]] if given["concurrency"] else [],
            [given["rate"]] if given["rate"] else [],
            given["model"],
            given["chat"],
            workload,
            1,
            given["warmup"],
            given["max_seconds"],
            given["timeout"],
            first_repeat=given["repeat"],
        )
        server = stream.server(target["base"], access)
        if given["client"] == results.OURS:
            result = session.measure(request, server, given["dataset_lines"])
        else:
            result = by_engine(given, request, server, access)
    except (WorkloadError, codec.CodecError, OSError, ValueError) as error:
        module.fail_json(msg=f"nothing was measured: {error}")
    module.exit_json(changed=False, result=codec.dump(result), summary=session.words(result.runs[0]))


def by_engine(given, request, server, access):  # type: ignore[no-untyped-def]
    """Let bench_serving send the prompts that our client would."""
    peer.refuse(request.workload)
    if not given["concurrency"] or not given["tokenizer"]:
        raise WorkloadError("bench_serving without concurrency or tokenizer; needed: both")
    if access.ca_file:
        raise WorkloadError("bench_serving against a router with TLS; needed: plain HTTP, since it trusts no file")
    empty, prompts = session.prepare(request, server)
    folder = tempfile.mkdtemp(prefix="pdstack-bench-")
    try:
        argv = peer.command(
            given["python"],
            given["target"]["base"],
            given["model"],
            given["tokenizer"],
            given["chat"],
            request.workload,
            given["concurrency"],
            folder,
        )
        # The key goes by the environment: an argument could be read by every user of the host.
        os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HOME": folder, **given["environment"]})
        if access.key_file:
            os.environ["OPENAI_API_KEY"] = http.read_key(access.key_file)
        os.environ["PYTHONPATH"] = folder
        peer.stand_ins(given["python"], folder, runner.run)
        limit = given["max_seconds"] + given["timeout"]
        run = peer.run(argv, prompts, folder, lambda words: runner.run(words, limit), given["repeat"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return codec.load(results.Result, {**codec.dump(empty), "client": results.ENGINES, "runs": [codec.dump(run)]})


if __name__ == "__main__":
    main()
