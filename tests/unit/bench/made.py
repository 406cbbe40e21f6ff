"""Results with chosen figures."""

from pdstack.bench.results import Result
from pdstack.bench.stats import Client, Run, Spread
from pdstack.bench.workload import Workload


def run(concurrency=16, tok_s=100.0, ttft=50.0, tpot=10.0, repeat=1, failed=0, **more):
    spread = Spread(tpot, tpot, tpot * 2, tpot * 3)
    fields = {
        "concurrency": concurrency,
        "rate": None,
        "repeat": repeat,
        "requests": 96,
        "completed": 96 - failed,
        "failed": failed,
        "duration_s": 10.0,
        "input_tokens": 96 * 256,
        "output_tokens": 96 * 128,
        "output_tok_s": tok_s,
        "total_tok_s": tok_s * 3,
        "requests_s": 9.6,
        "ttft_ms": Spread(ttft, ttft, ttft * 2, ttft * 3) if ttft else None,
        "tpot_ms": spread,
        "itl_ms": spread,
        "e2e_ms": spread,
        "client": Client(0.1, 1.0, 0.0),
        "errors": {"the stream was cut: no [DONE]": failed} if failed else {},
    }
    return Run(**{**fields, **more})


def result(runs=(), **more):
    fields = {
        "label": "gpu1 pd",
        "when": "2026-11-30T10:00:00Z",
        "client": "pdstack",
        "url": "http://h:8000",
        "model": "m",
        "chat": True,
        "workload": Workload(),
        "tokens_per_word": 1.2,
        "runs": list(runs) or [run()],
        "kind": "simulated",
        "release": "sglang-0.5.23-abc",
    }
    return Result(**{**fields, **more})
