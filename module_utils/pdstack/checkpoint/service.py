"""Units that finish a download without an SSH connection and scrub at night.

The download is a oneshot of its own: it outlives the connection, is started again after a kill
and resumes at boot, since its job file stays until it has ended.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import io
import json
import os
import shutil
import zipfile
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Tuple

from .. import codec
from .agent import (
    RCLONE_CREDENTIAL,
    SECRET_CREDENTIAL,
    STATE_DIR,
    TOKEN_CREDENTIAL,
    Job,
    Outcome,
    job_path,
    load_json,
    outcome_path,
)
from .errors import CheckpointError
from .peers import FanOut
from .progress import write_json
from .request import Request, check_files
from .store import Store

AGENT = "/usr/local/lib/pdstack/pdstack-checkpoint.pyz"
UNITS = "/etc/systemd/system"
MODULES = (
    "",
    "codec",
    "space",
    "checkpoint",
    "checkpoint.agent",
    "checkpoint.command",
    "checkpoint.errors",
    "checkpoint.fetch",
    "checkpoint.links",
    "checkpoint.listing",
    "checkpoint.manifest",
    "checkpoint.pages",
    "checkpoint.peers",
    "checkpoint.plan",
    "checkpoint.progress",
    "checkpoint.rclone",
    "checkpoint.reconcile",
    "checkpoint.repairs",
    "checkpoint.request",
    "checkpoint.retire",
    "checkpoint.sanity",
    "checkpoint.scrub",
    "checkpoint.service",
    "checkpoint.sources",
    "checkpoint.store",
    "checkpoint.transport",
    "checkpoint.xet",
    "checkpoint.xet_stream",
)
PACKAGES = ("", "checkpoint")

# Without PrivateTmp=, since a source may lie in a temporary folder.
_HARDENING = """\
NoNewPrivileges=yes
ProtectSystem=full
ProtectHome=read-only
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallFilter=@system-service
CapabilityBoundingSet=CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER
"""

FETCH_UNIT = f"""\
# Written by pdstack (pd_checkpoint). The job is {STATE_DIR}/jobs/%i.json; it goes away when it has ended.
[Unit]
Description=Bring checkpoint %i to this host
# Without the default dependencies multi-user.target does not wait for a download that resumes at boot.
DefaultDependencies=no
Conflicts=shutdown.target
Before=shutdown.target
Wants=network-online.target
After=basic.target network-online.target local-fs.target remote-fs.target
ConditionPathExists={STATE_DIR}/jobs/%i.json
StartLimitIntervalSec=10min
StartLimitBurst=5

[Service]
Type=oneshot
ExecStart={{python}} {AGENT} run %i
# A failure with a reason is for the operator; a kill, such as by the OOM killer, is resumed.
Restart=on-failure
RestartPreventExitStatus=1
RestartSec=5s
{_HARDENING}
[Install]
WantedBy=multi-user.target
"""

SCRUB_UNIT = f"""\
# Written by pdstack (pd_checkpoint). It only reads the checkpoints; the next deployment repairs what it finds.
[Unit]
Description=Hash the checkpoint files that were proven longest ago

[Service]
Type=oneshot
ExecStart={{python}} {AGENT} scrub --nights 7
IOSchedulingClass=idle
CPUSchedulingPolicy=idle
Nice=19
{_HARDENING}"""

SCRUB_TIMER = """\
# Written by pdstack (pd_checkpoint).
[Unit]
Description=Look for bit rot in the checkpoints every night

[Timer]
OnCalendar=*-*-* 03:00
RandomizedDelaySec=1h
Persistent=yes

[Install]
WantedBy=timers.target
"""

Runner = Callable[[List[str]], "Tuple[int, str]"]  # argv to exit status and output


def unit_name(name: str) -> str:
    return f"pd-checkpoint@{name}.service"


def secret_path(name: str) -> str:
    """Where the run's secret of the fan-out lies, for root alone."""
    return f"{STATE_DIR}/secrets/{name}"


def pack_agent(package: str = "") -> bytes:
    """Return the agent: this package as one file that Python runs, the same bytes everywhere.

    The sources come from the loader, since a module runs out of ansible's zip.
    """
    package = package or __name__.rpartition(".checkpoint.")[0]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:

        def add(name: str, text: str) -> None:
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text)

        add("__main__.py", "from pdstack.checkpoint.agent import main\n\nraise SystemExit(main())\n")
        for short in MODULES:
            module = importlib.import_module(f"{package}.{short}" if short else package)
            loader = module.__spec__.loader if module.__spec__ is not None else None
            source = getattr(loader, "get_source", lambda name: None)(module.__name__)
            parts = ["pdstack", *short.split(".")] if short else ["pdstack"]
            add("/".join(parts) + ("/__init__.py" if short in PACKAGES else ".py"), source or "")
    return packed.getvalue()


@dataclass
class Service:
    """The units on one host. ``prefix`` stands before every path (tests), ``python`` runs the agent."""

    run: Runner
    python: str
    prefix: str = ""

    @property
    def state_dir(self) -> str:
        return self.prefix + STATE_DIR

    def _files(self) -> Dict[str, bytes]:
        texts = {
            f"{UNITS}/pd-checkpoint@.service": FETCH_UNIT.replace("{python}", self.python),
            f"{UNITS}/pd-scrub.service": SCRUB_UNIT.replace("{python}", self.python),
            f"{UNITS}/pd-scrub.timer": SCRUB_TIMER,
        }
        return {AGENT: pack_agent(), **{path: text.encode() for path, text in texts.items()}}

    def differing(self, root: str) -> List[str]:
        """Return the paths that ``install`` would write."""
        found = [path for path, data in self._files().items() if _read(self.prefix + path) != data]
        if root not in self._roots():
            found.append(f"{STATE_DIR}/roots.json")
        if not os.path.islink(f"{self.prefix}{UNITS}/timers.target.wants/pd-scrub.timer"):
            found.append(f"{UNITS}/timers.target.wants/pd-scrub.timer")
        elif self.run(["systemctl", "is-active", "pd-scrub.timer"])[1].strip() != "active":
            found.append("pd-scrub.timer")  # enabled, and stopped by hand
        return found + self._by_hand()

    def _by_hand(self) -> List[str]:
        """Return drop-ins and masks of the scrub's units: a bad one would keep the timer from being started."""
        found = glob.glob(f"{self.prefix}{UNITS}/pd-scrub.*.d")
        for folder in ("/run/systemd/system", "/run/systemd/system.control", "/etc/systemd/system.control"):
            found += glob.glob(f"{self.prefix}{folder}/pd-scrub.*")
        return sorted(path[len(self.prefix) :] for path in found)

    def install(self, root: str) -> List[str]:
        """Write agent, units and timer where they differ; return what differed."""
        changed = self.differing(root)
        if not changed:
            return changed
        for path, data in self._files().items():
            if path in changed:
                _write(self.prefix + path, data)
        for path in self._by_hand():
            if os.path.isdir(self.prefix + path) and not os.path.islink(self.prefix + path):
                shutil.rmtree(self.prefix + path)
            else:
                os.unlink(self.prefix + path)
        os.makedirs(self.state_dir, mode=0o755, exist_ok=True)
        write_json(f"{self.state_dir}/roots.json", sorted({*self._roots(), root}))
        self._systemctl("daemon-reload")
        self._systemctl("enable", "--now", "pd-scrub.timer")
        return changed

    def active(self, name: str) -> bool:
        """True while the unit works or waits to be started again."""
        _, output = self.run(["systemctl", "is-active", unit_name(name)])
        return output.strip() in ("active", "activating", "reloading")

    def start(self, request: Request, name: str, fan_out: Optional[FanOut] = None) -> bool:
        """Write the job and start its unit without waiting; False where it is under way already."""
        check_files(request)
        path = job_path(self.state_dir, name)
        if self.active(name):
            with contextlib.suppress(OSError, ValueError):
                found = codec.load(Job, load_json(path)).request
                if found.root != request.root:
                    raise CheckpointError("locked", f"{unit_name(name)} works below {found.root}", "", "wait for it")
            return False
        for folder in (os.path.dirname(path), os.path.dirname(outcome_path(self.state_dir, name))):
            os.makedirs(folder, mode=0o755, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(outcome_path(self.state_dir, name))
        self._credentials(
            name,
            {
                TOKEN_CREDENTIAL: request.token_file,
                RCLONE_CREDENTIAL: request.rclone_config,
                SECRET_CREDENTIAL: fan_out.secret_file if fan_out else None,
            },
        )
        write_json(path, codec.dump(Job(request, fan_out)))
        self._systemctl("daemon-reload")
        self._systemctl("enable", unit_name(name))
        self.run(["systemctl", "reset-failed", unit_name(name)])
        self._systemctl("start", "--no-block", unit_name(name))
        return True

    def outcome(self, name: str) -> Optional[Outcome]:
        """Return how the job ended, None while it has not. Raises CheckpointError where it vanished."""
        path = outcome_path(self.state_dir, name)
        found = _read(path)
        if found is None and not self.active(name):
            found = _read(path)  # it may have ended between the two looks
            if found is None:
                raise CheckpointError(
                    "interrupted",
                    f"{unit_name(name)} stopped before it ended",
                    "a run to its end",
                    f"look at journalctl -u '{unit_name(name)}', then run again: what arrived is kept and resumed",
                )
        return None if found is None else codec.load(Outcome, json.loads(found))

    def stop(self, name: str) -> None:
        """Stop the unit where it works; what arrived is kept."""
        if self.active(name):
            self._systemctl("stop", unit_name(name))

    def remove(self, name: str, root: str) -> List[str]:
        """Take away what belongs to this checkpoint, and the units once no checkpoint is left; return the paths."""
        unit = unit_name(name)
        ours = [job_path(STATE_DIR, name), outcome_path(STATE_DIR, name), self._drop_in(name), secret_path(name)]
        ours.append(f"{UNITS}/multi-user.target.wants/{unit}")
        gone = [path for path in ours if os.path.lexists(self.prefix + path)]
        if gone:
            self._systemctl("stop", unit)
        for path in gone:
            os.unlink(self.prefix + path)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.prefix + self._drop_in(name)))
        if not Store(root, "").others():
            gone += self._remove_units(root)
        if gone:
            self._systemctl("daemon-reload")
        return gone

    def _remove_units(self, root: str) -> List[str]:
        roots = [item for item in self._roots() if item != root]
        if roots or not self._roots():
            if roots != self._roots():
                write_json(f"{self.state_dir}/roots.json", roots)
            return []
        self.run(["systemctl", "disable", "--now", "pd-scrub.timer"])
        self.run(["systemctl", "clean", "--what=state", "pd-scrub.timer"])  # when it last struck
        gone = [path for path in (*self._files(), f"{STATE_DIR}/roots.json") if os.path.lexists(self.prefix + path)]
        for path in gone:
            os.unlink(self.prefix + path)
        folders = (
            f"{STATE_DIR}/jobs",
            f"{STATE_DIR}/results",
            f"{STATE_DIR}/secrets",
            STATE_DIR,
            os.path.dirname(AGENT),
        )
        for folder in folders:
            with contextlib.suppress(OSError):
                os.rmdir(self.prefix + folder)
        return gone

    def _roots(self) -> List[str]:
        try:
            return [str(item) for item in load_json(f"{self.state_dir}/roots.json")]
        except (OSError, ValueError):
            return []

    def _drop_in(self, name: str) -> str:
        return f"{UNITS}/{unit_name(name)}.d/credentials.conf"

    def _credentials(self, name: str, given: Dict[str, Optional[str]]) -> None:
        path = self.prefix + self._drop_in(name)
        loads = [f"LoadCredential={key}:{value}" for key, value in given.items() if value]
        if not loads:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        lines = ["# Secrets that this unit alone may read.", "[Service]", *loads]
        _write(path, "".join(f"{line}\n" for line in lines).encode())

    def _systemctl(self, *arguments: str) -> None:
        status, output = self.run(["systemctl", *arguments])
        if status != 0:
            raise CheckpointError(
                "no-systemd",
                f"systemctl {' '.join(arguments)}: {output.strip()[:500]}",
                "a host that runs systemd",
                "set run to inline where there is none",
            )


def _read(path: str) -> Optional[bytes]:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError:
        return None


def _write(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    temporary = f"{path}.pdstack-new"
    with open(temporary, "wb") as stream:
        stream.write(data)
        os.fchmod(stream.fileno(), 0o644)
    os.replace(temporary, path)
