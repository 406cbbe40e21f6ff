"""The comparison that the plugin makes on the card: it passes here, and it fails for a kernel that is off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from pdstack_kernels import indexer, mhc, selfcheck, sparse_mla

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
EXACT: dict[str, Any] = {} if GPU else {"dot_dtype": tl.float32}


def test_the_kernels_pass() -> None:
    assert selfcheck.failures(["sparse_mla", "indexer", "hc_pre", "draft_moe"], DEVICE, **EXACT) == {}


@pytest.mark.parametrize(
    ("module", "name", "kernel"),
    [
        (sparse_mla, "sparse_mla_decode", "sparse_mla"),
        (indexer, "paged_mqa_logits", "indexer"),
        (mhc, "hc_pre", "hc_pre"),
    ],
)
def test_a_kernel_that_is_off_is_found(module: Any, name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(module, name)

    def off(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        first = result if isinstance(result, torch.Tensor) else result[0]
        first[0, ..., 3] += 0.05 * first.nan_to_num(0, 0, 0)[0].abs().max()
        return result

    monkeypatch.setattr(module, name, off)
    assert "off" in selfcheck.failures([kernel], DEVICE, **EXACT)[kernel]


def test_a_kernel_that_does_not_launch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(mhc, "hc_pre", broken)
    assert selfcheck.failures(["hc_pre"], DEVICE) == {"hc_pre": "RuntimeError: out of resource: shared memory"}
