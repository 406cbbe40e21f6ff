#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Compile a release's flashinfer modules for the host's GPUs ahead of the engine's first start."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_warm_up
short_description: Compile a release's flashinfer modules ahead of the engine's first start
description:
  - Runs the release's own generators under its Python, as the service's user and into its JIT cache, with the toolkit
    that the engine will use. No GPU is touched, so what serves goes on, at a cost of CPU time of the lowest priority.
  - On a host without GPUs, and for an architecture that the release lists nothing for, it says that there is nothing
    to do. What Triton, TileLang and DeepGEMM compile needs the GPU and is left to the engine's first start.
version_added: "0.1.0"
options:
  python:
    description: The release's interpreter.
    type: path
    required: true
  script:
    description: Text of the role's C(warm_up.py).
    type: str
    required: true
  modules:
    description: Generators by compute capability, such as C(flashinfer.jit.sampling:gen_sampling_module).
    type: dict
    default: {}
  architectures:
    description: Compute capabilities of the host's GPUs that will serve.
    type: list
    elements: str
    default: []
  environment:
    description: The engine's environment. C(SGLANG_CACHE_DIR) is the cache. Needed where there are GPUs.
    type: dict
    default: {}
  user:
    description: The service's user, who owns the cache.
    type: str
    default: pdstack
attributes:
  check_mode:
    description: Says whether something would be compiled, by the cache's own record.
    support: full
  diff_mode:
    description: Shows the modules that are compiled, by architecture.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Compile the release's kernels ahead of its first start
  pd_warm_up:
    python: /opt/pdstack/current/venv/bin/python
    script: "{{ lookup('ansible.builtin.file', 'warm_up.py') }}"
    modules: {"12.0": ["flashinfer.jit.sampling:gen_sampling_module"]}
    architectures: ["12.0"]
    environment: {SGLANG_CACHE_DIR: /var/lib/pdstack/jit/sglang-0.5.23/cuda-13.0, CUDA_HOME: /opt/pdstack/cuda}
"""

RETURN = r"""
reason:
  description: Why there was nothing to compile; empty where there was something.
  returned: always
  type: str
modules:
  description: Name, library, seconds (0 where it was there) and architecture of each module. Empty in check mode.
  returned: always
  type: list
  elements: dict
"""

import functools
import os
import pwd

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, runner, warm_up


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path", "required": True},
            "script": {"type": "str", "required": True},
            "modules": {"type": "dict", "default": {}},
            "architectures": {"type": "list", "elements": "str", "default": []},
            "environment": {"type": "dict", "default": {}},
            "user": {"type": "str", "default": "pdstack"},
        },
        supports_check_mode=True,
    )
    try:
        request = codec.load(warm_up.Request, module.params)
    except codec.CodecError as error:
        module.fail_json(msg=str(error))
    reason = warm_up.reason(request)
    if reason or warm_up.done(request):
        module.exit_json(changed=False, reason=reason, modules=[])
    found = warm_up.Outcome()
    if not module.check_mode:
        make(request.cache, request.user)
        try:
            # An hour: flashinfer's largest module takes many minutes on few cores.
            found = warm_up.apply(request, functools.partial(runner.run, timeout_s=3600.0))
        except (warm_up.WarmUpFailed, OSError) as error:
            module.fail_json(msg=str(error))
    lines = [f"{architecture}: {name}\n" for architecture, names in request.wanted.items() for name in names]
    module.exit_json(
        changed=True,
        reason="",
        modules=codec.dump(found)["modules"],
        diff={"before": "", "after": "".join(lines), "after_header": request.cache},
    )


def make(cache, user):  # type: ignore[no-untyped-def]
    """Make the cache's folders as the service's user's own."""
    owner = pwd.getpwnam(user)
    missing = []
    while not os.path.isdir(cache):
        missing.append(cache)
        cache = os.path.dirname(cache)
    for path in reversed(missing):
        os.mkdir(path, 0o755)
        os.chown(path, owner.pw_uid, owner.pw_gid)


if __name__ == "__main__":
    main()
