"""What a host's driver needs: a pure judgement on its facts, its packages and the pins of ``releases/*/host.yml``.

``needed`` says from the facts alone whether the plan can count on the driver; ``decide`` says what to do about it, step
by step with reasons, or why nothing may be done. The role gpu_host realises the steps and decides nothing.

Background: CUDA 13 needs branch 580, Blackwell needs the open kernel modules, a library that was replaced under a
loaded module fails every new process (NVML 18, CUDA 803) until a reboot, and Secure Boot refuses unsigned modules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

from .facts import HostFacts
from .refusal import Refusal, Refused

#: Names of the vendor's packages; those at the driver's version are the driver.
VENDOR = re.compile(
    r"^(?!.*container)(nvidia|(lib|firmware-|kmod-|xserver-xorg-video-)nvidia|libcuda|libnvcuvid|libnvoptix|cuda-drivers)"
)
OPEN_ONLY = ("10", "12")  # compute capabilities (major) of Blackwell
PERSISTENCED = "nvidia-persistenced.service"
FABRIC_MANAGER = "nvidia-fabricmanager.service"


class DriverRefused(Refused):
    """The driver cannot be brought to what is needed; nothing was changed."""

    title = "The driver's installation was refused; this host has not been changed"


@dataclass(frozen=True)
class DriverPins:
    floor: int  # oldest branch that serves
    branch: int  # the branch to install


@dataclass(frozen=True)
class ToolkitPins:
    package: str
    version: str  # the package's version starts with it
    home: str  # where the vendor's package puts the toolkit


@dataclass(frozen=True)
class Repository:
    """The vendor's repository. ``key`` is a file below ``url``; a missing fingerprint must be given by the operator."""

    url: str
    key: str
    fingerprint: Optional[str] = None


@dataclass(frozen=True)
class Packages:
    """Package names; {branch} and {kernel} are filled in."""

    driver: List[str]
    fabric_manager: str
    headers: List[str] = field(default_factory=list)
    stream: str = ""  # dnf module stream, "" where there is none


@dataclass(frozen=True)
class Pins:
    """``host.yml``: by distribution (``system_name``)."""

    driver: DriverPins
    toolkit: ToolkitPins
    repositories: Dict[str, Repository]
    packages: Dict[str, Packages]


@dataclass(frozen=True)
class KernelModule:
    """The nvidia module on disk for one kernel."""

    version: str = ""
    license: str = ""
    signer: str = ""  # "" for an unsigned module

    @property
    def open(self) -> bool:
        """Whether it is of the open flavour (its licence says MIT/GPL, the closed one's NVIDIA)."""
        return "GPL" in self.license


@dataclass(frozen=True)
class HostState:
    """What the driver's part of a host looks like on disk (pd_driver_info)."""

    packages: Dict[str, str] = field(default_factory=dict)  # installed package -> version, the vendor's names only
    held: List[str] = field(default_factory=list)
    recorded_holds: List[str] = field(default_factory=list)  # those that this bundle placed
    kernel: str = ""  # running
    next_kernel: str = ""  # the newest installed: it boots next
    modules: Dict[str, KernelModule] = field(default_factory=dict)  # by kernel
    mok_enrolled: Optional[bool] = None  # whether the firmware trusts the key that DKMS signs with; None: not known
    enabled: List[str] = field(default_factory=list)  # of the vendor's units: those enabled
    units: List[str] = field(default_factory=list)  # of the vendor's units: those that exist and are not masked
    toolkits: List[str] = field(default_factory=list)  # /usr/local/cuda-X.Y with an nvcc, however it came there


@dataclass(frozen=True)
class Step:
    """One thing to do. ``action``: unhold, key, repository, install, initramfs, fabric_manager, hold, enable, load."""

    action: str
    items: List[str] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True)
class Decision:
    """What to do on one host. ``branch`` is the one to pin, ``version`` the driver that stays, "" where one comes."""

    branch: int
    version: str = ""
    steps: List[Step] = field(default_factory=list)
    refusals: List[Refusal] = field(default_factory=list)
    reboot: str = ""  # why the host must be rebooted before it can serve
    notes: List[str] = field(default_factory=list)


def system_name(os_id: str, os_version: str) -> str:
    """Return the key of a distribution in the pins: debian12, ubuntu24.04, rhel9 (Rocky and Alma are RHEL here)."""
    if os_id in ("rhel", "rocky", "almalinux", "centos"):
        return "rhel" + os_version.split(".")[0]
    return os_id + (os_version if os_id == "ubuntu" else os_version.split(".")[0])


def branch_of(version: Optional[str]) -> Optional[int]:
    """Return the branch of a driver's version: 580 of 580.95.05."""
    head = (version or "").split(".")[0]
    return int(head) if head.isdigit() else None


def needed(facts: HostFacts, floor: int) -> str:
    """Return what must be mended before the plan can count on the driver, "" when it is healthy.

    Only what installing, loading or rebooting can mend counts. A host without GPUs needs no driver, and GPUs that are
    lost, forbidden or wedged are the planner's to judge.
    """
    manager = facts.driver.fabric_manager
    if facts.gpus and facts.driver.nvswitches and manager not in (None, "active"):
        words = f"{facts.driver.nvswitches} NVSwitches and the Fabric Manager {manager}"
    else:
        words = ""
    return _unfit(facts, floor) or words


def _unfit(facts: HostFacts, floor: int) -> str:
    driver = facts.driver
    if not facts.gpus:
        return ""
    if driver.state in ("absent", "not_loaded", "mismatch"):
        words = {
            "absent": "no driver",
            "not_loaded": "the driver is not loaded",
            "mismatch": "library and module differ",
        }
        return words[driver.state] + (f" ({driver.detail})" if driver.detail else "")
    branch = branch_of(driver.loaded_version)
    if branch is not None and branch < floor:
        return f"driver {driver.loaded_version} is older than {floor}"
    if driver.state == "ok" and driver.open_modules is False and _open_only(facts):
        return f"driver {driver.loaded_version} has the closed kernel modules, which Blackwell cannot use"
    return ""


def _open_only(facts: HostFacts) -> bool:
    return any((gpu.compute_capability or "").split(".")[0] in OPEN_ONLY for gpu in facts.gpus)


def family(state: HostState, version: str) -> List[str]:
    """Return the installed packages that make up the driver of this version."""
    return sorted(
        name for name, found in state.packages.items() if version and VENDOR.match(name) and _is(found, version)
    )


def _owned(state: HostState) -> bool:
    """Whether packages brought the driver; those of the toolkit and for containers say nothing of it."""
    return any(VENDOR.match(name) for name in state.packages)


def _is(package_version: str, version: str) -> bool:
    """Whether a package's version (epoch and revision allowed) is that upstream version."""
    return re.sub(r"^\d+:", "", package_version).split("-")[0] == version


def installed_version(state: HostState, name: str) -> str:
    """Return the upstream version of an installed package, "" where it is not installed."""
    return re.sub(r"^\d+:", "", state.packages.get(name, "")).split("-")[0]


def decide(facts: HostFacts, state: HostState, pins: Pins, install: bool = True) -> Decision:
    """Return what to do. ``install`` False forbids to bring another driver than the one that is there."""
    why = _unfit(facts, pins.driver.floor)
    loaded = facts.driver.loaded_version or ""
    if not facts.gpus:
        return Decision(pins.driver.branch, notes=["no NVIDIA GPU on the PCI bus: no driver is needed"])
    if not why:
        return _keep(facts, state, pins, loaded)
    name = system_name(facts.system.os_id, facts.system.os_version)
    ready = _on_disk(facts, state, pins, name)
    if ready or facts.driver.state == "mismatch":  # installed already: it only has to be the one that runs
        return _start(facts, state, pins, why, ready)
    refusals = _refusals(facts, state, pins, name, why, install)
    if refusals:
        return Decision(pins.driver.branch, refusals=refusals)
    return _install(facts, state, pins, name, why)


def _keep(facts: HostFacts, state: HostState, pins: Pins, version: str) -> Decision:
    """A driver that serves is left alone, but for what keeps it so."""
    branch = branch_of(version) or pins.driver.branch
    steps: List[Step] = []
    name = system_name(facts.system.os_id, facts.system.os_version)
    if facts.driver.nvswitches and facts.driver.fabric_manager != "active":
        steps += _fabric_manager(facts, state, pins, name, version)
    steps += after(facts, state, version)
    notes = [f"driver {version or '?'} ({facts.driver.state}) is left as it is"]
    if version and not _owned(state):
        notes.append("it was not installed from packages: nothing to hold, and its upgrades are the operator's")
    return Decision(branch, version, steps, notes=notes)


def after(facts: HostFacts, state: HostState, version: str) -> List[Step]:
    """Return what keeps an installed driver as it is: holds, and the daemons that it needs enabled."""
    steps: List[Step] = []
    free = [item for item in family(state, version) if item not in state.held]
    if free:
        steps.append(Step("hold", free, "an upgrade under a loaded driver breaks every new process until a reboot"))
    wanted = [PERSISTENCED] + ([FABRIC_MANAGER] if facts.driver.nvswitches else [])
    down = facts.driver.fabric_manager not in (None, "active")
    idle = [
        unit
        for unit in wanted
        if unit in state.units and (unit not in state.enabled or (unit == FABRIC_MANAGER and down))
    ]
    if idle:
        steps.append(Step("enable", idle, "keeps the GPUs initialised, and NVSwitches configured, from boot on"))
    return steps


def _fabric_manager(facts: HostFacts, state: HostState, pins: Pins, name: str, version: str) -> List[Step]:
    if name not in pins.packages:
        return []
    package = pins.packages[name].fabric_manager.format(branch=branch_of(version) or pins.driver.branch)
    if installed_version(state, package) == version and version:
        return []
    words = f"{facts.driver.nvswitches} NVSwitches need the Fabric Manager, at the driver's version"
    steps = [Step("key", [], "packages are taken from the vendor's repository"), Step("repository", [], words)]
    if package in state.held:
        steps.insert(0, Step("unhold", [package], "it has to follow the driver"))
    return [*steps, Step("fabric_manager", [package], words)]


def _on_disk(facts: HostFacts, state: HostState, pins: Pins, name: str) -> str:
    """Return the version of a driver above the floor that is installed but does not run, else ""."""
    candidates: List[str] = []
    if name in pins.packages:
        for package in pins.packages[name].driver:
            candidates.append(installed_version(state, package.format(branch=pins.driver.branch, kernel=state.kernel)))
    candidates.append(facts.driver.library_version or "")
    candidates += [module.version for module in state.modules.values() if module.open]
    for version in candidates:
        branch = branch_of(version)
        if branch is not None and branch >= pins.driver.floor and version != facts.driver.loaded_version:
            return version
    return ""


def _start(facts: HostFacts, state: HostState, pins: Pins, why: str, version: str) -> Decision:
    branch = branch_of(version) or pins.driver.branch
    unsigned = unsigned_modules(facts, state)
    if unsigned:
        return Decision(branch, version, refusals=unsigned)
    steps = after(facts, state, version)
    reboot = _reboot(facts, why)
    if facts.driver.nouveau_loaded:
        steps.insert(0, Step("initramfs", [], "nouveau holds the GPUs, and the initial ramdisk may load it again"))
    if not reboot:
        steps.append(Step("load", ["nvidia", "nvidia-uvm"], f"driver {version} is installed: {why}"))
    return Decision(branch, version, steps, reboot=reboot)


def _reboot(facts: HostFacts, why: str) -> str:
    if facts.driver.nouveau_loaded:
        return "nouveau is loaded and holds the GPUs"
    if facts.driver.loaded_version:
        return f"driver {facts.driver.loaded_version} is loaded: {why}"
    return ""


def unsigned_modules(facts: HostFacts, state: HostState) -> List[Refusal]:
    """Return a refusal per kernel that Secure Boot would leave without a driver: the running one and the next."""
    if not facts.system.secure_boot:
        return []
    refusals = []
    for kernel in sorted({state.kernel, state.next_kernel} - {""}):
        module = state.modules.get(kernel)
        if module is None or not module.signer:
            found = "no nvidia module" if module is None else "an unsigned nvidia module"
            refusals.append(
                Refusal(
                    f"kernel {kernel}",
                    f"Secure Boot is on, and {found}",
                    "a module signed by a key that the firmware trusts",
                    _SIGN,
                )
            )
    return refusals


_SIGN = (
    "on the host: `mokutil --import /var/lib/dkms/mok.pub` (choose a password), reboot, and at the console choose "
    "Enroll MOK; then `dkms autoinstall` and run this again. Or turn Secure Boot off in the firmware"
)


def _refusals(facts: HostFacts, state: HostState, pins: Pins, name: str, why: str, install: bool) -> List[Refusal]:
    branch, found = pins.driver.branch, []
    if name not in pins.packages or name not in pins.repositories:
        known = ", ".join(sorted(pins.packages))
        remedy = f"install driver {pins.driver.floor} or newer by hand (open kernel modules), then run again"
        return [Refusal("distribution", f"{name}; {why}", f"one of {known}", remedy)]
    if not install:
        remedy = "let the role do it (gpu_host_driver: install), or install it by hand"
        found.append(Refusal("gpu_host_driver", f"keep; {why}", f"driver {pins.driver.floor} or newer", remedy))
    users = sorted({f"{p.command or '?'} (pid {p.pid})" for gpu in facts.gpus for p in gpu.processes})
    if users:
        remedy = "stop them, then run again; the host has to be rebooted after the upgrade"
        found.append(Refusal("GPUs in use", ", ".join(users[:8]), f"idle GPUs: {why}", remedy))
    if facts.driver.loaded_version and not _owned(state):
        found.append(
            Refusal(
                f"driver {facts.driver.loaded_version}",
                "no package owns it: it came from the vendor's .run file",
                f"packages of branch {branch}",
                "run `nvidia-uninstall` on the host, then run again",
            )
        )
    if facts.system.secure_boot and state.mok_enrolled is False:
        found.append(
            Refusal(
                "Secure Boot",
                "on, and DKMS has no key that the firmware trusts",
                "an enrolled key before the driver's module is built: enrolment needs the console",
                _SIGN,
            )
        )
    return found


def _install(facts: HostFacts, state: HostState, pins: Pins, name: str, why: str) -> Decision:
    branch, packages = pins.driver.branch, pins.packages[name]
    fill = {"branch": branch, "kernel": state.kernel}
    wanted = [item.format(**fill) for item in [*packages.headers, *packages.driver]]
    steps: List[Step] = []
    blocked = sorted(item for item in state.held if VENDOR.match(item))
    if blocked:
        steps.append(Step("unhold", blocked, "their holds would keep the old driver"))
    steps.append(Step("key", [], "only packages signed by the pinned key are installed"))
    steps.append(Step("repository", [packages.stream.format(**fill)] if packages.stream else [], why))
    steps.append(Step("install", wanted, f"{why}; branch {branch} with the open kernel modules"))
    if facts.driver.nouveau_loaded:
        steps.append(Step("initramfs", [], "nouveau holds the GPUs, and the initial ramdisk may load it again"))
    if facts.driver.nvswitches:
        package = packages.fabric_manager.format(**fill)
        steps.append(Step("fabric_manager", [package], f"{facts.driver.nvswitches} NVSwitches need the Fabric Manager"))
    reboot = _reboot(facts, why)
    if not reboot:
        steps.append(Step("load", ["nvidia", "nvidia-uvm"], "no driver was loaded before: no reboot is needed"))
    return Decision(branch, steps=steps, reboot=reboot)


def driver_version(state: HostState, decision: Decision, pins: Pins, name: str) -> str:
    """Return the version of the driver that is installed once the steps were taken."""
    if decision.version or name not in pins.packages:
        return decision.version
    package = pins.packages[name].driver[0].format(branch=decision.branch, kernel=state.kernel)
    return installed_version(state, package)


def lines(decision: Decision) -> List[str]:
    """Return the decision as readable lines."""
    found = [f"{step.action} {' '.join(step.items)}".rstrip() + f": {step.reason}" for step in decision.steps]
    if decision.reboot:
        found.append(f"reboot: {decision.reboot}")
    return found


def repository(pins: Pins, name: str, url: str = "", key_url: str = "", fingerprint: str = "") -> Tuple[str, str, str]:
    """Return the repository's address, the key's and its fingerprint; what is given wins. Raises DriverRefused."""
    known = pins.repositories.get(name)
    if known is None and not (url and fingerprint):
        raise DriverRefused(
            [Refusal("distribution", name, f"one of {', '.join(sorted(pins.repositories))}", "see docs/host.md")]
        )
    base = url or (known.url if known else "")
    base = base if base.endswith("/") else base + "/"
    trusted = fingerprint or (known.fingerprint if known else "") or ""
    if not trusted:
        remedy = "compare the key's fingerprint with the vendor over a second channel and set gpu_host_key_fingerprint"
        raise DriverRefused([Refusal(f"signing key for {name}", "no fingerprint in host.yml", "one", remedy)])
    return base, key_url or base + (known.key if known else "key.asc"), trusted.replace(" ", "").upper()
