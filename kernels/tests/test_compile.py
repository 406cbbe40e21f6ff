"""Offline compilation for sm_120 and sm_90: what the machine code holds, without a GPU.

Compiled, never run on sm_120: these tests say that the code fits a block there and uses its tensor cores.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
from typing import Any

import pytest
import triton
import triton.language as tl
from pdstack_kernels import indexer, indexer_jit, mhc_jit, sparse_mla, sparse_mla_jit
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
SM120_SHARED = sparse_mla.SM120_SHARED

POINTERS = {
    "q_ptr": "*bf16",
    "cache0": "*u8",
    "indices0": "*i32",
    "lengths0": "*i32",
    "cache1": "*u8",
    "indices1": "*i32",
    "lengths1": "*i32",
    "sink_ptr": "*fp32",
    "out_ptr": "*bf16",
    "lse_ptr": "*fp32",
    "part_ptr": "*bf16",
    "part_lse_ptr": "*fp32",
    "cache8": "*fp8e4nv",
    "cache32": "*fp32",
    "weight_ptr": "*fp32",
    "lengths": "*i32",
    "page_table": "*i32",
    "x_ptr": "*bf16",
    "fn_ptr": "*fp32",
    "scale_ptr": "*fp32",
    "base_ptr": "*fp32",
    "y_ptr": "*bf16",
    "post_ptr": "*fp32",
    "comb_ptr": "*fp32",
}
FLOATS = {"scale_log2", "rms_eps", "hc_eps"}
# As the launcher sees them: not multiples of 16, or not known to be.
RAGGED = FLOATS | {"first_head", "heads", "rows", "splits", "identity_below"}


class Compiled:
    """A kernel's machine code: its instructions, registers, stack and shared memory."""

    def __init__(self, kernel: Any, capability: int, warps: int, constants: dict[str, Any], **types: str) -> None:
        signature: dict[str, str] = {}
        attributes = {}
        for position, name in enumerate(kernel.arg_names):
            if name in constants:
                signature[name] = "constexpr"
                continue
            signature[name] = types.get(name) or POINTERS.get(name) or ("fp32" if name in FLOATS else "i32")
            if name not in RAGGED:
                attributes[(position,)] = [["tt.divisibility", 16]]
        values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        self.shared = built.metadata.shared
        self.code = built.asm["cubin"]

    def tool(self, folder: pathlib.Path, option: str) -> str:
        file = folder / "kernel.cubin"
        file.write_bytes(self.code)
        run = [str(TOOLS / "cuobjdump"), option, str(file)]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout

    def count(self, folder: pathlib.Path, instruction: str) -> int:
        return len(re.findall(rf"\b{instruction}[.\s]", self.tool(folder, "-sass")))

    def stack(self, folder: pathlib.Path) -> int:
        found = re.search(r"STACK:(\d+)", self.tool(folder, "-res-usage"))
        assert found
        return int(found[1])


def attention(cut: sparse_mla.Config, capability: int, page1: int = 64) -> Compiled:
    constants = {
        "PAGE0": 256,
        "PAGE1": page1,
        "HAS_LENGTHS0": True,
        "HAS_LENGTHS1": page1 > 0,
        "HAS_SINK": True,
        "SPLIT": cut.splits > 1,
        "HB": cut.heads,
        "T": cut.tokens,
        "STAGES": cut.stages,
        "TURNED": cut.turned,
        "HELD": cut.held,
        "DT": tl.float16,
        "PACKED": True,
        "OVERLAP": True,
        "LATE": True,
    }
    return Compiled(sparse_mla_jit.decode_kernel, capability, cut.warps, constants)


def chosen(sms: int, shared: int) -> list[sparse_mla.Config]:
    """Every cut that `choose` gives to decode calls, one for each kernel that is compiled for them."""
    cuts = {
        sparse_mla.choose(rows, heads, 128, extra, sms, shared)
        for rows in (1, 16, 64, 192)
        for heads in (8, 16, 64)
        for extra in (0, 64, 512, 1024)
    }
    return sorted({dataclasses.replace(cut, splits=2) for cut in cuts}, key=dataclasses.astuple)


@pytest.mark.parametrize("cut", chosen(188, SM120_SHARED), ids=lambda cut: str(dataclasses.astuple(cut)))
def test_attention_fits_sm120(cut: sparse_mla.Config, tmp_path: pathlib.Path) -> None:
    code = attention(cut, 120)
    assert code.shared <= SM120_SHARED
    assert code.count(tmp_path, "HMMA") >= 32, "no tensor cores"
    assert code.count(tmp_path, "LDSM") >= 32, "operands are not loaded as matrices"
    assert code.count(tmp_path, "LDGSTS") >= 8 or cut.stages == 1, "tiles are not read ahead"
    assert code.stack(tmp_path) == 0, "registers spill"


@pytest.mark.parametrize("page1", [0, 2], ids=["one-pool", "pages-of-2"])
def test_attention_of_other_pools_fits_sm120(page1: int, tmp_path: pathlib.Path) -> None:
    code = attention(sparse_mla.Config(16, 32, 4, 1 if page1 == 0 else 2), 120, page1)
    assert code.shared <= SM120_SHARED // 2, "two blocks fit a multiprocessor"
    assert code.count(tmp_path, "HMMA") >= 32
    assert code.stack(tmp_path) <= 64


READ_AHEAD = [cut for cut in chosen(132, 232448) if cut.stages > 1]


@pytest.mark.parametrize("cut", READ_AHEAD, ids=lambda cut: str(dataclasses.astuple(cut)))
def test_sm90_runs_the_same_instructions(cut: sparse_mla.Config, tmp_path: pathlib.Path) -> None:
    code = attention(cut, 90)
    assert code.shared <= 232448
    assert code.count(tmp_path, "HMMA") >= 32
    assert code.count(tmp_path, "HGMMA") == 0, "a Hopper-only instruction: an H200 would test other code"
    assert code.count(tmp_path, "LDGSTS") >= 8, "tiles are not read ahead"
    assert cut.held == 0 or 3 * (code.shared + 1024) <= 233472, "a third program does not fit a multiprocessor"


@pytest.mark.parametrize(("capability", "instruction"), [(120, "QMMA"), (90, "QGMMA")])
def test_indexer(capability: int, instruction: str, tmp_path: pathlib.Path) -> None:
    constants = {"H": 64, "STAGES": 5, "DT": tl.float8e4nv, "CAST": False}
    code = Compiled(indexer_jit.logits_kernel, capability, 4, constants, q_ptr="*fp8e4nv", out_ptr="*fp32")
    assert code.shared <= indexer.PROGRAM_SHARED, "fewer programs fit than are launched"
    assert code.count(tmp_path, instruction) > 0
    assert code.stack(tmp_path) == 0


@pytest.mark.parametrize("capability", [120, 90])
@pytest.mark.parametrize("block", [(16, 128, 2), (32, 64, 3)], ids=str)
def test_hc_pre_product(capability: int, block: tuple[int, int, int], tmp_path: pathlib.Path) -> None:
    constants = {"BM": block[0], "BK": block[1], "TERMS": 3, "STAGES": block[2], "DT": tl.bfloat16, "OVERLAP": True}
    code = Compiled(mhc_jit.product_kernel, capability, 4, constants, part_ptr="*fp32")
    assert code.shared <= SM120_SHARED
    assert code.count(tmp_path, "HMMA") >= 3
    assert code.stack(tmp_path) == 0


def test_merge_and_finish(tmp_path: pathlib.Path) -> None:
    shapes = [{"HB": 1, "BS": 32}, {"HB": 4, "BS": 4}]
    merges = [
        Compiled(sparse_mla_jit.merge_kernel, 120, 4, shape | {"HAS_SINK": True, "OVERLAP": True}) for shape in shapes
    ]
    constants = {"ITERATIONS": 20, "BH": 1024, "BS": 64, "OVERLAP": True}
    finish = Compiled(mhc_jit.finish_kernel, 120, 4, constants, part_ptr="*fp32")
    # Every log-sum-exp and every part once, and the sink.
    assert merges[0].count(tmp_path, "LDG") == 2 * 32 + 1
    for code in (*merges, finish):
        assert code.shared <= SM120_SHARED
        assert code.stack(tmp_path) == 0
