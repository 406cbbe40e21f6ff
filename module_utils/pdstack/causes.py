"""Likely causes of a failed start, by patterns that engine, router and systemd are known to print."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import List, Optional


@dataclass(frozen=True)
class Cause:
    """What a pattern in the journal means and what to do about it."""

    pattern: str
    means: str
    do: str


CAUSES: List[Cause] = [
    Cause(
        r"failed to install Prometheus metrics exporter|PrometheusBuildError",
        "the router's metrics port is taken by another process, often a router that was started by hand",
        "find it with `ss -ltnp`, stop it, or set pd_ports.router_metrics to a free port",
    ),
    Cause(
        r"Address already in use|address already in use|EADDRINUSE",
        "the port of this instance is taken by another process",
        "find it with `ss -ltnp`, stop it, or choose another port in pd_ports",
    ),
    Cause(
        r"context_length \(\d+\) is greater than the derived context_length",
        "the context length is more than the model was made for",
        "lower pd_topology.context_length to what the message calls derived",
    ),
    Cause(
        r"DSpark dense speculative decoding requires setting|DSpark speculative_num_draft_tokens must equal",
        "the checkpoint brings no draft for DSPARK, or one for another number of tokens",
        "leave pd_speculative.num_draft_tokens out, name a draft with pd_engine.extra_args: "
        "speculative-draft-model-path, or take pd_speculative.algorithm: EAGLE",
    ),
    Cause(
        # At the start of a line, as the end of a traceback: sglang also mentions modules that it does without.
        r"(?m)^(?:ModuleNotFoundError:|(?:ImportError|OSError): .*(?:undefined symbol|cannot open shared object file))"
        r"|error while loading shared libraries",
        "the release is incomplete or mixes versions",
        "run playbooks/deploy_pd.yml again: sglang_runtime compares the release with its lock and repairs it",
    ),
    Cause(
        r"unrecognized arguments|invalid choice:|error: argument ",
        "an engine argument is unknown to this release",
        "look at pd_engine.extra_args; the plan's own flags follow the release's table",
    ),
    Cause(
        r"oom-kill|Out of memory: Killed process|A process of this unit has been killed by the OOM killer",
        "the host's memory ran out, and the kernel killed the engine",
        "look at `free -g`: loading takes as much page cache as the checkpoint; stop what else uses memory",
    ),
    Cause(
        r"No space left on device|Errno 28",
        "a disk is full: the JIT caches below /var/lib/pdstack, /tmp, or /dev/shm",
        "look at `df -h`; playbooks/preflight.yml lists what of pdstack may go",
    ),
    Cause(
        r"CUDA out of memory|OutOfMemoryError|Not enough memory",
        "the GPU or host memory does not hold the weights and the KV cache",
        "lower pd_engine.mem_fraction_static or pd_topology.context_length, or stop what else uses the GPU",
    ),
    Cause(
        r"CUDA driver version is insufficient|Driver/library version mismatch|system has unsupported display driver",
        "the loaded driver and the CUDA libraries do not fit",
        "run playbooks/probe.yml; after a driver upgrade the host needs a reboot",
    ),
    Cause(
        r"no kernel image is available|sm_\d+ is not compatible|CUDA capability .* not compatible",
        "the release has no kernels for this GPU",
        "compare `nvidia-smi --query-gpu=compute_cap` with the release in docs/releases.md",
    ),
    Cause(
        r"Python\.h: No such file|Failed to find C compiler",
        "Triton could not compile its helper: Python's headers or the compiler are not there",
        "run playbooks/host.yml: gpu_host installs both (gpu_host_build_packages)",
    ),
    Cause(
        r"fallen off the bus|uncorrectable ECC error|GPU is lost|Unable to determine the device handle",
        "a GPU failed",
        "`dmesg | grep Xid` names it; reset or power-cycle the host, and keep a GPU that fails again from serving "
        "(pd_excluded_gpus)",
    ),
    Cause(
        r"failed to map segment from shared object|Permission denied: '/tmp/sglang_temp_file",
        "what was compiled or written may not be executed: /var/lib/pdstack or /tmp is mounted noexec",
        "look at `findmnt -T /var/lib/pdstack/jit` and `findmnt -T /tmp`; mount that one without noexec",
    ),
    Cause(
        r"no CUDA-capable device is detected|CUDA unknown error|CUDA driver initialization failed"
        r"|No CUDA GPUs are available",
        "the driver shows the service no GPU, most likely since /dev/nvidia* or /dev/nvidia-uvm is not there",
        "run playbooks/probe.yml, which asks as root and so makes them; see `ls -l /dev/nvidia*` and `dmesg`",
    ),
    Cause(
        r"nvcc(?:: not found| fatal)|Could not find nvcc|CUDA_HOME.*not set|ninja: (?:error|build stopped)",
        "kernels could not be compiled at run time",
        "run playbooks/host.yml: cuda_toolkit compares the toolkit below /opt/pdstack/cuda with its lock and mends it",
    ),
    Cause(
        # The engine's own watchdog (srt/utils/watchdog.py); NCCL's is another one.
        r"Scheduler watchdog timeout|DistBackendError|Timed out waiting for .* to join|store->get\(.*timeout",
        "a rank hung or never joined the others: NCCL between the GPUs of this instance, or one pass compiled kernels "
        "for longer than pd_engine.watchdog_timeout_s",
        "where the journal shows a compilation, raise pd_engine.watchdog_timeout_s; else run playbooks/probe.yml with "
        "pd_probe_measure=true and look at P2P, IOMMU and ACS; NCCL_DEBUG=INFO in pd_engine.extra_env names the step",
    ),
    Cause(
        r"NCCL (?:WARN|ERROR)|ncclInternalError|ncclSystemError|Watchdog caught collective operation timeout",
        "NCCL failed or hung between the GPUs of this instance",
        "run playbooks/probe.yml with pd_probe_measure=true and look at P2P, IOMMU and ACS",
    ),
    Cause(
        r"NIXL_ERR_BACKEND|no active messages transport|network device .* is not available",
        "NIXL found no usable transport",
        "check UCX_TLS and UCX_NET_DEVICES in the instance's environment against `ls /sys/class/net`",
    ),
    Cause(
        r"No such file.*(?:config\.json|safetensors)|does not appear to have a file named|FileNotFoundError",
        "the model is missing, or user pdstack may not read it (safetensors reports that as missing, too)",
        "run playbooks/checkpoint.yml, and check with `sudo -u pdstack ls -l` on the model's folder",
    ),
    Cause(
        r"status=21[4-9]/|status=2[2-4]\d/|Failed at step (?:CPUAFFINITY|NUMA_POLICY|EXEC|NAMESPACE)",
        "systemd could not apply a setting of the unit before the program started",
        "`systemctl status` names the step; a CPU list or NUMA node that this host does not have is the usual reason",
    ),
    Cause(
        r"start request repeated too quickly|Start request repeated too quickly",
        "the unit failed several times in a row and systemd gave up",
        "the first failure in the journal is the one to read",
    ),
]


def likely(journal: str) -> Optional[Cause]:
    """Return the first known cause that the journal shows; the list is ordered from specific to general."""
    for cause in CAUSES:
        if re.search(cause.pattern, journal):
            return cause
    return None
