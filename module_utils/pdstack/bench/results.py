"""The result document: one schema for both clients, with all that made the figures. JSON by codec."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping

from .. import codec
from .stats import Run, Spread
from .workload import Workload

SCHEMA = 1
OURS, ENGINES = "pdstack", "bench_serving"


@dataclass(frozen=True)
class Result:
    """What one invocation measured."""

    label: str  # what the operator calls it
    when: str  # UTC, ISO 8601
    client: str  # pdstack | bench_serving
    url: str
    model: str
    chat: bool
    workload: Workload
    tokens_per_word: float
    runs: List[Run]
    kind: str = ""  # simulated | GPU: the kind of truth
    machine: str = ""  # one line: GPUs or CPU
    topology: str = ""  # one line: pd, prefill 1 x TP4, decode 1 x TP4
    release: str = ""
    versions: Dict[str, str] = field(default_factory=dict)
    plan: Dict[str, Any] = field(default_factory=dict)
    facts: Dict[str, Any] = field(default_factory=dict)  # by host
    quality: Dict[str, Any] = field(default_factory=dict)  # before and after, see quality.py
    notes: List[str] = field(default_factory=list)
    schema: int = SCHEMA


def load(document: Mapping[str, Any], name: str = "result") -> Result:
    """Return a result that was written before. Raises codec.CodecError for what is none."""
    found: Result = codec.load(Result, document, name)
    if found.schema != SCHEMA:
        raise codec.CodecError(f"{name}: schema {found.schema}; needed: {SCHEMA}")
    return found


def from_bench_serving(line: Mapping[str, Any], repeat: int = 1, sent: int = 0) -> Run:
    """Return one line of ``sglang.bench_serving --output-file`` as a run.

    It waits for the first chunk with text to take TTFT and writes 0.00 where there was none (engine.md 7); its TPOT
    then contains the prefill. Such a TTFT is None here, and nobody compares the TPOT beside it.
    """

    def figures(name: str) -> Spread:
        # 0.5.13 has no p95 of most figures; 0 says so
        return Spread(
            line[f"mean_{name}_ms"], line[f"median_{name}_ms"], line.get(f"p95_{name}_ms", 0.0), line[f"p99_{name}_ms"]
        )

    seconds = float(line["duration"])
    return Run(
        concurrency=int(line["max_concurrency"]),
        rate=None,
        repeat=repeat,
        requests=sent or int(line["completed"]),
        completed=int(line["completed"]),
        failed=max(0, sent - int(line["completed"])),
        duration_s=seconds,
        input_tokens=int(line["total_input_tokens"]),
        output_tokens=int(line["total_output_tokens"]),
        output_tok_s=float(line["output_throughput"]),
        total_tok_s=(int(line["total_input_tokens"]) + int(line["total_output_tokens"])) / seconds,
        requests_s=float(line["request_throughput"]),
        ttft_ms=figures("ttft") if line["median_ttft_ms"] > 0 else None,
        tpot_ms=figures("tpot"),
        itl_ms=figures("itl"),
        e2e_ms=figures("e2e_latency"),
    )
