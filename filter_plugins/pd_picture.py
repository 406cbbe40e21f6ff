# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Filters that draw a host's topology: doors to module_utils/pdstack/picture.py and svg.py."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Mapping, Optional

from ansible.module_utils.pdstack import codec, facts, inventory, picture, plan_types, svg


def _facts(documents: Iterable[Mapping[str, Any]], host: str) -> facts.HostFacts:
    """Join a host's partial documents under its inventory name."""
    return facts.merge([{**inventory.builtin(document), "host": host} for document in documents])


def _plan(document: Optional[Mapping[str, Any]]) -> Optional[plan_types.Plan]:
    return codec.load(plan_types.Plan, inventory.builtin(document)) if document else None


def text(documents: Iterable[Mapping[str, Any]], host: str, plan: Optional[Mapping[str, Any]] = None) -> str:
    """Return the picture for a terminal."""
    return picture.text(_facts(documents, host), _plan(plan))


def drawing(
    documents: Iterable[Mapping[str, Any]], host: str, plan: Optional[Mapping[str, Any]] = None, refused: str = ""
) -> str:
    """Return the picture as SVG."""
    return svg.svg(_facts(documents, host), _plan(plan), refused)


def document(documents: Iterable[Mapping[str, Any]], host: str) -> Dict[str, Any]:
    """Return the joined facts document."""
    whole: Dict[str, Any] = codec.dump(_facts(documents, host))
    return whole


class FilterModule:
    """The filters of the probe."""

    def filters(self) -> Dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"pd_picture": text, "pd_picture_svg": drawing, "pd_facts_document": document}
