"""Timing on a GPU: medians of CUDA graph replays over rotated inputs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def copy_bandwidth(size: int = 2**32) -> float:
    """Device-to-device copy bandwidth in bytes per second, read and written bytes both counted."""
    a = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    return 2 * size / (eager_time([lambda: b.copy_(a)] * 10, repeats=10) * 1e-6)


def replay_time(calls: Sequence[Callable[[], object]], repeats: int = 20, rounds: int = 4) -> float:
    """Median time of one call in microseconds.

    The calls, each on its own inputs so that none finds its cache lines warm, go into one graph ``rounds`` times;
    graphs are what the engine decodes with, and they take the launch overhead of Python out.
    """
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the inputs are still being made on the default stream
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    return _median(graph.replay, len(calls) * rounds, repeats)


def eager_time(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """As `replay_time` for what cannot be captured: launch overhead is in the result."""

    def once() -> None:
        for call in calls:
            call()

    once()
    return _median(once, len(calls), repeats)


def _median(run: Callable[[], None], calls: int, repeats: int) -> float:
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)
