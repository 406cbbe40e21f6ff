# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_benchmark_report
short_description: Keep a benchmark's result, compare it, and write the report
description:
  - Joins the measurements of M(pd_benchmark), keeps them as JSON below the folder by host and release, and writes a
    self-contained HTML page beside it. Where a Chromium is installed on the controller, a PNG too.
  - Fails, after it has written all that, when a request failed, an answer is wrong, or a figure is worse than the
    baseline's by more than the noise.
  - An action plugin. It needs no connection.
version_added: "0.2.0"
options:
  parts:
    description: The documents that M(pd_benchmark) returned. Those of C(bench_serving) become the peer check.
    type: list
    elements: dict
    required: true
  host:
    description: The host that was measured, for the folder's name.
    type: str
    required: true
  folder:
    description: Where results are kept on the controller.
    type: path
    required: true
  label:
    description: What the report calls this run; by default host and topology.
    type: str
    default: ""
  plan:
    description: The plan that was measured.
    type: dict
    default: {}
  facts:
    description: The facts of each host.
    type: dict
    default: {}
  manifest:
    description: The release's manifest.json.
    type: dict
    default: {}
  quality:
    description: Checks of golden completions, C(before) and C(after) the load, as M(pd_verify) returns them.
    type: dict
    default: {}
  baseline:
    description: A former result to compare with; V(previous) is the newest of this host under the same load.
    type: str
    default: ""
  beside:
    description: Other results that the page shows beside this one.
    type: list
    elements: path
    default: []
  noise_floor:
    description: The least share that counts as a change, whatever the repeats say.
    type: float
    default: 0.05
  png:
    description: Draw the page where a Chromium is installed.
    type: bool
    default: true
attributes:
  check_mode:
    description: Writes nothing.
    support: full
  diff_mode:
    description: Reports are new files.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Write the report
  pd_benchmark_report:
    parts: "{{ measured.results | map(attribute='result') }}"
    host: gpu1
    folder: reports/benchmark
    baseline: previous
"""

RETURN = r"""
result:
  description: The JSON file.
  returned: success
  type: str
page:
  description: The HTML file.
  returned: success
  type: str
png:
  description: The PNG file, empty where no browser is installed.
  returned: success
  type: str
summary:
  description: Figures and comparison as lines of text.
  returned: success
  type: list
changes:
  description: Each figure beside the baseline's, with its noise band and verdict.
  returned: success
  type: list
peer:
  description: Each figure of both clients, with their difference as a share.
  returned: success
  type: list
"""
