"""With a CUDA device the tests run the compiled kernels in bf16; without, Triton's interpreter runs them in fp32."""

from __future__ import annotations

import os
import pathlib
import sys

import torch

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1] / "src")]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
