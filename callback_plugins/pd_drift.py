"""Turn playbooks/drift.yml into a look that changes nothing and ends with a report and an exit code.

The phases that deploy_pd.yml imports run in check and diff mode, whatever the command line said, and their results
become the report. The playbook itself refuses to go on where this plugin did not work. It does nothing in other runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.pdstack import drift
from ansible.playbook import Playbook
from ansible.plugins.callback import CallbackBase
from ansible.utils.vars import load_options_vars

DOCUMENTATION = """
name: pd_drift
type: aggregate
short_description: Report of playbooks/drift.yml
description:
  - Gathers per host and item what the roles would change and why, and prints a table, or JSON.
  - Ends the run with exit code 0 (no drift), 2 (drift), 1 (a host or a task failed, so that nobody can say) or
    3 (a deployment is under way, whose half-done work would look like drift).
"""

PLAYBOOK = Path(__file__).resolve().parent.parent / "playbooks" / "drift.yml"


class CallbackModule(CallbackBase):
    """Active in runs of playbooks/drift.yml alone."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "pd_drift"

    def __init__(self) -> None:
        super().__init__()
        self.report: drift.Report | None = None
        self.target = ""
        self.began = 0.0

    def v2_playbook_on_start(self, playbook: Playbook) -> None:
        path = Path(str(playbook._file_name)).resolve()
        self.report = None
        if path != PLAYBOOK:
            return
        self.began = time.monotonic()
        self.report = drift.Report(started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        for play in playbook.get_plays():
            play.check_mode, play.diff = True, True
            play.any_errors_fatal = False  # a host that fails does not hide the others
        # What conditions read as ansible_check_mode.
        load_options_vars(None).update(ansible_check_mode=True, ansible_diff_mode=True)

    def v2_playbook_on_play_start(self, play: Any) -> None:
        if self.report is not None:
            self.target = str(play.get_variable_manager().extra_vars.get("pd_drift_report", ""))
            # What the playbook's last play goes by.
            load_options_vars(None).update(__drift_differs=bool(self.report.items or self.report.failures))

    def v2_runner_on_ok(self, result: Any) -> None:
        if self.report is None:
            return
        host, task, found = str(result.host.name), result.task_name, result.result
        if host not in self.report.hosts:
            self.report.hosts.append(host)
        if result.task.action == "pd_lock":
            if found.get("holder"):
                self.report.held(host, _plain(found))
            return
        # A module may call what it returns `results`, too; only a loop has one for each item.
        for one in found["results"] if result.task.loop is not None and "results" in found else [found]:
            one = _plain(one)
            self.report.add(drift.of_result(host, task, result.task.action, one))
            managed = self.report.managed.setdefault(host, [])
            managed += [name for name in drift.managed_of(task, result.task.action, one) if name not in managed]

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        # Once a deployment is known to be under way, the look ends for that.
        # What tasks/failed.yml says after a failure is that failure once more.
        again = result.task_name.startswith("failed | ")
        if self.report is not None and self.report.judges and not ignore_errors and not again:
            message = str(result.result.get("msg") or result.result.get("stderr") or "it failed without a word")
            # Of a module that could not begin, as on a full disk, the last line of Python tells why, and not Ansible's.
            last = str(result.result.get("module_stderr") or "").strip().splitlines()[-1:]
            message = ": ".join([message, *last])
            self.report.failures.append(drift.Failure(str(result.host.name), result.task_name, message))

    def v2_runner_on_unreachable(self, result: Any) -> None:
        if self.report is not None:
            message = "unreachable: " + str(result.result.get("msg", "")).strip()
            self.report.failures.append(drift.Failure(str(result.host.name), result.task_name, message))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """End the run: ansible's own exit code 2 means a failed task, so it cannot say what this one has to."""
        if self.report is None:
            return
        self.report.seconds = round(time.monotonic() - self.began, 1)
        if not self.report.hosts and not self.report.failures:
            self.report.failures.append(drift.Failure("no host", "inventory", "no host was looked at"))
        document = json.dumps(self.report.document(), indent=1) + "\n"
        try:
            if self.target == "-":
                sys.stdout.write(document)
            else:
                print(f"\n{self.report.text()}")
            if self.target not in ("", "-"):
                _write(Path(self.target), document)
        except OSError as error:
            print(f"the report could not be written: {error}", file=sys.stderr)
            sys.exit(drift.ERROR)
        sys.stdout.flush()
        sys.exit(self.report.exit_code)


def _plain(value: Any) -> dict[str, Any]:
    return json.loads(json.dumps(value, default=str))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)
