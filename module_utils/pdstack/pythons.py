"""Whether a Python can carry a release: its whole standard library, and its headers where they are compiled with."""

from __future__ import annotations

import os
from typing import Collection, List

from .refusal import Refusal
from .runner import Runner

#: The package that compiles a helper against Python.h when an engine starts. Distributions pack the headers apart.
HEADERS_FOR = "triton"
_ASK = (
    "import asyncio, ctypes, os, ssl, sqlite3, sys, sysconfig; print('%d.%d' % sys.version_info[:2]); "
    "print(os.path.join(sysconfig.get_path('include', 'posix_prefix'), 'Python.h'))"
)


def check(program: str, python: str, packages: Collection[str], runner: Runner) -> List[Refusal]:
    """Return why ``program`` cannot be the Python (such as "3.12") of a release that has these packages."""
    answer = runner([program, "-I", "-c", _ASK])
    version, _newline, header = answer.out.strip().partition("\n")
    if answer.rc != 0 or version != python:
        lines = (answer.err or answer.out).strip().splitlines()
        words = lines[-1] if lines else f"exit status {answer.rc}"
        remedy = f"install the distribution's whole package: apt-get install python{python} (not -minimal)"
        return [Refusal(program, words, f"Python {python} with its whole standard library", remedy)]
    if HEADERS_FOR not in packages or os.path.exists(header):
        return []
    needed = f"the headers of Python {python}, which {HEADERS_FOR} compiles with at the first start"
    remedy = f"apt-get install python{python}-dev, or dnf install python{python}-devel"
    return [Refusal(program, f"no {header}", needed, remedy)]
