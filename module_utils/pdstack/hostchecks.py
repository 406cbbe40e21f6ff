"""What forbids a host to serve: its driver, GPUs, memory, disk, IOMMU. Judgements on facts. Pure."""

from __future__ import annotations

import json
from typing import Callable, Dict, List, Mapping, Optional, Tuple

from .facts import Gpu, HostFacts
from .folders import STATE_DIR
from .intent import Host, Intent, is_bindable
from .plan_types import Plan
from .refusal import Refusal

ENGINE_PROCESS = "sglang"  # what the engine calls its processes
_DRIVER_REMEDY = {
    "absent": "install driver 580 or newer with the open kernel modules, then run again",
    "not_loaded": "load it (modprobe nvidia), see dmesg when that fails",
    "mismatch": "reboot the host: library and loaded kernel module differ, most likely after an unattended upgrade",
    "no_device": "look for the GPUs in lspci; reseat or power-cycle the host when they are missing there",
    "no_access": "run the probe as root, and see the permissions of /dev/nvidia*",
    "wedged": "the driver does not answer: reboot the host",
}
# By the driver's return code, which says more than the state.
_CODE_REMEDY = {
    34: "take the toolkit's stubs folder off the library path (LD_LIBRARY_PATH, /etc/ld.so.conf.d)",
    802: "systemctl enable --now nvidia-fabricmanager, at the driver's version",
    803: _DRIVER_REMEDY["mismatch"],
    804: "take CUDA's compat folder off the library path: this GPU has no forward compatibility",
}


def hosts(intent: Intent, facts: Mapping[str, HostFacts]) -> Tuple[List[Refusal], List[str]]:
    """Judge each GPU host by itself."""
    refusals: List[Refusal] = []
    notes: List[str] = []
    names = [host.name for host in (*intent.gpu_hosts, *intent.router_hosts)]
    for name in dict.fromkeys(name for name in names if name not in facts):
        remedy = "run without --limit, and see why the probe did not reach this host"
        refusals.append(Refusal(name, "no facts", "the probe's result of every host: one plan is for all", remedy))
    for host in intent.gpu_hosts:
        found = facts.get(host.name)
        if found is None:
            continue
        if intent.profile == "gpu":
            refusals += _driver(intent, host, found)
            if found.driver.state == "ok":  # else nothing that it says of the GPUs counts
                refusals += _gpus(intent, host, found) + _memory(intent, host, found)
            stopped, noted = _iommu(host, found)
            refusals += stopped
            notes += noted
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
        if not is_bindable(host.address):
            refusals.append(
                Refusal(
                    f"pd_service_address on {host.name}",
                    f"not set, and ansible_host is the name {host.address}",
                    "an IP address of the host: engines bind their sockets to it",
                    "set pd_service_address for this host",
                )
            )
        if not found.numa:
            notes.append(f"{host.name}: no NUMA nodes found, nothing is pinned")
        if found.simulated and intent.profile == "gpu":
            notes.append(f"{host.name}: facts are simulated")
    return refusals, notes


def _driver(intent: Intent, host: Host, facts: HostFacts) -> List[Refusal]:
    driver = facts.driver
    if not facts.gpus:
        return [
            Refusal(host.name, "no GPU", "at least one GPU", "remove the host from gpu_hosts, or see lspci -d 10de:")
        ]
    if driver.state != "ok":
        remedy = _DRIVER_REMEDY.get(driver.state, "see the probe's steps for this host")
        for code, cure in _CODE_REMEDY.items():
            if f"({code})" in driver.detail:
                remedy = cure
        if driver.nouveau_loaded:
            remedy = "blacklist nouveau and reboot: it holds the GPUs"
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
                "upgrade the driver, reboot, then run again",
            )
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


def _gpus(intent: Intent, host: Host, facts: HostFacts) -> List[Refusal]:
    """Judge the GPUs that are to serve; what several have in common is said once."""
    groups: Dict[Tuple[str, str, str], List[str]] = {}
    for gpu in facts.gpus:
        if gpu.pci not in host.excluded_gpus:
            for complaint in _complaints(intent, gpu):
                groups.setdefault(complaint, []).append(gpu.pci)
    refusals: List[Refusal] = []
    for (found, needed, remedy), users in groups.items():
        excluded = json.dumps(users)
        subject = f"{host.name} GPU {', '.join(users)}"
        out = f"or keep {'it' if len(users) == 1 else 'them'} from serving: pd_excluded_gpus: {excluded} for this host"
        refusals.append(Refusal(subject, found, needed, f"{remedy}, {out}"))
    return refusals


def _complaints(intent: Intent, gpu: Gpu) -> List[Tuple[str, str, str]]:
    """Return what forbids a GPU: found, needed, remedy."""
    if gpu.mig:  # a GPU in MIG mode is not listed by the driver API either
        remedy = f"nvidia-smi -i {gpu.pci} -mig 0"
        return [("MIG is on", "a whole GPU: a MIG slice has no peer-to-peer access", remedy)]
    if gpu.problems:
        return [("; ".join(gpu.problems), "a GPU that answers", "reset or replace it (dmesg has its Xid lines)")]
    found: List[Tuple[str, str, str]] = []
    if gpu.compute_mode in ("prohibited", "exclusive_process"):
        needed = "compute mode default: prefill and decode open each other's memory"
        found.append((f"compute mode {gpu.compute_mode}", needed, "nvidia-smi -c 0"))
    able = intent.release.engine.compute_capabilities
    if gpu.compute_capability is not None and gpu.compute_capability not in able:
        words = f"{gpu.name or 'GPU'}, compute capability {gpu.compute_capability}"
        found.append((words, f"one for which {intent.release.name} has kernels: {', '.join(able)}", "use other GPUs"))
    if gpu.index is None:
        found.append(("CUDA does not list it", "a CUDA index", "see the probe's steps for this GPU"))
    return found


def _iommu(host: Host, facts: HostFacts) -> Tuple[List[Refusal], List[str]]:
    """A translating IOMMU with ACS redirect hangs or corrupts peer-to-peer copies while the driver claims them."""
    bridges = facts.system.acs_redirect
    if facts.p2p.data_ok is False:
        words = "the probe's peer-to-peer copies arrived with other bytes"
        remedy = "set iommu=pt on the kernel command line, turn ACS off in the BIOS, reboot, and measure again"
        return [Refusal(host.name, words, "peer-to-peer copies that arrive intact", remedy)], []
    if len(facts.gpus) < 2 or not bridges:
        return [], []
    words = f"ACS redirect (ReqRedir+) on {len(bridges)} of the bridges above GPUs, such as {bridges[0]}"
    if facts.system.iommu_translating and facts.p2p.data_ok is not True:
        refusal = Refusal(
            host.name,
            f"an IOMMU that translates, and {words}",
            "peer-to-peer copies that reach the other GPU: this setting has hung NCCL and corrupted data (nccl#2079)",
            "set iommu=pt on the kernel command line, turn ACS off in the BIOS, or prove them (pd_probe_measure, "
            "pd_probe_force)",
        )
        return [refusal], []
    return [], [
        f"{host.name}: {words}: peer-to-peer copies cross the root complex (16 instead of 55 GB/s seen elsewhere)"
    ]


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
            least = next((n for n in range(-(-size // int(share)), 65) if (intent.heads or n) % n == 0), None)
            remedy = (f"set tp to at least {least}" if least else "use larger GPUs") + ", or raise "
            remedy += "pd_engine.mem_fraction_static"
            refusals.append(Refusal(f"pd_topology.{role}.tp on {host.name}", found, needed, remedy))
    return refusals


def _disk(intent: Intent, host: Host, facts: HostFacts) -> List[Refusal]:
    """A disk smaller than the checkpoint can never hold it; free space is the checkpoint role's check."""
    size = intent.size_bytes
    holding = [disk for disk in facts.disks if (STATE_DIR + "/").startswith(disk.path.rstrip("/") + "/")]
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
            f"mount a larger disk at {STATE_DIR}",
        )
    ]


def _branch(version: Optional[str]) -> Optional[int]:
    head = (version or "").split(".")[0]
    return int(head) if head.isdigit() else None


def in_use(
    wanted: Plan, facts: Mapping[str, HostFacts], excused: Callable[[str, str], bool] = lambda host, unit: False
) -> List[Refusal]:
    """Return a refusal for each planned GPU on which a program holds memory whose unit on its host is not excused.

    Where a process's unit is not known, an engine's name is taken for one of ours.
    """
    users: Dict[Tuple[str, int, str, str, Optional[int]], List[str]] = {}
    for item in wanted.instances:
        if wanted.profile != "gpu" or item.host not in facts:
            continue
        for planned in item.gpus:
            for process in facts[item.host].gpus[planned.position].processes:
                unit = process.unit or ""
                if not (excused(item.host, unit) if unit else process.command.startswith(ENGINE_PROCESS)):
                    key = (item.host, process.pid, process.command, unit, process.memory_bytes)
                    users.setdefault(key, []).append(planned.pci)
    return [
        Refusal(
            f"{host} GPU {', '.join(gpus)}",
            f"process {pid} ({command or 'unknown command'})"
            + (f" of unit {unit}" if unit else "")
            + (f" holds {size / 1e9:.1f} GB" if size else " holds memory"),
            "GPUs that nothing else uses",
            "stop it if nobody needs it "
            + (f"(systemctl disable --now {unit})" if unit.endswith(".service") else f"(kill {pid})"),
        )
        for (host, pid, command, unit, size), gpus in sorted(users.items(), key=lambda entry: entry[0][:2])
    ]
