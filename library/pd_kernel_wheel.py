#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Keep one pure Python wheel installed in a virtual environment, file by file."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_kernel_wheel
short_description: Keep one pure Python wheel installed in a virtual environment, file by file
description:
  - Unpacks a pure wheel into an environment's C(site-packages), which is all that its installation is, so neither pip
    nor network is needed. A file that is missing, altered or left from another version is found and set right.
  - Other packages are not touched, and nothing is resolved or upgraded.
version_added: "0.1.0"
options:
  wheel:
    description: The wheel's bytes in base64.
    type: str
    required: true
  venv:
    description: The virtual environment.
    type: path
    required: true
  state:
    description: Whether the wheel's package is installed.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    description: Reports the files that would be written and removed.
    support: full
  diff_mode:
    description: Shows the package's files with their hashes before and after.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Read the wheel
  ansible.builtin.slurp:
    src: dist/pdstack_kernels-0.1.0-py3-none-any.whl
  delegate_to: localhost
  register: wheel

- name: Install the kernels
  pd_kernel_wheel:
    wheel: "{{ wheel.content }}"
    venv: /opt/pdstack/current/venv
"""

RETURN = r"""
written:
  description: Files that were, or would be, written, relative to C(site-packages).
  returned: success
  type: list
  elements: str
removed:
  description: Files that were, or would be, removed.
  returned: success
  type: list
  elements: str
"""

import base64
import hashlib
import io
import os
import pathlib
import tempfile
import zipfile
from typing import Dict, List, Tuple

from ansible.module_utils.basic import AnsibleModule


def files_of(wheel: bytes) -> Dict[str, bytes]:
    """The wheel's files by path; ValueError for an archive that is no pure wheel of one package."""
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
    except zipfile.BadZipFile as error:
        raise ValueError(f"not a wheel: {error}") from error
    flags = [data for name, data in files.items() if name.endswith(".dist-info/WHEEL")]
    if len(flags) != 1 or b"Root-Is-Purelib: true" not in flags[0]:
        raise ValueError("not a pure wheel: it has no single dist-info that says Root-Is-Purelib")
    if any(name.startswith("/") or ".." in name.split("/") or ".data/" in name for name in files):
        raise ValueError("the wheel has files outside its package")
    return files


def site_packages(venv: pathlib.Path) -> pathlib.Path:
    """The environment's site-packages; ValueError where there is none."""
    found = sorted(venv.glob("lib/python3*/site-packages"))
    if len(found) != 1 or not (venv / "pyvenv.cfg").is_file():
        raise ValueError(f"{venv} is no virtual environment with one Python: install the release first")
    return found[0]


def installed(site: pathlib.Path, files: Dict[str, bytes]) -> Dict[str, bytes]:
    """What is there of the package, in any version; compiled files are Python's own."""
    tops = {name.split("/")[0] for name in files}
    info = next(top for top in tops if top.endswith(".dist-info"))
    folders = [site / top for top in tops if top != info]
    folders += site.glob(f"{info.split('-')[0]}-*.dist-info")
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(site).as_posix(): path.read_bytes() for path in paths}


def plan(have: Dict[str, bytes], want: Dict[str, bytes]) -> Tuple[List[str], List[str]]:
    """Paths to write and to remove."""
    return sorted(path for path in want if have.get(path) != want[path]), sorted(set(have) - set(want))


def apply(site: pathlib.Path, want: Dict[str, bytes], written: List[str], removed: List[str]) -> None:
    """Write and remove; RECORD last, so that an interrupted installation is found incomplete."""
    for path in sorted(written, key=lambda path: (path.endswith("/RECORD"), path)):
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=str(target.parent))
        with os.fdopen(handle, "wb") as file:
            file.write(want[path])
        os.chmod(temporary, 0o644)
        os.replace(temporary, str(target))
    for path in removed:
        (site / path).unlink()
    # What Python compiled of files that are gone, and folders that are empty then.
    for path in removed:
        folder = (site / path).parent
        for compiled in (folder / "__pycache__").glob(f"{pathlib.PurePosixPath(path).stem}.*.pyc"):
            compiled.unlink()
        for empty in (folder / "__pycache__", folder):
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()


def listing(files: Dict[str, bytes]) -> str:
    """Paths and hashes, for the diff."""
    return "".join(f"{hashlib.sha256(data).hexdigest()[:12]} {path}\n" for path, data in sorted(files.items()))


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "wheel": {"type": "str", "required": True},
            "venv": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    venv = pathlib.Path(module.params["venv"])
    absent = module.params["state"] == "absent"
    try:
        files = files_of(base64.b64decode(module.params["wheel"]))
        if absent and not venv.exists():
            module.exit_json(changed=False, written=[], removed=[])
        site = site_packages(venv)
        have = installed(site, files)
        want: Dict[str, bytes] = {} if absent else files
        written, removed = plan(have, want)
        if not module.check_mode:
            apply(site, want, written, removed)
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error))
    diff = {"before": listing(have), "after": listing(want), "before_header": str(site), "after_header": str(site)}
    module.exit_json(changed=bool(written or removed), written=written, removed=removed, diff=diff)


if __name__ == "__main__":
    main()
