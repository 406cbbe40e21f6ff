"""A Torch profiler trace (Chrome format) as a table of time by kernel family.

Where a trace has GPU kernels, their durations count; where it has none (the cpu profile), the operators' own time does.
Pure: it reads a parsed trace and nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

Event = Mapping[str, Any]

ATTENTION, INDEXER, MOE, ALL_REDUCE = "attention", "indexer", "MoE", "all-reduce"
DENSE, NORM, COPY, SAMPLING, OTHER = "dense", "norm and rope", "copy", "sampling", "other"
FAMILIES = (ATTENTION, INDEXER, MOE, ALL_REDUCE, DENSE, NORM, COPY, SAMPLING, OTHER)

# Names of kernels (SGLang, FlashInfer, FlashMLA, Marlin, CUTLASS, NCCL, this bundle) and of CPU operators, first match
# wins. The order matters: a MoE's GEMM is MoE, and an indexer's top-k is no sampling.
_PATTERNS: Sequence[Tuple[str, str]] = (
    (ALL_REDUCE, r"nccl|all_?reduce|cross_device_reduce|one_?shot|two_?shot|multimem|all_?gather|reduce_?scatter"),
    (ALL_REDUCE, r"^(c10d|gloo)::|mscclpp"),
    (COPY, r"at::native::.*(index_(elementwise|put|kernel)|index_?select|copy_kernel|CopyFunctor)"),
    (
        INDEXER,
        r"indexer|^logits_kernel|mqa_logits|paged_mqa|topk_transform|fast_topk|index_?k|index_?topk|kpool|hadamard",
    ),
    (MOE, r"moe|marlin|expert|group(ed)?_?gemm|groupproblem|topk_?gating|topk_?softmax|(grouped|hash)_topk"),
    (MOE, r"mxfp4|nvfp4|mxfp8|silu_and_mul|act_and_mul|swiglu|permute_token|count_and_sort"),
    (ATTENTION, r"sparse_?mla|sparse_decode|flash_?mla|fmha|flash_?attn|flash_?attention|flash_?fwd|flash::|_mla_"),
    (ATTENTION, r"paged_?attention|batch_?decode|batch_?prefill|decode_att|extend_att|scaled_dot_product|attention"),
    (ATTENTION, r"attn|^(decode|merge)_kernel|merge_state|kv_split|reduce_segments|set_mla_kv|set_kv|compress"),
    (ATTENTION, r"^_fwd_(grouped_)?kernel(_stage\d)?\b|kv_indices|store_kv_?cache"),
    (NORM, r"rms_?norm|layer_?norm|group_?norm|rotary|rope|\bnorm|mhc|^(product|finish)_kernel|hyper_?conn"),
    (DENSE, r"gemm|gemv|nvjet|cublas|cutlass|split_?k|xmma|::(mm|addmm|bmm|linear|matmul|_scaled_mm)\b"),
    (SAMPLING, r"sampl|argmax|multinomial|top_?p|top_?k|softmax"),
    (
        COPY,
        r"memcpy|memset|copy|::to\b|_to_copy|::cat\b|cat_?array|::clone|fill_|index_?select|gather|scatter|index_?put",
    ),
)
_COMPILED = tuple((family, re.compile(pattern, re.IGNORECASE)) for family, pattern in _PATTERNS)

# GB/s of the card's memory by its vendor's data sheet.
MEMORY_GB_S: Mapping[str, float] = {
    "H200": 4800.0,
    "H100": 3350.0,
    "RTX PRO 6000 Blackwell Server": 1597.0,
    "RTX PRO 6000 Blackwell": 1792.0,
    "A100-SXM4-80GB": 2039.0,
    "Tesla P4": 192.0,
}
_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "long": 8, "char": 1, "bool": 1}
_STEP = re.compile(r"^step\[(\w+)")


@dataclass(frozen=True)
class Limits:
    """What the machine could do. None: not known, and then no share of the roofline is said."""

    memory_gb_s: Optional[float] = None
    link_gb_s: Optional[float] = None  # one way between two GPUs, as the probe measured it
    family_bytes: Mapping[str, float] = field(default_factory=dict)  # bytes of one step, where the user knows them


@dataclass(frozen=True)
class Row:
    """Time of a family or a kernel. Milliseconds are of one step and one rank."""

    name: str
    ms: float
    share: float  # of all kernels' time
    calls: float  # of one step
    family: str = ""
    roofline: Optional[float] = None  # 1.0 is as fast as the hardware allows


@dataclass(frozen=True)
class Table:
    """What a trace says about one step."""

    source: str
    device: str  # gpu | cpu
    hardware: str
    stage: str  # DECODE, EXTEND, ... or "" where the trace does not say
    steps: int
    span_ms: float  # from one step's begin to the next one's
    busy_ms: float  # in which at least one kernel or operator ran
    families: List[Row]
    kernels: List[Row]  # the longest ones
    notes: List[str] = field(default_factory=list)


def family_of(name: str) -> str:
    """Return the family of a kernel or operator by its name."""
    for family, pattern in _COMPILED:
        if pattern.search(name):
            return family
    return OTHER


def analyse(
    document: Mapping[str, Any], source: str = "", steps: int = 0, limits: Optional[Limits] = None, longest: int = 20
) -> Table:
    """Return the table of a trace. ``steps`` is needed where the trace does not mark them. Raises ValueError."""
    events = [event for event in document.get("traceEvents", ()) if event.get("ph") == "X"]
    limits = limits or Limits()
    hardware = ", ".join(sorted({str(item.get("name")) for item in document.get("deviceProperties") or ()})) or "CPU"
    if limits.memory_gb_s is None:
        limits = Limits(memory_of(hardware), limits.link_gb_s, limits.family_bytes)
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    if not kernels and not operators:
        raise ValueError(f"{source or 'the trace'} has neither GPU kernels nor CPU operators; was a step running?")
    marked, stage = _marks(events)
    count = len(marked) or steps
    notes = []
    if not count:
        count = 1
        notes.append("the trace marks no steps and none were named: times are of the whole trace")
    timed = [(event, float(event["dur"])) for event in kernels] if kernels else own_times(operators)
    span, busy = _span_and_busy([event for event, _ in timed], marked)
    return Table(
        source=source,
        device="gpu" if kernels else "cpu",
        hardware=hardware,
        stage=stage,
        steps=count,
        span_ms=span / 1000 / (len(marked) - 1 if len(marked) > 1 else count),
        busy_ms=busy / 1000 / count,
        families=_families(timed, count, limits, operators),
        kernels=_longest(timed, count)[:longest],
        notes=notes,
    )


def memory_of(hardware: str) -> Optional[float]:
    """Return the memory bandwidth of a card by its name, longest match first; None for an unknown one."""
    for name in sorted(MEMORY_GB_S, key=len, reverse=True):
        if name.lower() in hardware.lower():
            return MEMORY_GB_S[name]
    return None


def own_times(operators: Iterable[Event]) -> List[Tuple[Event, float]]:
    """Return each operator with its time in microseconds less that of the operators it called."""
    found: List[Tuple[Event, float]] = []
    threads: Dict[Any, List[Event]] = {}
    for event in operators:
        threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    for thread in threads.values():
        stack: List[List[Any]] = []  # event, its end, its own time
        for event in sorted(thread, key=lambda item: (item["ts"], -item["dur"])):
            while stack and stack[-1][1] <= event["ts"]:
                done = stack.pop()
                found.append((done[0], max(0.0, done[2])))
            if stack:
                stack[-1][2] -= event["dur"]
            stack.append([event, event["ts"] + event["dur"], float(event["dur"])])
        found += [(item[0], max(0.0, item[2])) for item in stack]
    return found


def _marks(events: Sequence[Event]) -> Tuple[List[float], str]:
    """Return the begins of the steps of the most frequent stage, and its name."""
    by_stage: Dict[str, List[float]] = {}
    for event in events:
        match = _STEP.match(str(event.get("name"))) if event.get("cat") == "user_annotation" else None
        if match:
            by_stage.setdefault(match.group(1), []).append(float(event["ts"]))
    if not by_stage:
        return [], ""
    stage = max(by_stage, key=lambda name: len(by_stage[name]))
    return sorted(by_stage[stage]), stage


def _span_and_busy(events: Sequence[Event], marks: Sequence[float]) -> Tuple[float, float]:
    """Return the time between the first and the last step (of all events without marks), and the union of events."""
    busy, reached = 0.0, float("-inf")
    for begin, end in sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events):
        if end > reached:
            busy += end - max(begin, reached)
            reached = end
    if len(marks) > 1:
        return marks[-1] - marks[0], busy
    return reached - min(float(event["ts"]) for event in events), busy


def _families(
    timed: Sequence[Tuple[Event, float]], steps: int, limits: Limits, operators: Sequence[Event]
) -> List[Row]:
    total = sum(time for _, time in timed) or 1.0
    shapes = {event["args"].get("External id"): event for event in operators if event.get("args")}
    rows = []
    for family in FAMILIES:
        mine = [(event, time) for event, time in timed if family_of(event["name"]) == family]
        if mine:
            time = sum(part for _, part in mine)
            roofline = _roofline(family, mine, time, steps, limits, shapes)
            rows.append(Row(family, time / 1000 / steps, time / total, len(mine) / steps, roofline=roofline))
    return sorted(rows, key=lambda row: -row.ms)


def _roofline(
    family: str,
    mine: Sequence[Tuple[Event, float]],
    time_us: float,
    steps: int,
    limits: Limits,
    shapes: Mapping[Any, Event],
) -> Optional[float]:
    """Return the least time that the hardware needs for the bytes, over the time it took; None where not known."""
    if family in limits.family_bytes and limits.memory_gb_s:
        return limits.family_bytes[family] * steps / (limits.memory_gb_s * 1e3) / time_us
    if family == ALL_REDUCE and limits.link_gb_s:
        parts = [collective_bytes(event.get("args") or {}) for event, _ in mine]
        if parts and all(part is not None for part in parts):
            return sum(part or 0.0 for part in parts) / (limits.link_gb_s * 1e3) / time_us
    if family == DENSE and limits.memory_gb_s and mine and "Input Dims" not in (mine[0][0].get("args") or {}):
        launchers = [shapes.get((event.get("args") or {}).get("External id")) for event, _ in mine]
        sizes = [matmul_bytes(event.get("args") or {}) if event else None for event in launchers]
        if all(size is not None for size in sizes):
            return sum(size or 0.0 for size in sizes) / (limits.memory_gb_s * 1e3) / time_us
    return None


def collective_bytes(args: Mapping[str, Any]) -> Optional[float]:
    """Return the bytes that a ring sends over the slowest link for one collective, from NCCL's own arguments."""
    try:
        size = _BYTES_OF_NCCL[str(args["dtype"]).lower()] * int(args["In msg nelems"])
        ranks = int(args["Group size"])
    except (KeyError, ValueError):
        return None
    name = str(args.get("Collective name", "")).lower()
    rounds = 2 if "allreduce" in name or "all_reduce" in name else 1
    return rounds * (ranks - 1) / ranks * size if ranks > 1 else 0.0


_BYTES_OF_NCCL = {"bfloat16": 2, "half": 2, "float16": 2, "float": 4, "float32": 4, "byte": 1, "uint8": 1, "int": 4}


def matmul_bytes(args: Mapping[str, Any]) -> Optional[float]:
    """Return the bytes that a product reads and writes: both operands and the result, each once."""
    dims = [shape for shape in args.get("Input Dims") or () if isinstance(shape, list) and len(shape) == 2]
    kinds = [re.sub(r"^c10::", "", str(kind)).lower() for kind in args.get("Input type") or () if kind]
    if len(dims) < 2 or not kinds:
        return None
    size = _BYTES.get(kinds[0], 1 if "float8" in kinds[0] else 0)
    (rows, inner), (other, columns) = dims[-2], dims[-1]
    if not size or inner not in (other, columns):
        return None
    wide = columns if inner == other else other
    return float(size * (rows * inner + inner * wide + rows * wide))


def _longest(timed: Sequence[Tuple[Event, float]], steps: int) -> List[Row]:
    total = sum(time for _, time in timed) or 1.0
    by_name: Dict[str, List[float]] = {}
    for event, time in timed:
        by_name.setdefault(str(event["name"]), []).append(time)
    rows = [
        Row(name, sum(times) / 1000 / steps, sum(times) / total, len(times) / steps, family_of(name))
        for name, times in by_name.items()
    ]
    return sorted(rows, key=lambda row: (-row.ms, row.name))


def combine(tables: Sequence[Table]) -> Table:
    """Return the mean over ranks: a family's time is that of the average rank. Raises ValueError."""
    if not tables:
        raise ValueError("no trace; needed: at least one")
    if len(tables) == 1:
        return tables[0]
    first = tables[0]
    return Table(
        source=f"{len(tables)} ranks",
        device=first.device,
        hardware=first.hardware,
        stage=first.stage,
        steps=first.steps,
        span_ms=_mean([table.span_ms for table in tables]),
        busy_ms=_mean([table.busy_ms for table in tables]),
        families=_mean_rows([table.families for table in tables]),
        kernels=_mean_rows([table.kernels for table in tables])[: len(first.kernels)],
        notes=sorted({note for table in tables for note in table.notes}),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_rows(tables: Sequence[Sequence[Row]]) -> List[Row]:
    by_name: Dict[str, List[Row]] = {}
    for rows in tables:
        for row in rows:
            by_name.setdefault(row.name, []).append(row)
    count = len(tables)
    found = []
    for name, rows in by_name.items():
        known = [row.roofline for row in rows if row.roofline is not None]
        found.append(
            Row(
                name,
                sum(row.ms for row in rows) / count,
                sum(row.share for row in rows) / count,
                sum(row.calls for row in rows) / count,
                rows[0].family,
                _mean(known) if len(known) == count else None,
            )
        )
    return sorted(found, key=lambda row: (-row.ms, row.name))


def text(table: Table) -> str:
    """Return the table for a terminal."""
    idle = max(0.0, 1 - table.busy_ms / table.span_ms) if table.span_ms else 0.0
    what = "kernels" if table.device == "gpu" else "operators"
    stage = f"{table.stage} " if table.stage else ""
    lines = [
        f"{table.source}: {table.hardware}, {table.steps} {stage}steps; a step takes {table.span_ms:.3f} ms, "
        f"{what} run in {table.busy_ms:.3f} ms of it, idle {idle:.0%}",
        f"{'family':<14}{'ms a step':>11}{'share':>8}{'calls':>8}{'roofline':>10}",
    ]
    for row in table.families:
        roofline = "-" if row.roofline is None else f"{row.roofline:.0%}"
        lines.append(f"{row.name:<14}{row.ms:>11.3f}{row.share:>8.1%}{row.calls:>8.1f}{roofline:>10}")
    lines.append(f"longest {what}:")
    lines += [
        f"{row.ms:>11.3f} ms {row.share:>6.1%} {row.calls:>7.1f}x  {row.family:<13} {row.name[:90]}"
        for row in table.kernels
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in table.notes)])
