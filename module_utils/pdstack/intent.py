"""The operator's intent: inventory variables read into types, with every error found at once.

Static by nature: needs the inventory only, contacts nothing. ``parse`` is the one door.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from . import codec, flags, options
from .options import option, required
from .refusal import IntentError, Refusal

PREFIX = "pd_"
GPU_GROUP = "gpu_hosts"
ROUTER_GROUP = "router_hosts"
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
        "where the files come from: hub, dir:///absolute/path, or http(s)://...",
        "the hub is the only source that everybody has",
        pattern=r"hub|dir:///.+|https?://.+",
        pattern_words="hub, dir:///absolute/path, or http(s)://address",
    )
    served_name: Optional[str] = option(None, "the name that clients ask for", "the repository's own name is what clients expect")
    heads: Optional[int] = option(
        None, "attention heads, which a tensor-parallel size must divide", "known for the models in flags.MODELS", low=1, high=4096
    )
    size_bytes: Optional[int] = option(
        None, "bytes of the checkpoint, for the disk and memory checks", "known for the models in flags.MODELS", low=1
    )


@dataclass(frozen=True)
class Shape:
    """How many instances of one role, and how many GPUs each."""

    tp: int = option(4, "GPUs of one instance (tensor-parallel size)", "four GPUs of 96 GB hold the checkpoint", low=1, high=64)
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
    prefill: Shape = option(Shape, "mode pd: the prefill instances", "one instance of four GPUs, the reference")
    decode: Shape = option(Shape, "mode pd: the decode instances", "one instance of four GPUs, the reference")
    aggregated: One = option(One, "mode aggregated: the one server", "all GPUs of one host")
    replicas: Shape = option(lambda: Shape(count=2), "mode replicas: the servers", "two servers of four GPUs fill the reference host")


@dataclass(frozen=True)
class Ports:
    """First port of each kind on a host; the next instance of a role on that host gets the next port."""

    router: int = option(8000, "the router's port for clients", "the reference's port", **_PORT)
    router_metrics: int = option(29001, "the router's Prometheus port", "the reference's; the package's default 29000 meets stale routers", **_PORT)
    prefill: int = option(30000, "first HTTP port of prefill instances", "the engine's own default", **_PORT)
    decode: int = option(30100, "first HTTP port of decode instances", "leaves room for 100 prefill instances", **_PORT)
    aggregated: int = option(30200, "first HTTP port of aggregated instances and replicas", "apart from both other roles", **_PORT)
    bootstrap: int = option(8998, "first bootstrap port of prefill instances", "the engine's own default", **_PORT)


@dataclass(frozen=True)
class Engine:
    """Levers of the engine that operators turn."""

    mem_fraction_static: float = option(
        0.70, "share of GPU memory for weights and KV cache", "the reference's value, leaves room for JIT and graphs", low=0.1, high=0.98
    )
    cuda_graph_max_bs: int = option(32, "largest decode batch with a CUDA graph", "the reference's value", low=1, high=1024)
    moe_runner_backend: Optional[str] = option(None, "MoE kernels", "unset takes the release's proven choice (flags.ENGINES)")
    watchdog_timeout_s: int = option(300, "seconds after which a hung forward pass ends the process", "the engine's default", low=30, high=86400)
    bootstrap_timeout_s: Optional[int] = option(
        None,
        "seconds until a request whose peer does not answer fails",
        "120 on GPUs, 10 in the cpu profile; the engine's 300 leaves clients hanging when a peer dies",
        low=5,
        high=3600,
    )
    waiting_timeout_s: Optional[int] = option(
        None, "seconds that decode waits for the KV cache of a request", "300 on GPUs (long queues at load), 30 in the cpu profile", low=5, high=3600
    )
    extra_args: Dict[str, Any] = option(dict, "engine options for all roles, long names without dashes", "the plan sets what is needed")
    extra_env: Dict[str, Any] = option(
        dict, "environment for all instances; a name given here wins over the plan's choice", "the plan sets what is needed"
    )


@dataclass(frozen=True)
class Router:
    """The router's behaviour."""

    policy: str = option(
        "cache_aware",
        "how requests are spread over workers",
        "keeps a conversation on the worker that holds its prefix; also the router's default",
        choices=("random", "round_robin", "cache_aware", "power_of_two"),
    )
    scope: str = option(
        "all",
        "workers of each router: all of them, or those of its own host",
        "one address for everything; host is for several hosts without RDMA",
        choices=("all", "host"),
    )
    health_interval_s: int = option(
        10, "seconds between health checks of a worker", "a dead worker leaves within half a minute; the upstream recipe's 999999 never notices", low=1, high=600
    )
    health_timeout_s: int = option(5, "seconds until a health check counts as failed", "the router's default", low=1, high=600)
    health_failures: int = option(3, "failed checks in a row until a worker is taken out", "the router's default", low=1, high=100)
    request_timeout_s: int = option(600, "longest time of one request", "8192 tokens at 15 ms each take two minutes; bounds what a client waits", low=1, high=86400)
    startup_timeout_s: int = option(1800, "seconds that the router waits for workers at its start", "loading 146 GB from a slow disk", low=10, high=86400)
    shutdown_grace_s: int = option(180, "seconds for requests in flight when the router stops", "the router's default", low=0, high=3600)
    max_concurrent_requests: int = option(-1, "requests admitted at once, -1 for no limit", "the engine queues by itself", low=-1, high=1_000_000)
    extra_args: Dict[str, Any] = option(dict, "router options, long names without dashes", "the plan sets what is needed")


@dataclass(frozen=True)
class Speculative:
    """Multi-token prediction."""

    algorithm: str = option("none", "speculative decoding", "off until measured on the user's traffic", choices=("none", "EAGLE", "DSPARK"))
    num_steps: int = option(3, "draft steps", "the usual depth of a one-layer draft", low=1, high=16)
    eagle_topk: int = option(1, "branches of a draft step", "DeepSeek-V4 takes only 1", low=1, high=1)
    num_draft_tokens: int = option(4, "tokens verified at once", "draft steps plus one", low=1, high=64)
    moe_runner_backend: str = option("triton", "MoE kernels of the draft model", "left to itself the engine picks kernels for sm_100 (sglang#30952)")


@dataclass(frozen=True)
class Security:
    """Keys and TLS. Secrets are never part of a plan."""

    api_key: Optional[str] = option(None, "key that clients must send", "no key: open to whoever reaches the router", secret=True)
    admin_api_key: Optional[str] = option(None, "key of the engines' admin endpoints", "made on the host where unset", secret=True)
    tls_cert_file: Optional[str] = option(None, "certificate of the router on the controller", "plain HTTP where unset")
    tls_key_file: Optional[str] = option(None, "private key of that certificate on the controller", "plain HTTP where unset")
    firewall: bool = option(True, "admit only router and peers to worker, bootstrap and NIXL ports", "these ports have no authentication")


@dataclass(frozen=True)
class Settings:
    """Variables of the whole inventory, without their prefix ``pd_``. All hosts must agree on them."""

    model: Model = required("the checkpoint")
    profile: str = option("gpu", "gpu, or cpu: the real engine on simulated GPUs, for function only", "serving needs GPUs", choices=("gpu", "cpu"))
    release: Optional[str] = option(
        None,
        "the locked set of packages, a folder under releases/",
        "sglang-0.5.23 (newest that resolves) or cpu-0.5.23 by the profile",
        choices=tuple(sorted(flags.RELEASES)),
    )
    topology: Topology = option(Topology, "which instances serve", "one prefill and one decode instance of four GPUs")
    ports: Ports = option(Ports, "first ports", "the reference's")
    transfer: str = option(
        "nixl", "how the KV cache travels", "the reference's; mooncake_tcp is for the cpu profile", choices=("nixl", "mooncake_tcp")
    )
    engine: Engine = option(Engine, "levers of the engine", "the reference's")
    router: Router = option(Router, "behaviour of the router", "bounded times, failure detection on")
    speculative: Speculative = option(Speculative, "multi-token prediction", "off")
    kernel_extension: str = option("auto", "the bundle's own sm_120 kernels", "on where hardware and release fit", choices=("auto", "on", "off"))
    security: Security = option(Security, "keys, TLS, firewall", "firewall on")
    probe_measure: bool = option(False, "measure P2P bandwidth in the probe (idle GPUs only)", "copies load the PCIe links")
    report_dir: Optional[str] = option(None, "folder on the controller for JSON and pictures", "no files unless asked")


@dataclass(frozen=True)
class HostSettings:
    """Variables that may differ from host to host."""

    service_address: Optional[str] = option(None, "address where engines bind and peers connect", "ansible_host, else the inventory name")
    service_interface: Optional[str] = option(
        None, "network interface of that address", "pins UCX and Gloo to it; where unset they choose", pattern=r"[\w.@:-]{1,15}", pattern_words="an interface name"
    )
    sysfs_root: str = option("/", "root of the sysfs tree to probe", "the machine's own; the lab points at a simulated one", pattern=r"/.*", pattern_words="an absolute path")
    excluded_gpus: List[str] = option(list, "PCI ids of GPUs that must not serve, such as 0000:06:00.0", "all GPUs serve")
    driver_library: Optional[str] = option(None, "folder of the NVIDIA driver's libraries", "the system's; tests point at a fake driver")


@dataclass(frozen=True)
class Host:
    """A host as the inventory gives it."""

    name: str
    address: str
    interface: Optional[str] = None
    sysfs_root: str = "/"
    driver_library: Optional[str] = None
    excluded_gpus: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Intent:
    settings: Settings
    release: flags.Release
    gpu_hosts: Tuple[Host, ...]  # sorted by name
    router_hosts: Tuple[Host, ...]

    @property
    def model(self) -> Model:
        return self.settings.model

    @property
    def topology(self) -> Topology:
        return self.settings.topology

    @property
    def profile(self) -> str:
        return self.settings.profile

    @property
    def heads(self) -> Optional[int]:
        known = flags.MODELS.get(self.model.repo)
        return self.model.heads or (known.heads if known else None)

    @property
    def size_bytes(self) -> Optional[int]:
        known = flags.MODELS.get(self.model.repo)
        return self.model.size_bytes or (known.size_bytes if known else None)


def variable_names() -> List[str]:
    """Return the names of all variables of the bundle that are not role variables."""
    return sorted(PREFIX + f.name for cls in (Settings, HostSettings) for f in fields(cls))


def table() -> List[options.Row]:
    """Return the table of variables: name, type, default, and why."""
    return options.table(Settings, PREFIX) + options.table(HostSettings, PREFIX)


def parse(
    hosts: Mapping[str, Mapping[str, Any]],
    groups: Mapping[str, Iterable[str]],
    known_role_variables: Optional[Iterable[str]] = None,
    role_prefixes: Iterable[str] = (),
) -> Intent:
    """Return the intent of an inventory.

    ``hosts`` maps each host to its variables (other people's variables may be among them),
    ``groups`` has the members of ``gpu_hosts`` and ``router_hosts``. With ``known_role_variables``,
    variables that start with one of our prefixes but that nobody knows are refused.
    Raises IntentError with all refusals.
    """
    errors: List[Refusal] = []
    gpu_names = _group(groups, GPU_GROUP, "the hosts whose GPUs serve", errors)
    router_names = _group(groups, ROUTER_GROUP, "the hosts that run the router; a GPU host may be one", errors)
    names = sorted(set(gpu_names) | set(router_names), key=natural_key)
    if known_role_variables is not None:
        _unknown_names(hosts, names, set(known_role_variables), tuple(role_prefixes), errors)
    shared = _shared(hosts, names, errors)
    settings = options.read(Settings, shared, "pd", errors) if names else None
    errors[:] = [_with_prefix(item) for item in errors]
    by_name = {name: _host(name, hosts.get(name, {}), errors) for name in names}
    _addresses(by_name, errors)
    release = None
    if settings is not None:
        release = _release(settings, errors)
        errors += _consistent(settings, release)
    if errors or settings is None or release is None:
        raise IntentError(_unique(errors))
    found = {name: host for name, host in by_name.items() if host is not None}
    return Intent(
        settings,
        release,
        tuple(found[name] for name in sorted(gpu_names, key=natural_key)),
        tuple(found[name] for name in sorted(router_names, key=natural_key)),
    )


def public(intent: Intent) -> Dict[str, Any]:
    """Return the intent as plain data, with what is secret left out and the release resolved."""
    settings: Dict[str, Any] = codec.dump(intent.settings)
    del settings["security"]
    settings["release"] = intent.release.name
    settings["gpu_hosts"] = [host.name for host in intent.gpu_hosts]
    settings["router_hosts"] = [host.name for host in intent.router_hosts]
    return settings


def summary(intent: Intent) -> str:
    """Return one line that says what is asked for."""
    topology, model = intent.topology, intent.model
    shapes = {"pd": ("prefill", "decode"), "aggregated": ("aggregated",), "replicas": ("replicas",)}[topology.mode]
    words: List[str] = []
    for name in shapes:
        shape = getattr(topology, name)
        count = getattr(shape, "count", 1)
        words.append(f"{'auto' if count is None else count} x {name} of {shape.tp} GPUs")
    return (
        f"{model.repo}@{model.revision[:12]} with {intent.release.name}, mode {topology.mode}: {', '.join(words)}; "
        f"GPU hosts: {_some([h.name for h in intent.gpu_hosts])}; router hosts: {_some([h.name for h in intent.router_hosts])}"
    )


def natural_key(name: str) -> Tuple[Tuple[int, int, str], ...]:
    """Sort key by which ``gpu2`` comes before ``gpu10``."""
    parts: List[Tuple[int, int, str]] = []
    digits = ""
    for char in name + "\0":
        if char.isascii() and char.isdigit():
            digits += char
            continue
        if digits:
            parts.append((0, int(digits), digits))
            digits = ""
        parts.append((1, 0, char))
    return tuple(parts)


def _group(groups: Mapping[str, Iterable[str]], name: str, meaning: str, errors: List[Refusal]) -> List[str]:
    if name not in groups:
        errors.append(Refusal(f"group {name}", "no such group", meaning, f"add a group {name} to the inventory"))
        return []
    members = sorted({str(host) for host in groups[name]}, key=natural_key)
    if not members:
        errors.append(Refusal(f"group {name}", "no hosts in it", meaning, f"add at least one host to {name}"))
    return members


def _unknown_names(
    hosts: Mapping[str, Mapping[str, Any]],
    names: List[str],
    role_variables: "set[str]",
    prefixes: Tuple[str, ...],
    errors: List[Refusal],
) -> None:
    ours = set(variable_names())
    where: Dict[str, List[str]] = {}
    for host in names:
        for name in hosts.get(host, {}):
            if name.startswith((PREFIX,) + prefixes) and name not in ours and name not in role_variables:
                where.setdefault(str(name), []).append(host)
    for name, found in sorted(where.items()):
        hint = options.nearest(name, ours | role_variables) or "remove it; docs list all variables"
        errors.append(Refusal(name, f"an unknown variable (on {_some(found)})", "a variable of this bundle", hint))


def _shared(hosts: Mapping[str, Mapping[str, Any]], names: List[str], errors: List[Refusal]) -> Dict[str, Any]:
    """Return the inventory-wide variables; a pair on which two hosts disagree would hang at the client."""
    shared: Dict[str, Any] = {}
    for field in fields(Settings):
        variable = PREFIX + field.name
        values: List[Tuple[Any, List[str]]] = []
        for host in names:
            value = options.plain(hosts.get(host, {}).get(variable))
            for known, found in values:
                if known == value:
                    found.append(host)
                    break
            else:
                values.append((value, [host]))
        if len(values) > 1:
            secret = variable == "pd_security"
            shown = "; ".join(f"{'...' if secret else repr(value)} on {_some(found)}" for value, found in values)
            errors.append(
                Refusal(
                    variable,
                    f"different values: {shown}",
                    "one value for all hosts: instances that work together must agree on it",
                    "set it once, in group_vars/all, and remove it from host_vars",
                )
            )
        if values and values[0][0] is not None:
            shared[field.name] = _scalar(field.name, values[0][0])
    return shared


def _scalar(name: str, value: Any) -> Any:
    """Undo what ``-e name=value`` does to a boolean: it arrives as a string."""
    if name == "probe_measure" and isinstance(value, str) and value.lower() in ("true", "yes", "false", "no"):
        return value.lower() in ("true", "yes")
    return value


def _with_prefix(item: Refusal) -> Refusal:
    subject = PREFIX + item.subject[3:] if item.subject.startswith("pd.") else item.subject
    remedy = f"set {subject}" if item.remedy == f"set {item.subject}" else item.remedy
    return Refusal(subject, item.found, item.needed, remedy)


def _host(name: str, variables: Mapping[str, Any], errors: List[Refusal]) -> Optional[Host]:
    found: List[Refusal] = []
    data = {
        f.name: options.plain(variables[PREFIX + f.name])
        for f in fields(HostSettings)
        if variables.get(PREFIX + f.name) is not None
    }
    settings = options.read(HostSettings, data, "pd", found)
    errors += [Refusal(f"{i.subject} on {name}", i.found, i.needed, i.remedy) for i in map(_with_prefix, found)]
    if settings is None:
        return None
    address = settings.service_address or str(variables.get("ansible_host") or name)
    if settings.service_address is not None and not _is_address(address):
        errors.append(
            Refusal(f"pd_service_address on {name}", repr(address), "an IP address or a host name", "write the address of the service network")
        )
    return Host(name, address, settings.service_interface, settings.sysfs_root, settings.driver_library, tuple(settings.excluded_gpus))


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_unspecified
    except ValueError:
        labels = text.rstrip(".").split(".")
        return all(label and label.replace("-", "").replace("_", "").isalnum() for label in labels) and not labels[-1].isdigit()


def _addresses(hosts: Mapping[str, Optional[Host]], errors: List[Refusal]) -> None:
    """Several hosts must be reachable by each other, each at an address of its own."""
    users: Dict[str, List[str]] = {}
    for name, host in hosts.items():
        if host is not None:
            users.setdefault(host.address, []).append(name)
    for address, names in sorted(users.items()):
        if len(names) > 1:
            errors.append(
                Refusal(f"pd_service_address {address}", f"used by {_some(names)}", "one address for each host", "correct the address of the wrong host")
            )
        elif len(hosts) > 1 and address in ("localhost", "127.0.0.1", "::1"):
            errors.append(
                Refusal(
                    f"pd_service_address on {names[0]}",
                    f"{address}, and {len(hosts)} hosts in the inventory",
                    "an address that the other hosts can reach",
                    "set pd_service_address for this host",
                )
            )


def _release(settings: Settings, errors: List[Refusal]) -> Optional[flags.Release]:
    release = flags.RELEASES[settings.release or flags.DEFAULT_RELEASE[settings.profile]]
    if release.profile != settings.profile:
        fitting = ", ".join(sorted(name for name, item in flags.RELEASES.items() if item.profile == settings.profile))
        errors.append(
            Refusal(
                "pd_release",
                f"{release.name}, a release for the {release.profile} profile, with pd_profile: {settings.profile}",
                f"a release for the {settings.profile} profile: {fitting}",
                "remove pd_release to get the default of the profile, or change pd_profile",
            )
        )
        return None
    return release


def _consistent(settings: Settings, release: Optional[flags.Release]) -> List[Refusal]:
    """Rules between values that are each fine alone."""
    found: List[Refusal] = []
    model, topology, engine = settings.model, settings.topology, settings.engine
    known = flags.MODELS.get(model.repo)
    heads = model.heads or (known.heads if known else None)
    shapes: List[Tuple[str, int]] = {
        "pd": [("prefill", topology.prefill.tp), ("decode", topology.decode.tp)],
        "aggregated": [("aggregated", topology.aggregated.tp)],
        "replicas": [("replicas", topology.replicas.tp)],
    }[topology.mode]
    for role, tp in shapes:
        if heads is not None and heads % tp:
            fitting = ", ".join(str(n) for n in range(1, 65) if heads % n == 0)
            found.append(
                Refusal(f"pd_topology.{role}.tp", f"{tp}", f"a divisor of the model's {heads} attention heads", f"choose one of: {fitting}")
            )
    found += _extra("pd_engine.extra_args", engine.extra_args, pair=False)
    for role, extra in (
        ("prefill", topology.prefill.extra_args),
        ("decode", topology.decode.extra_args),
        ("aggregated", topology.aggregated.extra_args),
        ("replicas", topology.replicas.extra_args),
    ):
        found += _extra(f"pd_topology.{role}.extra_args", extra, pair=True)
    for name, value in engine.extra_env.items():
        if "expandable_segments" in str(value).lower():
            found.append(
                Refusal(
                    f"pd_engine.extra_env.{name}",
                    "expandable_segments",
                    "the allocator's default: with it KV memory cannot be shared by CUDA IPC and transfers are about 600 times slower (nixl#1754)",
                    "remove it",
                )
            )
    if settings.transfer == "mooncake_tcp" and settings.profile == "gpu" and topology.mode == "pd":
        found.append(
            Refusal("pd_transfer", "mooncake_tcp with pd_profile: gpu", "a KV lane that is not TCP", "set pd_transfer: nixl")
        )
    speculative = settings.speculative.algorithm
    if release is not None and speculative != "none" and speculative not in release.engine.speculative:
        able = ", ".join(sorted(n for n, r in flags.RELEASES.items() if speculative in r.engine.speculative and r.profile == settings.profile))
        found.append(
            Refusal(
                "pd_speculative.algorithm",
                f"{speculative} on {release.name}: {release.engine.speculative_reason or 'not supported there'}",
                f"a release on which it works: {able or 'none'}",
                "set pd_release to one of them, or pd_speculative.algorithm: none",
            )
        )
    if (settings.security.tls_cert_file is None) != (settings.security.tls_key_file is None):
        found.append(
            Refusal("pd_security", "one of tls_cert_file and tls_key_file", "both or neither", "give the certificate and its key together")
        )
    if settings.router.health_timeout_s > settings.router.health_interval_s:
        found.append(
            Refusal(
                "pd_router.health_timeout_s",
                f"{settings.router.health_timeout_s}, longer than health_interval_s {settings.router.health_interval_s}",
                "a check that ends before the next one starts",
                "lower health_timeout_s or raise health_interval_s",
            )
        )
    return found


def _extra(where: str, args: Mapping[str, Any], pair: bool) -> List[Refusal]:
    found: List[Refusal] = []
    for key, value in args.items():
        name = key.lstrip("-").replace("_", "-")
        if key != name:
            found.append(Refusal(f"{where}.{key}", repr(key), "the long option without dashes in front, words joined by '-'", f"write {name}"))
        if name in flags.SECRET_OPTIONS:
            found.append(
                Refusal(f"{where}.{key}", "a secret (not shown)", "secrets outside of arguments, which every user of the host can read", "use pd_security")
            )
        elif pair and name in flags.PAIR_OPTIONS:
            found.append(
                Refusal(
                    f"{where}.{key}",
                    f"{name} for one role alone",
                    "the same value on both sides of a pair: a mismatch is a hang or garbage at the client (sglang#30233)",
                    "set pd_topology.context_length, or pd_engine.extra_args for all roles",
                )
            )
        elif name in flags.PLAN_OWNED:
            found.append(
                Refusal(f"{where}.{key}", f"{name}, which the plan sets itself", "an option that the plan does not set", "use the variable of the bundle for it")
            )
        elif not isinstance(value, (str, int, float, bool, list)):
            found.append(Refusal(f"{where}.{key}", repr(value), "text, a number, true, or a list of them", "write one value"))
    return found


def _some(names: List[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _unique(errors: List[Refusal]) -> List[Refusal]:
    return list(dict.fromkeys(errors))
