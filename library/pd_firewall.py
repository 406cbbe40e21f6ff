#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Make the kernel's table of pdstack what a ruleset says."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_firewall
short_description: Make the kernel's table of pdstack what a ruleset says
description:
  - Compares the table C(inet pdstack) in the kernel with a ruleset and loads the ruleset when they differ. nft itself
    says what the ruleset means, in an empty network namespace, so a rule that was added or taken away by hand is seen
    and a difference in spelling is none.
  - Touches no other table.
version_added: "0.1.0"
options:
  ruleset:
    description: The ruleset, as C(nft -f) takes it. Empty for no table.
    type: str
    default: ""
attributes:
  check_mode:
    description: Compares and reports. Where nft is not installed yet, the table counts as missing.
    support: full
  diff_mode:
    description: Shows the table before and after as nft lists it.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Load the rules
  pd_firewall:
    ruleset: "{{ lookup('ansible.builtin.file', 'firewall.nft') }}"
"""

RETURN = r"""
table:
  description: The table as nft lists it now, or would after a run without check mode.
  returned: always
  type: str
"""

import os
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import runner
from ansible.module_utils.pdstack.firewall import TABLE

LIST = ("-s", "list", "table", *TABLE.split())
# nft lists what was there before a file, so it takes two runs in one namespace.
BOTH = '"$0" -f "$1" && shift && exec "$0" "$@"'


def main() -> None:
    module = AnsibleModule(
        argument_spec={"ruleset": {"type": "str", "default": ""}},
        supports_check_mode=True,
    )
    ruleset = module.params["ruleset"]
    nft = module.get_bin_path("nft", opt_dirs=["/usr/sbin", "/sbin"])
    if nft is None and not module.check_mode and ruleset:
        module.fail_json(msg="nft: found no such program; needed to keep the firewall; install the package nftables")
    try:
        before = runner.run([nft, *LIST]).out if nft else ""
        after = meaning(nft, ruleset) if nft and ruleset else ruleset
        changed = before != after
        if changed and not module.check_mode:
            if ruleset:
                load(nft, ruleset)
            else:
                runner.need(runner.run, [nft, "delete", "table", *TABLE.split()])
    except runner.CommandFailed as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=changed,
        table=after,
        diff={"before": before, "after": after, "before_header": f"table {TABLE}", "after_header": f"table {TABLE}"},
    )


def meaning(nft: str, ruleset: str) -> str:
    """Return the ruleset as nft lists it once loaded, from a network namespace that ends with the command."""
    return with_file(ruleset, lambda path: ["unshare", "--net", "--", "sh", "-c", BOTH, nft, path, *LIST])


def load(nft: str, ruleset: str) -> str:
    """Load the ruleset: all of it or, when nft refuses a line, nothing."""
    return with_file(ruleset, lambda path: [nft, "-f", path])


def with_file(text, command):  # type: ignore[no-untyped-def]
    """Run a command on a file with this text. Raises CommandFailed."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rules.nft")
        with open(path, "w", encoding="utf-8") as handle:
            handle.write(text)
        return runner.need(runner.run, command(path))


if __name__ == "__main__":
    main()
