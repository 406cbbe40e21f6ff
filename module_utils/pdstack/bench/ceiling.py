"""What the client itself can do: the same load against a stub worker in another process on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Callable, List

from . import session, stream
from .stats import Run
from .workload import Workload


@dataclass(frozen=True)
class Ceiling:
    """A client that is to measure a service must stay far below this."""

    concurrency: int
    requests_s: float
    tokens_s: float
    cpu_share: float
    cpu_us_per_token: float


def measure(
    concurrencies: List[int],
    output_len: int = 128,
    requests: int = 512,
    token_s: float = 0.0,
    say: Callable[[str], None] = print,
) -> List[Ceiling]:
    """Start a stub, load it, and return what the client reached.

    With ``token_s`` 0 a whole answer comes at once: the most requests a second. With a pause each token comes in a
    packet of its own, as an engine sends them: the CPU that a token costs.
    """
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    command = [sys.executable, "-m", "pdstack.bench.stub", "--token-s", str(token_s)]
    environment = {**os.environ, "PYTHONPATH": package}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as stub:
        try:
            assert stub.stdout is not None
            url = f"http://127.0.0.1:{int(stub.stdout.readline())}"
            load = Workload(input_len=256, output_len=output_len, requests=requests)
            wanted = session.Request(url, concurrencies, workload=load)
            found = session.measure(wanted, stream.server(url))
        finally:
            stub.kill()
    result = [_of(run) for run in found.runs]
    for item in result:
        say(
            f"C={item.concurrency}: {item.requests_s:.0f} requests/s, {item.tokens_s:.0f} tokens/s, "
            f"{item.cpu_share:.0%} of one CPU, {item.cpu_us_per_token:.1f} us of CPU a token"
        )
    return result


def _of(run: Run) -> Ceiling:
    cpu_s = run.client.cpu_share * run.duration_s
    return Ceiling(
        run.concurrency or 0,
        run.requests_s,
        run.output_tok_s,
        run.client.cpu_share,
        cpu_s * 1e6 / max(1, run.output_tokens),
    )
