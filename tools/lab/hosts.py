"""One host: its overlay, its boot, its end."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import uuid
from pathlib import Path
from typing import Callable

from . import answers, cgroups, engines, network, sysfs
from .errors import LabError
from .process import Process, attempt, run, wait_for
from .settings import Settings
from .state import Host

SIMULATED = "opt/pdstack-lab"  # in a host: sys/ and proc/ of the simulated machine
SCRIPT = Path(__file__).with_name("supervise.sh")


def folder(settings: Settings, name: str) -> Path:
    return settings.state / "hosts" / name


def prepare(settings: Settings, host: Host, base: Path, authorized: str, hosts_file: str) -> None:
    """Lay out the host's upper layer: identity, keys, names, the simulated sysfs."""
    where = folder(settings, host.name)
    for part in ("upper", "work", "root"):
        (where / part).mkdir(parents=True, exist_ok=True)
    (where / "upper").chmod(0o755)

    def put(name: str, content: str, mode: int = 0o644) -> None:
        path = where / "upper" / name
        _parents(path.parent, where / "upper", base)
        path.write_text(content)
        path.chmod(mode)

    put("etc/hostname", host.name + "\n")
    put("etc/machine-id", uuid.uuid4().hex + "\n", 0o444)  # one for all boots, so that the journal spans them
    put("etc/hosts", hosts_file)
    put("root/.ssh/authorized_keys", authorized, 0o600)
    (where / "upper/root/.ssh").chmod(0o700)
    key = where / "upper/etc/ssh/ssh_host_ed25519_key"
    _parents(key.parent, where / "upper", base)
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", str(key)])
    host.host_key = " ".join(key.with_suffix(".pub").read_text().split()[:2])
    simulated = where / "upper" / SIMULATED
    _parents(simulated, where / "upper", base)
    machine = sysfs.eight_rtx_pro_6000(*sysfs.real_machine())
    sysfs.write(sysfs.render(machine), simulated)
    (simulated / answers.FILE).write_text(answers.rtx_pro_6000(machine))


def _parents(path: Path, upper: Path, base: Path) -> None:
    """Make folders with the base tree's modes: an overlay shows the upper layer's."""
    missing = []
    while path != upper and not path.exists():
        missing.append(path)
        path = path.parent
    for made in reversed(missing):
        made.mkdir()
        original = base / made.relative_to(upper)
        made.chmod(original.stat().st_mode & 0o7777 if original.is_dir() else 0o755)


def start(settings: Settings, host: Host, base: Path, save: Callable[[], None]) -> None:
    """Boot the host; it is not ready yet when this returns."""
    machine, where, engine = settings.names.host(host.name), folder(settings, host.name), engines.BY_NAME[host.engine]
    place = cgroups.place(settings.lab, host.name, machine)
    host.cgroups = [str(path) for path in place.folders]
    save()  # before anything runs: `down` must know it
    if engine is engines.NSPAWN:
        command = engines.nspawn(machine, host.name, where / "root")
    else:
        runtime = _runtime(machine)
        runtime.mkdir(mode=0o700, exist_ok=True)
        (runtime / "containers.conf").write_text(engines.containers_conf(runtime, _ulimits()))
        command = engines.podman(machine, host.name, where / "root", runtime, cgroups.capabilities())
    argv = [
        *place.prefix,
        "nsenter",
        f"--net={network.NAMESPACES / machine}",
        *("unshare", "--mount", "--propagation", "slave"),
        *("sh", str(SCRIPT), str(engine.reboot_status), str(base), str(where), place.enter),
        *command,
    ]
    with (where / "console.log").open("ab") as log:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    host.supervisor = Process.of(child.pid)
    save()


def _ulimits() -> dict[str, int]:
    """Return this process's hard limits for podman, which cannot give more; it caps nproc at pid_max by itself."""
    nofile, nproc = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
    return {"nofile": nofile, "nproc": min(nproc, pid_max) if nproc > 0 else pid_max}


def _runtime(machine: str) -> Path:
    """Podman's own files of one host; a short path, since they hold sockets."""
    return Path("/run") / machine


def running(settings: Settings, host: Host) -> bool:
    """Whether the host's supervisor lives and its namespace is there."""
    there = (network.NAMESPACES / settings.names.host(host.name)).exists()
    return there and host.supervisor is not None and host.supervisor.alive()


def leader(host: Host) -> int | None:
    """Return the pid, as this machine sees it, of the host's PID 1."""
    for pid in cgroups.members([Path(group) for group in host.cgroups]):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        inner = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
        if len(inner) == 2 and inner[1] == "1":
            return pid
    return None


def replace_hosts_file(settings: Settings, host: Host, content: str) -> None:
    """Write /etc/hosts of a running host."""
    pid = leader(host)
    if pid is not None:
        Path(f"/proc/{pid}/root/etc/hosts").write_text(content)


def remove(settings: Settings, host: Host) -> None:
    """Stop the host and remove all that it has; parts that are gone already are no error.

    Its PID 1 gets SIGKILL: the kernel then ends every process of the host at once, and the overlay
    that an orderly shutdown would tidy up is thrown away anyway.
    """
    groups = [Path(group) for group in host.cgroups]
    pid = leader(host)
    if pid is not None:
        Process.of(pid).end(signal.SIGKILL, 5)
    supervisor = host.supervisor
    if supervisor is not None and not wait_for(lambda: not supervisor.alive(), 1):  # nspawn tidies up its lock
        supervisor.end(signal.SIGKILL, 5)
    cgroups.empty(groups)
    cgroups.remove(groups)
    machine = settings.names.host(host.name)
    network.remove_host(settings.names, host.name, host.number)
    for left in Path("/run/systemd/nspawn").glob(f"*/{machine}*") if Path("/run/systemd/nspawn").is_dir() else ():
        if left.is_dir():
            attempt(["umount", "-q", str(left)])
            shutil.rmtree(left, ignore_errors=True)
    for left in (_runtime(machine), folder(settings, host.name)):
        if left.is_dir():
            shutil.rmtree(left)


def console(settings: Settings, name: str, lines: int = 20) -> str:
    """Return the end of what the host's boot printed."""
    try:
        return "\n".join((folder(settings, name) / "console.log").read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def known_hosts(hosts: dict[str, Host], subnet_address: Callable[[int], str]) -> str:
    """Return the known_hosts file of a lab."""
    lines = [f"{h.name},{subnet_address(h.number)} {h.host_key}" for h in hosts.values() if h.host_key]
    return "".join(line + "\n" for line in sorted(lines))


def wait_ready(settings: Settings, host: Host, ssh: list[str], seconds: float) -> tuple[str, list[str]]:
    """Wait until ssh answers and systemd has started; return its state and the units that failed."""
    seen = {"state": "", "error": ""}

    def answered() -> bool:
        if not running(settings, host):
            raise LabError(f"{host.name} ended while it booted:\n{console(settings, host.name)}")
        done = attempt([*ssh, "systemctl is-system-running --wait"], timeout=seconds)
        seen["state"], seen["error"] = done.stdout.strip(), done.stderr.strip()
        return seen["state"] in ("running", "degraded", "maintenance")

    if not wait_for(answered, seconds, step=0.05):
        raise LabError(
            f"{host.name} did not come up within {seconds:g} s; state {seen['state']!r}, ssh said "
            f"{seen['error']!r}\n{console(settings, host.name)}"
        )
    failed = []
    if seen["state"] != "running":
        failed = attempt([*ssh, "systemctl --failed --plain --no-legend"]).stdout.splitlines()
    return seen["state"], [line.split()[0] for line in failed if line.split()]
