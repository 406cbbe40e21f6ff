"""What forbids a plan: judgements on facts, each with what was found, needed, and would allow it. Pure."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from .facts import Gpu, HostFacts
from .intent import Host, Intent, natural_key
from .placement import HostView
from .plan_types import Instance, Router, Seat
from .refusal import Refusal

DATA_DIR = "/var/lib/pdstack"
_DRIVER_REMEDY = {
    "absent": "install the driver: the role gpu_host does it where gpu_host_driver_manage is true",
    "not_loaded": "load it (modprobe nvidia), see dmesg when that fails",
    "mismatch": "reboot the host: library and loaded kernel module differ, most likely after an unattended upgrade",
    "no_device": "look for the GPUs in lspci; reseat or power-cycle the host when they are missing there",
    "no_access": "run the probe as root, and see the permissions of /dev/nvidia*",
    "wedged": "the driver does not answer: reboot the host",
}


def hosts(intent: Intent, facts: Mapping[str, HostFacts]) -> Tuple[List[Refusal], List[str]]:
    """Judge each GPU host by itself."""
    refusals: List[Refusal] = []
    notes: List[str] = []
    for host in intent.gpu_hosts:
        found = facts.get(host.name)
        if found is None:
            refusals.append(
                Refusal(
                    host.name,
                    "no facts",
                    "the probe's result of every GPU host",
                    "see why the probe did not reach this host",
                )
            )
            continue
        if intent.profile == "gpu":
            refusals += _driver(intent, host, found)
            for gpu in found.gpus:
                if gpu.pci not in host.excluded_gpus:
                    refusals += _gpu(intent, host, gpu)
            refusals += _memory(intent, host, found)
        unknown = sorted(set(host.excluded_gpus) - {gpu.pci for gpu in found.gpus})
        if unknown and found.gpus:
            known = ", ".join(gpu.pci for gpu in found.gpus)
            refusals.append(
                Refusal(
                    f"pd_excluded_gpus on {host.name}",
                    ", ".join(unknown),
                    f"PCI ids of this host's GPUs: {known}",
                    "correct or remove it",
                )
            )
        refusals += _disk(intent, host, found)
        if not found.numa:
            notes.append(f"{host.name}: no NUMA nodes found, nothing is pinned")
        if found.simulated and intent.profile == "gpu":
            notes.append(f"{host.name}: facts are simulated")
    return refusals, notes


def no_room(intent: Intent, views: Mapping[str, HostView]) -> List[Refusal]:
    """Explain why the instances do not fit on the GPUs that there are."""
    topology = intent.topology
    if topology.mode == "pd":
        shapes = [
            ("prefill", topology.prefill.tp, topology.prefill.count),
            ("decode", topology.decode.tp, topology.decode.count),
        ]
    elif topology.mode == "replicas":
        shapes = [("replicas", topology.replicas.tp, topology.replicas.count)]
    else:
        shapes = [("aggregated", topology.aggregated.tp, 1)]
    have = sum(len(view.usable) for view in views.values())
    each = "; ".join(f"{name}: {_gpus_of(views[name])}" for name in sorted(views, key=natural_key)[:8])
    largest = max((_largest_kind(view) for view in views.values()), default=0)
    refusals: List[Refusal] = []
    for role, tp, _ in shapes:
        if tp > largest:
            remedy = "lower tp: an instance lives on one host and on GPUs of one model"
            refusals.append(
                Refusal(f"pd_topology.{role}.tp", f"{tp}; {each}", f"at most {largest} GPUs for one instance", remedy)
            )
    if refusals:
        return refusals
    wanted = sum(tp * (count or 1) for _, tp, count in shapes)
    words = " + ".join(f"{'at least 1' if count is None else count} x {role} of {tp}" for role, tp, count in shapes)
    if topology.mode == "pd" and have == 1:
        remedy = (
            "one GPU cannot be split into prefill and decode: set pd_topology.mode: aggregated with aggregated.tp: 1"
        )
    elif topology.mode == "pd":
        remedy = "lower tp or count (count: auto takes what fits), add hosts, or set pd_topology.mode: aggregated"
    else:
        remedy = "lower tp or count (count: auto takes what fits), or add hosts"
    found = f"{have} usable GPU{'s' if have != 1 else ''} on {len(views)} host{'s' if len(views) != 1 else ''} ({each})"
    return [Refusal("pd_topology", found, f"{wanted} GPUs: {words}, each instance on one host", remedy)]


def lanes(intent: Intent, seats: Sequence[Seat]) -> List[Refusal]:
    """Refuse a KV cache that would travel over TCP on GPU hosts."""
    if intent.topology.mode != "pd" or intent.profile != "gpu":
        return []
    facts = {seat.host.name: seat.view.facts for seat in seats}
    users = sorted(facts, key=natural_key)
    without = [name for name in users if not rdma_devices(facts[name])]
    members: Dict[str, Set[str]] = {}
    for seat in seats:
        members.setdefault(seat.set, set()).add(seat.host.name)
    refusals: List[Refusal] = []
    for name in sorted(members, key=natural_key):
        spread = sorted(members[name], key=natural_key)
        lacking = [host for host in spread if host in without]
        if len(spread) > 1 and lacking:
            refusals.append(
                Refusal(
                    f"KV lane of {name}",
                    f"prefill and decode on {', '.join(spread)}; no RDMA device is up on {', '.join(lacking)}: TCP",
                    "RDMA between the hosts of a pair, or both sides on one host",
                    "lower tp so that a pair fits on one host, add RDMA NICs, or set pd_topology.mode: replicas",
                )
            )
    if not refusals and len(users) > 1 and intent.settings.router.scope == "all" and without:
        refusals.append(
            Refusal(
                "pd_router.scope",
                f"all: the router pairs any prefill with any decode of {len(users)} hosts; no RDMA device is up on "
                f"{', '.join(without[:4])}{' and more' if len(without) > 4 else ''}: TCP",
                "RDMA between all hosts, or routers that pair within one host",
                "set pd_router.scope: host with every GPU host in router_hosts too, or pd_topology.mode: replicas",
            )
        )
    return refusals


def routing(intent: Intent, routers: Sequence[Router], instances: Sequence[Instance]) -> List[Refusal]:
    """Every instance must be behind a router, and every router must have all that it needs."""
    roles = ("prefill", "decode") if intent.topology.mode == "pd" else ("aggregated",)
    remedy = "put every host that serves, and no other, into router_hosts, or set pd_router.scope: all"
    found: List[Refusal] = []
    for router in routers:
        lacking = [role for role in roles if not router.workers.get(role)]
        if lacking:
            found.append(
                Refusal(
                    f"{router.name} on {router.host}",
                    f"no {' and no '.join(lacking)} instance",
                    "one of each role",
                    remedy,
                )
            )
    served = {router.host for router in routers}
    alone = sorted({item.host for item in instances} - served, key=natural_key)
    if intent.settings.router.scope == "host" and alone:
        found.append(
            Refusal(
                "pd_router.scope",
                f"host, and no router on {', '.join(alone[:8])}",
                "a router on every host that serves",
                remedy,
            )
        )
    return found


def rdma_devices(facts: HostFacts) -> List[str]:
    """Return the RDMA devices whose link is up."""
    return sorted({nic.rdma for nic in facts.nics if nic.rdma and nic.up})


def ports(instances: Sequence[Instance], routers: Sequence[Router]) -> List[Refusal]:
    """Refuse two users of one port on a host."""
    users: Dict[Tuple[str, int], List[str]] = {}
    high: List[Refusal] = []
    for host, port, user in port_users(instances, routers):
        users.setdefault((host, port), []).append(user)
        if port > 65535:
            high.append(
                Refusal(f"{host} port {port}", f"port of {user}", "at most 65535", "lower the first port in pd_ports")
            )
    clashes = [
        Refusal(
            f"{host} port {port}",
            f"wanted by {' and '.join(names)}",
            "one user for each port",
            "move one of them with pd_ports",
        )
        for (host, port), names in sorted(users.items())
        if len(names) > 1
    ]
    return clashes + high


def port_users(instances: Sequence[Instance], routers: Sequence[Router]) -> List[Tuple[str, int, str]]:
    """Return host, port and user of each port of a plan."""
    users = [(i.host, port, f"{i.name} ({kind})") for i in instances for kind, port in sorted(i.ports.items())]
    return users + [(r.host, port, f"{r.name} ({kind})") for r in routers for kind, port in sorted(r.ports.items())]


def _driver(intent: Intent, host: Host, facts: HostFacts) -> List[Refusal]:
    driver = facts.driver
    if driver.state != "ok":
        remedy = _DRIVER_REMEDY.get(driver.state, "see the probe's steps for this host")
        if driver.nouveau_loaded:
            remedy = "blacklist nouveau and reboot: it holds the GPUs; the role gpu_host does it"
        found = f"driver {driver.state}" + (f": {driver.detail}" if driver.detail else "")
        return [Refusal(host.name, found, "a driver that answers", remedy)]
    refusals: List[Refusal] = []
    version = driver.loaded_version or driver.library_version
    floor = intent.release.engine.minimum_driver
    branch = _branch(version)
    if branch is not None and branch < floor:
        refusals.append(
            Refusal(
                host.name,
                f"driver {version}",
                f"driver {floor} or newer (CUDA 13, which {intent.release.name} is built for)",
                "upgrade the driver: the role gpu_host does it where gpu_host_driver_manage is true",
            )
        )
    if not facts.gpus:
        refusals.append(
            Refusal(host.name, "no GPU", "at least one GPU", "remove the host from gpu_hosts, or see lspci -d 10de:")
        )
    blackwell = any((gpu.compute_capability or "0").split(".")[0] in ("10", "12") for gpu in facts.gpus)
    if blackwell and driver.open_modules is False:
        refusals.append(
            Refusal(
                host.name,
                "closed kernel modules",
                "the open kernel modules, which Blackwell GPUs need",
                "install the open flavour of the driver",
            )
        )
    if driver.nvswitches and driver.fabric_manager not in (None, "active"):
        refusals.append(
            Refusal(
                host.name,
                f"{driver.nvswitches} NVSwitches and nvidia-fabricmanager {driver.fabric_manager}",
                "nvidia-fabricmanager active, at the driver's version",
                "systemctl enable --now nvidia-fabricmanager",
            )
        )
    return refusals


def _gpu(intent: Intent, host: Host, gpu: Gpu) -> List[Refusal]:
    subject = f"{host.name} GPU {gpu.pci}"
    out = f'pd_excluded_gpus: ["{gpu.pci}"] for this host keeps it from serving'
    refusals: List[Refusal] = []
    for problem in gpu.problems:
        refusals.append(
            Refusal(subject, problem, "a GPU that answers", f"reset or replace it (see dmesg for Xid lines), or {out}")
        )
    if gpu.mig:
        refusals.append(
            Refusal(
                subject,
                "MIG is on",
                "a whole GPU: a MIG slice has no peer-to-peer access",
                f"nvidia-smi -i {gpu.pci} -mig 0, or {out}",
            )
        )
    if gpu.compute_mode in ("prohibited", "exclusive_process"):
        refusals.append(
            Refusal(
                subject,
                f"compute mode {gpu.compute_mode}",
                "compute mode default",
                f"nvidia-smi -i {gpu.pci} -c 0, or {out}",
            )
        )
    able = intent.release.engine.compute_capabilities
    if gpu.compute_capability is not None and gpu.compute_capability not in able:
        refusals.append(
            Refusal(
                subject,
                f"{gpu.name or 'GPU'}, compute capability {gpu.compute_capability}",
                f"one for which {intent.release.name} has kernels: {', '.join(able)}",
                f"use other GPUs, or {out}",
            )
        )
    if gpu.index is None and not gpu.problems:
        refusals.append(
            Refusal(subject, "CUDA does not list it", "a CUDA index", f"see the probe's steps for this GPU, or {out}")
        )
    return refusals


def _memory(intent: Intent, host: Host, facts: HostFacts) -> List[Refusal]:
    """The weights must fit into the share of memory that the engine takes."""
    size = intent.size_bytes
    memories = [gpu.memory_bytes for gpu in facts.gpus if gpu.memory_bytes and gpu.pci not in host.excluded_gpus]
    if size is None or not memories:
        return []
    topology, fraction = intent.topology, intent.settings.engine.mem_fraction_static
    shapes = {
        "pd": [("prefill", topology.prefill.tp), ("decode", topology.decode.tp)],
        "aggregated": [("aggregated", topology.aggregated.tp)],
        "replicas": [("replicas", topology.replicas.tp)],
    }[topology.mode]
    smallest = min(memories)
    share = smallest * fraction
    refusals: List[Refusal] = []
    for role, tp in shapes:
        if size / tp > share:
            found = f"{tp}: {size / tp / 1e9:.0f} GB of weights on each GPU of {smallest / 1e9:.0f} GB"
            needed = f"at most {share / 1e9:.0f} GB: pd_engine.mem_fraction_static allows {fraction:g}"
            remedy = f"set tp to at least {-(-size // int(share))}, or raise pd_engine.mem_fraction_static"
            refusals.append(Refusal(f"pd_topology.{role}.tp on {host.name}", found, needed, remedy))
    return refusals


def _disk(intent: Intent, host: Host, facts: HostFacts) -> List[Refusal]:
    """A disk smaller than the checkpoint can never hold it; free space is the checkpoint role's check."""
    size = intent.size_bytes
    holding = [disk for disk in facts.disks if (DATA_DIR + "/").startswith(disk.path.rstrip("/") + "/")]
    if size is None or not holding:
        return []
    disk = max(holding, key=lambda item: len(item.path))
    if disk.total_bytes >= size:
        return []
    return [
        Refusal(
            host.name,
            f"{disk.path} on a disk of {disk.total_bytes / 1e9:.0f} GB",
            f"{size / 1e9:.0f} GB for the checkpoint of {intent.model.repo}",
            f"mount a larger disk at {DATA_DIR}",
        )
    ]


def _branch(version: Optional[str]) -> Optional[int]:
    head = (version or "").split(".")[0]
    return int(head) if head.isdigit() else None


def _largest_kind(view: HostView) -> int:
    counts: Dict[str, int] = {}
    for i in view.usable:
        counts[view.kinds[i]] = counts.get(view.kinds[i], 0) + 1
    return max(counts.values(), default=0)


def _gpus_of(view: HostView) -> str:
    counts: Dict[str, int] = {}
    for i in view.usable:
        name = view.facts.gpus[i].name or "GPU"
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or "no usable GPU"
