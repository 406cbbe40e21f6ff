#!/usr/bin/python
# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Pack the bundle on the controller. The work is in action_plugins/pd_support_bundle.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_support_bundle
short_description: Add the controller's part to what M(pd_support) gathered, and pack it
description:
  - Adds the inventory's variables, the drift report, what failed on which host, and the versions of the controller.
    Secrets are removed from them by their values, which the inventory has, and by their shape.
  - Packs all into one file that its owner alone may read.
  - Runs once for all hosts, on the controller.
version_added: "0.1.0"
options:
  folder:
    description: The folder that M(pd_support) wrote to. It is removed once it is packed.
    type: str
    required: true
  dest:
    description: The file to write, a gzip-compressed tar.
    type: str
    required: true
  documents:
    description: More documents, by name.
    type: dict
    default: {}
attributes:
  check_mode:
    description: The bundle is written on the controller in either mode.
    support: full
  diff_mode:
    description: Changes nothing on the hosts, so there is nothing to show.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Pack
  pd_support_bundle:
    folder: /tmp/bundle
    dest: bundle.tar.gz
"""

RETURN = r"""
dest:
  description: The file that was written.
  returned: success
  type: str
count:
  description: The number of documents in it.
  returned: success
  type: int
bytes:
  description: Its size.
  returned: success
  type: int
"""
