"""Show the progress of pd_checkpoint, and carry files of the controller to the host where a source lies here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shlex
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from ansible import constants
from ansible.errors import AnsibleActionFail
from ansible.module_utils.pdstack import codec
from ansible.module_utils.pdstack.checkpoint import listing as listings
from ansible.module_utils.pdstack.checkpoint.agent import Outcome
from ansible.module_utils.pdstack.checkpoint.errors import CheckpointError, SourceError
from ansible.module_utils.pdstack.checkpoint.progress import Status
from ansible.module_utils.pdstack.checkpoint.request import report
from ansible.module_utils.pdstack.checkpoint.service import secret_path
from ansible.module_utils.pdstack.checkpoint.sources import HUB_ENDPOINT, DirSource, HubSource, patiently
from ansible.module_utils.pdstack.checkpoint.transport import HttpTransport
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

SCHEME = "controller"
POLL = (0.3, 0.5, 1.0, 2.0, 3.0, 5.0)  # seconds between looks; the last one repeats
ATTEMPTS = 6  # to look a branch up at a hub that is busy or ill
LOST_LOOKS = 60  # looks without an answer, or at a stopped unit, before the wait is given up
display = Display()


class ActionModule(ActionBase):
    """The module decides on the host what is missing; only that is carried, named by its content."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        args = dict(self._task.args)
        host = str((task_vars or {}).get("inventory_hostname", ""))
        args.setdefault("peer_name", host)
        if not listings.is_commit(str(args.get("revision", ""))):
            args["revision"] = run_commit(args)
        sources = args.get("sources", ["hub"])
        folder = controller_folder(sources)
        if args.get("state", "present") != "present":
            return self._module(args, task_vars)
        if folder is None:
            return self._fetch(args, task_vars)
        try:
            listing = self._listing(folder, args)
            args["listing"] = listings.to_document(listing)
            planned = self._module(args, task_vars, check=True)
            if planned.get("failed") or not planned.get("changed") or self._task.check_mode:
                return planned
            args["sources"] = [
                f"keyed://{self._carry(folder, listing, planned['fetched'])}" if source_folder(text) else text
                for text in sources
            ]
            return self._fetch(args, task_vars)
        except (CheckpointError, SourceError) as error:
            raise AnsibleActionFail(f"{folder} on the controller: {error}") from None
        finally:
            self._remove_tmp_path(self._connection._shell.tmpdir)

    def _module(self, args: dict[str, Any], task_vars: dict[str, Any] | None, check: bool = False) -> dict[str, Any]:
        with self._checking() if check else contextlib.nullcontext():
            found: dict[str, Any] = self._execute_module(
                module_name="pd_checkpoint", module_args=args, task_vars=task_vars
            )
        return found

    def _fetch(self, args: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        if len(args.get("peers") or {}) > 1 and args.get("run") == "unit" and not self._task.check_mode:
            planned = self._module(args, task_vars, check=True)
            if planned.get("failed"):
                return planned
            if planned.get("changed") or args["peer_name"] in (args.get("peer_seeds") or []):
                self._share_secret(args)
        started = self._module({**args, "wait": False}, task_vars)
        if started.get("failed") or "outcome_file" not in started:
            return started
        outcome = self._wait(started, str(args["peer_name"]))
        if outcome.result is None:
            parts = [outcome.found, f"needed: {outcome.needed}", f"do: {outcome.remedy}"]
            words = "; ".join(part for part in parts if not part.endswith(": "))
            return {"failed": True, "msg": words, "code": outcome.code, "unit": started["unit"]}
        changed = outcome.result.changed or bool(started["service_files"])
        return {**started, **report(outcome.result), "changed": changed}

    def _share_secret(self, args: dict[str, Any]) -> None:
        """Put the run's secret on the host: by standard input, so that no argument or temporary file has it."""
        path = secret_path(listings.directory_name(str(args["repo"]), str(args["revision"])))
        folder, target = shlex.quote(os.path.dirname(path)), shlex.quote(path)
        command = f"umask 077 && mkdir -p {folder} && cat > {target}"
        done = self._low_level_execute_command(command, in_data=run_secret())
        if done["rc"] != 0:
            raise AnsibleActionFail(f"cannot write {path}: {done['stderr'].strip()}")

    def _wait(self, started: dict[str, Any], host: str) -> Outcome:
        """Show the status file until the outcome is there. Losing the connection does not stop the unit."""
        outcome_file, status_file, unit = (shlex.quote(started[key]) for key in ("outcome_file", "status_file", "unit"))
        command = f"cat {outcome_file} 2>/dev/null || {{ systemctl is-active {unit}; cat {status_file} 2>/dev/null; }}"
        shown, looks, lost = "", 0, 0
        while lost < LOST_LOOKS:
            time.sleep(POLL[min(looks, len(POLL) - 1)])
            looks += 1
            text = str(self._low_level_execute_command(command)["stdout"])
            state, _, rest = text.partition("\n")
            if text.lstrip().startswith("{"):
                return codec.load(Outcome, json.loads(text))
            lost = 0 if state.strip() in ("active", "activating") else lost + 1
            line = progress_line(rest)
            if line and line != shown:
                display.display(f"  {host}: {line}")
                shown = line
        raise AnsibleActionFail(
            f"{started['unit']} stopped without an outcome; needed: a run to its end; do: look at "
            f"journalctl -u {unit} on the host, then run again: what arrived is kept and resumed"
        )

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        before = self._task.check_mode
        self._task.check_mode = True
        try:
            yield
        finally:
            self._task.check_mode = before

    def _listing(self, folder: str, args: dict[str, Any]) -> listings.Listing:
        repo, commit = str(args.get("repo", "")), str(args.get("revision", ""))
        if args.get("listing"):
            return listings.from_document(args["listing"], repo, commit)
        found = DirSource(folder).listing(repo, commit)
        if found is None:
            raise CheckpointError(
                "no-listing",
                f"neither {listings.LISTING_NAME} nor the metadata of hf download for {repo}@{commit[:12]}",
                "a listing beside the files",
                "download them with hf download --local-dir, or write the listing",
            )
        return found

    def _carry(self, folder: str, listing: listings.Listing, wanted: list[str]) -> str:
        """Copy the wanted files into the host's temporary folder and return that folder."""
        target = self._connection._shell.tmpdir or self._make_tmp_path()
        by_path = {file.path: file for file in listing.files}
        carried: list[str] = []
        for path in wanted:
            remote = self._connection._shell.join_path(target, by_path[path].key)
            if remote not in carried:
                self._transfer_file(os.path.join(folder, path), remote)
                carried.append(remote)
        self._fixup_perms2([target, *carried])
        return str(target)


def once(name: str, make: Callable[[], str]) -> str:
    """Return what ``make`` returned to the first of the hosts' processes that asked in this run.

    It lies in ansible's own temporary folder of the run, which all of them share and which goes with the run.
    """
    path = os.path.join(constants.DEFAULT_LOCAL_TMP, f"pdstack-{name}")
    if not os.path.exists(path):
        fresh = f"{path}.{os.getpid()}"
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as stream:
                stream.write(make())
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
        finally:
            os.unlink(fresh)
    with open(path, encoding="utf-8") as found:
        return found.read()


def run_secret() -> bytes:
    """Return this run's secret of the exchange between hosts."""
    return once("peer-secret", lambda: secrets.token_hex(32)).encode()


def run_commit(args: dict[str, Any]) -> str:
    """Return the commit of a branch or tag, looked up once: it may move, and all hosts must hold the same."""
    repo, revision = str(args.get("repo", "")), str(args.get("revision", ""))

    def ask() -> str:
        web = HttpTransport(proxy=args.get("proxy"))
        endpoint = str(args.get("endpoint") or HUB_ENDPOINT)
        hub = HubSource(repo, "", web, endpoint, os.environ.get("HF_TOKEN"))
        return patiently(lambda: hub.resolve(revision), ATTEMPTS, time.sleep)

    try:
        listings.check_repo(repo)
        name = hashlib.sha256(f"{repo} {revision}".encode()).hexdigest()
        return once(f"commit-{name}", ask)
    except (CheckpointError, SourceError) as error:
        raise AnsibleActionFail(
            f"revision {revision!r} of {repo}: {error}; needed: its commit, 40 hex digits; do: write the commit "
            "down, or let the controller reach the hub (HF_TOKEN in its environment for a gated repository)"
        ) from None


def source_folder(source: str) -> str | None:
    """Return the folder of a controller source, None for any other source."""
    parts = urllib.parse.urlsplit(str(source))
    return urllib.parse.unquote(parts.path) if parts.scheme == SCHEME else None


def controller_folder(sources: list[str]) -> str | None:
    folders = [folder for folder in map(source_folder, sources) if folder is not None]
    if len(folders) > 1:
        raise AnsibleActionFail(f"{len(folders)} controller sources; needed: at most one")
    if folders and not os.path.isdir(folders[0]):
        raise AnsibleActionFail(f"{folders[0]} is not a folder on the controller; needed: the source's folder")
    return folders[0] if folders else None


def progress_line(text: str) -> str:
    """Return the status document as one line for people, an empty one where there is nothing to say yet."""
    try:
        status = codec.load(Status, json.loads(text))
    except ValueError:
        return ""
    if status.state not in ("fetching", "hashing"):
        return status.state
    line = f"{status.state} {status.files_done}/{status.files} files"
    line += f"  {status.bytes_done / 1e9:.2f}/{status.bytes / 1e9:.2f} GB  {status.rate / 1e9:.2f} GB/s"
    if status.eta is not None:
        minutes, seconds = divmod(round(status.eta), 60)
        line += f"  ETA {minutes}m{seconds:02d}s"
    return line
