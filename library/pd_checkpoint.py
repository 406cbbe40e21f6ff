#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Bring a checkpoint to a host, proven by digest, and keep it right."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_checkpoint
short_description: Bring a Hugging Face checkpoint to a host, proven by digest, and keep it right
description:
  - Makes C(DEST/ORGANISATION--NAME@COMMIT) hold a repository at one commit. Every byte is hashed against the
    listing's digests while it arrives; a kill or a reboot loses nothing that arrived, and only what is broken is
    fetched again.
  - The listing (a size and a digest per file) is what is trusted, so the bytes may come from anywhere. It comes from
    the hub where O(sources) has it, else from the first source that carries C(pdstack-listing.json) or the metadata
    of C(hf download).
  - An intact checkpoint costs one stat per file and no request.
version_added: "0.1.0"
options:
  repo:
    description: Repository as C(organisation/name).
    type: str
    required: true
  revision:
    description:
      - Commit, 40 hex digits. A branch or tag is looked up by the action plugin, once in a run for all hosts, on the
        controller (with C(HF_TOKEN) of its environment).
    type: str
    required: true
  dest:
    description: Folder of all checkpoints on the host.
    type: path
    default: /var/lib/pdstack/models
  state:
    description:
      - V(present) makes it complete and right, V(verified) only proves it, V(absent) removes what was placed and
        nothing else, V(status) says what is there.
    type: str
    choices: [present, verified, absent, status]
    default: present
  sources:
    description:
      - Where bytes may come from, in order of preference. V(hub); V(dir:///path) on the host, such as an NFS mount;
        V(controller:///path) on the controller, for small models; V(http://base/) for a mirror or a public bucket;
        V(rclone:REMOTE:PATH) for S3 and all else that rclone knows, with O(rclone_config).
      - A source that fails or lies is left for the next one, file by file.
    type: list
    elements: str
    default: [hub]
  listing:
    description: A listing document, in place of one from the sources.
    type: dict
  include:
    description: Shell patterns of files to place. All, where empty.
    type: list
    elements: str
    default: []
  exclude:
    description: Shell patterns of files to leave out.
    type: list
    elements: str
    default: []
  workers:
    description: Files under way at once.
    type: int
    default: 8
  verify:
    description:
      - How much of what is on the disk to hash. V(stat) hashes only what was touched since it was proven, V(sample)
        one file of eight too, V(full) everything.
      - The default is V(full) for O(state=verified), else V(stat).
    type: str
    choices: [stat, sample, full]
  min_free:
    description: Space to leave free, such as V(20G).
    type: str
    default: 1G
  expect_shards:
    description: Number of safetensors files that the checkpoint must have.
    type: int
  expect_expert_dtype:
    description: What C(expert_dtype) of C(config.json) must say.
    type: str
  endpoint:
    description: Address of the hub.
    type: str
    default: https://huggingface.co
  proxy:
    description: Address of an HTTP proxy that asks for no password. Without it, the environment's.
    type: str
  token_file:
    description: File on the host that holds the hub's token. The token itself is never an argument.
    type: path
  ca_file:
    description:
      - File on the host with the certificates to trust for HTTPS. Without it, the system's, or those that
        C(SSL_CERT_FILE) of the environment names.
    type: path
  rclone_config:
    description: Configuration file of rclone on the host. It names the remotes and holds their keys; it stays there.
    type: path
  xet:
    description:
      - Whether files that the hub keeps in its xet storage are asked for there first, by C(hf_xet). Off, or where that
        fails, they come over the hub's HTTP. xet has an address of its own, which O(endpoint) does not change.
    type: bool
    default: false
  xet_python:
    description: A Python on the host that has C(hf_xet). An engine release brings it.
    type: path
    default: /opt/pdstack/current/venv/bin/python
  min_rate:
    description: Bytes per second below which a transfer of a file is given up for the next attempt or source.
    type: int
    default: 65536
  stall:
    description: Seconds without a byte, or below O(min_rate), that a transfer is given.
    type: float
    default: 30.0
  run:
    description:
      - V(inline) fetches inside the module. V(unit) has a systemd unit fetch, which outlives the connection, resumes
        after a kill or a reboot and gets the token by LoadCredential; it also keeps the timer of the nightly scrub.
    type: str
    choices: [inline, unit]
    default: inline
  peers:
    description:
      - Hosts of this run, name to address, this one among them. With two or more and O(run=unit), each takes its share
        from the sources and the rest from the others, over HTTP on its own address, only while the run lasts.
      - The action plugin gives all hosts of one run a secret of their own.
    type: dict
    default: {}
  peer_name:
    description: This host's name in O(peers). The action plugin sets it.
    type: str
  peer_seeds:
    description:
      - Those of O(peers) that have the checkpoint already, while others do not. They serve it in place of the sources.
      - M(pd_checkpoint) with O(state=status) finds them, as the role C(checkpoint) does.
    type: list
    elements: str
    default: []
  peer_port:
    description: TCP port for the exchange between hosts.
    type: int
    default: 28999
  wait:
    description:
      - With O(run=unit), whether to wait for the end. The action plugin waits in its place and shows the progress.
    type: bool
    default: true
attributes:
  check_mode:
    description: Says what would be fetched, and hashes what only its bytes can tell.
    support: full
  diff_mode:
    description: Shows the digest of each file before and after, or what is wrong with it.
    support: full
  idempotent:
    description: An intact checkpoint is left alone.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Place the checkpoint
  pd_checkpoint:
    repo: deepseek-ai/DeepSeek-V4-Flash
    revision: "{{ pd_model.revision }}"
    sources: ["dir:///mnt/models/DeepSeek-V4-Flash", hub]
    expect_expert_dtype: fp4
    min_free: 50G

- name: Prove every byte of it
  pd_checkpoint:
    repo: deepseek-ai/DeepSeek-V4-Flash
    revision: "{{ pd_model.revision }}"
    state: verified
"""

RETURN = r"""
directory:
  description: Folder of the checkpoint.
  returned: always
  type: str
commit:
  description: Commit that it holds.
  returned: always
  type: str
files:
  description: Number of files of the selection.
  returned: success
  type: int
bytes:
  description: Their sizes in all.
  returned: success
  type: int
fetched:
  description: Files that were fetched; in check mode, that would be.
  returned: always
  type: list
  elements: str
verified:
  description: Files that were hashed on the disk in this run and were right.
  returned: always
  type: list
  elements: str
repaired:
  description:
    - Files that were replaced inside the published folder, each by one rename. Nothing has to be drained for that.
    - What it means for engines is in RV(suspect_since); M(pd_units) restarts those that it concerns.
  returned: always
  type: list
  elements: str
suspect_since:
  description:
    - When the first of RV(repaired) was last proven, UTC. An engine that started after it may have loaded wrong bytes.
  returned: when files were repaired
  type: str
linked:
  description: Files that another revision had, hard-linked.
  returned: always
  type: list
  elements: str
quarantined:
  description: Files that did not belong and were moved to C(DEST/.pdstack/quarantine).
  returned: always
  type: list
  elements: str
bytes_by_source:
  description: Bytes that each source delivered.
  returned: always
  type: dict
resumed_bytes:
  description: Bytes of partial files that an earlier run left and that were used.
  returned: always
  type: int
to_fetch_bytes:
  description: Bytes still to come.
  returned: check mode
  type: int
last_full_verify:
  description: The last moment at which every byte had been hashed, UTC.
  returned: success
  type: str
problems:
  description: What O(state=status) found wrong, or what O(state=absent) left.
  returned: always
  type: list
  elements: str
unit:
  description: The unit that fetches.
  returned: when O(run=unit) and there was something to do
  type: str
service_files:
  description: Units and programs of ours that were written or removed.
  returned: when O(run=unit)
  type: list
  elements: str
seconds:
  description: Time that it took.
  returned: success
  type: float
code:
  description:
    - Kind of the failure (bad-input, no-listing, no-space, disk, locked, fetch-failed, not-sane, not-verified,
      no-systemd, interrupted).
  returned: failure
  type: str
"""

import sys
import time
from typing import Any, Dict, List, Optional, Tuple

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.text.formatters import human_to_bytes
from ansible.module_utils.pdstack.checkpoint.agent import Outcome
from ansible.module_utils.pdstack.checkpoint.errors import CheckpointError
from ansible.module_utils.pdstack.checkpoint.peers import FanOut
from ansible.module_utils.pdstack.checkpoint.reconcile import Reconciler
from ansible.module_utils.pdstack.checkpoint.request import Request, report
from ansible.module_utils.pdstack.checkpoint.service import Service, outcome_path, secret_path, unit_name

SPEC: Dict[str, Any] = {
    "repo": {"type": "str", "required": True},
    "revision": {"type": "str", "required": True},
    "dest": {"type": "path", "default": "/var/lib/pdstack/models"},
    "state": {"type": "str", "default": "present", "choices": ["present", "verified", "absent", "status"]},
    "sources": {"type": "list", "elements": "str", "default": ["hub"]},
    "listing": {"type": "dict"},
    "include": {"type": "list", "elements": "str", "default": []},
    "exclude": {"type": "list", "elements": "str", "default": []},
    "workers": {"type": "int", "default": 8},
    "verify": {"type": "str", "choices": ["stat", "sample", "full"]},
    "min_free": {"type": "str", "default": "1G"},
    "expect_shards": {"type": "int"},
    "expect_expert_dtype": {"type": "str"},
    "endpoint": {"type": "str", "default": "https://huggingface.co"},
    "proxy": {"type": "str"},
    "token_file": {"type": "path", "no_log": False},
    "ca_file": {"type": "path"},
    "rclone_config": {"type": "path"},
    "xet": {"type": "bool", "default": False},
    "xet_python": {"type": "path", "default": "/opt/pdstack/current/venv/bin/python"},
    "min_rate": {"type": "int", "default": 65536},
    "stall": {"type": "float", "default": 30.0},
    "run": {"type": "str", "choices": ["inline", "unit"], "default": "inline"},
    "peers": {"type": "dict", "default": {}},
    "peer_name": {"type": "str"},
    "peer_seeds": {"type": "list", "elements": "str", "default": []},
    "peer_port": {"type": "int", "default": 28999},
    "wait": {"type": "bool", "default": True},
}


def request_of(params: Dict[str, Any]) -> Request:
    """Return the request for the module's parameters. Raises CheckpointError."""
    try:
        min_free = human_to_bytes(params["min_free"])
    except ValueError as error:
        raise CheckpointError("bad-input", f"min_free: {error}", "a size such as 20G") from None
    return Request(
        repo=params["repo"],
        commit=params["revision"],
        root=params["dest"],
        sources=params["sources"],
        listing=params["listing"],
        include=params["include"],
        exclude=params["exclude"],
        workers=params["workers"],
        verify=params["verify"] or ("full" if params["state"] == "verified" else "stat"),
        min_free=min_free,
        shards=params["expect_shards"],
        expert_dtype=params["expect_expert_dtype"],
        endpoint=params["endpoint"],
        proxy=params["proxy"],
        token_file=params["token_file"],
        ca_file=params["ca_file"],
        rclone_config=params["rclone_config"],
        xet=params["xet"],
        xet_python=params["xet_python"],
        min_rate=float(params["min_rate"]),
        stall=params["stall"],
    )


def fan_out_of(params: Dict[str, Any], name: str) -> Optional[FanOut]:
    """Return the fan-out of the parameters, None for a host by itself. Raises CheckpointError."""
    addresses = {str(host): str(address) for host, address in params["peers"].items()}
    if len(addresses) < 2:
        return None
    if params["peer_name"] not in addresses:
        raise CheckpointError("bad-input", f"peer_name {params['peer_name']!r}", f"one of {', '.join(addresses)}")
    if len(set(addresses.values())) != len(addresses):
        raise CheckpointError("bad-input", "two peers with one address", "an address of its own for every host")
    names = sorted(addresses)
    own = names.index(params["peer_name"])
    places = [addresses[host] for host in names]
    seeds = [host for host in names if host in params["peer_seeds"]]
    return FanOut(own, names, places, params["peer_port"], secret_path(name), seeds)


def seeds(fan_out: Optional[FanOut]) -> bool:
    """True where this host, being intact, is to serve the others."""
    return (
        fan_out is not None
        and fan_out.names[fan_out.index] in fan_out.seeds
        and len(fan_out.seeds) < len(fan_out.names)
    )


def run_inline(params: Dict[str, Any], request: Request, check: bool) -> Dict[str, Any]:
    """Do what the parameters ask for here and now. Raises CheckpointError."""
    reconciler = Reconciler(request)
    if params["state"] == "present":
        return report(reconciler.present(check))
    if params["state"] == "absent":
        return report(reconciler.absent(check))
    return report(reconciler.verified() if params["state"] == "verified" else reconciler.status())


def run_unit(params: Dict[str, Any], request: Request, check: bool, service: Service) -> Dict[str, Any]:
    """Have the unit do it, or take the unit away with its checkpoint. Raises CheckpointError."""
    reconciler = Reconciler(request)
    name = reconciler.store.name
    if params["state"] != "present":
        if params["state"] == "absent" and not check:
            service.stop(name)
        values = run_inline(params, request, check)
        if params["state"] == "absent" and not check:
            values["service_files"] = service.remove(name, request.root)
            values["changed"] = values["changed"] or bool(values["service_files"])
        return values
    if check:
        values = report(reconciler.present(check=True))
        values["service_files"] = service.differing(request.root)
        values["changed"] = values["changed"] or bool(values["service_files"])
        return values
    intact = reconciler.intact()
    files = service.install(request.root)
    fan_out = fan_out_of(params, name)
    if intact is not None and not seeds(fan_out):
        return {**report(intact), "service_files": files, "changed": bool(files)}
    service.start(request, name, fan_out)
    values = {
        "changed": True,
        "unit": unit_name(name),
        "service_files": files,
        "status_file": reconciler.store.status,
        "outcome_file": outcome_path(service.state_dir, name),
    }
    if params["wait"]:
        values.update(ended(wait(service, name)))
        values["changed"] = values["changed"] or bool(files)
    return values


def wait(service: Service, name: str) -> Outcome:
    """Return the outcome once there is one. Raises CheckpointError."""
    while True:
        outcome = service.outcome(name)
        if outcome is not None:
            return outcome
        time.sleep(1.0)


def ended(outcome: Outcome) -> Dict[str, Any]:
    """Return the values of a job that ended well. Raises CheckpointError for one that did not."""
    if outcome.result is None:
        raise CheckpointError(outcome.code, outcome.found, outcome.needed, outcome.remedy)
    return report(outcome.result)


def main() -> None:
    module = AnsibleModule(argument_spec=SPEC, supports_check_mode=True)

    def runner(argv: List[str]) -> Tuple[int, str]:
        status, out, err = module.run_command(argv)
        return status, out + err

    try:
        request = request_of(module.params)
        if module.params["run"] == "unit":
            values = run_unit(module.params, request, module.check_mode, Service(runner, sys.executable))
        else:
            values = run_inline(module.params, request, module.check_mode)
    except CheckpointError as error:
        module.fail_json(msg=str(error), code=error.code, found=error.found, needed=error.needed, remedy=error.remedy)
    module.exit_json(**values)


if __name__ == "__main__":
    main()
