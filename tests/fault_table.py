"""A row for each fault that was tried, kept below reports/faults, with their table in table.md there.

docs/results/faults.md has the table of a run that somebody looked at; no test writes there.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from dataclasses import asdict, dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = ROOT / "reports/faults"


@dataclass(frozen=True)
class Row:
    """A line of the table, in seconds. ``own_s``: from the start of the process that was hit to its first answer."""

    fault: str
    saw: str
    wrong: int
    longest_s: float
    served_s: float  # from the fault, or where ``held_s`` is given from its end, until all is served again
    own_s: float | None = None
    held_s: float | None = None  # how long the fault was held, where somebody else ends it
    note: str = ""

    def keep(self, number: int) -> None:
        """Keep it for the table. Rows are in the order of ``number``."""
        ROWS.mkdir(parents=True, exist_ok=True)
        row = {**asdict(self), "load": os.getloadavg()[0], "day": time.strftime("%Y-%m-%d", time.gmtime())}
        (ROWS / f"{number:02}.json").write_text(json.dumps(row, indent=1))
        write_table()


def write_table() -> None:
    """Write the rows that there are as a table."""
    rows = [json.loads(path.read_text()) for path in sorted(ROWS.glob("*.json"))]
    lines = ["| Fault | What clients saw | longest | own start | served again | note |", "|---|---|---|---|---|---|"]
    for row in rows:
        own = "-" if row["own_s"] is None else f"{row['own_s']:.1f} s"
        times = f"{row['longest_s']:.1f} s | {own} | {row['served_s']:.1f} s"
        lines.append(f"| {row['fault']} | {row['saw']} | {times} | {row['note']} |")
    days, loads = sorted({row["day"] for row in rows}), [row["load"] for row in rows]
    lines += [
        "",
        f"{', '.join(days)}; load of the machine {min(loads):.0f} to {max(loads):.0f} on {os.cpu_count()} cores.",
    ]
    (ROWS / "table.md").write_text("\n".join(lines) + "\n")
