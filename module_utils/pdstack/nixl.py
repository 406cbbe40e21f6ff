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

import json
import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence

from .refusal import Refusal, Refused
from .runner import Runner

#: The share of the measured P2P bandwidth that NIXL must reach between two GPUs.
SHARE = 0.8


class TransportRefused(Refused):
    """The transport does not carry the KV cache as it should."""

    title = "The transport was refused"


@dataclass(frozen=True)
class Lane:
    """What UCX uses for one range of message sizes (bytes), such as 0..inf, zero-copy, cma/memory."""

    sizes: str
    method: str
    lane: str


@dataclass(frozen=True)
class Side:
    """One process of a transfer: an engine's name, its environment, and a GPU by its index among those it sees."""

    name: str
    environment: Dict[str, str]
    device: int = 0


@dataclass(frozen=True)
class Pair:
    """Two sides that will hand KV over; the first is the one that writes in service."""

    memory: str  # DRAM | VRAM
    sides: List[Side]
    baseline: Optional[float] = None  # measured P2P bandwidth from the first side's GPU to the second's, bytes/s


@dataclass(frozen=True)
class Result:
    """What a pair's transfer gave. Bandwidths are bytes/s by direction, such as "prefill-0 to decode-0"."""

    memory: str
    sides: List[str]
    bytes: int
    directions: Dict[str, Dict[str, int]]  # direction -> best, median
    lane: str  # of large writes from the first side to the second
    lane_back: str
    lanes: List[Lane] = field(default_factory=list)
    versions: Dict[str, str] = field(default_factory=dict)


_CELL = re.compile(r"\|\s*(?P<a>[^|]*?)\s*\|\s*(?P<b>[^|]*?)\s*\|\s*(?P<c>[^|]*?)\s*\|\s*$")
_HEAD = re.compile(r"\|\s*(?P<text>[^|]*?)\s*\|\s*$")


def put_lanes(text: str, memory: str = "") -> List[Lane]:
    """Return the lanes of the last table of remote writes in UCX's words; empty where there is none.

    ``memory`` (DRAM or VRAM) takes the tables of writes from that kind of memory alone.
    """
    source = {"DRAM": " from host", "VRAM": " from cuda"}.get(memory, "")
    lanes: List[Lane] = []
    inside = False
    for line in text.splitlines():
        cells, head = _CELL.search(line), _HEAD.search(line)
        if cells is None and head is not None:
            if head["text"].startswith("remote memory write by ucp_put") and source in head["text"]:
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


def pairs(plan: Mapping[str, Any], host: str, measured_gb_s: Optional[Sequence[Sequence[Any]]] = None) -> List[Pair]:
    """Return the transfers that prove a host's part of the plan.

    With GPUs: rank by rank between the prefill and the decode instance of each set that has both here. Where the other
    side is on another host, between two GPUs of the instance itself. ``measured_gb_s`` is the facts' P2P matrix.
    """
    here = [item for item in plan["instances"] if item["host"] == host and item["role"] in ("prefill", "decode")]
    sets: Dict[str, Dict[str, Any]] = {}
    for item in here:
        sets.setdefault(item["set"], {})[item["role"]] = item
    found: List[Pair] = []
    for members in sets.values():
        alone = next(iter(members.values()))
        both = [members.get("prefill", alone), members.get("decode", alone)]
        if plan["profile"] != "gpu":
            found.append(Pair("DRAM", [_side(both[0], 0, "a"), _side(both[1], 0, "b")]))
        elif len(members) == 2:
            ranks = range(min(len(both[0]["gpus"]), len(both[1]["gpus"])))
            found += [_on_gpus(both, rank, rank, measured_gb_s) for rank in ranks]
        else:
            found.append(_on_gpus(both, 0, len(alone["gpus"]) - 1, measured_gb_s))
    return found


def _side(instance: Mapping[str, Any], device: int, word: str) -> Side:
    return Side(f"{instance['name']}.{word}", dict(instance["env"]), device)


def _on_gpus(both: Sequence[Mapping[str, Any]], first: int, second: int, measured: Any) -> Pair:
    positions = [both[0]["gpus"][first]["position"], both[1]["gpus"][second]["position"]]
    gb_s = measured[positions[0]][positions[1]] if measured and positions[0] != positions[1] else None
    sides = [_side(both[0], first, f"gpu{positions[0]}"), _side(both[1], second, f"gpu{positions[1]}")]
    if sides[0].name == sides[1].name:  # one GPU for both processes
        sides[1] = Side(sides[1].name + "b", sides[1].environment, second)
    return Pair("VRAM", sides, gb_s * 1e9 if gb_s else None)


def measure(script: str, python: str, pair: Pair, size: int, repetitions: int, runner: Runner) -> Result:
    """Run one transfer under the release's Python. Raises TransportRefused with UCX's own words where none comes about.

    ``script`` is the text of roles/nixl_ucx/files/nixl_transfer.py, ``size`` bytes of one transfer.
    """
    names = [side.name for side in pair.sides]
    subject = f"NIXL transfer {' - '.join(names)} ({pair.memory})"
    sides = [{"name": s.name, "environment": s.environment, "device": s.device} for s in pair.sides]
    request = {"bytes": size, "repetitions": repetitions, "memory": pair.memory, "sides": sides}
    done = runner([python, "-c", script, json.dumps(request)])
    try:
        answer = json.loads(done.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        words = f"it ended with status {done.rc}: {(done.err or done.out).strip()[-1500:]}"
        raise TransportRefused(
            [Refusal(subject, words, "a transfer in both directions", f"see whether {python} imports nixl")]
        ) from None
    if answer["failure"]:
        said = "; ".join(complaints("\n".join(answer["ucx"].values()))[:4]) or done.err.strip()[-500:]
        remedy = "check UCX_TLS and UCX_NET_DEVICES in the plan against the host's network devices (ip -br link)"
        if pair.memory == "VRAM":
            remedy += "; UCX_TLS must hold cuda_copy, and no second UCX may be loaded (LD_LIBRARY_PATH)"
        found = f"{answer['failure']}; UCX says: {said or 'nothing'}"
        raise TransportRefused([Refusal(subject, found, "a transfer between two processes in both directions", remedy)])
    there, back = [put_lanes(answer["ucx"].get(name, ""), pair.memory) for name in names]
    return Result(
        memory=pair.memory,
        sides=names,
        bytes=answer["bytes"],
        directions=answer["directions"],
        lane=bulk_lane(there),
        lane_back=bulk_lane(back),
        lanes=there,
        versions=answer["versions"],
    )


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


def check_result(result: Result, baseline: Optional[float], forbidden: Sequence[str]) -> List[Refusal]:
    """Refuse a result over a forbidden lane, or below SHARE of the measured P2P bandwidth (``baseline``, bytes/s).

    Judged is the direction in which the engine writes, from the first side to the second.
    """
    problems = check_lane(result.lane, forbidden)
    best = result.directions[" to ".join(result.sides)]["best"]
    if baseline and best < SHARE * baseline:
        problems.append(
            Refusal(
                f"NIXL bandwidth {' to '.join(result.sides)}",
                f"{best / 1e9:.1f} GB/s over {result.lane or 'an unknown lane'}",
                f"{SHARE:.0%} of the {baseline / 1e9:.1f} GB/s that a plain copy between the two GPUs reached",
                "UCX stages through the host, or rates cuda_ipc too low (before UCX 1.23 on RTX PRO 6000, ucx#11865): "
                "UCX_CUDA_IPC_BW or UCX_TLS in pd_engine.extra_env, or measure again on idle GPUs",
            )
        )
    return problems
