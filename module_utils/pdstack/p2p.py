"""Measured peer-to-peer: copies between GPUs, timed, with every byte compared. Opt-in.

A driver may claim peer access and yet hang or corrupt (an IOMMU that translates and bridges that
redirect), and pairs that are fast alone may collapse together. So two passes: each ordered pair alone,
and all pairs between two sets of GPUs at once, each direction. Copies are the copy engines'
(cuMemcpyPeerAsync), from plain device memory; contexts live in the child process (see isolate.py).
"""

from __future__ import annotations

import json
import os
import random
from contextlib import ExitStack
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from . import codec, codes, cuda, isolate
from .facts import Gpu, HostFacts, P2p

BUFFER_BYTES = 64 << 20  # of each copy
REPEATS = 16
WARM_UP = 2
TOLERANCE = 0.10  # a flow that lost more than this against the baseline is a regression
IDLE_BYTES = 1 << 30  # memory in use above which a GPU counts as busy
_ALREADY_ENABLED = 704
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Flow:
    """Copies from one GPU to another; positions in HostFacts.gpus."""

    source: int
    target: int
    gb_s: float  # 1e9 bytes a second, one way
    data_ok: bool
    direct: bool  # peer access was enabled; otherwise the driver stages through host memory


@dataclass(frozen=True)
class Measurement:
    """What a child measured. ``error`` is empty when all of it was."""

    pairs: List[Flow] = field(default_factory=list)
    concurrent: List[List[Flow]] = field(default_factory=list)  # one list per direction
    error: str = ""


@dataclass(frozen=True)
class Baseline:
    """A measurement to compare later ones with, keyed by PCI id. Kept on the host as JSON."""

    gpus: List[str]
    measured_at: str
    driver: Optional[str] = None
    measured_gb_s: List[List[Optional[float]]] = field(default_factory=list)
    concurrent_gb_s: Optional[float] = None


@dataclass(frozen=True)
class Kept:
    """The last measurement of a host, kept there as JSON: what plan and profile know of it, and for what it holds."""

    gpus: List[str]  # PCI addresses
    driver: Optional[str]
    iommu_translating: Optional[bool]
    acs_redirect: List[str]
    p2p: P2p


def refusal(facts: HostFacts, force: bool) -> str:
    """Return why this host must not be measured now, with the way out; "" when it may be.

    ``force`` lifts the refusal over IOMMU and ACS alone: a busy GPU is never measured, the load
    would disturb its user and the figure would be wrong.
    """
    if facts.driver.state != "ok":
        return f"not measured: the driver's state is {facts.driver.state} ({facts.driver.detail or 'no detail'})"
    usable = [gpu for gpu in facts.gpus if gpu.index is not None]
    if len(usable) < 2:
        return f"not measured: {len(usable)} usable GPU, a pair is needed"
    for gpu in usable:
        busy = in_use(gpu)
        if busy:
            return f"not measured: {busy}; it must be idle, so stop what uses it first"
    if facts.system.iommu_translating and facts.system.acs_redirect and not force:
        bridges = ", ".join(facts.system.acs_redirect)
        return (
            f"not measured: the IOMMU translates and ACS request redirect is on at {bridges}; copies between GPUs can "
            "hang the machine or corrupt data there. Boot with iommu=pt or turn ACS off in the firmware, or force it"
        )
    return ""


def in_use(gpu: Gpu) -> str:
    """Return what uses a GPU, in words; "" for an idle one."""
    if gpu.processes:
        return f"GPU {gpu.pci} is in use by {gpu.processes[0].command or 'process'} (pid {gpu.processes[0].pid})"
    used = gpu.memory_used_bytes or 0
    return f"GPU {gpu.pci} has {used >> 20} MiB in use" if used > IDLE_BYTES else ""


def halves(gpus: List[Gpu]) -> List[List[int]]:
    """Return two sets of positions: by NUMA node where both sides then have GPUs, else by order."""
    usable = [position for position, gpu in enumerate(gpus) if gpu.index is not None]
    nodes = sorted({gpus[p].numa_node for p in usable if gpus[p].numa_node is not None}, key=lambda node: node or 0)
    if len(nodes) > 1 and all(gpus[p].numa_node is not None for p in usable):
        low = set(nodes[: len(nodes) // 2])
        return [[p for p in usable if gpus[p].numa_node in low], [p for p in usable if gpus[p].numa_node not in low]]
    cut = (len(usable) + 1) // 2
    return [usable[:cut], usable[cut:]]


def measured(
    facts: HostFacts,
    folder: Optional[str],
    force: bool,
    timeout: float,
    when: str,
    before: Optional[Baseline] = None,
    size: Optional[int] = None,
    repeats: int = REPEATS,
) -> P2p:
    """Return the P2p section with what a child measured within ``timeout`` seconds, or why it did not.

    ``size`` is the bytes of one copy, BUFFER_BYTES unless given.
    """
    reason = refusal(facts, force)
    if reason:
        return replace(facts.p2p, note=reason)
    environment = isolate.driver_environment(os.environ)
    question = request(facts, folder, size or BUFFER_BYTES, repeats)
    outcome = isolate.Child(measure, question, timeout, environment).collect()
    if outcome.status != "ok":
        return replace(facts.p2p, note=f"measurement {outcome.status}: {outcome.detail}", measured_at=when)
    found = fill(facts.p2p, facts.gpus, codec.load(Measurement, outcome.value), when)
    if before is None:
        return found
    return replace(found, regressions=regressions(before, replace(facts, p2p=found)))


def request(facts: HostFacts, folder: Optional[str], size: int, repeats: int) -> Dict[str, Any]:
    """Return the request of a child that runs ``measure``."""
    usable = {str(position): gpu.pci for position, gpu in enumerate(facts.gpus) if gpu.index is not None}
    return {"folder": folder, "gpus": usable, "sets": halves(facts.gpus), "bytes": size, "repeats": repeats}


def fill(claims: P2p, gpus: List[Gpu], measured: Measurement, when: str) -> P2p:
    """Return the P2p section with the measured figures."""
    count = range(len(gpus))
    speed = {(flow.source, flow.target): flow.gb_s for flow in measured.pairs}
    flows = [flow for direction in measured.concurrent for flow in direction]
    totals = [sum(flow.gb_s for flow in direction) for direction in measured.concurrent]
    everything = [*measured.pairs, *flows]
    return replace(
        claims,
        measured_gb_s=[[speed.get((a, b)) for b in count] for a in count],
        concurrent_gb_s=min((flow.gb_s for flow in flows), default=None),
        concurrent_total_gb_s=min(totals, default=None),
        concurrent_sets=halves(gpus),
        data_ok=all(flow.data_ok for flow in everything) if everything else None,
        measured_at=when,
        note=measured.error or _wrong_bytes(everything, gpus),
    )


def _wrong_bytes(flows: List[Flow], gpus: List[Gpu]) -> str:
    wrong = sorted({(flow.source, flow.target) for flow in flows if not flow.data_ok})
    pairs = ", ".join(f"{gpus[a].pci} to {gpus[b].pci}" for a, b in wrong)
    return f"the copied bytes are wrong: {pairs}" if wrong else ""


def baseline(facts: HostFacts) -> Optional[Baseline]:
    """Return what to keep of a good measurement; None where nothing good was measured."""
    measured = facts.p2p
    if not measured.measured_at or measured.data_ok is not True or measured.note or measured.measured_gb_s is None:
        return None
    return Baseline(
        [gpu.pci for gpu in facts.gpus],
        measured.measured_at,
        facts.driver.loaded_version,
        measured.measured_gb_s,
        measured.concurrent_gb_s,
    )


def read_baseline(path: str) -> Optional[Baseline]:
    """Return the baseline that is kept at ``path``, None where there is none; ValueError with what to do if damaged."""
    try:
        with open(path, encoding="utf-8") as stream:
            found = codec.load(Baseline, json.load(stream))
        if [len(row) for row in found.measured_gb_s] != [len(found.gpus)] * len(found.gpus):
            raise ValueError(f"{len(found.gpus)} GPUs and a matrix of another size")
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: found a file that is no baseline ({error}), needed one that pd_fabric_info returned. "
            "Remove it and measure again."
        ) from error


def kept(facts: HostFacts) -> Optional[Kept]:
    """Return what to keep of a measurement, good or bad; None where none was begun.

    One that an error ended proves nothing, whatever had been copied by then.
    """
    measured = facts.p2p
    if measured.measured_at is None:
        return None
    if measured.note and measured.data_ok:
        measured = replace(measured, data_ok=None)
    return Kept(*_circumstances(facts), measured)


def read_kept(path: str) -> Optional[Kept]:
    """Return what is kept at ``path``; None where nothing is, or what is damaged, which the next measurement mends."""
    return codec.kept(Kept, path)


def recalled(facts: HostFacts, before: Optional[Kept]) -> HostFacts:
    """Return the facts with the figures of an earlier measurement, while what it holds for is the same."""
    if before is None or _circumstances(facts) != (
        before.gpus,
        before.driver,
        before.iommu_translating,
        before.acs_redirect,
    ):
        return facts
    then = before.p2p
    return replace(
        facts,
        p2p=replace(
            facts.p2p,
            measured_gb_s=then.measured_gb_s,
            concurrent_gb_s=then.concurrent_gb_s,
            concurrent_total_gb_s=then.concurrent_total_gb_s,
            concurrent_sets=then.concurrent_sets,
            data_ok=then.data_ok,
            measured_at=then.measured_at,
            note=then.note,
        ),
    )


def _circumstances(facts: HostFacts) -> Tuple[List[str], Optional[str], Optional[bool], List[str]]:
    """Return what a measurement holds for: with another kernel option or BIOS setting it has to be made again."""
    system, driver = facts.system, facts.driver.loaded_version
    return [gpu.pci for gpu in facts.gpus], driver, system.iommu_translating, system.acs_redirect


def regressions(before: Baseline, facts: HostFacts) -> List[str]:
    """Return, in words, each flow that lost more than the tolerance against the baseline."""
    now, addresses = facts.p2p, [gpu.pci for gpu in facts.gpus]
    if now.measured_gb_s is None:
        return []
    if before.gpus != addresses:
        return [f"the baseline of {before.measured_at} is of other GPUs ({', '.join(before.gpus)}): measure a new one"]
    found = []
    for a, row in enumerate(before.measured_gb_s):
        for b, old in enumerate(row):
            new = now.measured_gb_s[a][b]
            if _lost(old, new):
                found.append(f"{addresses[a]} to {addresses[b]}: {new:.1f} GB/s, {old:.1f} on {before.measured_at}")
    if _lost(before.concurrent_gb_s, now.concurrent_gb_s):
        found.append(
            f"all pairs at once, slowest: {now.concurrent_gb_s:.1f} GB/s, "
            f"{before.concurrent_gb_s:.1f} on {before.measured_at}"
        )
    return found


def _lost(old: Optional[float], new: Optional[float]) -> bool:
    return old is not None and new is not None and new < old * (1 - TOLERANCE)


# ---- in the child ----


class CudaFailed(Exception):
    """A driver call that did not succeed."""


def measure(question: Mapping[str, Any], announce: Callable[[str], None]) -> Any:
    """Child entry: run both passes and return a Measurement as plain JSON, as far as it got."""
    announce(f"dlopen {cuda.LIBRARY}")
    pairs: List[Flow] = []
    concurrent: List[List[Flow]] = []
    error = ""
    try:
        library = cuda.Library(cuda.load(cuda.LIBRARY, question.get("folder")), announce)
        with ExitStack() as stack:
            bench = Bench(library, stack, question["gpus"], int(question["bytes"]), int(question["repeats"]))
            for a in bench.positions:
                for b in bench.positions:
                    if a != b:
                        pairs += bench.run([(a, b)])
            first, second = question["sets"]
            for sources, targets in ((first, second), (second, first)):
                concurrent.append(bench.run([(a, b) for a in sources for b in targets]))
    except (OSError, CudaFailed, cuda.FunctionMissing) as failed:
        error = f"{type(failed).__name__}: {failed}"
    return codec.dump(Measurement(pairs, concurrent, error))


class Bench:
    """GPUs with a context and a filled source buffer each. ``stack`` releases everything in reverse order."""

    def __init__(
        self, library: cuda.Library, stack: ExitStack, gpus: Mapping[str, str], size: int, repeats: int
    ) -> None:
        self._library, self._size, self._repeats = library, size, repeats
        self.positions = [int(position) for position in gpus]
        self._contexts: Dict[int, c_void_p] = {}
        self._sources: Dict[int, c_ulonglong] = {}
        self._call("cuInit", c_uint(0))
        for position in self.positions:
            device, context = c_int(), c_void_p()
            self._call("cuDeviceGetByPCIBusId", byref(device), c_char_p(gpus[str(position)].encode()))
            self._call("cuDevicePrimaryCtxRetain", byref(context), device)
            stack.callback(library.call, "cuDevicePrimaryCtxRelease_v2", device)
            self._contexts[position] = context
        self._direct = {(a, b): self._enable(a, b) for a in self.positions for b in self.positions if a != b}
        for position in self.positions:
            self._sources[position] = self._allocate(stack, position)
            data = payload(position, size)
            self._call("cuMemcpyHtoD_v2", self._sources[position], data, c_size_t(size))

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._library.call(name, *arguments)
        if code:
            raise CudaFailed(f"{name}: {codes.cuda(code)} ({code})")

    def _on(self, position: int) -> None:
        self._call("cuCtxSetCurrent", self._contexts[position])

    def _enable(self, a: int, b: int) -> bool:
        self._on(a)
        return self._library.call("cuCtxEnablePeerAccess", self._contexts[b], c_uint(0)) in (0, _ALREADY_ENABLED)

    def _allocate(self, stack: ExitStack, position: int) -> c_ulonglong:
        pointer = c_ulonglong()
        self._on(position)
        self._call("cuMemAlloc_v2", byref(pointer), c_size_t(self._size))
        stack.callback(self._free, position, pointer)
        return pointer

    def _free(self, position: int, pointer: c_ulonglong) -> None:
        self._on(position)
        self._library.call("cuMemFree_v2", pointer)

    def _create(self, stack: ExitStack, make: str, destroy: str) -> c_void_p:
        thing = c_void_p()
        self._call(make, byref(thing), c_uint(0))
        stack.callback(self._library.call, destroy, thing)
        return thing

    def run(self, flows: List[Tuple[int, int]]) -> List[Flow]:
        """Copy along all flows at once and return each with its speed and the check of its bytes."""
        with ExitStack() as stack:
            lanes = [self._lane(stack, a, b) for a, b in flows]
            for _ in range(WARM_UP):
                self._copy(lanes)
            for lane in lanes:
                self._call("cuEventRecord", lane.start, lane.stream)
            for _ in range(self._repeats):
                self._copy(lanes)
            for lane in lanes:
                self._call("cuEventRecord", lane.end, lane.stream)
            for lane in lanes:
                self._call("cuEventSynchronize", lane.end)
            return [self._flow(lane) for lane in lanes]

    def _lane(self, stack: ExitStack, a: int, b: int) -> _Lane:
        target = self._allocate(stack, b)
        self._call("cuMemsetD8_v2", target, c_ubyte(0), c_size_t(self._size))
        self._call("cuCtxSynchronize")
        self._on(a)
        stream = self._create(stack, "cuStreamCreate", "cuStreamDestroy_v2")
        start = self._create(stack, "cuEventCreate", "cuEventDestroy_v2")
        end = self._create(stack, "cuEventCreate", "cuEventDestroy_v2")
        return _Lane(a, b, target, stream, start, end)

    def _copy(self, lanes: List[_Lane]) -> None:
        for lane in lanes:
            self._call(
                "cuMemcpyPeerAsync",
                lane.target,
                self._contexts[lane.b],
                self._sources[lane.a],
                self._contexts[lane.a],
                c_size_t(self._size),
                lane.stream,
            )

    def _flow(self, lane: _Lane) -> Flow:
        milliseconds = c_float()
        self._call("cuEventElapsedTime", byref(milliseconds), lane.start, lane.end)
        landed = bytearray(self._size)
        self._on(lane.b)
        view = (c_ubyte * self._size).from_buffer(landed)
        self._call("cuMemcpyDtoH_v2", view, lane.target, c_size_t(self._size))
        del view
        speed = self._size * self._repeats / max(milliseconds.value, 1e-6) / 1e6
        same = landed == payload(lane.a, self._size)
        return Flow(lane.a, lane.b, round(speed, 2), same, self._direct[lane.a, lane.b])


@dataclass(frozen=True)
class _Lane:
    a: int
    b: int
    target: c_ulonglong
    stream: c_void_p
    start: c_void_p
    end: c_void_p


def payload(position: int, size: int) -> bytes:
    """Return the bytes that a GPU sends: its own random block, each copy of it numbered.

    So bytes of another GPU, blocks in another order and memory that was never written all differ.
    """
    block = random.Random(position).randbytes(_BLOCK - 8)
    return b"".join(block + number.to_bytes(8, "little") for number in range(-(-size // _BLOCK)))[:size]
