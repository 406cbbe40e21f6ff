"""What an engine is doing while it starts, by what it writes to its journal. Pure.

The lines are those of sglang 0.5.13 to 0.5.23. launch.py lets progress bars end their lines, so that they arrive while
the work is going on and not at its end.
"""

from __future__ import annotations

import re
from typing import List, Optional, Pattern, Tuple

_BAR = r"(?P<done>\d+)/(?P<all>\d+) \["

# The last line of the journal that matches any says the phase; of several that match one line the last counts.
_PHASES: List[Tuple[Pattern[str], str]] = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"^Started pd-|launch_server\.py|server_args=", "importing the engine"),
        (r"Init (?:parallel|torch distributed) begin", "joining the ranks (NCCL)"),
        (r"Load weight begin", "loading the checkpoint"),
        (r"[Ll]oading (?:\S+ checkpoint )?shards:.*?" + _BAR, "loading shard {done} of {all}"),
        (r"Load weight end", "allocating the KV cache"),
        (r"(?:Capture|Capturing) .*(?:graph|batches)", "capturing graphs"),
        (r"Capturing (?:batches|num tokens)[^|]*\|.*?" + _BAR, "capturing graphs {done} of {all}"),
        (r"DeepGEMM warmup.*?" + _BAR, "compiling DeepGEMM kernels {done} of {all}"),
        (r"ninja|\[jit\]|JIT compil|Compiling .*kernel", "compiling kernels"),
        (r"Warmup prefill shapes.*?" + _BAR, "warm-up {done} of {all}"),
        (r"Application startup complete|Uvicorn running|Start of .*warmup", "warm-up"),
        (r"The server is fired up", "started, /health does not answer yet"),
    )
]


def phase(journal: str) -> Optional[str]:
    """Return the phase that the last telling line names, None when no line tells. A bar may have rewritten its line."""
    for line in reversed(journal.splitlines()):  # at each \\r, too
        found = None
        for pattern, words in _PHASES:
            match = pattern.search(line)
            if match:
                found = words.format(**match.groupdict())
        if found:
            return found
    return None
