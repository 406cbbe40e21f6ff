"""The table of the fault tests: rows of several runs in their order, below reports/ alone."""

from __future__ import annotations

import fault_table


def test_rows_of_several_runs_stand_in_their_order(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fault_table, "ROWS", tmp_path / "faults")
    fault_table.Row("second", "nothing", 0, 1.0, 2.0, held_s=30.0).keep(7)
    fault_table.Row("first", "2 failed", 0, 3.25, 4.0, own_s=20.0).keep(2)
    table = (tmp_path / "faults/table.md").read_text().splitlines()
    assert table[2:4] == [
        "| first | 2 failed | 3.2 s | 20.0 s | 4.0 s |  |",
        "| second | nothing | 1.0 s | - | 2.0 s |  |",
    ]
