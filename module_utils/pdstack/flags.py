"""What each release can do and how it spells it: data, so that a renamed flag is one line here.

Read from the released wheels; tests/unit/test_engine_flags.py parses every rendered plan with the
real argument parser of each wheel, so that a wrong line here fails in a test and not on a host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

# Names of the decisions that releases spell differently.
GRAPH_LIMIT = "graph_limit"
EAGER_PREFILL = "eager_prefill"


@dataclass(frozen=True)
class Engine:
    """One sglang release: only what differs between releases or must be checked against hardware."""

    version: str
    spelling: Dict[str, str]
    info_endpoints: Tuple[str, str]  # server and model information
    moe_runner_backend: str  # for the FP4 checkpoint on this release
    moe_reason: str
    compute_capabilities: Tuple[str, ...]  # for which the release's wheels carry kernels or a JIT path
    speculative: Tuple[str, ...]  # algorithms that work for DeepSeek-V4 on this release
    speculative_reason: str = ""
    minimum_driver: int = 580  # CUDA 13.0
    kernel_reason: str = ""  # what the bundle's own sm_120 kernels do for this release under "auto"; "": nothing
    pcie_all_reduce: str = ""  # variable that turns on all-reduce kernels for GPUs without NVLink, where it has some
    own_numa: str = ""  # variable that turns off the release's own pinning of ranks, where it has one
    strict_numa: str = ""  # variable that makes a failed NUMA binding of a rank fatal, where the release has one


@dataclass(frozen=True)
class Router:
    """One router program. Every release locks all of them, each for a venv of its own."""

    package: str
    version: str
    venv: str  # below a release


ENGINES: Dict[str, Engine] = {
    "0.5.13.post1": Engine(
        version="0.5.13.post1",
        spelling={GRAPH_LIMIT: "cuda-graph-max-bs", EAGER_PREFILL: "disable-cuda-graph"},
        info_endpoints=("/get_server_info", "/get_model_info"),
        moe_runner_backend="marlin",
        moe_reason="what the reference ran; this release's other backends cannot read the FP4 packing",
        compute_capabilities=("9.0", "10.0", "10.3", "12.0"),
        kernel_reason="this release decodes sparse attention without tensor cores and scores the full context width",
        speculative=(),
        speculative_reason="its draft model's FP4 experts reach a kernel for sm_100 only (sglang#30952), and "
        "flashinfer before 0.7 crashes in speculative decoding on sm_120 (sglang#33943)",
    ),
    "0.5.22": Engine(
        version="0.5.22",
        spelling={GRAPH_LIMIT: "cuda-graph-max-bs-decode", EAGER_PREFILL: "disable-prefill-cuda-graph"},
        info_endpoints=("/server_info", "/model_info"),
        moe_runner_backend="auto",
        moe_reason="this release picks by itself; it is locked for the cpu profile only",
        compute_capabilities=(),
        speculative=(),
        speculative_reason="it is locked for the cpu profile only",
        strict_numa="SGLANG_CRASH_ON_NUMA_BIND_FAILURE",
    ),
    "0.5.23": Engine(
        version="0.5.23",
        spelling={GRAPH_LIMIT: "cuda-graph-max-bs-decode", EAGER_PREFILL: "disable-prefill-cuda-graph"},
        info_endpoints=("/server_info", "/model_info"),
        moe_runner_backend="auto",
        moe_reason="this release picks flashinfer_mxfp4 for the FP4 experts",
        compute_capabilities=("9.0", "10.0", "10.3", "12.0"),
        speculative=("EAGLE", "DSPARK"),
        kernel_reason="this release has sm_120 kernels of its own: only the guard of the draft model's FP4 experts",
        pcie_all_reduce="SGLANG_ENABLE_PCIE_IPC_ALLREDUCE",
        own_numa="SGLANG_AUTO_NUMA_BIND",
        strict_numa="SGLANG_CRASH_ON_NUMA_BIND_FAILURE",
    ),
}

ROUTERS: Dict[str, Router] = {
    "sglang-router": Router("sglang-router", "0.3.2", "router"),
    "smg": Router("smg", "1.13.0", "smg"),
}


@dataclass(frozen=True)
class Release:
    """A folder under releases/: one locked set of packages."""

    name: str
    profile: str  # gpu | cpu
    engine: Engine


RELEASES: Dict[str, Release] = {
    "sglang-0.5.23": Release("sglang-0.5.23", "gpu", ENGINES["0.5.23"]),
    "sglang-0.5.13.post1": Release("sglang-0.5.13.post1", "gpu", ENGINES["0.5.13.post1"]),
    "cpu-0.5.23": Release("cpu-0.5.23", "cpu", ENGINES["0.5.23"]),
    # The release before, on CPUs: what upgrades and rollbacks are tried with.
    "cpu-0.5.22": Release("cpu-0.5.22", "cpu", ENGINES["0.5.22"]),
}
# The default of cuda_toolkit_set, a folder under releases/.
TOOLKIT = "cuda-13.0"
# The entry point of kernels/: the one plugin that the engine may load.
KERNEL_PLUGIN = "pdstack_kernels"
DEFAULT_RELEASE = {"gpu": "sglang-0.5.23", "cpu": "cpu-0.5.23"}


@dataclass(frozen=True)
class ModelFacts:
    """What a plan must know of a checkpoint before it is on any disk."""

    heads: int  # attention heads: a tensor-parallel size must divide them
    size_bytes: int  # all files of the checkpoint
    trust_remote_code: bool


MODELS: Dict[str, ModelFacts] = {
    "deepseek-ai/DeepSeek-V4-Flash": ModelFacts(heads=64, size_bytes=146_000_000_000, trust_remote_code=True),
}

# Options that the plan sets itself: given a second time the engine takes the last one, silently.
PLAN_OWNED = frozenset(
    {
        "base-gpu-id",
        "config",
        "context-length",
        "cuda-graph-max-bs",
        "cuda-graph-max-bs-decode",
        "device",
        "disable-cuda-graph",
        "disable-custom-all-reduce",
        "disable-prefill-cuda-graph",
        "disaggregation-bootstrap-port",
        "disaggregation-mode",
        "disaggregation-transfer-backend",
        "dist-init-addr",
        "enable-metrics",
        "host",
        "mem-fraction-static",
        "model",
        "model-path",
        "moe-runner-backend",
        "nnodes",
        "node-rank",
        "numa-node",
        "port",
        "served-model-name",
        "speculative-algorithm",
        "speculative-eagle-topk",
        "speculative-moe-runner-backend",
        "speculative-num-draft-tokens",
        "speculative-num-steps",
        "tensor-parallel-size",
        "tokenizer-path",
        "tp",
        "tp-size",
    }
)
# The same for the router: what the plan or the variables of pd_router say.
ROUTER_OWNED = frozenset(
    {
        "cb-failure-threshold",
        "cb-success-threshold",
        "cb-timeout-duration-secs",
        "decode",
        "health-check-interval-secs",
        "health-check-timeout-secs",
        "health-failure-threshold",
        "health-success-threshold",
        "host",
        "max-concurrent-requests",
        "pd-disaggregation",
        "policy",
        "port",
        "prefill",
        "prometheus-host",
        "prometheus-port",
        "request-timeout-secs",
        "retry-backoff-multiplier",
        "retry-initial-backoff-ms",
        "retry-max-backoff-ms",
        "retry-max-retries",
        "shutdown-grace-period-secs",
        "worker-startup-check-interval",
        "worker-startup-timeout-secs",
        "worker-urls",
    }
)
# Options that carry a secret: they would show in the process list.
SECRET_OPTIONS = frozenset(
    {"admin-api-key", "api-key", "control-plane-api-keys", "oracle-password", "postgres-db-url", "ssl-keyfile-password"}
)
# Options on which both sides of a pair must agree; allowed for all roles at once, never for one.
PAIR_OPTIONS = frozenset(
    {
        "context-length",
        "disaggregation-transfer-backend",
        "dtype",
        "kv-cache-dtype",
        "load-format",
        "model",
        "model-path",
        "page-size",
        "quantization",
        "revision",
    }
)


def command_line(args: Dict[str, Any]) -> List[str]:
    """Return options as a command line: ``True`` is a bare flag, a list repeats its values after one flag."""
    words: List[str] = []
    for name, value in args.items():
        if value is False or value is None:
            continue
        words.append(f"--{name}")
        if value is True:
            continue
        words += [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return words
