#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Keep an engine release installed exactly as its locks say, and point ``current`` at it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_venv
short_description: Keep an engine release installed exactly as its locks say
description:
  - Installs a release (one virtual environment per lock) from a wheelhouse on the host, without network, and points
    C(current) at it.
  - A release is built beside its final folder, proven by importing its modules, and put in place by one rename. A
    package or a file that was changed by hand is found, and the release is built anew the same way, so that
    C(current) names a whole release whenever the installation is interrupted.
  - A missing or altered wheel, a Python that the release is not locked for, an old glibc, a full disk and a second
    installation that outlasts O(wait) are refused before anything is touched.
version_added: "0.1.0"
options:
  name:
    description: The release, such as C(sglang-0.5.23).
    type: str
    required: true
  locks:
    description:
      - The locks' texts, by Python version and environment. The host's own Python decides which one is used.
      - C(engine) is installed as C(venv), any other environment under its own name.
    type: dict
    required: true
  environments:
    description: The environments of O(locks) that this host needs; all of them, where empty.
    type: list
    elements: str
    default: []
  imports:
    description: Modules to import as the proof of an installation, by environment.
    type: dict
    default: {}
  imports_gpu:
    description: Further modules, imported only where the NVIDIA driver is loaded.
    type: dict
    default: {}
  import_environment:
    description: Environment variables of the import test.
    type: dict
    default: {}
  root:
    description: Folder of releases and links.
    type: path
    default: /opt/pdstack
  wheelhouse:
    description: Folder with the wheels and their manifest. Without it, C(<root>/wheelhouse/<name>-py<XY>).
    type: path
  python:
    description: Interpreter to use. Without it, a Python of O(locks) on the host, Ansible's own version first.
    type: path
  interpreters:
    description:
      - Text of C(releases/python.txt), which pins interpreters that a wheelhouse can carry. Used where the host has
        none of the locked Pythons; unpacked below C(<root>/python).
    type: str
    default: ""
  foreign:
    description: Packages that other roles add, by environment; they are left alone and are no drift.
    type: dict
    default: {}
  base:
    description:
      - Folder of packages (site-packages) of the host's own Python that the engine sees behind its environment's. For
        a machine whose Python already has torch, with locks that leave those packages out.
    type: path
  provided:
    description: The packages that O(base) must have, with their versions.
    type: dict
    default: {}
  activate:
    description: Whether to point C(current) at the release. The one before stays linked as C(previous).
    type: bool
    default: true
  keep:
    description: How many releases to keep. Older ones go, but none that is linked or in use.
    type: int
    default: 2
  spared:
    description: Ids of releases that are not pruned, beside those that are linked or in use.
    type: list
    elements: str
    default: []
  wait:
    description:
      - Seconds to wait for another installation on this host, such as one that a killed run started and that goes on.
        After that this one is refused, with the holder's process, what it does and since when.
    type: float
    default: 120.0
  caches:
    description:
      - Folder of the engines' JIT caches, which has one for each release's name. A cache goes with the last release of
        its name that is pruned or taken away, unless a process has mapped something of it.
    type: path
    default: /var/lib/pdstack/jit
  state:
    description:
      - Whether the release is on the host. V(absent) takes away every build of O(name), its wheelhouse and JIT cache.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    description: Reports the steps and the packages that would change.
    support: full
  diff_mode:
    description: Shows the environments' packages and C(current), before and after, and what is pruned.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Install the release
  pd_venv:
    name: cpu-0.5.23
    locks:
      "3.11":
        engine: "{{ lookup('ansible.builtin.file', 'releases/cpu-0.5.23/engine-py311.txt') }}"
        router: "{{ lookup('ansible.builtin.file', 'releases/cpu-0.5.23/router-py311.txt') }}"
    imports:
      engine: [torch, sglang]
      router: [sglang_router]
"""

RETURN = r"""
id:
  description: The release's id, which is also its folder's name.
  returned: always
  type: str
path:
  description: The release's folder.
  returned: always
  type: str
python:
  description: The Python version that the release is installed for on this host.
  returned: always
  type: str
wheelhouse:
  description: The folder on the host that the release is installed from.
  returned: always
  type: str
carried:
  description: The interpreter's archive that the wheelhouse has to bring; empty where the host has a Python of its own.
  returned: always
  type: str
wheels:
  description: The wheels of the wheelhouse that this host needs, beside the one of uv.
  returned: always
  type: list
  elements: str
delivered:
  description: Whether every wheel that is needed lies in the host's wheelhouse already. Looked at only before a build.
  returned: always
  type: bool
held_by:
  description: Who is installing on this host at this moment, so that this run has to wait; empty where nobody is.
  returned: always
  type: str
found:
  description: What was there before (absent, unfinished, damaged, incomplete or intact).
  returned: always
  type: str
steps:
  description: What was done, or would be, with the reason of each step.
  returned: always
  type: list
  elements: dict
rebuilt:
  description: Whether the environments of this id were built in this run, so that running services hold older files.
  returned: always
  type: bool
seconds:
  description: How long the installation and the import test of each environment took.
  returned: always
  type: dict
"""

import functools
import os
import time
from typing import Dict, List

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import codec, release, runner, turns, venv, venv_build, venv_links


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "locks": {"type": "dict", "required": True},
            "environments": {"type": "list", "elements": "str", "default": []},
            "imports": {"type": "dict", "default": {}},
            "imports_gpu": {"type": "dict", "default": {}},
            "import_environment": {"type": "dict", "default": {}},
            "root": {"type": "path", "default": "/opt/pdstack"},
            "wheelhouse": {"type": "path"},
            "python": {"type": "path"},
            "interpreters": {"type": "str", "default": ""},
            "foreign": {"type": "dict", "default": {}},
            "base": {"type": "path"},
            "provided": {"type": "dict", "default": {}},
            "activate": {"type": "bool", "default": True},
            "keep": {"type": "int", "default": 2},
            "spared": {"type": "list", "elements": "str", "default": []},
            "caches": {"type": "path", "default": "/var/lib/pdstack/jit"},
            "wait": {"type": "float", "default": 120.0},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    # Half an hour for one step: a GPU release unpacks to some 10 GB, perhaps onto a slow disk.
    host = venv.Host(runner=functools.partial(runner.run, timeout_s=1800.0))
    try:
        request = read(module.params)
        seen = venv.observe(request, host)
        steps = venv.plan(seen, request)
        holder = turns.holder(os.path.join(request.root, venv_links.LOCK)) if steps else None
        building = any(step.action in ("build", "repair") for step in steps)
        delivered = building and venv.delivered(seen, request)
        before, after = venv.diff(seen, request)
        if steps and not module.check_mode:
            steps = venv.apply(request, host)
    except (release.ReleaseRefused, venv_build.InstallFailed, codec.CodecError, OSError) as error:
        module.fail_json(msg=str(error), refusals=codec.dump(getattr(error, "refusals", [])))
    manifest = release.read_manifest(seen.path)
    module.exit_json(
        changed=bool(steps),
        id=seen.id,
        path=seen.path,
        python=seen.python,
        wheelhouse=seen.wheelhouse,
        carried=seen.carried,
        wheels=sorted({pin.file for pins in request.pins(seen.python).values() for pin in pins}),
        delivered=delivered,
        held_by=holder.words(time.time()) if holder else "",
        found=seen.state,
        steps=codec.dump(steps),
        rebuilt=any(step.action in ("build", "repair") for step in steps),
        seconds=manifest.seconds if manifest else {},
        diff={"before": before, "after": after, "before_header": seen.id, "after_header": seen.id},
    )


def read(params):  # type: ignore[no-untyped-def]
    """Return the module's parameters as a request."""
    locks = {
        version: {name: release.parse_lock(text, f"{name}, Python {version}") for name, text in texts.items()}
        for version, texts in codec.load(Dict[str, Dict[str, str]], params["locks"], "locks").items()
    }
    imports = codec.load(Dict[str, List[str]], params["imports"], "imports")
    if os.path.exists("/proc/driver/nvidia/version"):
        for name, modules in codec.load(Dict[str, List[str]], params["imports_gpu"], "imports_gpu").items():
            imports[name] = imports.get(name, []) + modules
    return venv.Request(
        name=params["name"],
        locks=locks,
        environments=params["environments"],
        imports=imports,
        root=params["root"],
        wheelhouse=params["wheelhouse"] or "",
        interpreter=params["python"] or "",
        environment=codec.load(Dict[str, str], params["import_environment"], "import_environment"),
        foreign=codec.load(Dict[str, List[str]], params["foreign"], "foreign"),
        base=params["base"] or "",
        provided=codec.load(Dict[str, str], params["provided"], "provided"),
        activate=params["activate"],
        keep=params["keep"],
        spared=params["spared"],
        caches=params["caches"],
        carried=release.parse_interpreters(params["interpreters"]),
        wanted=params["state"] == "present",
        wait_s=params["wait"],
    )


if __name__ == "__main__":
    main()
