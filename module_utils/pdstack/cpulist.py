"""CPU lists in the kernel's format, such as ``0-3,64-67``.

Format: https://docs.kernel.org/admin-guide/cputopology.html (and systemd's ``CPUAffinity=``).
"""

from __future__ import annotations

from typing import FrozenSet, Iterable, List, Tuple


def parse(text: str) -> FrozenSet[int]:
    """Return the CPUs that a kernel list names; an empty or blank list names none.

    Raises ValueError for anything that is not such a list.
    """
    cpus: List[int] = []
    for part in text.strip().split(","):
        part = part.strip()
        if not part:
            continue
        first, dash, last = part.partition("-")
        try:
            start = int(first)
            end = int(last) if dash else start
        except ValueError:
            raise ValueError(f"not a CPU list: {text!r}") from None
        if start < 0 or end < start:
            raise ValueError(f"not a CPU list: {text!r}")
        cpus.extend(range(start, end + 1))
    return frozenset(cpus)


def ranges(cpus: Iterable[int]) -> List[Tuple[int, int]]:
    """Return the inclusive runs of consecutive CPUs, ascending."""
    runs: List[Tuple[int, int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1] = (runs[-1][0], cpu)
        else:
            runs.append((cpu, cpu))
    return runs


def render(cpus: Iterable[int]) -> str:
    """Return the shortest kernel list that names these CPUs (``""`` for none)."""
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in ranges(cpus))
