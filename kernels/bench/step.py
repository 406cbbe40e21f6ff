"""The bytes of one decode step of DeepSeek-V4-Flash on one GPU of a TP4 group, and what they take at a bandwidth.

Arithmetic, not a measurement: bytes that must be read once over 1.79 TB/s (RTX PRO 6000). Shapes from the model's
configuration; FP4 weights with one scale byte for 32, FP8 for the rest. Communication and launches are not in it.

    python3 bench/step.py [context]
"""

from __future__ import annotations

import sys

BANDWIDTH = 1.79e12
TP, LAYERS, HEADS, HIDDEN = 4, 43, 64, 4096
WINDOW_ONLY, RATIO_4, RATIO_128 = 2, 21, 20
EXPERTS, TOP, EXPERT_VALUES = 256, 6, 3 * 4096 * 2048
ACTIVE_VALUES = 13e9


def step(rows: int, context: int) -> dict[str, float]:
    """Bytes a step by part, for ``rows`` requests at a context length."""
    sparse = min(512, context // 4)
    tokens = WINDOW_ONLY * 128 + RATIO_4 * (128 + sparse) + RATIO_128 * (128 + context // 128)
    touched = EXPERTS * (1 - (1 - TOP / EXPERTS) ** rows)
    routed = LAYERS * TOP * EXPERT_VALUES
    return {
        "attention": rows * (584 * tokens + 2048 * HEADS / TP * LAYERS),
        "indexer": rows * RATIO_4 * (context // 4) * (132 + 4) if context // 4 > 512 else 0.0,
        "hyper-connections": 2 * LAYERS * (24 * 4 * HIDDEN * 4 + rows * (2 * 4 + 1) * HIDDEN * 2),
        "routed experts": LAYERS * touched * EXPERT_VALUES * (4.25 / 8) / TP,
        "other weights": (ACTIVE_VALUES - routed) / TP,
    }


def main() -> None:
    """Print the table."""
    context = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    table = {rows: step(rows, context) for rows in (1, 16, 64)}
    print(f"| part, context {context} | " + " | ".join(f"C={rows}" for rows in table) + " |")
    print("|---|" + "---|" * len(table))
    for part in table[1]:
        cells = [f"{one[part] / 1e6:,.0f} MB, {one[part] / BANDWIDTH * 1e3:.2f} ms" for one in table.values()]
        print(f"| {part} | " + " | ".join(cells) + " |")
    print("| sum | " + " | ".join(f"{sum(one.values()) / BANDWIDTH * 1e3:.2f} ms" for one in table.values()) + " |")


if __name__ == "__main__":
    main()
