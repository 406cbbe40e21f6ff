#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Keep the workers of the routers of this host those of the plan."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_router
short_description: Keep the workers of the routers of this host those of the plan
description:
  - Adds workers that answer and that the router does not have, such as one that came later than the router waits at
    its start, and removes workers that nobody planned.
  - Takes workers out on demand, and waits, bounded, until their requests in flight are finished.
  - Keeps engines apart that a router must not pair, such as two releases in the middle of an update, by what each
    engine says of itself.
  - A router that does not answer, or not to this host's key, is reported in RV(silent) and is no error here.
version_added: "0.1.0"
options:
  routers:
    description: The routers of this host, as M(pd_service_wait) takes targets.
    type: list
    elements: dict
    required: true
  workers:
    description: The workers that they should have.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: The instance's name.
        type: str
        required: true
      set:
        description: The set that restarts together.
        type: str
        default: ""
      role:
        description: The instance's role.
        type: str
        required: true
        choices: [prefill, decode, aggregated]
      url:
        description: Scheme, address and port.
        type: str
        required: true
      bootstrap_port:
        description: The bootstrap port of a prefill server.
        type: int
        default: 0
      key_file:
        description: File on this host with the key that the worker wants.
        type: str
        default: ""
  out:
    description: Instances or sets that must get no requests.
    type: list
    elements: str
    default: []
  prefer:
    description: Sets that win where as many engines of one signature as of another could serve.
    type: list
    elements: str
    default: []
  info_path:
    description: The path at which an engine of this release tells its configuration.
    type: str
    default: /server_info
  drain_timeout:
    description: Seconds that requests in flight at workers taken out may take.
    type: int
    default: 120
attributes:
  check_mode:
    description: Looks, and reports what would be added and removed.
    support: full
  diff_mode:
    description: Shows each worker with the reason.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Take a pair out, its requests finished
  pd_router:
    routers: "{{ plan | pd_service_router_targets(inventory_hostname) }}"
    workers: "{{ plan | pd_service_router_workers(inventory_hostname) }}"
    out: [pair-1]
"""

RETURN = r"""
added:
  description: Workers that were added, by router.
  returned: always
  type: dict
removed:
  description: Workers that were removed, by router.
  returned: always
  type: dict
absent:
  description: Planned workers that do not answer and are not members.
  returned: always
  type: list
  elements: str
cut:
  description: Requests by instance that were still in flight when O(drain_timeout) had passed.
  returned: always
  type: dict
out:
  description: What O(out) named, so that a reader of the result knows what the change was for.
  returned: always
  type: list
  elements: str
left:
  description: Healthy workers of each role that each router has after it, by router.
  returned: always
  type: dict
silent:
  description: Routers that do not answer, or that refuse the key, such as one that has not restarted with a new one.
  returned: always
  type: list
  elements: str
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, http, router, waiter


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "routers": {"type": "list", "elements": "dict", "required": True},
            "workers": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "name": {"type": "str", "required": True},
                    "set": {"type": "str", "default": ""},
                    "role": {"type": "str", "required": True, "choices": ["prefill", "decode", "aggregated"]},
                    "url": {"type": "str", "required": True},
                    "bootstrap_port": {"type": "int", "default": 0},
                    "key_file": {"type": "str", "default": "", "no_log": False},
                },
            },
            "out": {"type": "list", "elements": "str", "default": []},
            "prefer": {"type": "list", "elements": "str", "default": []},
            "info_path": {"type": "str", "default": "/server_info"},
            "drain_timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    params = module.params
    workers = [codec.load(router.Worker, item) for item in params["workers"]]
    targets = [codec.load(waiter.Target, item) for item in params["routers"]]
    added, removed, left, silent, lines, absent, cut = {}, {}, {}, [], [], set(), {}
    try:
        signatures = {w.name: router.signature(get(w, params["info_path"])) for w in workers} if targets else {}
        for target in targets:
            ask = asking(target)
            # Not there, or still with the keys from before: then it restarts at the end of this run.
            if ask("GET", "/workers", None).status in (0, 401, 403):
                silent.append(target.name)
                continue
            present = router.members(ask)
            todo = router.changes(present, workers, params["out"], signatures, params["prefer"])
            left[target.name] = router.left(present, workers, todo)
            added[target.name] = [worker.url for worker in todo.add]
            removed[target.name] = [member.url for member in todo.remove]
            absent |= {worker.name for worker in todo.absent}
            lines += [f"{target.name} remove {url}: {todo.why[url]}\n" for url in removed[target.name]]
            lines += [f"{target.name} add {url}: {todo.why[url]}\n" for url in added[target.name]]
            if not module.check_mode:
                router.remove(ask, todo.remove, time.monotonic, time.sleep)
                router.add(ask, todo.add, http.read_key, time.monotonic, time.sleep)
        if params["out"] and targets and not module.check_mode:
            leaving = [worker for worker in workers if {worker.name, worker.set} & set(params["out"])]
            cut = router.drain(
                lambda: {w.name: router.in_flight(get(w, "/v1/loads")) for w in leaving},
                params["drain_timeout"],
                time.monotonic,
                time.sleep,
            )
    except (router.RouterError, OSError) as error:
        module.fail_json(
            msg=f"{error}; needed: a router that lets its workers be changed; do: look at `journalctl -u pd-router`, "
            "then run again"
        )
    if cut:
        module.warn(f"still in flight after {params['drain_timeout']} s, and cut where the engine stops first: {cut}")
    module.exit_json(
        changed=bool(lines),
        added=added,
        removed=removed,
        absent=sorted(absent),
        cut=cut,
        left=left,
        silent=silent,
        out=module.params["out"],
        diff={"before": "", "after": "".join(lines), "before_header": "workers", "after_header": "workers"},
    )


def get(worker, path):  # type: ignore[no-untyped-def]
    return http.request("GET", worker.url + path, timeout_s=5.0, access=http.Access(worker.key_file))


def asking(target):  # type: ignore[no-untyped-def]
    return lambda method, path, body: http.request(method, target.base + path, body, 10.0, target.admin)


if __name__ == "__main__":
    main()
