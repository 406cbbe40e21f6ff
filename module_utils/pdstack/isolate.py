"""Run a function of this package in a child process that may be killed.

A wedged driver blocks its caller inside the kernel, sometimes beyond the reach of SIGKILL. So each
driver library is asked in a child, with a deadline, and a child that does not come back is itself
an answer: "wedged", with the name of the call that did not return.

The child is the same interpreter with the parent's ``sys.path``, so it finds the package wherever
the parent did: in a folder, or in the zip file that Ansible sends (AnsiballZ). The request, the
announcements and the result travel through unlinked temporary files: a pipe that fills up, or that a
stuck child holds open, cannot block the parent.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import IO, Any, Callable, Dict, Mapping, Optional, Tuple

_BOOTSTRAP = (
    "import json,sys;r=json.load(sys.stdin);sys.path[:]=r['path'];"
    "import importlib;importlib.import_module(r['isolate']).serve(r)"
)
_CALL, _RESULT = "@pdstack call ", "@pdstack result "
_GRACE = 1.0  # seconds that a killed child has to go

Entry = Callable[[Mapping[str, Any], Callable[[str], None]], Any]


@dataclass(frozen=True)
class Outcome:
    """How a child ended. ``value`` is the entry's JSON result when ``status`` is ok."""

    status: str  # ok | wedged | crashed
    value: Any = None
    at: str = ""  # the last call that the child announced
    detail: str = ""
    seconds: float = 0.0


class Child:
    """A child that runs one entry. Start several, then collect each."""

    def __init__(
        self,
        entry: Entry,
        request: Mapping[str, Any],
        timeout: float,
        environment: Optional[Mapping[str, str]] = None,
        popen: Callable[..., Any] = subprocess.Popen,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout, self._clock, self._started = timeout, clock, clock()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - outlives this call
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        message = {
            "path": [entry_path for entry_path in sys.path if entry_path],
            "isolate": __name__,
            "module": entry.__module__,
            "function": entry.__name__,
            "request": dict(request),
        }
        with tempfile.TemporaryFile() as source:
            source.write(json.dumps(message).encode())
            source.seek(0)
            self._process = popen(
                [sys.executable, "-I", "-S", "-B", "-c", _BOOTSTRAP],
                stdin=source,
                stdout=self._output,
                stderr=self._errors,
                env=dict(os.environ if environment is None else environment),
                start_new_session=True,
            )

    def collect(self) -> Outcome:
        """Wait for the child, at most until its deadline, and return how it ended. Call once."""
        with self._output, self._errors:
            try:
                code = self._process.wait(timeout=max(0.0, self._started + self._timeout - self._clock()))
            except subprocess.TimeoutExpired:
                return self._abandon()
            seconds = self._clock() - self._started
            at, result = self._read()
            if code == 0 and result is not None:
                return Outcome("ok", result, at, "", seconds)
            how = f"died by signal {-code}" if code < 0 else f"ended with status {code}"
            detail = f"the probe {how} in {at or 'its start'}{self._last_error()}"
            return Outcome("crashed", None, at, detail, seconds)

    def _abandon(self) -> Outcome:
        self._process.kill()
        killed = True
        try:
            self._process.wait(timeout=_GRACE)
        except subprocess.TimeoutExpired:
            killed = False  # blocked inside the kernel; init will reap it
        at, _result = self._read()
        words = f"{at or 'the start of the probe'} did not return within {self._timeout:g} s"
        if not killed:
            words += f", and process {self._process.pid} cannot be killed: it is blocked in the kernel"
        return Outcome("wedged", None, at, words, self._clock() - self._started)

    def _read(self) -> Tuple[str, Any]:
        self._output.seek(0)
        at, result = "", None
        for line in self._output.read().decode("utf-8", "replace").splitlines():
            if line.startswith(_CALL):
                at = line[len(_CALL) :]
            elif line.startswith(_RESULT):
                result = json.loads(line[len(_RESULT) :])
        return at, result

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


def driver_environment(base: Mapping[str, str]) -> Dict[str, str]:
    """Return an environment in which the driver numbers every GPU by PCI id and hides none."""
    environment = {key: value for key, value in base.items() if key != "CUDA_VISIBLE_DEVICES"}
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return environment


def serve(message: Mapping[str, Any]) -> None:
    """The child's side: run the entry, announce each call, print the result."""

    def announce(name: str) -> None:
        os.write(1, f"\n{_CALL}{name}\n".encode())

    entry = getattr(importlib.import_module(message["module"]), message["function"])
    result = entry(message["request"], announce)
    os.write(1, f"\n{_RESULT}{json.dumps(result)}\n".encode())
