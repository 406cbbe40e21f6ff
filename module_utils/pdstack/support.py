"""What a bug report needs of one host: gathered, bounded, and without secrets before it leaves the host.

Whatever cannot be read is said in its place, since a host that needs support is rarely whole.
"""

from __future__ import annotations

import glob
import json
import os
import re
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from .http import Access
from .redact import Redactor
from .runner import Runner
from .verify import Reply

HttpGet = Callable[[str, Access], Reply]  # an address to its answer

# Name of the document -> command.
COMMANDS: Dict[str, List[str]] = {
    "system/uname.txt": ["uname", "-a"],
    "system/uptime.txt": ["uptime"],
    "system/cpus.txt": ["lscpu"],
    "system/numa.txt": ["numactl", "--hardware"],
    "system/memory.txt": ["free", "-m"],
    "system/disks.txt": ["df", "-hT"],
    "system/addresses.txt": ["ip", "-brief", "address"],
    "system/ports.txt": ["ss", "-Hltnp"],
    "system/processes.txt": ["ps", "-eo", "pid,ppid,user,lstart,stat,rss,psr,args", "--sort=-rss"],
    "system/firewall.txt": ["nft", "list", "ruleset"],
    "system/failed-units.txt": ["systemctl", "list-units", "--failed", "--no-pager"],
    "gpu/nvidia-smi.txt": ["nvidia-smi"],
    "gpu/nvidia-smi-q.txt": ["nvidia-smi", "-q"],
    "gpu/topology.txt": ["nvidia-smi", "topo", "-m"],
    "units/list.txt": ["systemctl", "list-units", "--all", "--no-pager", "pd*"],
    "units/files.txt": ["systemctl", "list-unit-files", "--no-pager", "pd*"],
    "units/timers.txt": ["systemctl", "list-timers", "--all", "--no-pager"],
    "packages/gpu.txt": ["dpkg-query", "-W", "nvidia*", "libnvidia*", "libcuda*", "cuda*"],
    "packages/python.txt": ["/opt/pdstack/current/venv/bin/python", "--version"],
}
# Patterns of files. Nothing of /etc/pdstack/credentials.
FILES = (
    "/etc/os-release",
    "/etc/pdstack/*.json",
    "/etc/pdstack/*-packages",
    "/etc/pdstack/instances/*",
    "/etc/systemd/system/pd*",  # as they lie on the disk: systemd may have read them before they were edited
    "/etc/systemd/system/pd*.d/*",
    "/run/systemd/system*/pd*.d/*",
    "/opt/pdstack/releases/*/manifest.json",
    "/opt/pdstack/releases/*/*lock.txt",
    "/run/pdstack/*",
    "/run/pdstack/ready/*",
    "/var/lib/pdstack/checkpoint/*.json",
    "/var/lib/pdstack/checkpoint/results/*",
    "/var/lib/pdstack/nixl/*.json",
    "/proc/cmdline",
    "/proc/driver/nvidia/version",
)
LINKS = ("/opt/pdstack/current", "/opt/pdstack/previous", "/opt/pdstack/cuda")
# Whose contents are hunted for in everything else.
SECRET_FILES = ("/etc/pdstack/credentials/*", "/var/lib/pdstack/checkpoint/secrets/*")
KERNEL = r"NVRM|Xid|nvidia|oom|Out of memory|mce:|Machine check|AER:|pcieport|mlx5|IOMMU"


@dataclass(frozen=True)
class Limits:
    """How much is taken: of journals the last ``lines`` of ``hours``, of any document its last ``size`` bytes."""

    hours: int = 48
    lines: int = 2000
    size: int = 2 * 1024 * 1024


@dataclass(frozen=True)
class Endpoint:
    """An engine or router that runs here, and what to ask it."""

    name: str
    base: str
    paths: Sequence[str]
    access: Access = Access()


def collect(
    runner: Runner, get: HttpGet, endpoints: Sequence[Endpoint], limits: Limits, root: str = "/"
) -> Dict[str, str]:
    """Return the documents of this host by name, without secrets. Files are read below ``root``."""
    found: Dict[str, str] = {name: _run(runner, argv) for name, argv in COMMANDS.items()}
    for unit in _units(runner):
        found[f"units/{unit}.txt"] = _run(runner, ["systemctl", "cat", "--no-pager", unit])
        found[f"units/{unit}.properties.txt"] = _run(runner, ["systemctl", "show", "--no-pager", unit])
        journal = ["journalctl", "--no-pager", "-o", "short-precise", "--since", f"-{limits.hours}h"]
        found[f"journal/{unit}.txt"] = _run(runner, [*journal, "-n", str(limits.lines), "-u", unit])
    kernel = ["journalctl", "--no-pager", "-k", "-o", "short-precise", "--since", f"-{limits.hours}h", "-g", KERNEL]
    found["journal/kernel.txt"] = _run(runner, [*kernel, "-n", str(limits.lines)])
    for path in sorted({match for pattern in FILES for match in glob.glob(_below(root, pattern))}):
        if os.path.isfile(path):
            found[f"files/{os.path.relpath(path, root)}"] = _read(path, limits.size)
    found["files/links.txt"] = "".join(f"{link} -> {_target(_below(root, link))}\n" for link in LINKS)
    for endpoint in endpoints:
        for path in endpoint.paths:
            reply = get(endpoint.base + path, endpoint.access)
            name = f"answers/{endpoint.name}{path.replace('/', '-')}.txt"
            found[name] = reply.body if reply.status == 200 else f"status {reply.status}: {reply.body[:2000]}\n"
    redactor = Redactor(known_secrets(found, root))
    clean = {name: redactor.text(_bounded(text, limits.size)) for name, text in sorted(found.items())}
    clean["removed.json"] = json.dumps(redactor.counts, indent=1, sort_keys=True) + "\n"
    return clean


def failures(results: Mapping[str, Mapping[str, Any]], signs: Mapping[str, str]) -> Dict[str, str]:
    """Return, by step, why it gave nothing, in the order of ``signs``.

    ``signs`` has for each step a key that its result has where it went well; ``results`` lacks a step that did not run.
    """
    found = {}
    for step, sign in signs.items():
        result = results.get(step) or {"msg": "not tried"}
        if result.get("unreachable"):
            return {"connection": str(result.get("msg", "")).strip()}  # nothing else was tried
        if sign not in result:
            words = [str(result.get(key) or "").strip() for key in ("msg", "module_stderr", "stderr")]
            found[step] = "\n".join(word for word in dict.fromkeys(words) if word)[-2000:]
    return found


def known_secrets(documents: Mapping[str, str], root: str) -> List[str]:
    """Return the contents of the files that hold secrets: ours, and those that our units load credentials from."""
    patterns = [_below(root, pattern) for pattern in SECRET_FILES]
    for name, text in documents.items():
        if name.startswith(("units/", "files/etc/systemd/", "files/run/systemd/")):
            loaded = re.findall(r"^LoadCredential=[^:\s]+:(/\S+)", text, re.MULTILINE)
            patterns += [_below(root, glob.escape(path)) for path in loaded]
    paths = sorted({match for pattern in patterns for match in glob.glob(pattern)})
    return [_read(path, 65536) for path in paths if os.path.isfile(path) and not path.endswith((".crt", "tls_cert"))]


def _units(runner: Runner) -> List[str]:
    units = set()
    for verb in ("list-units", "list-unit-files"):
        for line in runner(["systemctl", verb, "--no-legend", "--plain", "--no-pager", "pd*"]).out.splitlines():
            words = line.split()
            if words and "@." not in words[0]:
                units.add(words[0])
    return sorted(units)


def _run(runner: Runner, argv: Sequence[str]) -> str:
    done = runner(argv)
    return done.out if done.rc == 0 else f"{done.out}{' '.join(argv)}: exit {done.rc}: {done.err}\n"


def _read(path: str, size: int) -> str:
    try:
        with open(path, "rb") as handle:
            return handle.read(size).decode(errors="replace")
    except OSError as error:
        return f"cannot be read: {error.strerror}\n"


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return "(none)"


def _below(root: str, path: str) -> str:
    return os.path.join(root, path.lstrip("/"))


def _bounded(text: str, size: int) -> str:
    """Return the end of a text: the newest lines are the ones that matter."""
    if len(text) <= size:
        return text
    return f"(the first {len(text) - size} characters are left out)\n" + text[-size:].partition("\n")[2]


def endpoints_of(
    targets: Sequence[Mapping[str, Any]], info_path: str, engines: Optional[Sequence[str]] = None
) -> List[Endpoint]:
    """Return what to ask of the targets of a host (service.targets); ``engines`` names those that are engines."""
    found = []
    for target in targets:
        access = Access(str(target.get("key_file", "")), str(target.get("ca_file", "")))
        engine = engines is None or target["name"] in engines
        paths = ["/metrics", info_path] if engine else ["/workers", "/readiness"]
        found.append(Endpoint(str(target["name"]), str(target["base"]), paths, access))
    return found
