"""Rules between variables that are each fine alone. Pure, and needs no facts."""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Tuple

from . import engine_options, flags, folders, options
from .refusal import Refusal
from .settings import Security, Settings

# Variables of roles that say what the plan, the units and the other roles say, too: a role by itself may have another
# value, a deployment may not.
PLACES: Dict[str, str] = {
    "checkpoint_root": folders.MODELS_DIR,
    "gpu_host_state_dir": folders.STATE_DIR,
    "pd_service_state_dir": folders.STATE_DIR,
    "sglang_runtime_caches": folders.JIT_DIR,
    "sglang_runtime_root": "/opt/pdstack",
    "cuda_toolkit_link": "/opt/pdstack/cuda",
}
USERS = ("gpu_host_user", "pd_service_user", "sglang_runtime_user")
USER = "pdstack"  # the default of each


def roles_agree(host: str, variables: Mapping[str, Any]) -> List[Refusal]:
    """Refuse values of a host's role variables with which one role would put what the others do not find."""
    found = [
        Refusal(
            f"{name} on {host}",
            str(variables[name]),
            f"{place}, the place that the plan, the units and the other roles go by",
            f"remove it, and mount the larger disk there: at {place}",
        )
        for name, place in PLACES.items()
        if name in variables and str(variables[name]).rstrip("/") != place
    ]
    users = {name: str(variables.get(name, USER)) for name in USERS}
    if len(set(users.values())) > 1:
        words = ", ".join(f"{name}: {user}" for name, user in users.items())
        found.append(
            Refusal(f"{USERS[0]} on {host}", words, "one user, whose files the others use", "give all three one name")
        )
    return found


def broken(settings: Settings, release: Optional[flags.Release]) -> List[Refusal]:
    """Rules between values that are each fine alone."""
    found: List[Refusal] = []
    model, topology, engine = settings.model, settings.topology, settings.engine
    if set(model.revision) == {"0"}:
        found.append(
            Refusal(
                "pd_model.revision",
                "the placeholder of the example",
                "the commit of the checkpoint to serve",
                f"take it from the page of {model.repo}, under the files and their versions",
            )
        )
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
                Refusal(
                    f"pd_topology.{role}.tp",
                    f"{tp}",
                    f"a divisor of the model's {heads} attention heads",
                    f"choose one of: {fitting}",
                )
            )
    prefill, decode = topology.prefill.tp, topology.decode.tp
    if topology.mode == "pd" and max(prefill, decode) % min(prefill, decode):
        found.append(
            Refusal(
                "pd_topology",
                f"prefill.tp {prefill} and decode.tp {decode}",
                "equal sizes, or one a multiple of the other: the engine maps ranks of one side to ranks of the other",
                f"set both to {min(prefill, decode)}, or one to a multiple of the other",
            )
        )
    names = engine_options.ENGINES[release.engine.version] if release else None
    found += _extra("pd_engine.extra_args", engine.extra_args, flags.PLAN_OWNED, names)
    for role, extra in (
        ("prefill", topology.prefill.extra_args),
        ("decode", topology.decode.extra_args),
        ("aggregated", topology.aggregated.extra_args),
        ("replicas", topology.replicas.extra_args),
    ):
        found += _extra(f"pd_topology.{role}.extra_args", extra, flags.PLAN_OWNED, names, flags.PAIR_OPTIONS)
    program = flags.ROUTERS.get(settings.router.implementation)
    router = engine_options.ROUTERS[f"{program.package} {program.version}"] if program else None
    found += _extra("pd_router.extra_args", settings.router.extra_args, flags.ROUTER_OWNED, router)
    for name, value in engine.extra_env.items():
        if "expandable_segments" in str(value).lower():
            found.append(
                Refusal(
                    f"pd_engine.extra_env.{name}",
                    "expandable_segments",
                    "the allocator's default: with it KV memory cannot be shared by CUDA IPC and transfers are about "
                    "600 times slower (nixl#1754)",
                    "remove it",
                )
            )
    if settings.transfer == "mooncake_tcp" and settings.profile == "gpu" and topology.mode == "pd":
        found.append(
            Refusal(
                "pd_transfer", "mooncake_tcp with pd_profile: gpu", "a KV lane that is not TCP", "set pd_transfer: nixl"
            )
        )
    speculative = settings.speculative.algorithm
    if release is not None and speculative != "none" and speculative not in release.engine.speculative:
        able = ", ".join(
            sorted(
                n
                for n, r in flags.RELEASES.items()
                if speculative in r.engine.speculative and r.profile == settings.profile
            )
        )
        found.append(
            Refusal(
                "pd_speculative.algorithm",
                f"{speculative} on {release.name}: {release.engine.speculative_reason or 'not supported there'}",
                f"a release on which it works: {able or 'none'}",
                "set pd_release to one of them, or pd_speculative.algorithm: none",
            )
        )
    found += _security(settings.security)
    if settings.router.health_timeout_s > settings.router.health_interval_s:
        found.append(
            Refusal(
                "pd_router.health_timeout_s",
                f"{settings.router.health_timeout_s}, more than health_interval_s: {settings.router.health_interval_s}",
                "a check that ends before the next one starts",
                "lower health_timeout_s or raise health_interval_s",
            )
        )
    return found


def _security(security: Security) -> List[Refusal]:
    found: List[Refusal] = []
    if security.api_key is not None and security.api_key == security.admin_api_key:
        found.append(
            Refusal(
                "pd_security.admin_api_key",
                "the same as api_key (not shown)",
                "a key that clients do not have",
                "leave it out, and each host makes its own",
            )
        )
    files = {"tls_cert_file": security.tls_cert_file, "tls_key_file": security.tls_key_file}
    for name, path in files.items():
        if security.tls == "given" and not path:
            found.append(
                Refusal(f"pd_security.{name}", "nothing", "a file on the controller, for tls: given", f"set {name}")
            )
        elif security.tls != "given" and path:
            found.append(
                Refusal(f"pd_security.{name}", f"set, with tls: {security.tls}", "tls: given", "set pd_security.tls")
            )
    for name in security.tls_names:
        if not re.fullmatch(r"[A-Za-z0-9.:*-]{1,253}", name):
            found.append(
                Refusal("pd_security.tls_names", repr(name), "a host name or an IP address", "write one for each item")
            )
    for variable in ("client_networks", "metrics_networks"):
        for text in getattr(security, variable):
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                found.append(
                    Refusal(f"pd_security.{variable}", str(error), "a network or an address", "such as 10.1.0.0/16")
                )
    if not security.firewall:
        found += [
            Refusal(f"pd_security.{name}", "set, with firewall: false", "a firewall that obeys it", f"remove {name}")
            for name in ("client_networks", "metrics_networks", "firewall_open_ports")
            if getattr(security, name)
        ]
    found += [
        Refusal("pd_security.firewall_open_ports", str(port), "1 to 65535", "write a port number")
        for port in security.firewall_open_ports
        if not 1 <= port <= 65535
    ]
    return found


def _extra(
    where: str,
    args: Mapping[str, Any],
    owned: FrozenSet[str],
    known: Optional[FrozenSet[str]],
    shared: FrozenSet[str] = frozenset(),
) -> List[Refusal]:
    """Judge options that go to a program unseen: ``owned`` are the plan's, ``shared`` may not differ between roles."""
    found: List[Refusal] = []
    for key, value in args.items():
        name = key.lstrip("-").replace("_", "-")
        if key != name:
            found.append(
                Refusal(
                    f"{where}.{key}",
                    repr(key),
                    "the long option without dashes in front, words joined by '-'",
                    f"write {name}",
                )
            )
        if name in flags.SECRET_OPTIONS:
            found.append(
                Refusal(
                    f"{where}.{key}",
                    "a secret (not shown)",
                    "secrets outside of arguments, which every user of the host can read",
                    "use pd_security",
                )
            )
        elif name in shared:
            found.append(
                Refusal(
                    f"{where}.{key}",
                    f"{name} for one role alone",
                    "one value for both sides of a pair: a mismatch is a hang or garbage at the client (sglang#30233)",
                    "set pd_topology.context_length, or pd_engine.extra_args for all roles",
                )
            )
        elif name in owned:
            found.append(
                Refusal(
                    f"{where}.{key}",
                    f"{name}, which the plan sets itself",
                    "an option that the plan does not set",
                    "use the variable of the bundle for it",
                )
            )
        elif known is not None and name not in known:
            hint = options.nearest(name, known) or "remove it"
            found.append(Refusal(f"{where}.{key}", "an unknown option", "an option of the release's program", hint))
        elif not isinstance(value, (str, int, float, bool, list)):
            found.append(
                Refusal(f"{where}.{key}", repr(value), "text, a number, true, or a list of them", "write one value")
            )
    return found
