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
    description: Commit, 40 hex digits. A branch moves, so it is refused.
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
        V(controller:///path) on the controller, for small models; V(http://base/) for a mirror, which may be an object
        store or C(rclone serve http).
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
    description: Address of an HTTP proxy. Without it, the environment's.
    type: str
  token_file:
    description: File on the host that holds the hub's token. The token itself is never an argument.
    type: path
  min_rate:
    description: Bytes per second below which a transfer of a file is given up for the next attempt or source.
    type: int
    default: 65536
  stall:
    description: Seconds without a byte, or below O(min_rate), that a transfer is given.
    type: float
    default: 30.0
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
  description: Files that were replaced inside the published folder. An engine that maps them should restart.
  returned: always
  type: list
  elements: str
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
seconds:
  description: Time that it took.
  returned: success
  type: float
code:
  description: Kind of the failure (bad-input, no-listing, no-space, locked, fetch-failed, not-sane, not-verified).
  returned: failure
  type: str
"""

from typing import Any, Dict

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.text.formatters import human_to_bytes
from ansible.module_utils.pdstack import codec
from ansible.module_utils.pdstack.checkpoint.errors import CheckpointError
from ansible.module_utils.pdstack.checkpoint.reconcile import Reconciler, Request, Result

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
    "min_rate": {"type": "int", "default": 65536},
    "stall": {"type": "float", "default": 30.0},
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
        min_rate=float(params["min_rate"]),
        stall=params["stall"],
    )


def run(params: Dict[str, Any], check: bool) -> Result:
    """Do what the parameters ask for. Raises CheckpointError."""
    reconciler = Reconciler(request_of(params))
    if params["state"] == "present":
        return reconciler.present(check)
    if params["state"] == "absent":
        return reconciler.absent(check)
    return reconciler.verified() if params["state"] == "verified" else reconciler.status()


def lines(files: Dict[str, str]) -> str:
    return "".join(f"{path}: {files[path]}\n" for path in sorted(files))


def main() -> None:
    module = AnsibleModule(argument_spec=SPEC, supports_check_mode=True)
    try:
        result = run(module.params, module.check_mode)
    except CheckpointError as error:
        module.fail_json(msg=str(error), code=error.code, found=error.found, needed=error.needed, remedy=error.remedy)
    values = codec.dump(result)
    before, after = values.pop("before"), values.pop("after")
    if result.changed:
        values["diff"] = {
            "before_header": result.directory,
            "after_header": result.directory,
            "before": lines(before),
            "after": lines(after),
        }
    module.exit_json(**values)


if __name__ == "__main__":
    main()
