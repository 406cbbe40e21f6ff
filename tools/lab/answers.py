"""What the NVIDIA driver of a simulated machine would answer: the content of its ``pdstack-simulated.json``.

The probe replays this file where a root is not the machine's own and no driver library is given
(module_utils/pdstack/answers.py has the types). A unit test asks the fake driver of
tests/fixtures/fake_driver the same questions and compares, so the replay cannot drift from the calls.

Figures of the card: local-inference-lab/rtx6kpro (FB 97887 MiB, BAR1 131072 MiB, ECC on, MIG off,
index 0 has minor 2). No run of ours has seen that card.
"""

from __future__ import annotations

import json
from typing import Any, Callable

from .sysfs import Machine, PciDevice

FILE = "pdstack-simulated.json"
MIB = 1 << 20
GRANULE = 2 * MIB
NVIDIA, DISPLAY = 0x10DE, (0x0300, 0x0302)
# nvmlGpuTopologyLevel_t
SINGLE, MULTIPLE, HOST_BRIDGE, NODE, SYSTEM = 10, 20, 30, 40, 50


def rtx_pro_6000(machine: Machine) -> str:
    """Return the file for a machine whose GPUs are all RTX PRO 6000, idle and healthy."""
    gpus = [device for device in machine.devices if is_gpu(device)]
    return json.dumps({"cuda": _cuda(gpus), "nvml": _nvml(gpus, machine.driver_version)}, indent=1) + "\n"


def is_gpu(device: PciDevice) -> bool:
    """Tell whether a PCI function is an NVIDIA GPU."""
    return device.vendor == NVIDIA and device.device_class >> 8 in DISPLAY


def ancestor(a: PciDevice, b: PciDevice) -> int:
    """Return NVML's common ancestor of two GPUs, from their PCI paths and nodes."""
    shared = sum(1 for left, right in zip(a.path, b.path, strict=False) if left == right)
    if shared:
        return SINGLE if max(len(a.path), len(b.path)) - 1 - shared <= 1 else MULTIPLE
    if a.path[0].rsplit(":", 1)[0] == b.path[0].rsplit(":", 1)[0]:
        return HOST_BRIDGE
    return NODE if a.numa_node == b.numa_node >= 0 else SYSTEM


def uuid(index: int) -> str:
    """Return the UUID of a simulated GPU: zeros, and its number."""
    return f"GPU-00000000-0000-0000-0000-{index + 1:012x}"


def minor(index: int) -> int:
    """Return N of /dev/nvidiaN, which need not be the index."""
    return index ^ 2


def _matrix(count: int, cell: Callable[[int, int], Any]) -> list[list[Any]]:
    return [[None if a == b else cell(a, b) for b in range(count)] for a in range(count)]


def _step(name: str, code: int | None, words: str, value: int | None = None) -> dict[str, Any]:
    return {"name": name, "code": code, "words": words, "value": value}


def _cuda(gpus: list[PciDevice]) -> dict[str, Any]:
    steps = [
        _step("attr_vmm", 0, "yes", 1),
        _step("attr_posix_fd", 0, "yes", 1),
        _step("attr_gdr", 0, "yes", 1),
        _step("attr_fabric", 0, "no", 0),
        _step("attr_multicast", 0, "no", 0),
        _step("fd_granularity", 0, "ok", GRANULE),
        _step("fd_create", 0, "ok"),
        _step("fd_export", 0, "ok"),
        _step("fd_release", 0, "ok"),
        _step("fabric_create", None, "not called: the device has no fabric handles"),
        _step("multicast_granularity", 801, "not supported"),
    ]
    return {
        "status": "ok",
        "library": "simulated",
        "init_code": 0,
        "version": 13020,
        "devices": [
            {
                "index": index,
                "pci": gpu.path[-1],
                "uuid": uuid(index),
                "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
                "compute_capability": "12.0",
                "memory_bytes": 97887 * MIB,
                "steps": steps,
            }
            for index, gpu in enumerate(gpus)
        ],
        "peer": _matrix(len(gpus), lambda a, b: True),
        "atomics": _matrix(len(gpus), lambda a, b: False),
    }


def _nvml(gpus: list[PciDevice], driver_version: str) -> dict[str, Any]:
    return {
        "status": "ok",
        "library": "simulated",
        "binding": "simulated",
        "init_code": 0,
        "driver_version": driver_version,
        "confidential_compute": False,
        "devices": [
            {
                "pci": gpu.path[-1],
                "index": index,
                "minor": minor(index),
                "uuid": uuid(index),
                "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
                "compute_capability": "12.0",
                "memory_bytes": 97887 * MIB,
                "memory_used_bytes": 2 * MIB,
                "bar1_bytes": 131072 * MIB,
                "mig": False,
                "ecc": True,
                "persistence": True,
                "compute_mode": "default",
                "fabric_state": "not_supported",
                "fabric_status": 0,
            }
            for index, gpu in enumerate(gpus)
        ],
        "topology": _matrix(len(gpus), lambda a, b: ancestor(gpus[a], gpus[b])),
        "nvlink": _matrix(len(gpus), lambda a, b: False),
    }
