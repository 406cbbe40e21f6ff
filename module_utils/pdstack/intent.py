"""The operator's intent: inventory variables read into types, with every error found at once.

Static by nature: needs the inventory only, contacts nothing. ``parse`` is the one door.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from . import codec, flags, options, pci, rules
from .refusal import IntentError, Refusal
from .settings import PREFIX, RENAMED, HostSettings, Model, Settings, Topology, variable_names

GPU_GROUP = "gpu_hosts"
ROUTER_GROUP = "router_hosts"


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
    toolkit: str = flags.TOOLKIT  # the set that kernels are compiled with: the role variable cuda_toolkit_set

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
    for name in names:
        errors += rules.roles_agree(name, hosts.get(name, {}))
    shared = _shared(hosts, names, set(gpu_names), errors)
    settings = options.read(Settings, shared, "pd", errors) if names else None
    errors[:] = [_with_prefix(item) for item in errors]
    by_name = {name: _host(name, hosts.get(name, {}), errors) for name in names}
    _addresses(by_name, errors)
    if settings is not None and settings.security.firewall and len(by_name) > 1:
        _numeric(by_name, errors)
    release = None
    if settings is not None:
        judged = {item.subject for item in errors}
        release = None if judged & {"pd_profile", "pd_release"} else _release(settings, errors)
        errors += rules.broken(settings, release)
    if errors or settings is None or release is None:
        raise IntentError(_unique([_renamed(item) for item in errors]))
    found = {name: host for name, host in by_name.items() if host is not None}
    return Intent(
        settings,
        release,
        tuple(found[name] for name in sorted(gpu_names, key=natural_key)),
        tuple(found[name] for name in sorted(router_names, key=natural_key)),
        str(hosts[gpu_names[0]].get("cuda_toolkit_set") or flags.TOOLKIT),
    )


def check_only(
    hosts: Mapping[str, Mapping[str, Any]],
    only: Sequence[str],
    known_role_variables: Iterable[str],
    role_prefixes: Iterable[str] = (),
) -> None:
    """Refuse names that nobody knows, and wrong values of the variables ``only``; the others' values are not judged.

    For playbooks that must work whatever the inventory is like, such as on a host that is to be retired: a slip in
    what they act by is refused all the same. Raises IntentError.
    """
    errors: List[Refusal] = []
    names = sorted(hosts, key=natural_key)
    _unknown_names(hosts, names, set(known_role_variables), tuple(role_prefixes), errors)
    judged = {name: {key: value for key, value in hosts[name].items() if key in only} for name in names}
    found: List[Refusal] = []
    options.read(Settings, _shared(judged, names, set(names), found), "pd", found)
    errors += [item for item in map(_with_prefix, found) if item.subject.split(".")[0] in only]
    if errors:
        raise IntentError(_unique([_renamed(item) for item in errors]))


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
    gpu = _some([host.name for host in intent.gpu_hosts])
    router = _some([host.name for host in intent.router_hosts])
    what = f"{model.repo}@{model.revision[:12]} with {intent.release.name}, mode {topology.mode}: {', '.join(words)}"
    return f"{what}; GPU hosts: {gpu}; router hosts: {router}"


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
        hint = options.nearest(name, groups) or f"add a group {name} to the inventory"
        errors.append(Refusal(f"group {name}", "no such group", meaning, hint))
        return []
    members = sorted({str(host) for host in groups[name]}, key=natural_key)
    if not members:
        errors.append(Refusal(f"group {name}", "no hosts in it", meaning, f"add at least one host to {name}"))
    return members


def _unknown_names(
    hosts: Mapping[str, Mapping[str, Any]],
    names: List[str],
    role_variables: set[str],
    prefixes: Tuple[str, ...],
    errors: List[Refusal],
) -> None:
    ours = set(variable_names())
    where: Dict[str, List[str]] = {}
    for host in names:
        for name in hosts.get(host, {}):
            if name.startswith((PREFIX, *prefixes)) and name not in ours and name not in role_variables:
                where.setdefault(str(name), []).append(host)
    for name, found in sorted(where.items()):
        hint = options.nearest(name, ours | role_variables) or "remove it; docs list all variables"
        errors.append(Refusal(name, f"an unknown variable (on {_some(found)})", "a variable of this bundle", hint))


def _renamed(item: Refusal) -> Refusal:
    """Say what became of an unknown name that an earlier version knew."""
    former = RENAMED.get(item.subject.partition(" on ")[0])
    if former is None or not item.found.startswith("an unknown"):
        return item
    remedy = f"write {former.now} in its place; {former.value}"
    return Refusal(item.subject, f"a name that is {former.now} since {former.since}", former.now, remedy)


def _shared(
    hosts: Mapping[str, Mapping[str, Any]], names: List[str], gpu_names: Set[str], errors: List[Refusal]
) -> Dict[str, Any]:
    """Return the inventory-wide variables; a pair on which two hosts disagree would hang at the client.

    A host that only routes may leave a variable unset: it is often given to the group gpu_hosts alone.
    """
    shared: Dict[str, Any] = {}
    for field in fields(Settings):
        variable = PREFIX + field.name
        values: List[Tuple[Any, List[str]]] = []
        for host in names:
            value = options.plain(hosts.get(host, {}).get(variable))
            if value is None and host not in gpu_names:
                continue
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
            shared[field.name] = _switch(Settings, field.name, values[0][0])
    return shared


def _switch(cls: Any, name: str, value: Any) -> Any:
    """Undo what ``-e name=value`` does to a switch: it arrives as a string."""
    if isinstance(value, str) and cls.__annotations__[name] == "bool":
        return {"true": True, "yes": True, "false": False, "no": False}.get(value.lower(), value)
    return value


def _with_prefix(item: Refusal) -> Refusal:
    subject = PREFIX + item.subject[3:] if item.subject.startswith("pd.") else item.subject
    remedy = f"set {subject}" if item.remedy == f"set {item.subject}" else item.remedy
    return Refusal(subject, item.found, item.needed, remedy)


def _host(name: str, variables: Mapping[str, Any], errors: List[Refusal]) -> Optional[Host]:
    found: List[Refusal] = []
    data = {
        f.name: _switch(HostSettings, f.name, options.plain(variables[PREFIX + f.name]))
        for f in fields(HostSettings)
        if variables.get(PREFIX + f.name) is not None
    }
    settings = options.read(HostSettings, data, "pd", found)
    errors += [Refusal(f"{i.subject} on {name}", i.found, i.needed, i.remedy) for i in map(_with_prefix, found)]
    if settings is None:
        return None
    address = settings.service_address or str(variables.get("ansible_host") or name)
    if settings.service_address is not None and not is_bindable(address):
        errors.append(
            Refusal(
                f"pd_service_address on {name}",
                repr(address),
                "an IP address of the host: engines bind their sockets to it, and a name or 0.0.0.0 does not do",
                "write the host's address on the service network",
            )
        )
    excluded: List[str] = []
    for text in settings.excluded_gpus:
        try:
            excluded.append(pci.normalise(text))
        except ValueError as error:
            needed = "PCI ids as sysfs or nvidia-smi write them, such as 0000:06:00.0"
            errors.append(Refusal(f"pd_excluded_gpus on {name}", str(error), needed, "see playbooks/probe.yml"))
    return Host(
        name, address, settings.service_interface, settings.sysfs_root, settings.driver_library, tuple(excluded)
    )


def is_bindable(text: str) -> bool:
    """Whether an engine can bind to this address and tell peers to connect to it."""
    try:
        return not ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False


def _addresses(hosts: Mapping[str, Optional[Host]], errors: List[Refusal]) -> None:
    """Several hosts must be reachable by each other, each at an address of its own."""
    users: Dict[str, List[str]] = {}
    for name, host in hosts.items():
        if host is not None:
            users.setdefault(host.address, []).append(name)
    for address, names in sorted(users.items()):
        if len(names) > 1:
            errors.append(
                Refusal(
                    f"pd_service_address {address}",
                    f"used by {_some(names)}",
                    "one address for each host",
                    "correct the address of the wrong host",
                )
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


def _numeric(hosts: Mapping[str, Optional[Host]], errors: List[Refusal]) -> None:
    """A firewall admits addresses: a name would have to be looked up before the network is there."""
    errors += [
        Refusal(
            f"pd_service_address on {name}",
            f"{host.address}, which is no IP address, with pd_security.firewall: true",
            "an IP address that the rules of the other hosts can admit",
            "set pd_service_address for this host",
        )
        for name, host in hosts.items()
        if host is not None and not is_bindable(host.address) and host.address != "localhost"
    ]


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


def _some(names: List[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _unique(errors: List[Refusal]) -> List[Refusal]:
    return list(dict.fromkeys(errors))
