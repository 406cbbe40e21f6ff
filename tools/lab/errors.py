"""What the lab tells its user when it cannot go on."""

from __future__ import annotations


class LabError(Exception):
    """What was found, what was needed, what to do; the CLI prints it and exits 1."""
