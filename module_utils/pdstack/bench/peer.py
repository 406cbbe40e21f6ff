"""The engine's own client, ``sglang.bench_serving``, as a second opinion: same server, same prompts, one schema."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Dict, List, Sequence

from .. import runner
from . import results, stats
from .stats import Run
from .workload import FIXED, Prompt, Workload, WorkloadError


@dataclass(frozen=True)
class Agreement:
    """One figure of both clients. ``difference`` is theirs over ours, less one."""

    step: str
    metric: str
    ours: float
    theirs: float

    @property
    def difference(self) -> float:
        return self.theirs / self.ours - 1 if self.ours else float("inf")


def command(
    python: str, url: str, model: str, tokenizer: str, chat: bool, workload: Workload, concurrency: int, folder: str
) -> List[str]:
    """Return the command line. Both releases know all of these options. The key never stands in it."""
    return [
        *(python, "-m", "sglang.bench_serving"),
        *("--backend", "sglang-oai-chat" if chat else "sglang-oai"),
        *("--base-url", url, "--model", model, "--tokenizer", tokenizer),
        *("--dataset-name", "custom", "--dataset-path", os.path.join(folder, "prompts.jsonl")),
        *("--sharegpt-output-len", str(workload.output_len), "--num-prompts", str(workload.requests)),
        *("--max-concurrency", str(concurrency), "--warmup-requests", str(max(4, min(32, concurrency)))),
        *("--seed", str(workload.seed), "--disable-tqdm", "--output-file", os.path.join(folder, "out.jsonl")),
    ]


def dataset(prompts: Sequence[Prompt]) -> str:
    """Return our prompts as its custom dataset: conversations of which it takes the first turn."""
    lines = [json.dumps({"conversations": [{"value": item.text}, {"value": "-"}]}) for item in prompts]
    return "\n".join(lines) + "\n"


def refuse(workload: Workload) -> None:
    """Refuse what it cannot be asked for in the same way. Raises WorkloadError."""
    if workload.dataset != FIXED or not workload.ignore_eos:
        raise WorkloadError(
            f"dataset {workload.dataset}, ignore_eos {workload.ignore_eos} with bench_serving; needed: fixed lengths, "
            "since its custom dataset takes one answer length for all"
        )
    if workload.output_len < 4:
        raise WorkloadError(f"output_len {workload.output_len} with bench_serving; needed: at least 4")


# It imports these for data sets that are not asked for here; the cpu profile's release does not carry them.
UNUSED_IMPORTS = ("datasets",)


def stand_ins(python: str, folder: str, run_command: runner.Runner) -> None:
    """Put an empty module into ``folder`` for each unused import that the release lacks."""
    for name in UNUSED_IMPORTS:
        look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
        if run_command([python, "-c", look]).rc != 0:
            with open(os.path.join(folder, f"{name}.py"), "w", encoding="utf-8") as stream:
                stream.write("load_dataset = None\n")


def run(argv: Sequence[str], prompts: Sequence[Prompt], folder: str, run_command: runner.Runner, repeat: int) -> Run:
    """Write the prompts, run the client, and return its line as a run. Raises WorkloadError.

    The key is for ``OPENAI_API_KEY`` in the environment of ``run_command``.
    """
    with open(os.path.join(folder, "prompts.jsonl"), "w", encoding="utf-8") as stream:
        stream.write(dataset(prompts))
    output = os.path.join(folder, "out.jsonl")
    done = run_command(argv)
    if done.rc != 0 or not os.path.exists(output):
        raise WorkloadError(f"bench_serving ended with {done.rc}: {(done.err or done.out).strip()[-1500:]}")
    with open(output, encoding="utf-8") as lines:
        line: Dict[str, Any] = json.loads(lines.readlines()[-1])
    return results.from_bench_serving(line, repeat, len(prompts))


def agreement(ours: Sequence[Run], theirs: Sequence[Run]) -> List[Agreement]:
    """Return the figures that both clients measured, medians over repeats, step by step.

    Compared are tok/s and TPOT. TTFT is not: bench_serving's is 0 for a first chunk without text, and its TPOT is
    left out as well where that happened.
    """
    found = []
    for name in stats.steps(ours):
        mine, other = stats.of_step(ours, name), stats.of_step(theirs, name)
        if not other:
            continue
        metrics = ["output_tok_s"] + (["tpot_p50_ms"] if all(item.ttft_ms for item in other) else [])
        for metric in metrics:
            of = stats.METRICS[metric]
            a = stats.median([of(item) or 0.0 for item in mine])
            b = stats.median([of(item) or 0.0 for item in other])
            found.append(Agreement(name, metric, a, b))
    return found
