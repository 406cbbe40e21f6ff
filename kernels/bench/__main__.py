"""All measurements of the kernels on one GPU: a table on the screen, JSON in a file.

    python3 bench --out results.json [--wheel FOLDER] [--flash-mla] [--deep-gemm] [--only attention]

FOLDER holds flash_mla_sm120_triton.py and indexer.py of an unpacked SGLang 0.5.13.post1 wheel.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import subprocess
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "tests")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--wheel", type=pathlib.Path)
    parser.add_argument("--flash-mla", action="store_true")
    parser.add_argument("--deep-gemm", action="store_true")
    parser.add_argument(
        "--only", nargs="+", choices=["attention", "indexer", "mhc"], default=["attention", "indexer", "mhc"]
    )
    options = parser.parse_args()

    import attention
    import indexer
    import mhc
    import timing
    import torch
    import triton

    bandwidth = timing.copy_bandwidth()
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    result: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python3", "bench", *(word.rsplit("/", 1)[-1] for word in sys.argv[1:])]),
        "copy_bandwidth_tb_s": bandwidth / 1e12,
        "records": [],
    }
    print(json.dumps({key: value for key, value in result.items() if key != "records"}), flush=True)
    sources = {
        "attention": [attention.measure(bandwidth, options.wheel, options.flash_mla)],
        "indexer": [indexer.measure(bandwidth, options.wheel, options.deep_gemm)],
        "mhc": [mhc.times(bandwidth), mhc.gate_times(), mhc.routing()],
    }
    for source in (source for name in options.only for source in sources[name]):
        for record in source:
            if "ideal_us" in record:
                record["roofline_share"] = record["ideal_us"] / record["us"]
            for name in [name for name in record if name.endswith("_us") and name != "ideal_us" and "us" in record]:
                record[name.removesuffix("_us") + "_ratio"] = record[name] / record["us"]
            result["records"].append(record)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in record.items()}
            print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
