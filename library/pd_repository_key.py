#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Keep a package repository's signing key, trusted only when its fingerprint is the pinned one."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_repository_key
short_description: Keep a repository's signing key, checked against a pinned fingerprint
description:
  - Fetches the key, computes the fingerprints of all primary keys in it, and writes it only when the pinned one is the
    only one. With any other nothing is written, whatever was there before.
  - A key that is there already with that fingerprint is not fetched again. Needs no gpg on the host.
version_added: "0.1.0"
options:
  path:
    description: Where the key is kept, in armor; apt wants that to end in C(.asc).
    type: path
    required: true
  url:
    description: Where the key comes from (http, https or file).
    type: str
  content:
    description: The key itself, armored, instead of O(url).
    type: str
  fingerprint:
    description: Fingerprint of the primary key, 40 hex digits.
    type: str
    required: true
attributes:
  check_mode:
    description: Fetches and compares the key, and reports whether it would be written.
    support: full
  diff_mode:
    description: Shows the fingerprint of the key before and after.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Trust the vendor's key
  pd_repository_key:
    path: /etc/apt/keyrings/vendor.asc
    url: https://repository.example/key.asc
    fingerprint: EB693B3035CD5710E231E123A4B469963BF863CC
"""

RETURN = r"""
fingerprints:
  description: Fingerprints of the primary keys in the file that was there or was fetched.
  returned: always
  type: list
  elements: str
"""

import os
import urllib.request

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import openpgp

LARGEST = 1 << 20  # bytes; a key has some thousands


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "url": {"type": "str"},
            "content": {"type": "str", "no_log": False},
            "fingerprint": {"type": "str", "required": True},
        },
        mutually_exclusive=[["url", "content"]],
        required_one_of=[["url", "content"]],
        supports_check_mode=True,
    )
    given = module.params
    wanted = given["fingerprint"].replace(" ", "").upper()
    before = present(given["path"])
    if before == [wanted]:
        module.exit_json(changed=False, fingerprints=before)
    source = given["url"] or "the given text"
    try:
        data = given["content"].encode() if given["content"] else fetch(given["url"])
        found = openpgp.fingerprints(data)
    except (OSError, ValueError) as error:
        module.fail_json(
            msg=f"signing key: found {source}: {error}; needed an OpenPGP public key with fingerprint {wanted}. Check "
            f"the address, or give the key's file with gpu_host_key_file. Nothing was changed."
        )
    if found != [wanted]:
        module.fail_json(
            msg=f"signing key: found {', '.join(found)} at {source}; needed {wanted} alone. Do not go on before you "
            f"know why: compare with the vendor over a second channel. If the vendor changed its key, review the new "
            f"fingerprint in host.yml or set gpu_host_key_fingerprint. Nothing was changed.",
            fingerprints=found,
        )
    if not module.check_mode:
        write(given["path"], openpgp.armored(data))
    module.exit_json(
        changed=True,
        fingerprints=found,
        diff={"before": "\n".join(before), "after": wanted, "before_header": given["path"], "after_header": source},
    )


def present(path):  # type: ignore[no-untyped-def]
    """Return the fingerprints of the key that is there, none where it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return openpgp.fingerprints(stream.read())
    except (OSError, ValueError):
        return []


def fetch(url):  # type: ignore[no-untyped-def]
    """Return at most LARGEST bytes; proxies come from the environment, as apt's and dnf's do."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read(LARGEST)


def write(path, data):  # type: ignore[no-untyped-def]
    """Write the key beside its place, then rename."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    draft = f"{path}.pdstack-{os.getpid()}"
    with open(draft, "wb") as stream:
        os.fchmod(stream.fileno(), 0o644)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, path)


if __name__ == "__main__":
    main()
