"""What an engine is doing, by the lines that it writes."""

from __future__ import annotations

import pytest
from pdstack import phases

STARTED = "Started pd-decode@0.service - pdstack decode engine 0 (SGLang).\n"


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("[2026-11-30 09:05:31] Init parallel begin.", "joining the ranks (NCCL)"),
        ("[2026-06-16 10:00:00 TP0] Init torch distributed begin.", "joining the ranks (NCCL)"),
        ("[2026-11-30 09:05:34] Load weight begin. avail mem=11.71 GB", "loading the checkpoint"),
        ("Multi-thread loading shards:  15% Completed | 7/46 [00:31<02:52,  4.42s/it]", "loading shard 7 of 46"),
        ("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01]", "loading shard 1 of 2"),
        ("Load weight end. elapsed=0.05 s, type=LlamaForCausalLM", "allocating the KV cache"),
        ("[TP0] Capture cuda graph begin. This can take up to several minutes.", "capturing graphs"),
        (
            "Capturing batches (bs=24 avail_mem=20.10 GB):  25%|##5       | 3/12 [00:05<00:15]",
            "capturing graphs 3 of 12",
        ),
        ("DeepGEMM warmup:  10%|#         | 5/50 [00:05<00:15]", "compiling DeepGEMM kernels 5 of 50"),
        ("INFO:     Application startup complete.", "warm-up"),
        ("The server is fired up and ready to roll!", "started, /health does not answer yet"),
    ],
)
def test_a_line_names_its_phase(line: str, phase: str) -> None:
    assert phases.phase(f"{STARTED}{line}\nIgnore import error when loading x\n") == phase


def test_the_last_telling_line_counts() -> None:
    journal = f"{STARTED}Load weight begin.\nLoad weight end.\nsomething else\n"
    assert phases.phase(journal) == "allocating the KV cache"
    assert phases.phase(STARTED) == "importing the engine"
    assert phases.phase("nothing known\n") is None


def test_a_bar_that_rewrote_its_line_counts_by_its_end() -> None:
    bar = "Multi-thread loading shards:  {}% Completed | {}/2 [00:00]"
    assert phases.phase(f"{bar.format(0, 0)}\r{bar.format(50, 1)}") == "loading shard 1 of 2"
