"""Plots as SVG that stand alone or inside the report page. Pure.

Colours come from classes, so that one drawing serves light and dark; each series also has its own mark, so that it
reads without colour. Numbers are in the page's tables too: a plot is never their only place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Callable, List, Optional, Sequence, Tuple
from xml.sax.saxutils import escape, quoteattr

from .trace import Table

WIDTH, HEIGHT = 440, 290  # so small that its words can be read on a phone
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 46
BARS_WIDTH = 560
FONT = "system-ui, 'DejaVu Sans', Verdana, Arial, sans-serif"
# Each at least 4.5:1 on its background (a test computes it).
PAPER, INK, MUTED, GRID = ("#ffffff", "#111827"), ("#1f2937", "#e5e7eb"), ("#4b5563", "#9ca3af"), ("#d1d5db", "#374151")
SERIES: Sequence[Tuple[str, str]] = (
    ("#1d4ed8", "#93c5fd"),
    ("#b45309", "#fdba74"),
    ("#15803d", "#86efac"),
    ("#7e22ce", "#d8b4fe"),
    ("#be185d", "#f9a8d4"),
    ("#0f766e", "#5eead4"),
)


def style() -> str:
    """Return the CSS of the plots, for light and dark."""

    def rules(theme: int) -> str:
        found = f".pp-paper{{fill:{PAPER[theme]}}}.pp-ink{{fill:{INK[theme]}}}.pp-muted{{fill:{MUTED[theme]}}}"
        found += f".pp-grid{{stroke:{GRID[theme]}}}.pp-axis{{stroke:{MUTED[theme]}}}"
        for number, colours in enumerate(SERIES):
            found += f".pp-l{number}{{stroke:{colours[theme]}}}.pp-f{number}{{fill:{colours[theme]}}}"
        return found

    return rules(0) + "@media (prefers-color-scheme:dark){" + rules(1) + "}"


@dataclass(frozen=True)
class Line:
    """One series: a value for each place of the x axis, and the range of its repeats."""

    name: str
    values: Sequence[Optional[float]]
    low: Sequence[Optional[float]] = field(default_factory=list)
    high: Sequence[Optional[float]] = field(default_factory=list)


def nice(top: float) -> Tuple[float, float]:
    """Return an axis end and a step: round numbers, four to six steps."""
    if top <= 0:
        return 1.0, 0.25
    raw = top / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return step * math.ceil(top / step * 0.9999), step


def number(value: float) -> str:
    """Return a figure with three significant digits and no exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def lines(title: str, places: Sequence[str], series: Sequence[Line], unit: str, axis: str, alone: bool = True) -> str:
    """Return a line plot over named places (concurrencies). y starts at 0."""
    known = [value for line in series for value in [*line.values, *line.high] if value is not None]
    top, step = nice(max(known, default=0.0))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(place: int) -> float:
        return LEFT + width * ((place + 0.5) / max(1, len(places)))

    def y(value: float) -> float:
        return TOP + height * (1 - value / top)

    parts: List[str] = []
    for tick in range(round(top / step) + 1):
        level = y(tick * step)
        parts.append(f'<line class="pp-grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(_words(LEFT - 8, level + 5, number(tick * step), "end", "pp-muted"))
    for place, name in enumerate(places):
        parts.append(_words(x(place), HEIGHT - BOTTOM + 20, name, "middle", "pp-muted"))
    parts.append(_words(LEFT + width / 2, HEIGHT - 6, axis, "middle", "pp-muted"))
    for index, line in enumerate(series):
        parts += _line(index, line, [x(place) for place in range(len(places))], y)
    described = "; ".join(
        f"{line.name}: "
        + ", ".join(f"{place} {number(v)} {unit}" for place, v in zip(places, line.values) if v is not None)
        for line in series
    )
    return _document(title, described, WIDTH, HEIGHT, parts, alone)


def _line(index: int, line: Line, xs: Sequence[float], y: Callable[[float], float]) -> List[str]:
    tone = index % len(SERIES)
    points = [(at, y(value)) for at, value in zip(xs, line.values) if value is not None]
    parts = []
    for at, low, high in zip(xs, line.low, line.high):
        if low is not None and high is not None and high > low:
            parts.append(
                f'<line class="pp-l{tone}" x1="{at:.1f}" x2="{at:.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}" '
                'stroke-width="5" opacity="0.4"/>'
            )
    if len(points) > 1:
        path = " ".join(f"{at:.1f},{level:.1f}" for at, level in points)
        dash = ' stroke-dasharray="7 4"' if index >= len(SERIES) else ""
        parts.append(f'<polyline class="pp-l{tone}" points="{path}" fill="none" stroke-width="2.5"{dash}/>')
    return parts + [mark(index, at, level) for at, level in points]


def mark(index: int, x: float, y: float, size: float = 5.5) -> str:
    """Return the mark of a series: a shape of its own."""
    tone, shape = f"pp-f{index % len(SERIES)}", index % 4
    if shape == 0:
        return f'<circle class="{tone}" cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>'
    if shape == 1:
        side = f'width="{2 * size:.1f}" height="{2 * size:.1f}"'
        return f'<rect class="{tone}" x="{x - size:.1f}" y="{y - size:.1f}" {side}/>'
    corners = (
        [(x, y - size * 1.25), (x + size * 1.15, y + size), (x - size * 1.15, y + size)]
        if shape == 2
        else [(x, y - size * 1.3), (x + size * 1.3, y), (x, y + size * 1.3), (x - size * 1.3, y)]
    )
    return f'<polygon class="{tone}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}"/>'


def legend(series: Sequence[Line]) -> str:
    """Return the key of a page's plots as HTML: the same marks, with the names as text."""
    items = []
    for index, line in enumerate(series):
        drawing = f'<svg width="18" height="18" viewBox="0 0 18 18" aria-hidden="true">{mark(index, 9, 9)}</svg>'
        items.append(f"<li>{drawing} {escape(line.name)}</li>")
    return f'<ul class="key">{"".join(items)}</ul>'


def families(table: Table, title: str, alone: bool = True, rows: int = 12) -> str:
    """Return a trace as bars: one a family, with its time, share, and share of the roofline where known."""
    shown = table.families[:rows]
    top = max((row.ms for row in shown), default=1.0) or 1.0
    label, bar, height, head = 130, 250, 30, 58
    parts = [
        _words(16, 24, title, "start", "pp-ink", 17, bold=True),
        _words(
            16,
            44,
            f"{table.hardware}, {table.steps} {table.stage} steps, {number(table.span_ms)} ms a step",
            "start",
            "pp-muted",
            13,
        ),
    ]
    for index, row in enumerate(shown):
        level = head + index * height
        parts.append(_words(label - 8, level + 19, row.name, "end", "pp-ink"))
        parts.append(
            f'<rect class="pp-f0" x="{label}" y="{level + 5}" width="{max(1.0, bar * row.ms / top):.1f}" height="20"/>'
        )
        roof = "" if row.roofline is None else f", {row.roofline:.0%} of roofline"
        x = label + max(1.0, bar * row.ms / top) + 8
        inside = x > BARS_WIDTH - 190
        parts.append(
            _words(
                x if not inside else x - 14,
                level + 20,
                f"{number(row.ms)} ms, {row.share:.0%}{roof}",
                "end" if inside else "start",
                "pp-paper" if inside else "pp-ink",
                13,
            )
        )
    described = "; ".join(f"{row.name} {number(row.ms)} ms, {row.share:.0%}" for row in shown)
    return _document(title, described, BARS_WIDTH, head + len(shown) * height + 14, parts, alone)


def _words(x: float, y: float, text: str, anchor: str, tone: str, size: float = 14, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text class="{tone}" x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}"{weight}>'
        f"{escape(text)}</text>"
    )


def _document(title: str, described: str, width: int, height: int, parts: Sequence[str], alone: bool) -> str:
    size = f' width="{width}" height="{height}"' if alone else ""
    sheet = f"<style>{style()}</style>" if alone else ""
    paper = f'<rect class="pp-paper" width="{width}" height="{height}"/>' if alone else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label={quoteattr(title + ". " + described)}{size} '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}"><title>{escape(title)}</title>{sheet}{paper}'
        + "".join(parts)
        + "</svg>"
    )
