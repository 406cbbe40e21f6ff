"""Look for drift with the inventory and the variables of this run (see library/pd_support_drift.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible import constants, context
from ansible.module_utils.pdstack import inventory
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars

# What of this run's command line counts for the other one too: ansible's names, and the options' own.
OPTIONS = {
    "inventory": "--inventory",
    "vault_ids": "--vault-id",
    "vault_password_files": "--vault-password-file",
    "connection_password_file": "--connection-password-file",
    "become_password_file": "--become-password-file",
    "become_method": "--become-method",
    "become_user": "--become-user",
    "connection": "--connection",
    "forks": "--forks",
    "private_key_file": "--private-key",
    "remote_user": "--user",
    "ssh_common_args": "--ssh-common-args",
    "ssh_extra_args": "--ssh-extra-args",
    "timeout": "--timeout",
}

MEMORY = "/dev/shm"


def options(given: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line that say what ``given``, ansible's parsed one, said."""
    words = ["--become"] if given.get("become") else []
    for name, option in OPTIONS.items():
        value = given.get(name)
        values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        words += [f"{option}={item}" for item in values]
    return words


class ActionModule(ActionBase):
    """One run for all hosts, without a connection."""

    BYPASS_HOST_LOOP = True
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = {**inventory.builtin(load_extra_vars(self._loader)), "pd_drift_report": "-"}
        command = [str(Path(sys.executable).parent / "ansible-playbook"), *options(context.CLIARGS)]
        # Its owner alone may read it: what -e says may be a key, and a command line is for everybody to see. In memory,
        # so that a run which is killed here leaves none on a disk. (Ansible follows /proc/self/fd to a name: no memfd.)
        with tempfile.NamedTemporaryFile("w", dir=MEMORY, prefix="pdstack-", suffix=".json") as stream:
            json.dump(variables, stream)
            stream.flush()
            done = subprocess.run(
                [*command, f"--extra-vars=@{stream.name}", str(self._task.args["playbook"])],
                env={**os.environ, "ANSIBLE_STDOUT_CALLBACK": "pd_quiet", "ANSIBLE_CONFIG": str(constants.CONFIG_FILE)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        said = {"rc": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        return {**result, "changed": False, "failed": False, **said}  # whatever the look's own exit code
