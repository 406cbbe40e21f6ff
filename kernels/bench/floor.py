"""What the sparse MLA decode cannot be faster than: launches, dependent reads and the gather, without its products.

    python3 bench/floor.py --out floor.json

Stripped kernels on the inputs of the table's rows at B=64, launched and timed as `attention` launches and times the
real one, each step of the chain added to the one before: nothing; lengths and indices; every byte of the KV and the
query, the output written; and a second launch behind it that reads two or four partial results and writes the output,
which is the merge. The gather is cut as suits it best, not as the products need it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "tests")]

import attention  # noqa: E402
import timing  # noqa: E402
import torch  # noqa: E402
from pdstack_kernels import layout, sparse_mla, sparse_mla_jit  # noqa: E402
from stripped_jit import stripped_kernel  # noqa: E402

NOTHING, INDICES, GATHER = range(3)
TOKENS = (16, 32, 64)


def strip(one: dict[str, Any], level: int, tokens: int, merged: int = 0) -> None:
    """One call: the stripped kernel, a program a tile, and with ``merged`` the merge of so many partial results."""
    rows, _, heads, _ = one["q"].shape
    index0 = one["indices"].reshape(rows, -1)
    second = "extra_indices" in one
    index1 = one["extra_indices"].reshape(rows, -1) if second else index0
    cache0 = layout.raw_bytes(one["k_cache"])
    cache1 = layout.raw_bytes(one["extra_k_cache"]) if second else cache0
    width0, width1 = index0.shape[1], index1.shape[1] if second else 0
    tiles = -(-width0 // tokens) - (-width1 // tokens)
    out = torch.empty(rows, 1, heads, layout.HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(rows, max(1, merged), heads, dtype=torch.float32, device="cuda")
    part = torch.empty(rows, max(1, merged), heads, layout.HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    stripped_kernel[(1, tiles, rows)](
        one["q"],
        cache0,
        index0,
        one["topk_length"],
        cache1,
        index1,
        one["extra_topk_length"] if second else one["topk_length"],
        part,
        width0,
        width1,
        one["k_cache"].stride(0),
        one["extra_k_cache"].stride(0) if second else 0,
        index0.stride(0),
        index1.stride(0),
        heads,
        PAGE0=one["k_cache"].shape[1],
        PAGE1=one["extra_k_cache"].shape[1] if second else 0,
        LEVEL=level,
        T=tokens,
        SPLITS=max(1, merged),
        num_warps=4,
        launch_pdl=True,
    )
    if merged:
        block = sparse_mla.merged_heads(rows, heads, merged, sparse_mla.device_limits(out.device)[0])
        sparse_mla_jit.merge_kernel[(-(-heads // block), rows)](
            part,
            lse,
            one["attn_sink"],
            out,
            lse,
            merged,
            out.stride(0),
            out.stride(2),
            0,
            heads,
            HAS_SINK=True,
            HB=block,
            BS=merged,
            OVERLAP=True,
            num_warps=4,
            launch_pdl=True,
        )


def timed(sets: list[dict[str, Any]], *what: int) -> float:
    return timing.replay_time([lambda one=one: strip(one, *what) for one in sets])


def measure(bandwidth: float) -> list[dict[str, Any]]:
    """One record a row of the table with 64 query rows."""
    records = []
    for shape in attention.SHAPES:
        if shape.rows != 64:
            continue
        sets = attention.inputs_of(shape)
        record: dict[str, Any] = {"B": 64, "H": shape.heads, "tokens": shape.tokens}
        record["ideal_us"] = shape.bytes / bandwidth * 1e6
        record["launch_us"] = timed(sets, NOTHING, 64)
        record["indices_us"] = timed(sets, INDICES, 64)
        record["gather_us"], size = min((timed(sets, GATHER, size), size) for size in TOKENS)
        for splits in (2, 4):
            record[f"gather_merge{splits}_us"] = timed(sets, GATHER, size, splits)
        record["us"] = timing.replay_time(attention.my_calls(sets))
        records.append(record)
        print(json.dumps({key: round(value, 2) for key, value in record.items()}), flush=True)
        torch.cuda.empty_cache()
    return records


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    bandwidth = timing.copy_bandwidth()
    found = {"card": torch.cuda.get_device_name(), "copy_bandwidth_tb_s": bandwidth / 1e12}
    found["records"] = measure(bandwidth)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
