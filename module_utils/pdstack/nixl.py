"""NIXL's proof of transport: what a two-process transfer measured, and which lane UCX took for it.

UCX says which transport serves which size of message when UCX_PROTO_INFO=y is set. Up to UCX 1.21 (nixl 1.1.0)::

    | ucp_context_0 intra-node cfg#1 | remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda/dev[1] |
    +--------------------------------+-----------+----------------------------------------------------------+
    |                         0..inf | zero-copy | cuda_ipc/cuda                                            |

and later (nixl 1.5.1) the same in rows of their own, with a heading, perhaps with a count in front of each range::

    | decode intra-node cfg#1                                  |
    | remote memory write by ucp_put* from host memory to host |
    +--------+-------------+-----------------------------------+
    | Range  | Description |              Config               |
    +--------+-------------+-----------------------------------+
    | 0..inf | zero-copy   | cma/memory                        |

The engine's prefill server writes (PUT), so the table of ``ucp_put`` is the one that counts. Words in which no such
table is found are kept as they are, and the lane is ``unknown``, never empty.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from . import p2p
from .facts import HostFacts
from .refusal import Refusal, Refused
from .runner import Runner

#: The share of a plain copy's speed that NIXL must reach between two GPUs, each block allowed BLOCK_S more than it.
SHARE = 0.8
#: Seconds that each block of a transfer may take beyond a plain copy of it: what NIXL's progress thread cost on two
#: H200s (docs/releases.md). The proof runs without that thread since; the allowance stays until that has run between
#: two GPUs. Over NVLink it is half of a block of 64 MB, over PCIe 5.0 a fourteenth.
BLOCK_S = 1e-4
#: The lane of a transfer whose table UCX did not print, or not in a known form.
UNKNOWN = "unknown"
#: Lines of UCX's words that are kept where the lane is unknown.
KEPT_LINES = 40
#: Copies of the buffer that one transfer between GPUs has in flight, as a prefill server hands over many blocks at
#: once and as the probe's own P2P measurement queues 16 copies.
IN_FLIGHT = {"VRAM": 16, "DRAM": 1}


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
    copied: Optional[float] = None  # bytes/s of a plain copy from the first side's GPU to the second's, if measured
    busy: str = ""  # what else uses these GPUs, in words


@dataclass(frozen=True)
class Result:
    """What a pair's transfer gave. Bandwidths are bytes/s by direction, such as "prefill-0 to decode-0"."""

    memory: str
    sides: List[str]
    bytes: int  # of one transfer: all copies of the buffer that were in flight
    directions: Dict[str, Dict[str, int]]  # direction -> best, median
    lane: str  # of large writes from the first side to the second, or UNKNOWN
    lane_back: str
    lanes: List[Lane] = field(default_factory=list)
    words: List[str] = field(default_factory=list)  # the writer's last words of UCX, where its lane is unknown
    versions: Dict[str, str] = field(default_factory=dict)
    busy: str = ""  # what else used the GPUs meanwhile: bandwidth then says little


_ROW = re.compile(r"(?:\[[^\]]*\]\s*)*\|(?P<cells>.*)\|\s*$")  # behind UCX's prefixes of time and process
_RANGE = re.compile(r"\d[\dKMGTB.]*(?:\.\.(?:inf|\d[\dKMGTB.]*))?")  # 0..inf, 8185..65528, 0..2K, 0
_PUT = re.compile(r"remote memory write by ucp_put\S*.*?\bfrom (?P<source>\S+)")
_MEMORY = {"DRAM": "host", "VRAM": "cuda"}


def put_lanes(text: str, memory: str = "") -> List[Lane]:
    """Return the lanes of the last table of remote writes in UCX's words; empty where there is none.

    ``memory`` (DRAM or VRAM) takes the tables of writes from that kind of memory alone. Tables of writes to another
    process come before those to the own one (``self``), which UCX makes at its start.
    """
    tables: List[Tuple[bool, List[Lane]]] = []
    name, rows = "", None  # type: str, Optional[List[Lane]]
    for line in text.splitlines():
        row = _ROW.match(line.strip())
        if row is None:
            continue
        cells = [cell.strip() for cell in row["cells"].split("|")]
        title = cells[-1]
        put = _PUT.match(title)
        if put:
            name = cells[0] if len(cells) > 1 else name
            wanted = put["source"].split("/")[0].startswith(_MEMORY.get(memory, ""))
            rows = [] if wanted else None
            if rows is not None:
                tables.append((" self " in f" {name} ", rows))
        elif len(cells) < 3:  # a title of something else, or the first row of a title
            name, rows = cells[0], None
        elif rows is not None and _RANGE.fullmatch(cells[-3]):
            rows.append(Lane(*cells[-3:]))
    for own in (False, True):
        found = [lanes for is_own, lanes in tables if lanes and is_own is own]
        if found:
            return found[-1]
    return []


def bulk_lane(lanes: Sequence[Lane]) -> str:
    """Return the lane that the largest messages take, which are the KV cache's; UNKNOWN where none is known."""
    return lanes[-1].lane if lanes else UNKNOWN


def complaints(text: str) -> List[str]:
    """Return UCX's warnings and errors without their prefixes, each once."""
    found: Dict[str, None] = {}
    for line in text.splitlines():
        match = re.search(r"UCX\s+(?:WARN|ERROR)\s+(.*)", line)
        if match:
            found[match.group(1).strip()] = None
    return list(found)


def pairs(plan: Mapping[str, Any], host: str, found: HostFacts) -> List[Pair]:
    """Return the transfers that prove a host's part of the plan.

    With GPUs: rank by rank between the prefill and the decode instance of each set that has both here. Where the other
    side is on another host, between two GPUs of the instance itself. ``found`` tells what a plain copy
    between them reached, and whether one is in use.
    """
    here = [item for item in plan["instances"] if item["host"] == host and item["role"] in ("prefill", "decode")]
    sets: Dict[str, Dict[str, Any]] = {}
    for item in here:
        sets.setdefault(item["set"], {})[item["role"]] = item
    wanted: List[Pair] = []
    for members in sets.values():
        alone = next(iter(members.values()))
        both = [members.get("prefill", alone), members.get("decode", alone)]
        if plan["profile"] != "gpu":
            wanted.append(Pair("DRAM", [_side(both[0], 0, "a"), _side(both[1], 0, "b")]))
        elif len(members) == 2:
            ranks = range(min(len(both[0]["gpus"]), len(both[1]["gpus"])))
            wanted += [_on_gpus(both, rank, rank, found) for rank in ranks]
        else:
            wanted.append(_on_gpus(both, 0, len(alone["gpus"]) - 1, found))
    return wanted


def _side(instance: Mapping[str, Any], device: int, word: str) -> Side:
    # The engine's HOME is its JIT cache. The driver would make its own folders there for the user who runs this, root,
    # and the engine could not write below them.
    return Side(f"{instance['name']}.{word}", {**instance["env"], "CUDA_CACHE_DISABLE": "1"}, device)


def _on_gpus(both: Sequence[Mapping[str, Any]], first: int, second: int, found: HostFacts) -> Pair:
    a, b = both[0]["gpus"][first]["position"], both[1]["gpus"][second]["position"]
    sides = [_side(both[0], first, f"gpu{a}"), _side(both[1], second, f"gpu{b}")]
    if sides[0].name == sides[1].name:  # one GPU for both processes
        sides[1] = Side(sides[1].name + "b", sides[1].environment, second)
    measured = found.p2p.measured_gb_s if found.p2p.data_ok else None
    gb_s = measured[a][b] if measured else None
    return Pair("VRAM", sides, gb_s * 1e9 if gb_s else None, p2p.in_use(found.gpus[a]) or p2p.in_use(found.gpus[b]))


def measure(script: str, python: str, pair: Pair, size: int, repetitions: int, runner: Runner) -> Result:
    """Run one transfer under the release's Python. Raises TransportRefused with UCX's own words where none comes about.

    ``script`` is the text of roles/nixl_ucx/files/nixl_transfer.py, ``size`` bytes of one transfer.
    """
    names = [side.name for side in pair.sides]
    subject = f"NIXL transfer {' - '.join(names)} ({pair.memory})"
    sides = [{"name": s.name, "environment": s.environment, "device": s.device} for s in pair.sides]
    flight = IN_FLIGHT[pair.memory]
    request = {"bytes": size, "in_flight": flight, "repetitions": repetitions, "memory": pair.memory, "sides": sides}
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
        words=[] if there else answer["ucx"].get(names[0], "").splitlines()[-KEPT_LINES:] or ["UCX said nothing"],
        versions=answer["versions"],
        busy=pair.busy,
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
    transports = {part.split("/")[0] for part in re.split(r"[\s,]+", lane)}
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


def warnings(result: Result, copied: Optional[float]) -> List[str]:
    """Say where a transfer between GPUs is proven less than it could be: its lane, or its bandwidth.

    An unknown lane is no refusal by itself: the bandwidth rule stands, and the bytes arrived. Nor is a low bandwidth
    beside something else that used the GPUs. ``copied`` as check_result.
    """
    if result.memory != "VRAM":
        return []
    found, best = [], result.directions[" to ".join(result.sides)]["best"]
    subject = f"NIXL {' to '.join(result.sides)}: {best / 1e9:.1f} GB/s"
    if result.busy and copied and best < needed(result.bytes, copied):
        found.append(
            f"{subject} where {needed(result.bytes, copied) / 1e9:.1f} are needed, but {result.busy} while it was "
            "measured. To know, remove /var/lib/pdstack/nixl and deploy again with pd.target stopped"
        )
    if result.lane == UNKNOWN:
        rule = "" if copied else "; nor is its bandwidth held against P2P: playbooks/probe.yml -e pd_probe_measure=true"
        found.append(
            f"{subject} over a lane that UCX did not name in a known form"
            f"{rule}. Its last words: {' / '.join(line.strip() for line in result.words[-3:])}"
        )
    return found


def needed(moved: int, copied: float) -> float:
    """Return the bandwidth (bytes/s) that NIXL must reach between two GPUs with a transfer of ``moved`` bytes.

    ``copied`` is what a plain copy between them reached (bytes/s). Staging through the host costs several times that.
    """
    return SHARE * moved / (moved / copied + IN_FLIGHT["VRAM"] * BLOCK_S)


def check_result(result: Result, copied: Optional[float], forbidden: Sequence[str]) -> List[Refusal]:
    """Refuse a result over a forbidden lane, or too slow beside a plain copy between the GPUs.

    ``copied`` is the bandwidth of that copy (bytes/s) from the first side's GPU to the second's; None where none was
    measured. Judged is the direction in which the engine writes, from the first side to the second, and only where
    nothing else used the GPUs: a deployment to a host that serves must not fail because it serves.
    """
    problems = check_lane(result.lane, forbidden)
    best = result.directions[" to ".join(result.sides)]["best"]
    if copied and not result.busy and best < needed(result.bytes, copied):
        problems.append(
            Refusal(
                f"NIXL bandwidth {' to '.join(result.sides)}",
                f"{best / 1e9:.1f} GB/s over {result.lane if result.lane != UNKNOWN else 'an unknown lane'}",
                f"{needed(result.bytes, copied) / 1e9:.1f} GB/s: {SHARE:.0%} of a plain copy's {copied / 1e9:.1f}, "
                f"{BLOCK_S * 1e3:g} ms allowed for each block",
                "UCX stages through the host, or rates cuda_ipc too low (before UCX 1.23 on RTX PRO 6000, ucx#11865): "
                "UCX_CUDA_IPC_BW or UCX_TLS in pd_engine.extra_env; to measure again, remove /var/lib/pdstack/nixl and "
                "deploy on idle GPUs",
            )
        )
    return problems
