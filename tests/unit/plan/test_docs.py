"""docs/plan.md shows what the planner says today. ``python -m unit.plan.test_docs`` from tests/ writes it."""

from __future__ import annotations

import pathlib
import re

from pdstack import report
from unit.plan import inventories as inv
from unit.plan.recorded import recorded

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs/plan.md"


def rendered(text: str) -> str:
    """Return the page with each marked block filled in."""
    made = inv.planned(recorded()["rtx-pro-6000-8"])
    reasons = [line.strip() for line in report.plan_text(made).splitlines() if line.startswith("  ")]

    def fill(match: re.Match[str]) -> str:
        kind, names = match[1], match[2].split(", ")
        if kind == "report":
            block = report.plan_table(made)
        else:
            block = "\n".join(line for name in names for line in reasons if line.startswith(f"{name} ["))
        return f"<!-- {kind}: {match[2]} -->\n```\n{block}\n```"

    return re.sub(r"<!-- (report|reasons): ([^\n]*) -->\n```\n(?:.*?\n)??```", fill, text, flags=re.DOTALL)


def test_the_page_is_current() -> None:
    text = PAGE.read_text()
    assert text.count("```") == 4
    assert "decode-0   decode   rtx-pro-6000-8  4-7" in text
    assert "NCCL_P2P_LEVEL [decode-0]: " in text
    assert rendered(text) == text


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
