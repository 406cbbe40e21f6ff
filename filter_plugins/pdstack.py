# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Doors from templates to the pure package: each filter is one function of module_utils/pdstack."""

from __future__ import annotations

from typing import Any, Callable, Dict

from ansible.module_utils.pdstack import service


class FilterModule:
    """The filters that the roles use."""

    def filters(self) -> Dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "pd_instances_of": service.instances_of,
            "pd_routers_of": service.routers_of,
            "pd_router_arguments": service.router_arguments,
            "pd_service_files": service.files,
            "pd_service_targets": service.targets,
            "pd_service_units": service.units,
        }
