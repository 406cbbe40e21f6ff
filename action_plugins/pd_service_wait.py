"""Show what each instance is doing while pd_service_wait waits: loading shard 3 of 46, capturing graphs 5 of 12."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

SLICE_S = 10  # seconds between two looks from here; on the host it looks twice a second
REMIND_S = 60  # seconds after which a line that has not changed is shown again, with the time that has passed
display = Display()


class ActionModule(ActionBase):
    """The module waits in slices, so that between them its phases come to the terminal."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        host = str((task_vars or {}).get("inventory_hostname", ""))
        args, shown, said = {"slice": SLICE_S, **self._task.args}, "", 0
        while True:
            found: dict[str, Any] = self._execute_module(
                module_name="pd_service_wait", module_args=args, task_vars=task_vars
            )
            if found.get("failed") or not found.get("pending") or self._task.check_mode:
                return found
            line, waited = progress_line(found["instances"]), int(found["waited"])
            if line != shown or waited >= said + REMIND_S:
                limit = args.get("timeout")
                display.display(f"  {host}: {line} ({waited} s{f' of at most {limit} s' if limit else ''})")
                shown, said = line, waited
            args["progress"] = found["progress"]


def progress_line(instances: list[dict[str, Any]]) -> str:
    """Return what those are doing that are not ready yet, in one line."""
    late = [item for item in instances if not item["ready"]]
    return "; ".join(f"{item['name']}: {item['phase'] or item['state']}" for item in late)
