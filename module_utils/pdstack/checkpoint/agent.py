"""The program that systemd runs on a host: finish a job, or scrub what is there.

It is the same package as the module's, packed into one file (see service.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
import traceback
from typing import Any, Dict, List, Optional

from .. import codec
from . import scrub
from .errors import CheckpointError
from .peers import FanOut, Swarm, read_secret
from .progress import write_json
from .reconcile import Reconciler, World
from .request import Request, Result
from .store import Store, load_manifest

STATE_DIR = "/var/lib/pdstack/checkpoint"
TOKEN_CREDENTIAL = "hub-token"
SECRET_CREDENTIAL = "peer-secret"
RCLONE_CREDENTIAL = "rclone-config"
FAILED = 1  # a typed failure: it is written to the result, starting again at once would not help


@dataclasses.dataclass(frozen=True)
class Job:
    """A request that outlives the connection which made it."""

    request: Request
    fan_out: Optional[FanOut] = None


@dataclasses.dataclass
class Outcome:
    """How a job ended. ``result`` is None where it failed; then the rest says why."""

    finished_at: float
    result: Optional[Result] = None
    code: str = ""
    found: str = ""
    needed: str = ""
    remedy: str = ""


def job_path(state_dir: str, name: str) -> str:
    return os.path.join(state_dir, "jobs", f"{name}.json")


def outcome_path(state_dir: str, name: str) -> str:
    return os.path.join(state_dir, "results", f"{name}.json")


def load_json(path: str) -> Any:
    with open(path, encoding="utf-8") as stream:
        return json.load(stream)


def run_job(name: str, state_dir: str, credentials: Optional[str]) -> int:
    """Finish the job ``name``. It is forgotten when it ended, well or not; a kill leaves it for the next start."""
    job = codec.load(Job, load_json(job_path(state_dir, name)))
    request, fan_out = job.request, job.fan_out
    names = (TOKEN_CREDENTIAL, RCLONE_CREDENTIAL, SECRET_CREDENTIAL)
    given = {found: os.path.join(credentials or "", found) for found in names}
    if credentials and os.path.isfile(given[TOKEN_CREDENTIAL]):
        request = dataclasses.replace(request, token_file=given[TOKEN_CREDENTIAL])
    if credentials and os.path.isfile(given[RCLONE_CREDENTIAL]):
        request = dataclasses.replace(request, rclone_config=given[RCLONE_CREDENTIAL])
    if fan_out is None:
        return _finish(name, state_dir, request, World())
    try:
        secret = read_secret(given[SECRET_CREDENTIAL] if credentials else fan_out.secret_file)
        swarm = Swarm(fan_out, secret, time)
    except (OSError, ValueError) as error:  # the fan-out saves time; without it the origin still has everything
        print(f"{name}: no exchange with other hosts: {error}", file=sys.stderr)
        return _finish(name, state_dir, request, World())
    with swarm:
        status = _finish(name, state_dir, request, World(swarm=swarm))
        if status == 0:
            swarm.finish()
            swarm.linger()
    with contextlib.suppress(OSError):
        os.unlink(fan_out.secret_file)  # it was for this run
    return status


def _finish(name: str, state_dir: str, request: Request, world: World) -> int:
    try:
        result = Reconciler(request, world).present()
        outcome = Outcome(time.time(), result)
    except CheckpointError as error:
        outcome = Outcome(time.time(), None, error.code, error.found, error.needed, error.remedy)
        print(f"{name}: {error}", file=sys.stderr)
    except Exception as error:  # a job that is forgotten without an outcome would leave its operator waiting
        outcome = Outcome(time.time(), None, "error", f"{type(error).__name__}: {error}")
        traceback.print_exc()
    write_outcome(state_dir, name, outcome)
    os.unlink(job_path(state_dir, name))
    return FAILED if outcome.result is None else 0


def write_outcome(state_dir: str, name: str, outcome: Outcome) -> None:
    path = outcome_path(state_dir, name)
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    write_json(path, codec.dump(outcome))


def scrub_roots(roots: List[str], nights: int, full: bool) -> int:
    """Scrub every published checkpoint below ``roots``; 1 where any file was found corrupt."""
    bad = 0
    for root in roots:
        names = sorted(os.listdir(root)) if os.path.isdir(root) else []
        for store in (Store(root, name) for name in names if "@" in name):
            if load_manifest(store.final) is None:
                continue
            results = scrub.run(store, nights, time.time, full)
            wrong: Dict[str, str] = {path: words for path, words in results.items() if words}
            print(f"{store.name}: {len(results)} files hashed, {len(wrong)} corrupt")
            for path, words in sorted(wrong.items()):
                print(f"{store.final}/{path}: {words}; run the deployment again, it fetches this file", file=sys.stderr)
            bad += len(wrong)
    return 1 if bad else 0


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="pdstack-checkpoint", description="Finish checkpoint jobs and scrub.")
    parser.add_argument("--state-dir", default=STATE_DIR)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="finish the job NAME")
    run.add_argument("name")
    scrubbing = commands.add_parser("scrub", help="hash the files that were proven longest ago")
    scrubbing.add_argument("--nights", type=int, default=7, help="runs in which every byte is hashed once")
    scrubbing.add_argument("--full", action="store_true", help="hash everything now")
    chosen = parser.parse_args(arguments)
    if chosen.command == "run":
        return run_job(chosen.name, chosen.state_dir, os.environ.get("CREDENTIALS_DIRECTORY"))
    roots = load_json(os.path.join(chosen.state_dir, "roots.json"))
    return scrub_roots([str(root) for root in roots], chosen.nights, chosen.full)
