"""Where the tests run.

With a CUDA device: everything, the compiled kernels in bf16. Without: Triton's interpreter in fp32, or with
TRITON_INTERPRET=0 the offline compilation; one process cannot do both. `make test` runs both.
"""

from __future__ import annotations

import os
import pathlib
import sys

import torch

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
collect_ignore: list[str] = []
if not torch.cuda.is_available():
    if os.environ.setdefault("TRITON_INTERPRET", "1") == "1":
        collect_ignore = ["test_compile.py"]
    else:
        collect_ignore = sorted({path.name for path in HERE.glob("test_*.py")} - {"test_compile.py"})
