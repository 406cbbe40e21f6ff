"""NIXL's proof of transport: what a two-process transfer measured, and which lane UCX took for it.

UCX says which transport serves which size of message when UCX_PROTO_INFO=y is set, in tables like

    | decode intra-node cfg#1                                  |
    | remote memory write by ucp_put* from host memory to host |
    +--------+-------------+-----------------------------------+
    | Range  | Description |              Config               |
    +--------+-------------+-----------------------------------+
    | 0..inf | zero-copy   | cma/memory                        |

The engine's prefill server writes (PUT), so the table of ``ucp_put`` is the one that counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Mapping, Sequence

from .refusal import Refusal


@dataclass(frozen=True)
class Lane:
    """What UCX uses for one range of message sizes (bytes), such as 0..inf, zero-copy, cma/memory."""

    sizes: str
    method: str
    lane: str


_CELL = re.compile(r"\|\s*(?P<a>[^|]*?)\s*\|\s*(?P<b>[^|]*?)\s*\|\s*(?P<c>[^|]*?)\s*\|\s*$")
_HEAD = re.compile(r"\|\s*(?P<text>[^|]*?)\s*\|\s*$")


def put_lanes(text: str) -> List[Lane]:
    """Return the lanes of the last table of remote writes in UCX's words; empty where there is none."""
    lanes: List[Lane] = []
    inside = False
    for line in text.splitlines():
        cells, head = _CELL.search(line), _HEAD.search(line)
        if cells is None and head is not None:
            if head["text"].startswith("remote memory write by ucp_put"):
                lanes, inside = [], True
            elif " by ucp_" in head["text"]:
                inside = False
        elif cells is not None and inside and cells["a"] != "Range":
            lanes.append(Lane(cells["a"], cells["b"], cells["c"]))
    return lanes


def bulk_lane(lanes: Sequence[Lane]) -> str:
    """Return the lane that the largest messages take, which are the KV cache's; "" where none is known."""
    return lanes[-1].lane if lanes else ""


def complaints(text: str) -> List[str]:
    """Return UCX's warnings and errors without their prefixes, each once."""
    found: Dict[str, None] = {}
    for line in text.splitlines():
        match = re.search(r"UCX\s+(?:WARN|ERROR)\s+(.*)", line)
        if match:
            found[match.group(1).strip()] = None
    return list(found)


def check_environment(environment: Mapping[str, str]) -> List[Refusal]:
    """Refuse settings that silently cost the transport its speed."""
    problems = []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if re.search(r"expandable_segments:\s*true", environment.get(name, ""), re.IGNORECASE):
            problems.append(
                Refusal(
                    name,
                    environment[name],
                    "no expandable segments: NIXL transfers from them are about 600 times slower",
                    "remove expandable_segments:True from the engine's environment",
                )
            )
    return problems


def check_lane(lane: str, forbidden: Sequence[str]) -> List[Refusal]:
    """Refuse a transport that the host should not need, such as tcp between GPUs of one host."""
    transports = {part.split("/")[0] for part in re.split(r"[\s,]+", lane) if "/" in part}
    bad = sorted(transports & set(forbidden))
    if not bad:
        return []
    return [
        Refusal(
            "data lane",
            f"UCX moves the KV cache over {lane}",
            f"a lane other than {', '.join(bad)}",
            "check UCX_TLS and UCX_NET_DEVICES; on a GPU host P2P access and cuda_ipc must work (see the probe)",
        )
    ]
