"""The probes' documents of the fixture hosts."""

from __future__ import annotations

import functools
import json
import pathlib

from pdstack import codec, facts

FACTS = pathlib.Path(__file__).resolve().parents[2] / "fixtures/facts"


@functools.cache
def recorded() -> dict[str, facts.HostFacts]:
    """The documents by host name."""
    found = {path.stem: codec.load(facts.HostFacts, json.loads(path.read_text())) for path in FACTS.glob("*.json")}
    assert len(found) > 15
    return found
