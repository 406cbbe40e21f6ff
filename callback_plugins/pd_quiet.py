"""A stdout callback without a word: for runs whose own report is all that should be read, such as drift by cron."""

from __future__ import annotations

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: pd_quiet
type: stdout
short_description: Prints nothing
description:
  - Set C(ANSIBLE_STDOUT_CALLBACK=pd_quiet) and a playbook prints what its own report says, and warnings and errors
    on standard error.
"""


class CallbackModule(CallbackBase):
    """Inherits methods that do nothing."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "pd_quiet"
