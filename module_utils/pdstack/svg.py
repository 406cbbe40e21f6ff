"""A host's topology as one self-contained SVG. Pure; the same facts as picture.py, which has the words.

Colours repeat what the text says, so the drawing also works in print and for colour-blind readers.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple
from xml.sax.saxutils import escape

from . import cpulist, picture
from .facts import Gpu, HostFacts, Nic
from .picture import Place
from .plan_types import Instance, Plan

WIDTH = 1240
MARGIN = 28
GAP = 24
INNER = WIDTH - 2 * MARGIN
FONT = "DejaVu Sans, Verdana, Arial, sans-serif"
MONO = "DejaVu Sans Mono, Menlo, Consolas, monospace"

INK, MUTED, LINE, PAPER, CARD = "#1f2937", "#6b7280", "#cbd5e1", "#ffffff", "#f8fafc"
WRONG, NOTABLE = "#b91c1c", "#b45309"


@dataclass(frozen=True)
class Tone:
    """Fill and border of what belongs to a role."""

    fill: str
    border: str


ROLES = {
    "prefill": Tone("#dbeafe", "#1d4ed8"),
    "decode": Tone("#ffedd5", "#c2410c"),
    "aggregated": Tone("#dcfce7", "#15803d"),
}
IDLE = Tone("#f1f5f9", "#94a3b8")
# The nearer, the greener; far is no fault, so it is not red.
LINKS = {
    "X": "#ffffff",
    "NVL": "#4ade80",
    "PIX": "#86efac",
    "PXB": "#bbf7d0",
    "PHB": "#dcfce7",
    "NODE": "#ecfccb",
    "SYS": "#e2e8f0",
    "?": "#fef3c7",
}


class Sheet:
    """Collects elements; ``y`` is where the next block starts."""

    def __init__(self) -> None:
        self._elements: List[str] = []
        self.y = float(MARGIN)

    def box(self, x: float, y: float, w: float, h: float, tone: Tone, radius: int = 6, stroke: float = 1.0) -> None:
        self._elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius}" '
            f'fill="{tone.fill}" stroke="{tone.border}" stroke-width="{stroke}"/>'
        )

    def line(self, points: Sequence[Tuple[float, float]], colour: str = MUTED, stroke: float = 1.6) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._elements.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{stroke}"/>')

    def words(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 13,
        colour: str = INK,
        bold: bool = False,
        anchor: str = "start",
        mono: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        family = f' font-family="{MONO}"' if mono else ""
        self._elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}{family}>'
            f"{escape(text)}</text>"
        )

    def paragraph(
        self, x: float, width: float, text: str, size: float = 12.5, colour: str = INK, hang: float = 14
    ) -> None:
        """Write wrapped text at ``y`` and move ``y`` below it."""
        for number, line in enumerate(textwrap.wrap(text, max(20, int(width / (size * 0.56)))) or [""]):
            self.y += size * 1.4
            self.words(x + (hang if number else 0), self.y, line, size, colour)

    def heading(self, text: str, x: float = MARGIN) -> None:
        self.y += 30
        self.words(x, self.y, text, 15, bold=True)
        self.y += 4

    def document(self, title: str) -> str:
        height = self.y + MARGIN
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
            f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="{FONT}">'
        )
        paper = f'<rect width="{WIDTH}" height="{height:.0f}" fill="{PAPER}"/>'
        return "\n".join([head, f"<title>{escape(title)}</title>", paper, *self._elements, "</svg>"]) + "\n"


def svg(facts: HostFacts, plan: Optional[Plan] = None, refused: str = "") -> str:
    """Return the drawing. ``refused`` is the planner's text where there is no plan."""
    sheet, instances = Sheet(), picture.serving(facts, plan)
    _title(sheet, facts, plan)
    _problems(sheet, facts)
    for pair in _pairs(picture.places(facts)):
        _row(sheet, facts, pair, instances)
    if not facts.gpus:
        sheet.heading("No NVIDIA GPU on the PCI bus")
    extra = [f"node {node.node} {picture.gib(node.memory_bytes)}" for node in picture.memory_nodes(facts)]
    if extra:
        sheet.paragraph(MARGIN, INNER, "Memory without CPUs: " + ", ".join(extra))
    _legend(sheet, instances)
    top = sheet.y
    _matrices(sheet, facts)
    _settings(sheet, facts)
    left, sheet.y = sheet.y, top
    column = MARGIN + (INNER + GAP) / 2 if _matrix_width(facts) <= (INNER - GAP) / 2 and facts.gpus else None
    if column is None:
        sheet.y = left
    _steps(sheet, facts, column or MARGIN)
    sheet.y = max(left, sheet.y)
    _plan(sheet, facts, plan)
    if refused:
        sheet.heading("Refused")
        for words in refused.splitlines():
            sheet.paragraph(MARGIN, INNER, words, colour=WRONG)
    return sheet.document(f"Topology of {facts.host}")


def _title(sheet: Sheet, facts: HostFacts, plan: Optional[Plan]) -> None:
    sheet.y += 20
    sheet.words(MARGIN, sheet.y, facts.host, 24, bold=True)
    x = float(WIDTH - MARGIN)
    if facts.simulated:
        sheet.box(x - 96, sheet.y - 19, 96, 26, Tone("#fef3c7", NOTABLE), radius=13)
        sheet.words(x - 48, sheet.y - 1.5, "simulated", 13, NOTABLE, anchor="middle")
        x -= 112
    if plan:
        words = f"{plan.topology.mode}, {plan.release}, profile {plan.profile}"
        sheet.words(x, sheet.y, words, 14, MUTED, anchor="end")
    sheet.y += 24
    sheet.words(MARGIN, sheet.y, picture.headline(facts), 13.5, MUTED)
    sheet.y += 6


def _problems(sheet: Sheet, facts: HostFacts) -> None:
    found = picture.problems(facts)
    for words in found:
        sheet.paragraph(MARGIN, INNER, words, 13, WRONG)
    if found:
        sheet.y += 8


def _pairs(places: List[Place]) -> List[List[Place]]:
    return [places[i : i + 2] for i in range(0, len(places), 2)]


TILE, TILE_GAP, NIC = 50, 8, 28


def _height(place: Place) -> float:
    head = 78 if place.node else 44
    return head + len(place.gpus) * (TILE + TILE_GAP) + len(place.nics) * (NIC + 6) + 8


def _row(sheet: Sheet, facts: HostFacts, pair: List[Place], instances: Dict[str, Instance]) -> None:
    sheet.y += 14
    top, width = sheet.y, (INNER - GAP) / 2 if len(pair) == 2 else INNER
    height = max(_height(place) for place in pair)
    for number, place in enumerate(pair):
        _place(sheet, facts, place, instances, (MARGIN + number * (width + GAP), top, width, height))
    sheet.y = top + height


def _place(
    sheet: Sheet,
    facts: HostFacts,
    place: Place,
    instances: Dict[str, Instance],
    area: Tuple[float, float, float, float],
) -> None:
    x, y, width, height = area
    sheet.box(x, y, width, height, Tone(CARD, LINE), radius=10)
    if place.node:
        node = place.node
        sheet.words(x + 18, y + 29, f"NUMA node {node.node}", 16, bold=True)
        distances = " ".join(str(distance) for distance in node.distances[:8])
        sheet.words(x + width - 18, y + 29, f"distance {distances}" if distances else "", 12, MUTED, anchor="end")
        sheet.words(x + 18, y + 53, picture.node_line(node), 12.5, MUTED)
        y += 68
    else:
        sheet.words(x + 18, y + 29, "No known NUMA node", 16, WRONG, bold=True)
        y += 44
    tops: Dict[str, List[float]] = {}
    for position in place.gpus:
        gpu = facts.gpus[position]
        _tile(sheet, position, gpu, instances.get(gpu.pci), (x + 40, y, width - 58))
        if gpu.pci_path:
            tops.setdefault(gpu.pci_path[0], []).append(y)
        y += TILE + TILE_GAP
    for port, starts in tops.items():
        _brace(sheet, port, x, starts)
    for nic in place.nics:
        _nic(sheet, nic, (x + 40, y, width - 58))
        y += NIC + 6


def _brace(sheet: Sheet, port: str, x: float, starts: List[float]) -> None:
    """Join the GPUs below one root port on the left of their tiles."""
    middles = [start + TILE / 2 for start in starts]
    for middle in middles:
        sheet.line([(x + 24, middle), (x + 40, middle)])
    if len(middles) > 1:
        sheet.line([(x + 24, middles[0]), (x + 24, middles[-1])])
    sheet.line([(x + 12, sum(middles) / len(middles)), (x + 24, sum(middles) / len(middles))])


def _tile(
    sheet: Sheet, position: int, gpu: Gpu, instance: Optional[Instance], area: Tuple[float, float, float]
) -> None:
    x, y, width = area
    tone = ROLES.get(instance.role, IDLE) if instance else IDLE
    border = WRONG if gpu.problems or gpu.mig else tone.border
    sheet.box(x, y, width, TILE, Tone(tone.fill, border), stroke=2 if border != IDLE.border else 1)
    sheet.words(x + 22, y + 31, str(position), 17, bold=True, anchor="middle")
    sheet.words(x + 44, y + 21, picture.short_name(gpu), 13.5, bold=True)
    arch = f"sm_{(gpu.compute_capability or '?').replace('.', '')}"
    notes = [picture.link(gpu), picture.gib(gpu.memory_bytes), arch, *picture.flags(gpu)]
    sheet.words(x + 44, y + 40, gpu.pci, 11.5, MUTED, mono=True)
    sheet.words(x + 152, y + 40, ", ".join(notes)[: int((width - 160) / 6.6)], 11.5, MUTED)
    label = instance.name if instance else "PROBLEM" if gpu.problems else ""
    sheet.words(x + width - 14, y + 21, label, 13, border if label else MUTED, bold=True, anchor="end")


def _nic(sheet: Sheet, nic: Nic, area: Tuple[float, float, float]) -> None:
    x, y, width = area
    sheet.box(x, y, width, NIC, Tone("#ffffff", LINE))
    speed = f"{nic.speed_mbps / 1000:g} Gb/s" if nic.speed_mbps else "speed not known"
    rdma = f", RDMA {nic.rdma}" if nic.rdma else ""
    sheet.words(x + 12, y + 18.5, f"NIC {nic.name}", 12.5, bold=True)
    sheet.words(x + 152, y + 18.5, f"{nic.pci or ''}  {speed}, {'up' if nic.up else 'down'}{rdma}", 11.5, MUTED)


def _legend(sheet: Sheet, instances: Dict[str, Instance]) -> None:
    roles = [role for role in ROLES if role in {item.role for item in instances.values()}]
    if not roles:
        return
    sheet.y += 26
    x = float(MARGIN)
    for role in [*roles, "no role"]:
        tone = ROLES.get(role, IDLE)
        sheet.box(x, sheet.y - 12, 18, 14, tone, radius=3)
        sheet.words(x + 25, sheet.y, role, 12.5)
        x += 50 + 8 * len(role)


LABEL, CELL_H = 62, 26


def _cell(facts: HostFacts) -> float:
    return 50 if len(facts.gpus) <= 10 else 40


def _matrix_width(facts: HostFacts) -> float:
    return LABEL + len(facts.gpus) * _cell(facts)


def _matrices(sheet: Sheet, facts: HostFacts) -> None:
    count = range(len(facts.gpus))
    if len(facts.p2p.link_type) < 2:
        return
    claimed = facts.p2p.claimed

    def kind(a: int, b: int) -> Tuple[str, str]:
        word = facts.p2p.link_type[a][b]
        denied = a != b and bool(claimed) and claimed[a][b] is False
        return (word.lower() if denied else word), LINKS.get(word, LINKS["?"])

    sheet.heading("P2P: the way between GPUs")
    seen = {word for row in facts.p2p.link_type for word in row} - {"X"}
    legend = ", ".join(f"{word} {picture.LINK_WORDS[word]}" for word in picture.LINK_WORDS if word in seen)
    denied = any(value is False for row in claimed for value in row)
    sheet.paragraph(
        MARGIN,
        (INNER - GAP) / 2,
        legend + ("; small letters: the driver denies peer access" if denied else ""),
        12,
        MUTED,
        0,
    )
    _grid(sheet, facts, [[kind(a, b) for b in count] for a in count])
    speeds = facts.p2p.measured_gb_s
    if speeds:
        sheet.heading("P2P measured: GB/s one way, row to column, one pair at a time")
        fastest = max((speed for row in speeds for speed in row if speed), default=1.0)
        _grid(sheet, facts, [[_speed(speed, fastest) for speed in row] for row in speeds])
    for words in picture.p2p_lines(facts):
        sheet.paragraph(MARGIN, (INNER - GAP) / 2, words, 12.5, WRONG if "WRONG" in words else INK)


def _speed(speed: Optional[float], fastest: float) -> Tuple[str, str]:
    if speed is None:
        return "", "#ffffff"
    share = speed / fastest
    return f"{speed:.1f}", "#bbf7d0" if share > 0.9 else "#fef08a" if share > 0.6 else "#fecaca"


def _grid(sheet: Sheet, facts: HostFacts, cells: List[List[Tuple[str, str]]]) -> None:
    cell = _cell(facts)
    sheet.y += 20
    for column in range(len(cells)):
        sheet.words(MARGIN + LABEL + (column + 0.5) * cell, sheet.y, str(column), 12, MUTED, anchor="middle")
    sheet.y += 6
    for row, values in enumerate(cells):
        sheet.words(MARGIN + LABEL - 10, sheet.y + 18, f"GPU {row}", 12, MUTED, anchor="end")
        for column, (text, fill) in enumerate(values):
            x = MARGIN + LABEL + column * cell
            sheet.box(x, sheet.y, cell, CELL_H, Tone(fill, "#ffffff"), radius=0)
            sheet.words(x + cell / 2, sheet.y + 17.5, text, 11.5, anchor="middle")
        sheet.y += CELL_H
    sheet.y += 6


def _steps(sheet: Sheet, facts: HostFacts, x: float) -> None:
    right = WIDTH - MARGIN
    for positions, steps in picture.step_groups(facts):
        sheet.heading(f"Fabric probe, GPU {cpulist.render(positions)}", x)
        sheet.y += 18
        for column, text in ((0, "step"), (176, "code"), (224, "meaning")):
            sheet.words(x + column, sheet.y, text, 12, MUTED)
        sheet.y += 5
        sheet.line([(x, sheet.y), (right, sheet.y)], LINE, 1)
        for step in steps:
            failed = step.code not in (0, None)
            colour = NOTABLE if failed else INK
            sheet.y += 18
            sheet.words(x, sheet.y, step.name, 11.5, colour, mono=True)
            sheet.words(x + 176, sheet.y, picture.step_code(step), 11.5, colour, mono=True)
            words = picture.step_words(step)
            room = int((right - x - 224) / 6.4)
            for number, part in enumerate(textwrap.wrap(words, room)):
                sheet.y += 15 if number else 0
                sheet.words(x + 224, sheet.y, part, 11.5, colour)


def _settings(sheet: Sheet, facts: HostFacts) -> None:
    sheet.heading("Settings")
    for subject, words in picture.state_lines(facts):
        sheet.words(MARGIN, sheet.y + 17.5, subject, 12.5, MUTED)
        sheet.paragraph(MARGIN + 170, (INNER - GAP) / 2 - 170, words, hang=0)


def _plan(sheet: Sheet, facts: HostFacts, plan: Optional[Plan]) -> None:
    if plan is None:
        return
    order = list(ROLES)
    here = [item for item in plan.instances if item.host == facts.host]
    mine = sorted(here, key=lambda item: (order.index(item.role), item.index))
    sheet.heading("Plan")
    for item in mine:
        gpus = cpulist.render(ref.position for ref in item.gpus)
        memory = f"memory of node {item.memory_nodes}" if item.memory_nodes else "memory not bound"
        words = f"{item.name}: GPU {gpus}, CPUs {item.cpus or 'any'}, {memory}, port {item.ports.get('http', '?')}"
        sheet.paragraph(MARGIN, INNER, words, 13, ROLES.get(item.role, IDLE).border)
    sheet.heading("Why")
    shared: Dict[Tuple[str, str], List[str]] = {}
    for item in mine:
        for why in item.why:
            shared.setdefault((why.decision, why.reason), []).append(item.name)
    for (decision, reason), names in shared.items():
        sheet.paragraph(MARGIN, INNER, f"{decision} ({', '.join(names)}): {reason}")
    for note in plan.notes:
        sheet.paragraph(MARGIN, INNER, f"note: {note}", colour=MUTED)
