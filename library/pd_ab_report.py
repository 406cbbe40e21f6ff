# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pd_ab_report
short_description: Say which topology wins, and set the candidates side by side
description:
  - Reads the results that M(pd_benchmark_report) kept, one of each candidate, and says for each step which has the most
    tok/s and the shortest TTFT, TPOT and ITL, by how much, and whether that is more than noise.
  - An action plugin. It needs no connection.
version_added: "0.2.0"
options:
  results:
    description: The JSON files of the candidates.
    type: list
    elements: path
    required: true
  page:
    description: The HTML file to write.
    type: path
    required: true
  noise_floor:
    description: The least share that counts as a difference, whatever the repeats say.
    type: float
    default: 0.05
attributes:
  check_mode:
    description: Writes nothing.
    support: full
  diff_mode:
    description: The report is a new file.
    support: none
author: The pdstack contributors
"""

EXAMPLES = r"""
- name: Say which topology wins
  pd_ab_report:
    results: [reports/pd.json, reports/replicas.json]
    page: reports/ab.html
"""

RETURN = r"""
verdicts:
  description: For each step and figure the winner, its lead and the noise band.
  returned: success
  type: list
page:
  description: The HTML file.
  returned: success
  type: str
"""
