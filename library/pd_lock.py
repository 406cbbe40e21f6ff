#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Hold a host for one deployment. action_plugins/pd_lock.py says who holds it, and whether a holder still lives."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_lock
short_description: Hold a host for one deployment at a time
description:
  - Writes who deploys, from where and since when into a file on the host, where another controller sees it.
  - A second run is told who holds the host. Where the holder ran on the same controller and its process is dead, its
    lock is taken over. Where it ran on another one, that cannot be seen, and the operator decides with O(force).
  - Does not fail where somebody else holds the host, so that a run over several hosts can give the others back first;
    see RV(held).
version_added: "0.1.0"
options:
  state:
    description:
      - V(held) takes the lock, V(released) gives it back where it is this run's.
      - V(asked) only says who holds it, whatever the mode; a holder that is known to be dead is nobody.
    type: str
    choices: [held, released, asked]
    default: held
  force:
    description: Take the lock over from whoever holds it.
    type: bool
    default: false
  seen:
    description:
      - What M(pd_host_info) has read of the lock, its RV(pd_host_info#module:lock). Then O(state=asked) does not go to
        the host again.
    type: dict
  path:
    description: The file on the host.
    type: path
    default: /run/pdstack/deploy.lock
  owner:
    description: Who takes it. The action plugin sets this.
    type: dict
  instead_of:
    description: The holder whose lock may be taken over. The action plugin sets this.
    type: dict
attributes:
  check_mode:
    description: A rehearsal takes no lock and needs none; it says that it would hold it.
    support: full
  diff_mode:
    description: A lock is no state of the system that anybody would want to compare.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Take the lock
  pd_lock:
    state: held
  register: lock
"""

RETURN = r"""
held:
  description: Whether this run holds the host now.
  returned: always
  type: bool
holder:
  description: Who else holds it, or whose lock was taken over.
  returned: when there was one
  type: dict
alive:
  description: Whether the holder runs. Null where it belongs to another controller, so that nobody here can say.
  returned: where O(state=asked) and somebody holds the host
  type: bool
told:
  description: RV(holder) and RV(alive) in words.
  returned: where O(state=asked) and somebody holds the host
  type: str
now:
  description: The host's time, seconds since the epoch.
  returned: always
  type: float
refusal:
  description: What the operator is told where somebody else holds the host.
  returned: where RV(held) is false
  type: str
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, runlock


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "released", "asked"], "default": "held"},
            "force": {"type": "bool", "default": False},
            "seen": {"type": "dict"},
            "path": {"type": "path", "default": runlock.PATH},
            "owner": {"type": "dict"},
            "instead_of": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    params = module.params
    if params["state"] == "asked":
        outcome = runlock.Outcome(False, runlock.read(params["path"]), time.time())
        module.exit_json(changed=False, **codec.dump(outcome))
    if module.check_mode:
        module.exit_json(changed=False, held=params["state"] == "held", now=time.time())
    me = codec.load(runlock.Owner, params["owner"])
    try:
        if params["state"] == "released":
            module.exit_json(changed=runlock.release(params["path"], me), held=False, now=time.time())
        instead_of = codec.load(runlock.Owner, params["instead_of"]) if params["instead_of"] else None
        if params["force"]:
            instead_of = runlock.read(params["path"])
        outcome = runlock.take(params["path"], me, time.time(), instead_of)
    except OSError as error:
        module.fail_json(
            msg=f"found {params['path']}: {error.strerror or error}; needed: a lock there, so that nobody else deploys "
            "meanwhile; nothing was changed. Do: look at `df -h /run` and `findmnt /run` on the host, then run again."
        )
    module.exit_json(changed=outcome.held, **codec.dump(outcome))


if __name__ == "__main__":
    main()
