"""A lab: hosts that come up together, reach each other, and go without a trace."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import resource
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterable, Iterator, Sequence

from . import aptproxy, base, cgroups, engines, hosts, inventory, naming, network, packages, sources, state as states
from .errors import LabError
from .process import attempt, run, wait_for
from .settings import Settings

READY_SECONDS = 90
CAP_SYS_RESOURCE = 24


@dataclass
class HostReport:
    """One host as the user sees it."""

    name: str
    address: str
    suite: str
    python: str
    engine: str
    state: str
    failed_units: list[str] = field(default_factory=list)


def key_file(settings: Settings) -> Path:
    return settings.state / "id_ed25519"


def known_hosts_file(settings: Settings) -> Path:
    return settings.state / "known_hosts"


def ssh_command(settings: Settings, address: str) -> list[str]:
    """Return the ssh command line that reaches one host as root."""
    options = inventory.ssh_options(str(known_hosts_file(settings)))
    fixed = ["-F", "/dev/null", "-i", str(key_file(settings)), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    return ["ssh", *fixed, *options, f"root@{address}"]


def up(settings: Settings, wanted: Sequence[naming.HostSpec], say: Callable[[str], None]) -> bool:
    """Bring the wanted hosts up; True when something had to be done."""
    with _locked(settings):
        state = states.load(settings.state)
        if state is not None and _all_run(settings, state, wanted):
            return False
        engine = engines.BY_NAME[settings.engine]
        if packages.missing({**packages.COMMON, **engine.packages}):
            say("installing what the lab needs through apt")
            packages.ensure({**packages.COMMON, **engine.packages})
        trees = _trees(settings, wanted, say)
        state = _network(settings, state)
        _mirrors(settings, state, trees.values())
        fresh = _fresh_hosts(settings, state, wanted)
        hosts_files = {name: _hosts_file(state, name) for name in state.hosts}
        authorized = key_file(settings).with_suffix(".pub").read_text()
        for host in fresh:
            tree = trees[host.suite, host.python]
            hosts.prepare(settings, host, tree, authorized, hosts_files[host.name])
            _apt_proxy_file(settings, state, host)
        _write_known_hosts(settings, state)
        for host in fresh:
            network.add_host(settings.names, host.name, host.number, _address(state, host))
            hosts.start(settings, host, trees[host.suite, host.python], lambda: states.save(settings.state, state))
        for host in state.hosts.values():
            if host not in fresh:
                hosts.replace_hosts_file(settings, host, hosts_files[host.name])
        for host in fresh:
            hosts.wait_ready(settings, host, ssh_command(settings, _address(state, host)), READY_SECONDS)
    return True


def down(settings: Settings, names: Sequence[str] = (), purge: bool = False) -> bool:
    """Remove the named hosts, or the whole lab; True when there was something to remove."""
    changed = False
    if settings.state.is_dir():
        with _locked(settings):
            state = states.load(settings.state)
            if state is not None:
                unknown = [name for name in names if name not in state.hosts]
                for name in list(names or state.hosts):
                    if name not in unknown:
                        hosts.remove(settings, state.hosts.pop(name))
                        states.save(settings.state, state)
                        changed = True
            if not names or (state is not None and not state.hosts):
                _end(settings, state)
                changed = True
            elif state is not None:
                _write_known_hosts(settings, state)
                for host in state.hosts.values():
                    hosts.replace_hosts_file(settings, host, _hosts_file(state, host.name))
                for path in list(state.inventories):
                    _write_inventory(settings, state, Path(path))
    if purge and (settings.cache / "base").is_dir():
        others = sorted(path.parent.name for path in settings.state.parent.glob("*/state.json"))
        if others:
            raise LabError(
                f"the cached base trees are in use by lab {', '.join(others)}; take it down first (LAB_ID=...)"
            )
        shutil.rmtree(settings.cache / "base")
        changed = True
    return changed


def reboot(settings: Settings, name: str) -> HostReport:
    """Reboot a host in order and wait until it is back."""
    state, host = _host(settings, name)
    ssh = ssh_command(settings, _address(state, host))
    read = [*ssh, "cat /proc/1/stat | cut -d' ' -f22"]  # PID 1's start time: podman's hosts share the boot id
    before = run(read).strip()
    attempt([*ssh, "systemctl reboot"])  # the connection ends under it
    if not wait_for(lambda: attempt(read).stdout.strip() not in ("", before), READY_SECONDS, 0.1):
        raise LabError(f"{name} did not reboot within {READY_SECONDS} s\n{hosts.console(settings, name)}")
    hosts.wait_ready(settings, host, ssh, READY_SECONDS)
    return report(settings, [name])[0]


def report(settings: Settings, names: Sequence[str] = ()) -> list[HostReport]:
    """Return every host (or the named ones) with the state that its systemd reports now."""
    state = states.load(settings.state)
    found = []
    for host in state.hosts.values() if state else ():
        if names and host.name not in names:
            continue
        assert state is not None
        where = _address(state, host)
        condition, failed = "down", []
        if hosts.running(settings, host):
            ssh = ssh_command(settings, where)
            done = attempt([*ssh, "systemctl is-system-running; systemctl --failed --plain --no-legend"], timeout=30)
            lines = done.stdout.splitlines()
            condition = lines[0] if lines else "no answer on ssh"
            failed = [line.split()[0] for line in lines[1:] if line.split()]
        found.append(HostReport(host.name, where, host.suite, host.python, host.engine, condition, failed))
    return found


def write_inventory(settings: Settings, path: Path) -> bool:
    """Write the generated inventory and remember it for `down`; True when its content changed."""
    with _locked(settings):
        state = states.load(settings.state)
        if state is None:
            raise LabError("no lab is up; run `lab up` first")
        changed = _write_inventory(settings, state, path)
        if str(path) not in state.inventories:
            state.inventories.append(str(path))
            states.save(settings.state, state)
    return changed


def inventory_text(settings: Settings, state: states.State) -> str:
    connections = [inventory.Connection(h.name, _address(state, h)) for h in state.hosts.values()]
    return inventory.render(connections, str(key_file(settings)), str(known_hosts_file(settings)))


def address_of(settings: Settings, name: str) -> str:
    """Return a host's address; LabError when there is no such host."""
    return _address(*_host(settings, name))


def limits() -> list[str]:
    """Return what a host of this machine cannot give, in words; empty on a machine that gives all."""
    found = []
    if not cgroups.capabilities() >> CAP_SYS_RESOURCE & 1:
        memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        nofile = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        found.append(
            "no CAP_SYS_RESOURCE: LimitMEMLOCK= stays at "
            f"{'unlimited' if memlock < 0 else f'{memlock // 1024} KiB'}, LimitNOFILE= at {nofile}, and a negative "
            "OOMScoreAdjust= becomes 0, without an error; read /proc/PID/limits"
        )
    if not cgroups.unified():
        found.append("hybrid cgroups: MemoryMax=, TasksMax=, CPUQuota= and AllowedCPUs= are accepted and not enforced")
    if not Path("/sys/devices/system/node/node1").exists():
        found.append("one real NUMA node: the simulated node 1 has real CPUs and no memory of its own")
    return found


# Parts of `up` and `down`.


@contextlib.contextmanager
def _locked(settings: Settings) -> Iterator[None]:
    """One `lab` at a time for a lab."""
    _own_folder(settings, settings.state)
    with (settings.state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            if not (settings.state / "state.json").exists() and not (settings.state / "hosts").exists():
                shutil.rmtree(settings.state, ignore_errors=True)


def _own_folder(settings: Settings, path: Path) -> None:
    """Make a folder, owned with its new parents by the user who called."""
    missing = [p for p in [path, *path.parents] if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        os.chown(made, settings.uid, settings.gid)


def _all_run(settings: Settings, state: states.State, wanted: Sequence[naming.HostSpec]) -> bool:
    if not all(proxy.alive() for proxy in state.proxies.values()):
        return False
    for spec in wanted:
        host = state.hosts.get(spec.name)
        if host is None or not hosts.running(settings, host):
            return False
        _same(host, spec, settings.engine)
    return True


def _same(host: states.Host, spec: naming.HostSpec, engine: str) -> None:
    there, asked = (host.suite, host.python, host.engine), (spec.suite, spec.python, engine)
    if there != asked:
        raise LabError(
            f"host {host.name} runs with {'/'.join(there)} and {'/'.join(asked)} was asked for; "
            f"run `lab down {host.name}` first"
        )


def _trees(
    settings: Settings, wanted: Sequence[naming.HostSpec], say: Callable[[str], None]
) -> dict[tuple[str, str], Path]:
    """Return the base tree for each kind of host that is wanted; builds what the cache lacks."""
    _own_folder(settings, settings.cache)
    kinds = {(spec.suite, spec.python) for spec in wanted}
    return {(suite, python): base.tree(settings.cache, suite, python, say) for suite, python in sorted(kinds)}


def _network(settings: Settings, state: states.State | None) -> states.State:
    """Return the state of a lab whose network is there; what an earlier boot left is removed."""
    if state is not None and network.exists(settings.names):
        if settings.subnet and naming.parse_subnet(settings.subnet) != ipaddress.IPv4Network(state.subnet):
            raise LabError(f"lab {settings.lab} runs in {state.subnet}; `lab down` first, then set LAB_SUBNET")
        return state
    if state is not None:
        for host in state.hosts.values():
            hosts.remove(settings, host)
    inventories = state.inventories if state is not None else []
    _stop_proxies(state)
    network.remove(settings.names)
    if settings.subnet:
        subnet = naming.parse_subnet(settings.subnet)
        clash = [str(n) for n in network.routed() if n.overlaps(subnet)]
        if clash:
            raise LabError(f"LAB_SUBNET {subnet} overlaps {clash[0]}, which is routed already; choose another")
    else:
        subnet = naming.pick_subnet(settings.lab, network.routed())
    state = states.State(settings.lab, str(subnet), inventories=inventories)
    states.save(settings.state, state)
    network.make(settings.names, subnet)
    key = key_file(settings)
    if not key.exists():
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"pdstack-lab-{settings.lab}", "-f", str(key)])
    for path in (settings.state, key, key.with_suffix(".pub")):
        os.chown(path, settings.uid, settings.gid)
    return state


def _mirrors(settings: Settings, state: states.State, trees: Iterable[Path]) -> None:
    """Have a proxy run for each mirror that the trees' apt sources name."""
    proxy = sources.proxy_endpoint(run(["apt-config", "dump"]))
    needed = {proxy[0]: (proxy[1],)} if proxy else base.endpoints(trees)
    state.apt_proxy = f"http://{proxy[0]}:{proxy[1]}" if proxy else None
    for mirror, ports in needed.items():
        where = state.mirrors.get(mirror) or naming.mirror_address(state.subnet, len(state.mirrors))
        if mirror not in state.mirrors:
            network.add_address(settings.names, where)
            state.mirrors[mirror] = where
        for port in ports:
            name = f"{mirror}:{port}"
            if name not in state.proxies or not state.proxies[name].alive():
                state.proxies[name] = aptproxy.start(
                    settings.names, where, port, mirror, settings.state / "aptproxy.log"
                )
                states.save(settings.state, state)


def _fresh_hosts(settings: Settings, state: states.State, wanted: Sequence[naming.HostSpec]) -> list[states.Host]:
    """Return the hosts to start, with addresses; what is left of dead ones is removed."""
    fresh = []
    for spec in wanted:
        host = state.hosts.get(spec.name)
        if host is not None and hosts.running(settings, host):
            _same(host, spec, settings.engine)
            continue
        number = host.number if host is not None else naming.next_number(h.number for h in state.hosts.values())
        left = host or states.Host(spec.name, number, spec.suite, spec.python, settings.engine)
        hosts.remove(settings, left)
        state.hosts[spec.name] = states.Host(spec.name, number, spec.suite, spec.python, settings.engine)
        fresh.append(state.hosts[spec.name])
    states.save(settings.state, state)
    return fresh


def _apt_proxy_file(settings: Settings, state: states.State, host: states.Host) -> None:
    if state.apt_proxy:
        path = hosts.folder(settings, host.name) / "upper/etc/apt/apt.conf.d/90pdstack-lab"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'Acquire::http::Proxy "{state.apt_proxy}";\nAcquire::https::Proxy "{state.apt_proxy}";\n')


def _hosts_file(state: states.State, name: str) -> str:
    numbers = {host.name: host.number for host in state.hosts.values()}
    return naming.hosts_file(ipaddress.IPv4Network(state.subnet), numbers, state.mirrors, name)


def _write_known_hosts(settings: Settings, state: states.State) -> None:
    subnet = ipaddress.IPv4Network(state.subnet)
    path = known_hosts_file(settings)
    path.write_text(hosts.known_hosts(state.hosts, lambda number: naming.address(subnet, number)))
    os.chown(path, settings.uid, settings.gid)


def _write_inventory(settings: Settings, state: states.State, path: Path) -> bool:
    text = inventory_text(settings, state)
    if path.exists() and path.read_text() == text:
        return False
    if not path.parent.is_dir():
        raise LabError(f"{path.parent} is no folder; the inventory {path.name} cannot be written there")
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    os.chown(fresh, settings.uid, settings.gid)
    os.replace(fresh, path)
    return True


def _stop_proxies(state: states.State | None) -> None:
    for proxy in state.proxies.values() if state is not None else ():
        if not proxy.end(signal.SIGTERM, 3):
            proxy.end(signal.SIGKILL, 3)


def _end(settings: Settings, state: states.State | None) -> None:
    """Remove what is the lab's and no host's: proxies, namespace, generated inventories, state."""
    _stop_proxies(state)
    network.remove(settings.names)
    for path in state.inventories if state is not None else ():
        text = Path(path).read_text() if Path(path).exists() else ""
        if text.startswith(inventory.HEADER):
            Path(path).unlink()
    shutil.rmtree(settings.state)


def _address(state: states.State, host: states.Host) -> str:
    return naming.address(ipaddress.IPv4Network(state.subnet), host.number)


def _host(settings: Settings, name: str) -> tuple[states.State, states.Host]:
    state = states.load(settings.state)
    if state is None or name not in state.hosts:
        known = ", ".join(state.hosts) if state and state.hosts else "none"
        raise LabError(f"there is no host {name!r} in lab {settings.lab}; hosts: {known}")
    return state, state.hosts[name]
