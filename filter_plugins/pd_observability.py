# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""The door from the role observability to module_utils/pdstack/observe.py."""

from __future__ import annotations

from typing import Any, Callable, Dict

from ansible.module_utils.pdstack import observe


class FilterModule:
    """The filters of the role observability."""

    def filters(self) -> Dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"pd_observability_files": observe.files}
