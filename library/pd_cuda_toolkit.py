#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Keep a CUDA toolkit proven and linked; from wheels, built too."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_cuda_toolkit
short_description: Keep a CUDA toolkit, proven by compiling a small program
description:
  - With O(lock) the toolkit at O(path) is laid out from hash-locked wheels; without, it is the vendor's package's.
  - It is proven before O(link) points to it. C(nvcc) compiles a small program for each architecture that the
    bundle serves on and, where a driver is loaded, the program runs on a GPU.
  - A missing or altered wheel, a full disk and a toolkit that does not compile are refused, and the toolkit that was
    there stays. One that was changed by hand is built anew.
version_added: "0.1.0"
options:
  path:
    description: The toolkit's folder.
    type: path
    required: true
  link:
    description: The link that services use as C(CUDA_HOME).
    type: path
    default: /opt/pdstack/cuda
  lock:
    description: The lock's text, one wheel a line. Empty for the vendor's package.
    type: str
    default: ""
  wheels:
    description: Folder with the wheels.
    type: path
    default: /opt/pdstack/wheelhouse/cuda-13.0
  release:
    description: The release that C(nvcc) has to report.
    type: str
    default: "13.0"
  wait:
    description: Seconds to wait for another run that builds it, such as one whose controller was killed.
    type: float
    default: 120.0
  state:
    description: Whether the toolkit is linked and, with O(lock), on the host.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    description: Reports the steps.
    support: full
  diff_mode:
    description: Shows the steps with their reasons.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Use the vendor's toolkit
  pd_cuda_toolkit:
    path: /usr/local/cuda-13.0
"""

RETURN = r"""
steps:
  description: What was done, or would be, each with its reason.
  returned: always
  type: list
  elements: dict
proof:
  description: What the proof of a toolkit from wheels saw when it was built.
  returned: always
  type: str
"""

import functools

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, release, runner, toolkit


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "link": {"type": "path", "default": "/opt/pdstack/cuda"},
            "lock": {"type": "str", "default": ""},
            "wheels": {"type": "path", "default": "/opt/pdstack/wheelhouse/cuda-13.0"},
            "release": {"type": "str", "default": "13.0"},
            "wait": {"type": "float", "default": 120.0},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    given = module.params
    host = toolkit.Host(runner=functools.partial(runner.run, timeout_s=600.0))
    try:
        request = toolkit.Request(
            path=given["path"],
            link=given["link"],
            pins=release.parse_lock(given["lock"], "lock") if given["lock"] else [],
            wheels=given["wheels"],
            wanted=given["state"] == "present",
            release=given["release"],
        )
        steps = toolkit.plan(request)
        if steps and not module.check_mode:
            toolkit.apply(request, host, steps, given["wait"])
    except (toolkit.ToolkitRefused, release.ReleaseRefused, OSError) as error:
        module.fail_json(msg=str(error), refusals=codec.dump(getattr(error, "refusals", [])))
    manifest = toolkit.read_manifest(given["path"])
    module.exit_json(
        changed=bool(steps),
        steps=codec.dump(steps),
        proof=manifest.proof if manifest else "",
        diff={
            "before": "",
            "after": "".join(f"{step.action}: {step.reason}\n" for step in steps),
            "before_header": given["path"],
            "after_header": given["path"],
        },
    )


if __name__ == "__main__":
    main()
