"""The variables of the inventory: names, types, defaults, what is allowed, and why. One table.

The documentation and the argument specifications are rendered from ``table``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Dict, List, Optional

from . import flags, options
from .options import option, required
from .settings_router import Canary, Router

PREFIX = "pd_"
# What both sides of a pair must have in common stands above them.
_PAIR = {
    "context_length": "set pd_topology.context_length: it holds for both sides of a pair",
    "model": "set pd_model: it holds for both sides of a pair",
    "release": "set pd_release: it holds for both sides of a pair",
}
_PORT: Dict[str, Any] = {"low": 1024, "high": 65535}


@dataclass(frozen=True)
class Model:
    """The checkpoint, named so that it can never change under a running service."""

    repo: str = required(
        "the model's name as owner/name",
        pattern=r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*",
        pattern_words="owner/name",
    )
    revision: str = required(
        "the commit of the checkpoint (40 hex digits; a branch moves)",
        pattern=r"[0-9a-f]{40}",
        pattern_words="a full commit, 40 lower-case hex digits",
    )
    source: str = option(
        "hub",
        "where the files come from: hub, dir:///path, controller:///path, http(s)://... or rclone:REMOTE:PATH",
        "the hub is the only source that everybody has",
        pattern=r"hub|(dir|controller):///.+|https?://.+|rclone:\w[^:]*:.*",
        pattern_words="hub, dir:///absolute/path, controller:///absolute/path, http(s)://address or rclone:REMOTE:PATH",
    )
    fallbacks: List[str] = option(
        list, "sources that stand behind the first one, in order", "one source that has everything is enough"
    )
    served_name: Optional[str] = option(
        None, "the name that clients ask for", "the repository's own name is what clients expect"
    )
    heads: Optional[int] = option(
        None,
        "attention heads, which a tensor-parallel size must divide",
        "known for the models in flags.MODELS",
        low=1,
        high=4096,
    )
    size_bytes: Optional[int] = option(
        None, "bytes of the checkpoint, for the disk and memory checks", "known for the models in flags.MODELS", low=1
    )


@dataclass(frozen=True)
class Shape:
    """How many instances of one role, and how many GPUs each."""

    tp: int = option(
        4, "GPUs of one instance (tensor-parallel size)", "four GPUs of 96 GB hold the checkpoint", low=1, high=64
    )
    count: Optional[int] = option(
        1, 'how many instances, or "auto" for as many as fit', "one pair is the reference", low=1, high=10000, auto=True
    )
    extra_args: Dict[str, Any] = option(
        dict, "engine options for this role alone, long names without dashes", "the plan sets what is needed"
    )


@dataclass(frozen=True)
class One:
    """The one aggregated server."""

    tp: int = option(8, "GPUs of the one server (tensor-parallel size)", "all GPUs of one host", low=1, high=64)
    extra_args: Dict[str, Any] = option(
        dict, "engine options for this server alone, long names without dashes", "the plan sets what is needed"
    )


@dataclass(frozen=True)
class Topology:
    mode: str = option(
        "pd",
        "pd: prefill and decode apart; aggregated: one server; replicas: several servers behind the router",
        "prefill-decode disaggregation is what this bundle is for",
        choices=("pd", "aggregated", "replicas"),
    )
    context_length: int = option(
        8192,
        "longest prompt plus answer in tokens, the same for all instances",
        "bounds the indexer's work on sm_120, the reference's largest gain",
        low=256,
        high=1_048_576,
    )
    prefill: Shape = option(
        Shape, "mode pd: the prefill instances", "one instance of four GPUs, the reference", elsewhere=_PAIR
    )
    decode: Shape = option(
        Shape, "mode pd: the decode instances", "one instance of four GPUs, the reference", elsewhere=_PAIR
    )
    aggregated: One = option(One, "mode aggregated: the one server", "all GPUs of one host")
    replicas: Shape = option(
        lambda: Shape(count=2), "mode replicas: the servers", "two servers of four GPUs fill the reference host"
    )


@dataclass(frozen=True)
class Ports:
    """First port of each kind on a host; the next instance of a role on that host gets the next port."""

    router: int = option(8000, "the router's port for clients", "the reference's port", **_PORT)
    router_metrics: int = option(
        29001,
        "the router's Prometheus port",
        "the reference's; the package's default 29000 meets stale routers",
        **_PORT,
    )
    prefill: int = option(30000, "first HTTP port of prefill instances", "the engine's own default", **_PORT)
    decode: int = option(30100, "first HTTP port of decode instances", "leaves room for 100 prefill instances", **_PORT)
    aggregated: int = option(
        30200, "first HTTP port of aggregated instances and replicas", "apart from both other roles", **_PORT
    )
    bootstrap: int = option(8998, "first bootstrap port of prefill instances", "the engine's own default", **_PORT)


@dataclass(frozen=True)
class Engine:
    """Levers of the engine that operators turn."""

    mem_fraction_static: float = option(
        0.70,
        "share of GPU memory for weights and KV cache",
        "the reference's value, leaves room for JIT and graphs",
        low=0.1,
        high=0.98,
    )
    cuda_graph_max_bs: int = option(
        32, "largest decode batch with a CUDA graph; 0 is eager", "the reference's value", low=0, high=1024
    )
    moe_runner_backend: Optional[str] = option(
        None, "MoE kernels", "unset takes the release's proven choice (flags.ENGINES)"
    )
    watchdog_timeout_s: int = option(
        300, "seconds after which a hung forward pass ends the process", "the engine's default", low=30, high=86400
    )
    bootstrap_timeout_s: Optional[int] = option(
        None,
        "seconds until a request whose peer does not answer fails",
        "120 on GPUs, 10 in the cpu profile; the engine's 300 leaves clients hanging when a peer dies",
        low=5,
        high=3600,
    )
    waiting_timeout_s: Optional[int] = option(
        None,
        "seconds that decode waits for the KV cache of a request",
        "300 on GPUs (long queues at load), 30 in the cpu profile",
        low=5,
        high=3600,
    )
    extra_args: Dict[str, Any] = option(
        dict, "engine options for all roles, long names without dashes", "the plan sets what is needed"
    )
    extra_env: Dict[str, Any] = option(
        dict,
        "environment for all instances; a name given here wins over the plan's choice",
        "the plan sets what is needed",
    )


@dataclass(frozen=True)
class Speculative:
    """Multi-token prediction."""

    algorithm: str = option(
        "none", "speculative decoding", "off until measured on the user's traffic", choices=("none", "EAGLE", "DSPARK")
    )
    num_steps: Optional[int] = option(
        None, "draft steps", "3 for EAGLE, the usual depth of a one-layer draft; DSPARK has one", low=1, high=16
    )
    eagle_topk: int = option(1, "branches of a draft step", "DeepSeek-V4 takes only 1", low=1, high=1)
    num_draft_tokens: Optional[int] = option(
        None,
        "tokens verified at once",
        "for EAGLE draft steps plus one; for DSPARK what the draft was made for, any other number ends the engine",
        low=1,
        high=64,
    )
    moe_runner_backend: Optional[str] = option(
        None,
        "MoE kernels of the draft model",
        "the model's own: the draft layer has the same FP4 experts, and triton cannot read them (sglang#30952)",
    )


_KEY = {
    "secret": True,
    "pattern": r"[A-Za-z0-9._~+/=-]{16,256}",
    "pattern_words": "16 to 256 of A-Z a-z 0-9 . _ ~ + / = -",
}

_PATH = {"pattern": r"[/~].+", "pattern_words": "an absolute path, or one that starts with ~"}


@dataclass(frozen=True)
class Security:
    """Keys, TLS and firewall (docs/security.md). Values of keys come from a vault or a file and enter no plan."""

    api_key: Optional[str] = option(
        None,
        "key that clients send as a bearer token; the router passes it on, and engines ask for it too",
        "none: whoever reaches the router's port may use the model, see client_networks",
        **_KEY,
    )
    admin_api_key: Optional[str] = option(
        None,
        "key of what changes a server: the router's workers; flush, profile and weights of an engine",
        "auto: each host makes one of its own, so that nothing of the kind is ever open",
        auto=True,
        **_KEY,
    )
    tls: str = option(
        "off",
        "the router's certificate: off, given, or own (self-signed, made on each router host, renewed by a re-run)",
        "a certificate that your clients trust has to come from you",
        choices=("off", "given", "own"),
    )
    tls_cert_file: Optional[str] = option(
        None, "certificate chain on the controller, PEM, the router's own first", "for tls: given", **_PATH
    )
    tls_key_file: Optional[str] = option(
        None, "private key of that certificate on the controller, PEM, without a password", "for tls: given", **_PATH
    )
    tls_names: List[str] = option(
        list, "further names and addresses in an own certificate", "it has the host's name and its service address"
    )
    firewall: bool = option(
        True,
        "admit only hosts of this inventory to the ports of engines and to the router's metrics (nftables)",
        "bootstrap and NIXL have no authentication; ports of other programs and other tables stay as they are",
    )
    client_networks: List[str] = option(
        list, "networks that may reach the router's port, such as 10.0.0.0/8", "all: the router is what clients use"
    )
    metrics_networks: List[str] = option(
        list, "networks that may read metrics of engines and router", "only hosts of this inventory"
    )
    firewall_open_ports: List[int] = option(
        list,
        "TCP ports of other programs on GPU hosts that stay open to all",
        "engines choose ports from 22000 to 29999 and from 32768 up, so these are closed to strangers",
    )


@dataclass(frozen=True)
class Benchmark:
    """The load of benchmark.yml, ab.yml and profile.yml."""

    client: str = option(
        "pdstack",
        "who sends: pdstack, the engine's own bench_serving, or both on the same server",
        "it needs nothing on the host, and counts tokens by usage",
        choices=("pdstack", "bench_serving", "both"),
    )
    endpoint: str = option("chat", "chat or completions", "what applications call", choices=("chat", "completions"))
    concurrency: List[int] = option(lambda: [1, 8, 16, 64], "requests at once, one measurement each", "the reference's")
    rates: List[float] = option(
        list, "open loop instead: requests a second, Poisson arrivals", "a closed loop shows capacity"
    )
    dataset: str = option(
        "fixed", "fixed, sharegpt-like, or a JSONL file on the controller", "the reference's fixed lengths"
    )
    input_len: int = option(256, "tokens of a prompt (fixed)", "the reference's", low=1, high=1_000_000)
    output_len: int = option(
        128, "tokens of an answer (fixed, or a line that names none)", "the reference's", low=1, high=1_000_000
    )
    requests: int = option(96, "requests of each measurement", "the reference's", low=1, high=1_000_000)
    shared_prefix: float = option(
        0.0, "share of the prompt that all requests have in common", "0 is a cold prefix cache", low=0.0, high=0.99
    )
    stop_at_eos: bool = option(False, "let answers end by themselves", "equal lengths compare")
    repeats: int = option(2, "how often each measurement runs", "the noise band comes from it", low=1, high=20)
    warmup: Optional[int] = option(
        None, "requests before each measurement", "4 to 32 after the concurrency", low=0, high=10000
    )
    max_seconds: int = option(
        600, "after this time of a measurement no further request leaves", "bounds the run", low=1, high=86400
    )
    label: Optional[str] = option(None, "what the report calls the run", "host and topology")
    baseline: Optional[str] = option(
        None, "a former result (JSON) to compare with, or previous", "the first run has none"
    )
    beside: List[str] = option(list, "results (JSON) that the page shows beside this one", "this run alone")
    noise_floor: float = option(
        0.05, "least change, as a share, that counts as one", "what repeats of one hour do not show", low=0.0, high=1.0
    )
    quality: bool = option(
        True, "golden completions before and after, which must be right", "a faster wrong answer is no gain"
    )


@dataclass(frozen=True)
class Trace:
    """What profile.yml records."""

    role: str = option("decode", "whose steps", "the reference's question", choices=("decode", "prefill", "aggregated"))
    steps: int = option(5, "forward steps to record", "a trace of some megabytes", low=1, high=200)
    concurrency: int = option(16, "requests under way meanwhile", "half the reference's graph batch", low=1, high=4096)
    memory_gb_s: Optional[float] = option(
        None, "GB/s of the GPU's memory, for the roofline", "the data sheet's where the card is known", low=1.0
    )


@dataclass(frozen=True)
class Settings:
    """Variables of the whole inventory, without their prefix ``pd_``. All hosts must agree on them."""

    model: Model = required("the checkpoint")
    profile: str = option(
        "gpu",
        "gpu, or cpu: the real engine on simulated GPUs, for function only",
        "serving needs GPUs",
        choices=("gpu", "cpu"),
    )
    release: Optional[str] = option(
        None,
        "the locked set of packages, a folder under releases/",
        "sglang-0.5.23 (newest that resolves) or cpu-0.5.23 by the profile",
        choices=tuple(sorted(flags.RELEASES)),
    )
    topology: Topology = option(Topology, "which instances serve", "one prefill and one decode instance of four GPUs")
    ports: Ports = option(Ports, "first ports", "the reference's")
    transfer: str = option(
        "nixl",
        "how the KV cache travels",
        "the reference's; mooncake_tcp is for the cpu profile",
        choices=("nixl", "mooncake_tcp"),
    )
    engine: Engine = option(Engine, "levers of the engine", "the reference's")
    canary: Canary = option(Canary, "watching by completions", "on: nothing else notices a pair that hangs")
    router: Router = option(Router, "behaviour of the router", "bounded times, failure detection on")
    speculative: Speculative = option(Speculative, "multi-token prediction", "off")
    kernel_extension: str = option(
        "auto", "the bundle's own sm_120 kernels", "on where hardware and release fit", choices=("auto", "on", "off")
    )
    security: Security = option(Security, "keys, TLS, firewall", "firewall on, admin key made by each host")
    stop_foreign: List[str] = option(
        list,
        "units or listening ports of a former deployment by hand that serve may stop, where they hold a port of ours",
        "nothing is stopped that was not named; preflight lists what holds our ports",
    )
    probe_measure: bool = option(
        False, "measure P2P bandwidth in the probe (idle GPUs only)", "copies load the PCIe links"
    )
    probe_force: bool = option(
        False,
        "measure P2P although an IOMMU translates and ACS redirects",
        "copies between GPUs can hang such a machine",
    )
    drift_report: Optional[str] = option(
        None, "file on the controller for drift.yml's JSON, - for standard output", "a table alone"
    )
    bundle: Optional[str] = option(
        None, "file on the controller that support_bundle.yml writes", "pdstack-support.tar.gz in the current folder"
    )
    lock_break: bool = option(
        False, "take a host over from a deployment that is known to be dead", "two deployments at once undo each other"
    )
    drain: Optional[str] = option(
        None, "what drain.yml takes out of service: an instance, a set, a router or a host", "nothing by accident"
    )
    drain_outage: bool = option(
        False, "let drain.yml take out what nothing else can stand in for", "an outage is to be meant"
    )
    resume: Optional[str] = option(None, "what resume.yml brings back", "nothing by accident")
    retire: Optional[str] = option(
        None, "what retire.yml takes the system off: a host, or the inventory's name for all", "nothing by accident"
    )
    retire_keep: List[str] = option(list, "what retire.yml leaves in place: checkpoint", "a host without a trace")
    benchmark: Benchmark = option(Benchmark, "the load of benchmark.yml, ab.yml and profile.yml", "the reference's")
    trace: Trace = option(Trace, "what profile.yml records", "five steps of decode")
    ab_candidates: Dict[str, Any] = option(
        dict, "ab.yml: a pd_topology for each candidate's name", "there is no choice that suits all hosts"
    )
    ab_confirm: bool = option(
        False, "ab.yml: let each candidate serve in turn", "every change of topology restarts engines"
    )
    report_dir: Optional[str] = option(
        None, "folder on the controller for results and pictures", "reports; probe.yml writes none unless asked"
    )


@dataclass(frozen=True)
class HostSettings:
    """Variables that may differ from host to host."""

    service_address: Optional[str] = option(
        None, "IP address where engines bind and peers connect", "ansible_host, else the inventory name"
    )
    service_interface: Optional[str] = option(
        None,
        "network interface of that address",
        "pins UCX and Gloo to it; where unset they choose",
        pattern=r"[\w.@:-]{1,15}",
        pattern_words="an interface name",
    )
    sysfs_root: str = option(
        "/",
        "root of the sysfs tree to probe",
        "the machine's own; the lab points at a simulated one",
        pattern=r"/.*",
        pattern_words="an absolute path",
    )
    bootstrap_python: bool = option(True, "install a complete Python where the host has none", "modules need it")
    excluded_gpus: List[str] = option(
        list, "PCI ids of GPUs that must not serve, such as 0000:06:00.0", "all GPUs serve"
    )
    driver_library: Optional[str] = option(
        None, "folder of the NVIDIA driver's libraries", "the system's; tests point at a fake driver"
    )


@dataclass(frozen=True)
class Renamed:
    """What became of a variable of an earlier version: its name now, since when, and what becomes of its value."""

    now: str
    since: str
    value: str = "the value stays as it is"


# Former name -> what became of it. A dot stands before a key, as in the table of variables. A former name is refused
# with the new one, so that an inventory of an earlier version never half works.
RENAMED: Dict[str, Renamed] = {
    "nixl_ucx_environment": Renamed("nixl_ucx_pairs", "0.1.0", "the playbooks set it from the plan, so remove it"),
}


def variable_names() -> List[str]:
    """Return the names of all variables of the bundle that are not role variables."""
    return sorted(PREFIX + f.name for cls in (Settings, HostSettings) for f in fields(cls))


def table() -> List[options.Row]:
    """Return the table of variables: name, type, default, and why."""
    return options.table(Settings, PREFIX) + options.table(HostSettings, PREFIX)
