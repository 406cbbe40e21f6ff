"""Return codes of the CUDA driver API and of NVML, in an operator's words.

Sources: the enums CUresult of cuda.h (13.0) and nvmlReturn_t of nvml.h.
"""

from __future__ import annotations

from typing import Dict

OUT_OF_MEMORY = 2

_CUDA: Dict[int, str] = {
    0: "ok",
    1: "invalid value",
    2: "out of memory",
    3: "not initialised",
    34: "a stub library answered, not the driver's: a toolkit's stubs folder is on the library path",
    46: "device unavailable: another process holds it exclusively, or its compute mode forbids use",
    100: "no device, or no access to /dev/nvidia*",
    101: "no such device",
    201: "invalid context",
    217: "peer access is not possible between these GPUs",
    214: "uncorrectable ECC error",
    500: "not found in this driver",
    700: "illegal address",
    719: "launch failed",
    800: "not permitted (for a fabric handle: no IMEX channel)",
    801: "not supported",
    802: "not ready: a required daemon (Fabric Manager) is not running",
    803: "library and kernel driver differ in version",
    804: "forward compatibility was tried on hardware that does not have it",
    999: "unknown error of the driver",
}

_NVML: Dict[int, str] = {
    0: "ok",
    1: "not initialised",
    2: "invalid argument",
    3: "not supported",
    4: "no permission",
    6: "not found",
    9: "the driver is not loaded",
    10: "timed out",
    12: "the NVML library was not found",
    13: "this driver's NVML has no such function",
    15: "GPU is lost: it fell off the bus or cannot be reached",
    16: "GPU needs a reset",
    17: "blocked by the operating system (cgroup)",
    18: "library and kernel driver differ in version",
    23: "insufficient resources",
    25: "this driver's NVML has another structure version",
    999: "unknown error",
}


def cuda(code: int) -> str:
    """Return what a CUresult means; an unknown one says so with its number."""
    return _CUDA.get(code, f"CUDA error {code}")


def nvml(code: int) -> str:
    """Return what an nvmlReturn_t means; an unknown one says so with its number."""
    return _NVML.get(code, f"NVML error {code}")
