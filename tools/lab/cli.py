"""The command line: ``lab up | down | reboot | list | exec | inventory``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Sequence

from . import lab, naming, settings as settings_module, state as states
from .errors import LabError
from .process import attempt
from .settings import Settings

DEFAULT_HOST = "lab1"
ENVIRONMENT = ("LAB_ID", "LAB_ENGINE", "LAB_SUBNET", "XDG_CACHE_HOME", "XDG_STATE_HOME")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="lab",
        description="Real systemd hosts on this machine, each in a network namespace of its own.",
        epilog="Environment: LAB_ENGINE=nspawn|podman, LAB_ID (default: from the checkout's path), "
        "LAB_SUBNET (default: a free /24 of 10.99.0.0/16). See docs/lab.md.",
    )
    commands = top.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring hosts up (default: lab1) and wait until systemd runs")
    up.add_argument("hosts", nargs="*", metavar="NAME[:SUITE[:PYTHON]]", default=[DEFAULT_HOST])
    up.add_argument("--suite", choices=naming.SUITES, default=naming.DEFAULT_SUITE)
    up.add_argument("--python", choices=naming.PYTHONS, default="full", help="how much Python the hosts have")
    up.add_argument("--inventory", type=Path, metavar="FILE", help="write an inventory there; `down` removes it")
    down = commands.add_parser("down", help="stop hosts (default: all) and remove everything they left")
    down.add_argument("hosts", nargs="*", metavar="NAME")
    down.add_argument("--purge", action="store_true", help="remove the cached base trees too")
    reboot = commands.add_parser("reboot", help="reboot a host and wait until it is back")
    reboot.add_argument("host", metavar="NAME")
    listing = commands.add_parser("list", help="show the hosts and what they cannot give")
    execute = commands.add_parser("exec", help="run a command in a host, or a shell: lab exec NAME [-- COMMAND...]")
    execute.add_argument("host", metavar="NAME")
    execute.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    inventory = commands.add_parser("inventory", help="print an Ansible inventory with literal connection values")
    inventory.add_argument("--output", type=Path, metavar="FILE", help="write it there; `down` removes it")
    for command in (up, down, reboot, listing):
        command.add_argument("--json", action="store_true", help="print one JSON document")
    return top


def become_root(argv: Sequence[str]) -> None:
    """Start again as root through sudo; LabError where that cannot be."""
    if os.geteuid() == 0:
        return
    if shutil.which("sudo") is None:
        raise LabError("the lab makes namespaces and mounts, which needs root: run it as root or install sudo")
    if not sys.stdin.isatty() and attempt(["sudo", "-n", "true"]).returncode:
        raise LabError(
            "the lab makes namespaces and mounts, which needs root, and sudo wants a password here: "
            "give ansible-playbook --become --ask-become-pass, or run `sudo tools/lab/lab ...` in a terminal"
        )
    print("lab: namespaces and mounts need root; asking sudo", file=sys.stderr)
    kept = [f"{name}={os.environ[name]}" for name in ENVIRONMENT if os.environ.get(name)]
    script = str(Path(__file__).with_name("lab"))
    os.execvp("sudo", ["sudo", "env", *kept, sys.executable, script, *argv])


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(words)
    try:
        chosen = settings_module.load(os.environ)
        if options.command in ("up", "down"):
            become_root(words)
        return _COMMANDS[options.command](chosen, options)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _up(settings: Settings, options: argparse.Namespace) -> int:
    start = time.monotonic()
    wanted = [naming.parse_spec(text, options.suite, options.python) for text in options.hosts]
    changed = lab.up(settings, wanted, lambda words: print(f"lab: {words}", file=sys.stderr))
    if options.inventory:
        changed = lab.write_inventory(settings, options.inventory.absolute()) or changed
    _print(settings, options.json, changed, time.monotonic() - start, lab.report(settings))
    return 0


def _down(settings: Settings, options: argparse.Namespace) -> int:
    start = time.monotonic()
    changed = lab.down(settings, options.hosts, options.purge)
    if options.json:
        _print(settings, True, changed, time.monotonic() - start, lab.report(settings))
    else:
        print("removed" if changed else "nothing to remove")
    return 0


def _reboot(settings: Settings, options: argparse.Namespace) -> int:
    start = time.monotonic()
    _print(settings, options.json, True, time.monotonic() - start, [lab.reboot(settings, options.host)])
    return 0


def _list(settings: Settings, options: argparse.Namespace) -> int:
    _print(settings, options.json, False, 0.0, lab.report(settings))
    return 0


def _exec(settings: Settings, options: argparse.Namespace) -> int:
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    ssh = lab.ssh_command(settings, lab.address_of(settings, options.host))
    command = words[0] if len(words) == 1 else shlex.join(words)  # one word is a line for the host's shell
    os.execvp(ssh[0], [*ssh, *(["--", command] if command else [])])


def _inventory(settings: Settings, options: argparse.Namespace) -> int:
    if options.output:
        lab.write_inventory(settings, options.output.absolute())
        return 0
    state = states.load(settings.state)
    if state is None:
        raise LabError("no lab is up; run `lab up` first")
    print(lab.inventory_text(settings, state), end="")
    return 0


def _print(settings: Settings, as_json: bool, changed: bool, seconds: float, found: list[lab.HostReport]) -> None:
    if as_json:
        document = {
            "changed": changed,
            "lab": settings.lab,
            "seconds": round(seconds, 3),
            "hosts": [asdict(host) for host in found],
            "limits": lab.limits(),
        }
        print(json.dumps(document, indent=1))
        return
    rows = [("NAME", "ADDRESS", "SUITE", "PYTHON", "ENGINE", "STATE")]
    rows += [(h.name, h.address, h.suite, h.python, h.engine, " ".join([h.state, *h.failed_units])) for h in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip())
    for words in lab.limits():
        print(f"limit: {words}")


_COMMANDS = {
    "up": _up,
    "down": _down,
    "reboot": _reboot,
    "list": _list,
    "exec": _exec,
    "inventory": _inventory,
}
