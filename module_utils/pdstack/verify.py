"""Proof that the running service is the planned one: processes, configuration, and real completions.

Everything is read from the machine (/proc, HTTP), never from the files that were written.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional

from . import cpulist
from .cgroup import unit_of


@dataclass(frozen=True)
class Reply:
    """An HTTP answer; status 0 when none came, and then ``body`` says why."""

    status: int
    body: str


Http = Callable[[str, str, Optional[Dict[str, Any]]], Reply]  # method, url, JSON body


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. ``found`` and ``wanted`` are for an operator to compare."""

    subject: str
    ok: bool
    found: str
    wanted: str


@dataclass(frozen=True)
class GoldenCase:
    """A prompt and what its greedy completion must be.

    ``expect`` is the exact text (from a reference implementation of the same weights), or
    ``pattern`` a regular expression that the text must contain.
    """

    prompt: str
    max_tokens: int = 16
    expect: Optional[str] = None
    pattern: Optional[str] = None
    tokens: Optional[List[int]] = None  # of the reference, for a person who looks into a difference
    margin: Optional[float] = None  # the reference's smallest lead of a chosen token, in logits


def processes_of(unit: str, proc_root: str = "/proc") -> List[int]:
    """Return the processes in a unit's control group."""
    pids = (int(name) for name in os.listdir(proc_root) if name.isdigit())
    return sorted(pid for pid in pids if unit_of(proc_root, pid) == unit)


def check_pinning(unit: str, cpus: str, memory_nodes: str, proc_root: str = "/proc") -> List[Check]:
    """Compare the CPUs and the memory policy of every process of a unit with the plan.

    ``cpus`` and ``memory_nodes`` are kernel lists; "" means that the plan does not bind.
    """
    pids = processes_of(unit, proc_root)
    if not pids:
        return [Check(f"{unit} processes", False, "none", "at least one running")]
    checks = []
    if cpus:
        wanted = cpulist.render(cpulist.parse(cpus))
        found = {pid: _allowed_cpus(proc_root, pid) for pid in pids}
        checks.append(_all_alike(f"{unit} CPUs of {len(pids)} processes", found, wanted))
    if memory_nodes:
        policies = {pid: _memory_policy(proc_root, pid) for pid in pids}
        checks.append(_all_alike(f"{unit} memory policy of {len(pids)} processes", policies, f"bind:{memory_nodes}"))
    return checks


def _all_alike(subject: str, found: Mapping[int, Optional[str]], wanted: str) -> Check:
    """Judge what was read of each process (None: it ended while we looked). What was read of none proves nothing."""
    read = {pid: text for pid, text in found.items() if text is not None}
    if not read:
        return Check(subject, False, "it can be read of none of them", wanted)
    stray = next((f"{text} (pid {pid})" for pid, text in read.items() if text != wanted), None)
    return Check(subject, stray is None, stray or wanted, wanted)


def _allowed_cpus(proc_root: str, pid: int) -> Optional[str]:
    try:
        with open(os.path.join(proc_root, str(pid), "status"), encoding="utf-8", errors="replace") as handle:
            match = re.search(r"^Cpus_allowed_list:\s*(\S+)", handle.read(), re.MULTILINE)
    except OSError:
        return None  # it ended while we looked
    return match.group(1) if match else None


def _memory_policy(proc_root: str, pid: int) -> Optional[str]:
    """The policy of the first mapping, which is the process's own default."""
    try:
        with open(os.path.join(proc_root, str(pid), "numa_maps"), encoding="utf-8") as handle:
            fields = handle.readline().split()
    except OSError:
        return None
    return fields[1] if len(fields) > 1 else None


def check_kernels(unit: str, env: Mapping[str, str], proc_root: str = "/proc") -> List[Check]:
    """Compare what an instance's ranks say of the kernel extension with what its environment asks for.

    ``env``: the planned environment of the instance. Without ``PDSTACK_KERNELS_REPORT`` nothing is asked. Only files
    of processes that run in the unit now count. ``PDSTACK_KERNELS=auto`` reports and passes: the engine's own code
    runs where a kernel does not.
    """
    pattern = env.get("PDSTACK_KERNELS_REPORT", "")
    if not pattern:
        return []
    subject = f"{unit} kernel extension"
    wanted = "every hooked kernel live in every rank"
    reports = []
    for pid in processes_of(unit, proc_root):
        try:
            with open(pattern.replace("{pid}", str(pid)), encoding="utf-8") as handle:
                report = json.load(handle)
            if not isinstance(report, dict) or not {"calls", "silent", "broken", "captured"} <= set(report):
                raise ValueError("it is not a rank's report")
            reports.append((pid, report))
        except FileNotFoundError:
            continue  # not a rank: the launcher, the tokenizer
        except (OSError, ValueError) as error:
            return [Check(subject, False, f"no readable report of process {pid}: {error}", wanted)]
    faults = [] if reports else ["no rank has reported: the plugin was not loaded"]
    for pid, report in reports:
        for kernel in report["broken"]:
            faults.append(f"{kernel} computes wrongly on this GPU (pid {pid})")
        for kernel in report["silent"] if report["captured"] else []:
            faults.append(f"{kernel} is not in the decode graphs (pid {pid})")
    if not faults:
        live = ", ".join(sorted(reports[0][1]["calls"])) or "none hooked"
        return [Check(subject, True, f"{len(reports)} ranks: {live}", wanted)]
    return [Check(subject, env.get("PDSTACK_KERNELS") != "on", "; ".join(faults), wanted)]


# What an engine makes of a value before it reports it.
_REPORTED_AS = {("disaggregation-transfer-backend", "mooncake_tcp"): "mooncake"}  # mooncake, told to use TCP


def check_configuration(
    subject: str, url: str, args: Mapping[str, Any], http: Http, ignore: Iterable[str] = ()
) -> List[Check]:
    """Compare an engine's own account of its configuration with the planned arguments.

    A process of an earlier deployment can answer on the port, so an answer alone proves nothing.
    """
    reply = http("GET", url, None)
    if reply.status != 200:
        return [Check(f"{subject} configuration", False, f"{url}: {reply.status} {reply.body[:200]}", "200")]
    try:
        info = json.loads(reply.body)
    except ValueError:
        info = None
    if not isinstance(info, dict):
        found = f"{url}: an answer that cannot be read: {reply.body[:200]!r}"
        return [Check(f"{subject} configuration", False, found, "the configuration, a JSON object")]
    checks = []
    for option, planned in sorted(args.items()):
        key = option.replace("-", "_")
        wanted = _REPORTED_AS.get((option, planned), planned) if isinstance(planned, str) else planned
        if option in ignore:
            continue
        if key not in info:
            checks.append(Check(f"{subject} {option}", False, "not reported", _plain(wanted)))
        elif info[key] != wanted:  # 300 == 300.0, and neither is "300"
            checks.append(Check(f"{subject} {option}", False, _plain(info[key]), _plain(wanted)))
    return checks or [Check(f"{subject} {len(args)} arguments", True, "as planned", "as planned")]


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True)


def check_completion(base_url: str, model: str, case: GoldenCase, http: Http, stream: bool) -> Check:
    """Send one greedy completion and compare its text.

    A streamed answer must end with the ``[DONE]`` event: a stream that was cut has status 200, too.
    """
    kind = "streamed" if stream else "plain"
    subject = f"{kind} completion of {case.prompt[:40]!r}"
    body = {"model": model, "prompt": case.prompt, "max_tokens": case.max_tokens, "temperature": 0, "stream": stream}
    reply = http("POST", base_url + "/v1/completions", body)
    wanted = repr(case.expect) if case.expect is not None else f"a match of /{case.pattern}/"
    if reply.status != 200:
        return Check(subject, False, f"status {reply.status}: {reply.body[:300]}", wanted)
    try:
        text = _streamed(reply.body) if stream else str(json.loads(reply.body)["choices"][0]["text"])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return Check(subject, False, f"an answer that cannot be read ({error}): {reply.body[:300]!r}", wanted)
    if case.expect is not None:
        return Check(subject, text == case.expect, repr(text), wanted)
    return Check(subject, bool(re.search(case.pattern or "", text)), repr(text), wanted)


def _streamed(body: str) -> str:
    events = [line[5:].strip() for line in body.splitlines() if line.startswith("data:")]
    if not events or events[-1] != "[DONE]":
        raise ValueError("the stream was cut: no [DONE]")
    return "".join(
        str(json.loads(event)["choices"][0]["text"]) for event in events[:-1] if json.loads(event).get("choices")
    )


@dataclass
class Report:
    """All checks of one host."""

    checks: List[Check] = field(default_factory=list)

    @property
    def failures(self) -> List[Check]:
        return [check for check in self.checks if not check.ok]

    def text(self) -> str:
        """One line a failure: what was found, what was needed."""
        return "\n".join(f"- {check.subject}: found {check.found}, wanted {check.wanted}" for check in self.failures)
