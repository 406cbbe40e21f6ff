"""What the bundle says when it will not go on: found, needed, and the way out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, List


@dataclass(frozen=True)
class Refusal:
    """One reason not to go on, complete enough to be acted on without reading code."""

    subject: str  # the variable, host or instance concerned
    found: str
    needed: str
    remedy: str


class Refused(ValueError):
    """Carries every refusal at once, so that an operator mends them in one go."""

    title = "refused"

    def __init__(self, refusals: Iterable[Refusal]) -> None:
        self.refusals: List[Refusal] = list(refusals)
        super().__init__(render(self.title, self.refusals))


class IntentError(Refused):
    """The inventory's variables are wrong; nothing has been contacted."""

    title = "The inventory was refused; no host has been contacted"


class PlanRefused(Refused):
    """The intent is well formed but these hosts cannot serve it; nothing has been changed."""

    title = "The plan was refused; no host has been changed"


def render(title: str, refusals: List[Refusal]) -> str:
    """Return the readable text of a list of refusals."""
    lines = [f"{title} ({len(refusals)} {'problem' if len(refusals) == 1 else 'problems'})."]
    for item in refusals:
        lines += [
            "",
            f"  {item.subject}",
            f"    found:  {item.found}",
            f"    needed: {item.needed}",
            f"    remedy: {item.remedy}",
        ]
    return "\n".join(lines)
