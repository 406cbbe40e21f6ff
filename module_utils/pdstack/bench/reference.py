"""The reference deployment's table (8x RTX PRO 6000, DeepSeek-V4-Flash, 256 in / 128 out, 96 prompts), to stand beside.

Measured by hand there; None where it was not written down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Sequence


@dataclass(frozen=True)
class Row:
    state: str  # first | final
    topology: str
    concurrency: int
    output_tok_s: Optional[float]
    tpot_ms: Optional[float] = None
    ttft_ms: Optional[float] = None


ROWS: Sequence[Row] = (
    Row("first", "TP4", 1, 10.2, 94, 696),
    Row("first", "PD", 1, 9.95, 94, 893),
    Row("first", "PD", 8, 24.5, 282, 2000),
    Row("first", "PD", 16, 25.0, 510, 8800),
    Row("final", "TP4", 1, 58.7),
    Row("final", "TP4", 16, 279, 43),
    Row("final", "TP4", 64, 509, 88),
    Row("final", "PD", 1, 56.6, 15),
    Row("final", "PD", 16, 280, 25.5),
    Row("final", "PD", 64, 385, 32, 5400),
)
MODEL = "DeepSeek-V4-Flash"
CAPTION = f"The reference: 8x RTX PRO 6000, {MODEL}, 256 in / 128 out, 96 prompts, measured by hand"
