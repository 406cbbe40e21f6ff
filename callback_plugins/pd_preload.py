"""Load filters before the first worker is forked, so that a run pays for it once.

Ansible runs each task on each host in a process of its own. The first template in there that asks for a filter loads
the files of all filters, ours with the package behind them: a hundred times a run. What the parent has, children share.
"""

from __future__ import annotations

import gc
from typing import Any

from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import filter_loader, test_loader

DOCUMENTATION = """
name: pd_preload
type: aggregate
short_description: Loads filters and tests once for all workers
description:
  - Says nothing, and changes nothing but the time that a run takes.
"""


class CallbackModule(CallbackBase):
    """Active in every run."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "pd_preload"

    def v2_playbook_on_start(self, playbook: Any) -> None:
        for loader in (filter_loader, test_loader):
            for _plugin in loader.all():
                pass
        # The collector would write to each object of this process, and so copy its memory into each worker.
        gc.collect()
        gc.freeze()
