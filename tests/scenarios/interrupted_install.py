#!/usr/bin/env python3
"""Kill the installation of a release again and again while the former release serves, and see that it never shows.

    interrupted_install.py --inventory FOLDER --host lab1 --release cpu-0.5.23 --kills 20 --span 70

A lab host serves another release already. Each round starts playbooks/runtime.yml for the new one and, at a random
moment within the span (seconds), kills the playbook and everything that it started on the host, with SIGKILL. Every
second moment counts from when the host began to build, so that slow machines are met in the middle, too. After each
kill `current` must be a whole release whose Python imports the engine, and the units must run the same processes as at
the start. Clients complete through the router all the while: not one request may fail. At last the same playbook runs
to its end and must finish the installation. Prints JSON.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
UNITS = "pd-prefill@0 pd-decode@0 pd-router"
# Whatever somebody started on the host by ssh, and what became of it: the module, uv, the import test. The service is
# systemd's, and this shell is itself.
MURDER = r"""
for round in 1 2 3; do
  for file in $(grep -lsaz '^SSH_CONNECTION=' /proc/[0-9]*/environ); do
    pid=${file//[^0-9]/}
    [ "$pid" = $$ ] || kill -9 $pid 2>/dev/null
  done
done
true
"""
STATE = r"""
cd /opt/pdstack; id=$(basename $(readlink current)); echo "$id"; test -s current/manifest.json && echo manifest
current/venv/bin/python -c 'import os, sglang, sys, torch; print(os.path.realpath(sys.prefix))' 2>&1; ls -A releases
"""


class Clients:
    """Threads that complete through the router until they are stopped; each failure is kept."""

    def __init__(self, url, model, count):
        self.url, self.model, self.failures, self.seconds, self.stopped = url, model, [], [], threading.Event()
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def work(self):
        body = json.dumps({"model": self.model, "prompt": "The quick", "max_tokens": 8, "temperature": 0}).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while not self.stopped.is_set():
            started = time.monotonic()
            request = urllib.request.Request(self.url, data=body, headers={"Content-Type": "application/json"})
            try:
                with opener.open(request, timeout=120) as answer:
                    if json.load(answer)["usage"]["completion_tokens"] < 1:
                        self.failures.append("an empty completion")
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            self.seconds.append(time.monotonic() - started)
            time.sleep(0.2)  # traffic, not load: two cores install and serve here

    def stop(self):
        self.stopped.set()
        for thread in self.threads:
            thread.join(150)


def connect(inventory, host):
    """How `lab up` wrote that the host is reached: the words of ssh before the command."""
    known = yaml.safe_load((pathlib.Path(inventory) / "connection.yml").read_text())["all"]["hosts"][host]
    options = shlex.split(known["ansible_ssh_common_args"])
    return [
        "ssh",
        "-F",
        "/dev/null",
        *options,
        "-i",
        known["ansible_ssh_private_key_file"],
        f"root@{known['ansible_host']}",
    ]


def on(ssh, command, check=True):
    done = subprocess.run([*ssh, command], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        sys.exit(f"{command.strip()[:200]}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def playbook(given, log):
    command = [BIN / "ansible-playbook", "-i", given.inventory, ROOT / "playbooks/runtime.yml"]
    command += ["-e", f"pd_release={given.release}"]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def pids(host):
    return on(host, f"systemctl show --value -p MainPID {UNITS}").split()


def reset(given, former):
    """The state before: the former release is current, of the new one nothing is there."""
    on(
        given.host,
        f"cd /opt/pdstack && ln -sfn releases/{former} .back && mv -T .back current"
        f" && rm -rf releases/{given.release}-* releases/.*.partial",
    )


def family(pid):
    """A process and all that it started: Ansible's workers have sessions of their own and would outlive it."""
    parents = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def kill_round(given, former, moment, log, building):
    process, started = playbook(given, log), time.monotonic()
    try:
        while building and process.poll() is None and time.monotonic() - started < 300:
            if on(given.host, "ls -d /opt/pdstack/releases/.*.partial 2>/dev/null || true"):
                break
            time.sleep(0.3)
        process.wait(moment)
        finished = process.returncode == 0
    except subprocess.TimeoutExpired:
        finished = False
        for pid in family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    on(given.host, MURDER)
    lines = on(given.host, STATE, check=False).splitlines()
    current = lines[0] if lines else ""
    whole = "manifest" in lines and any(line.startswith("/opt/pdstack/releases/" + current) for line in lines)
    left = [line for line in lines if line.endswith(".partial")]
    new = [line for line in lines if re.fullmatch(re.escape(given.release) + r"-[0-9a-f]{12}", line)]
    reached = "switched" if current != former else "installed" if new else "in the middle" if left else "before it"
    found = {
        "killed after": round(moment, 1),
        "counted from": "the build" if building else "the start",
        "finished": finished,
        "reached": reached,
        "whole": whole,
    }
    return found if whole else {**found, "seen": lines}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inventory", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--release", default="cpu-0.5.23")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--span", type=float, default=70.0, help="seconds within which a kill falls")
    parser.add_argument(
        "--first", type=float, default=4.0, help="the earliest second of a kill: before it is only Ansible"
    )
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leave", action="store_true", help="do not finish the installation at the end")
    given = parser.parse_args()
    given.host, name = connect(given.inventory, given.host), given.host
    plan = json.loads(on(given.host, "cat /etc/pdstack/plan.json"))
    router = plan["routers"][0]
    url = f"http://{router['address']}:{router['ports']['http']}/v1/completions"
    former = on(given.host, "basename $(readlink /opt/pdstack/current)")
    if former.startswith(given.release) or on(given.host, f"ls -d /opt/pdstack/releases/{given.release}-* || true"):
        sys.exit(f"{name} has {given.release} already: nothing to interrupt")
    before, chance, rounds = pids(given.host), random.Random(given.seed), []
    clients = Clients(url, plan["model"]["served_name"], given.clients)
    problems = []
    with tempfile.TemporaryFile("w+") as log:
        span, killed = given.span, 0
        while killed < given.kills and len(rounds) < 2 * given.kills:
            number, building = len(rounds), len(rounds) % 2 == 1
            moment = chance.uniform(0.0 if building else given.first, span)
            found = kill_round(given, former, moment, log, building)
            rounds.append(found)
            killed += not found["finished"]
            if found["finished"]:  # this machine is faster than the span: the round is taken again, within its time
                span = max(given.first + 1.0, min(span, 0.9 * moment))
            print(f"{number + 1:3}: {found}", file=sys.stderr, flush=True)
            if not found["whole"]:
                problems.append(f"round {number + 1}: current is broken: {found}")
            if found["reached"] in ("switched", "installed"):
                reset(given, former)
        if pids(given.host) != before:
            problems.append(f"units run other processes: {before} before, {pids(given.host)} after")
        started = time.monotonic()
        if not given.leave:
            log.truncate(log.seek(0))
            if playbook(given, log).wait(900) != 0:
                log.seek(0)
                problems.append(f"the last run did not finish the installation: {log.read()[-3000:]}")
            finishing = time.monotonic() - started
            lines = on(given.host, STATE, check=False).splitlines()
            if not lines or not lines[0].startswith(given.release) or "manifest" not in lines:
                problems.append(f"the last run left {lines}")
            if any(line.endswith(".partial") for line in lines):
                problems.append(f"the last run left a part behind: {lines}")
    clients.stop()
    problems += sorted(set(clients.failures))
    answer = {
        "kills": sum(not item["finished"] for item in rounds),
        "reached": {
            word: sum(item["reached"] == word for item in rounds) for word in sorted({r["reached"] for r in rounds})
        },
        "requests": len(clients.seconds),
        "failed requests": len(clients.failures),
        "request seconds": {
            "median": round(statistics.median(clients.seconds), 2),
            "longest": round(max(clients.seconds), 2),
        },
        "seconds of the last run": None if given.leave else round(finishing, 1),
        "problems": problems,
    }
    print(json.dumps(answer, indent=1))
    sys.exit(1 if problems or not clients.seconds else 0)


if __name__ == "__main__":
    main()
