"""From Ansible's view of an inventory to plain data: the only code here that knows of hostvars."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from . import intent, settings
from .refusal import IntentError, Refusal

# Prefixes of our roles' variables; those of pd_service and pd_verify start with pd_ anyway.
ROLE_PREFIXES = (
    "gpu_host_",
    "cuda_toolkit_",
    "sglang_runtime_",
    "nixl_ucx_",
    "kernel_extension_",
    "checkpoint_",
    "firewall_",
    "observability_",
)


def read_intent(
    task_vars: Mapping[str, Any],
    role_variables: Optional[Iterable[str]] = None,
    release: str = "",
    instead: Optional[Mapping[str, Any]] = None,
) -> intent.Intent:
    """Return the intent of the whole inventory, whatever part of it the play covers.

    ``task_vars`` needs ``groups`` and ``hostvars``. With ``role_variables`` (the options of our
    roles), variables that carry one of our prefixes but that nobody knows are refused. ``release`` takes the place of
    what the hosts have as pd_release, and ``instead`` holds more variables that win over the inventory's.
    Raises IntentError.
    """
    groups, hosts = _inventory(task_vars)
    wins = {**builtin(instead or {}), **({f"{settings.PREFIX}release": release} if release else {})}
    hosts = {name: {**variables, **wins} for name, variables in hosts.items()}
    return intent.parse(hosts, groups, role_variables, ROLE_PREFIXES)


def check_only(task_vars: Mapping[str, Any], only: Iterable[str], role_variables: Iterable[str]) -> None:
    """Refuse names that nobody knows, and wrong values of the variables ``only`` (intent.check_only)."""
    _, hosts = _inventory(task_vars)
    intent.check_only(hosts, list(only), role_variables, ROLE_PREFIXES)


def _inventory(task_vars: Mapping[str, Any]) -> Tuple[Dict[str, List[str]], Dict[str, Dict[str, Any]]]:
    """Return the groups, and our variables by host. Raises IntentError where one cannot be told."""
    groups = {str(name): [str(host) for host in members] for name, members in task_vars.get("groups", {}).items()}
    names = sorted({host for group in (intent.GPU_GROUP, intent.ROUTER_GROUP) for host in groups.get(group, ())})
    errors: List[Refusal] = []
    hosts = {name: _variables(name, task_vars["hostvars"][name], errors) for name in names}
    if errors:
        raise IntentError(errors)
    return groups, hosts


def builtin(value: Any) -> Any:
    """Return builtin types for Ansible's tagged and lazy ones, so that the pure code sees plain data."""
    if isinstance(value, Mapping):
        return {str(key): builtin(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [builtin(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    return str(value)  # a tagged string, or a vault's, which decrypts here


def _registered(value: Any) -> bool:
    """Whether a value is a task's result: those stand among the variables too, once a playbook has gone on."""
    return isinstance(value, dict) and {"changed", "failed"} <= set(value)


def _variables(host: str, hostvars: Mapping[str, Any], errors: List[Refusal]) -> Dict[str, Any]:
    """Return our variables of one host, templated, as builtin types."""
    prefixes: Tuple[str, ...] = (settings.PREFIX, *ROLE_PREFIXES)
    found: Dict[str, Any] = {}
    for name in hostvars:
        if name.startswith(prefixes) or name == "ansible_host":
            try:
                value = builtin(hostvars[name])
            except Exception as error:  # whatever a template can raise: all of it is the operator's to mend
                reason = " ".join(str(error).split()) or type(error).__name__
                errors.append(Refusal(f"{name} on {host}", reason, "a value", "define what the expression uses"))
                continue
            if not _registered(value):
                found[str(name)] = value
    return found
