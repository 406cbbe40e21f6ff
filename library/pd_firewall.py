#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Keep the firewall of pdstack: the kernel's table, the file of its rules, and the unit that loads it at boot."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_firewall
short_description: Keep the firewall of pdstack
description:
  - Compares the table C(inet pdstack) in the kernel with a ruleset and loads the ruleset when they differ. nft itself
    says what the ruleset means, in an empty network namespace, so a rule that was added or taken away by hand is seen
    and a difference in spelling is none.
  - Then keeps the file of the rules and the unit that loads it at boot.
  - Touches no other table.
version_added: "0.1.0"
options:
  ruleset:
    description: The ruleset, as C(nft -f) takes it. Empty for no firewall; then table, file and unit are taken away.
    type: str
    default: ""
  unit:
    description: The text of the unit C(pd-firewall.service).
    type: str
    required: true
attributes:
  check_mode:
    description: Compares and reports. Where nft is not installed yet, the table counts as missing.
    support: full
  diff_mode:
    description: Shows the table as nft lists it and the files, before and after.
    support: full
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Keep the firewall
  pd_firewall:
    ruleset: "{{ lookup('ansible.builtin.file', 'firewall.nft') }}"
    unit: "{{ lookup('ansible.builtin.file', 'pd-firewall.service') }}"
"""

RETURN = r"""
declared:
  description: What was compared, the table, files and unit.
  returned: always
  type: list
  elements: str
steps:
  description: The table where it differed, with C(subject), C(action) and C(why).
  returned: always
  type: list
  elements: dict
paths:
  description: The files that differed, as M(pd_files) returns them.
  returned: always
  type: dict
actions:
  description: What is done to the unit by verb, as M(pd_units) returns it.
  returned: always
  type: dict
reasons:
  description: Why the unit is acted on.
  returned: always
  type: dict
table:
  description: The table as nft lists it now, or would after a run without check mode.
  returned: always
  type: str
"""

import os
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.pdstack import files, firewall, runner, units

LIST = ("-s", "list", "table", *firewall.TABLE.split())
# nft lists what was there before a file, so it takes two runs in one namespace.
BOTH = '"$0" -f "$1" && shift && exec "$0" "$@"'


def main() -> None:
    module = AnsibleModule(
        argument_spec={"ruleset": {"type": "str", "default": ""}, "unit": {"type": "str", "required": True}},
        supports_check_mode=True,
    )
    ruleset = module.params["ruleset"]
    nft = module.get_bin_path("nft", opt_dirs=["/usr/sbin", "/sbin"])
    if nft is None and not module.check_mode and ruleset:
        module.fail_json(msg="nft: found no such program; needed to keep the firewall; install the package nftables")
    entries = [files.Entry(firewall.RULES, ruleset), files.Entry(firewall.UNIT_FILE, module.params["unit"])]
    try:
        before = runner.run([nft, *LIST]).out if nft else ""
        after = meaning(nft, ruleset) if nft and ruleset else ruleset
        written = files.plan(entries if ruleset else [], [entry.path for entry in entries])
        todo = unit_plan(bool(ruleset), written)
        if not module.check_mode:
            # The rules first: what is written after them is only for the next boot.
            if before != after and ruleset:
                load(nft, ruleset)
            elif before != after:
                runner.need(runner.run, [nft, "delete", "table", *firewall.TABLE.split()])
            files.apply(written)
            units.apply(todo, runner.run)
    except (runner.CommandFailed, files.FilesError) as error:
        module.fail_json(msg=str(error))
    table = f"table {firewall.TABLE}"
    steps = [{"subject": table, "action": "differs", "why": firewall.difference(before, after)}]
    module.exit_json(
        changed=bool(before != after or written.changes or todo.changed),
        table=after,
        declared=[table, *sorted(written.entries), *([firewall.UNIT] if ruleset else [])],
        steps=steps if before != after else [],
        paths={change.path: change.action for change in written.changes},
        actions=todo.actions,
        reasons=todo.why,
        diff=[{"before": before, "after": after, "before_header": table, "after_header": table}, *files.diff(written)],
    )


def unit_plan(wanted, written):  # type: ignore[no-untyped-def]
    """Return what to do to the unit: it is enabled and active, or it is gone."""
    kept = [units.WantedUnit(firewall.UNIT)] if wanted else []
    strays = [] if wanted else units.known(runner.run, [firewall.UNIT])
    todo = units.plan(kept, units.show(runner.run, [unit.name for unit in kept] + strays), {}, strays)
    todo.reload = todo.reload or firewall.UNIT_FILE in files.effective(written)
    return todo


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
