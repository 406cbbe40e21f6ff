"""apt inside hosts that have no route out: the lab's bridge stands in for this machine's mirrors.

systemd-socket-proxyd gets a socket that listens inside the lab's namespace, runs outside it, and
forwards bytes to one mirror alone. The hosts find the mirror's name in /etc/hosts at the bridge, so
their sources and the mirror's TLS certificate stay as they are.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from . import network
from .errors import LabError
from .naming import Names
from .process import Process

PROXY = Path("/lib/systemd/systemd-socket-proxyd")


def start(names: Names, where: str, port: int, mirror: str, log: Path) -> Process:
    """Forward ``where:port`` in the lab to ``mirror:port``; return the process that does it."""
    if not PROXY.exists():
        raise LabError(f"{PROXY} is missing; it comes with the package systemd")
    listener = network.listen(names, where, port)
    with listener, log.open("ab") as output:
        # The socket activation protocol, sd_listen_fds(3): the socket as descriptor 3, and our own pid.
        script = 'exec 3<&0 0</dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" "$1"'
        child = subprocess.Popen(
            ["sh", "-c", script, str(PROXY), f"{mirror}:{port}"],
            stdin=listener.fileno(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )
    return Process.of(child.pid)
