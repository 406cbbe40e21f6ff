"""Waiting is bounded, ends early on failure, and explains."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from pdstack import causes, units, waiter
from pdstack.http import Access
from pdstack.runner import Completed
from pdstack.verify import Reply

TARGET = waiter.Target("decode-0", "pd-decode@0.service", "http://h/health")


class World:
    """A machine whose unit changes state and answers at given seconds."""

    def __init__(
        self, ready_at: float, fails_at: float = 1e9, restart_at: Sequence[float] = (), journal: str = ""
    ) -> None:
        self.now = 100.0
        self.start = self.now
        self.ready_at, self.fails_at, self.restart_at, self.journal = ready_at, fails_at, restart_at, journal

    def runner(self, argv: Sequence[str]) -> Completed:
        if argv[0] == "journalctl":
            return Completed(0, self.journal, "")
        elapsed = self.now - self.start
        failed = elapsed >= self.fails_at
        restarts = sum(elapsed >= moment for moment in self.restart_at)
        active, sub = ("failed", "failed") if failed else ("active", "running")
        return Completed(
            0,
            f"LoadState=loaded\nActiveState={active}\nSubState={sub}\n"
            f"Result={'exit-code' if failed else 'success'}\nMainPID=7\nNRestarts={restarts}\n"
            f"ExecMainStartTimestampMonotonic={int(self.start * 1e6)}\n",
            "",
        )

    def http(self, url: str, access: Access) -> Reply:
        return Reply(200, "") if self.now - self.start >= self.ready_at else Reply(0, "timed out")

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, marks: Path, timeout: float = 60) -> waiter.Readiness:
        return waiter.wait([TARGET], self.runner, self.http, lambda: self.now, self.sleep, timeout, str(marks))[0]


def test_ready_after_a_while_with_its_time(tmp_path: Path) -> None:
    result = World(ready_at=22).wait(tmp_path)
    assert (result.ready, result.seconds) == (True, 22.0)


def test_a_later_run_still_tells_the_time_but_not_of_another_process(tmp_path: Path) -> None:
    world = World(ready_at=22)
    world.wait(tmp_path)
    assert world.wait(tmp_path).seconds == 22.0
    world.start = world.now - 50  # another process, ready before we looked
    assert world.wait(tmp_path).seconds is None


def test_a_process_that_ran_long_before_tells_no_time(tmp_path: Path) -> None:
    """A router that stayed up while its workers restarted did not take that long to start."""
    world = World(ready_at=400)
    world.now += 390
    result = world.wait(tmp_path)
    assert result.ready
    assert result.seconds is None


def test_a_process_that_was_ready_before_is_asked_the_cheap_way(tmp_path: Path) -> None:
    world, asked = World(ready_at=5), []

    def look() -> waiter.Readiness:
        target = waiter.Target("decode-0", "pd-decode@0.service", "health", "alive")
        http = lambda url, access: asked.append(url) or world.http(url, access)  # noqa: E731
        return waiter.wait([target], world.runner, http, lambda: world.now, world.sleep, 60, str(tmp_path))[0]

    assert look().ready
    assert set(asked) == {"health"}
    asked.clear()
    assert look().ready
    assert asked == ["alive"]
    asked.clear()
    world.start = world.now  # another process must prove itself
    world.ready_at = 5
    assert look().ready
    assert set(asked) == {"health"}


def test_a_process_that_was_never_seen_ready_is_known(tmp_path: Path) -> None:
    """An interrupted run leaves one: the next run must wait for it, though it has nothing to restart."""
    world = World(ready_at=5)

    def states() -> list[units.UnitState]:
        return list(units.show(world.runner, ["pd-decode@0.service"]).values())

    assert waiter.never_ready(states(), str(tmp_path)) == ["pd-decode@0.service"]
    world.wait(tmp_path)
    assert waiter.never_ready(states(), str(tmp_path)) == []
    world.start = world.now + 1
    assert waiter.never_ready(states(), str(tmp_path)) == ["pd-decode@0.service"]


def test_a_wait_in_slices_is_one_wait(tmp_path: Path) -> None:
    """The bound, the time to ready and the count of restarts go on; in between the journal tells the phase."""
    world = World(ready_at=22, journal="Load weight begin. avail mem=93.2 GB\n")
    progress = waiter.Progress()

    def piece(target_world: World, timeout: float) -> waiter.Readiness:
        return waiter.wait(
            [TARGET],
            target_world.runner,
            target_world.http,
            lambda: target_world.now,
            target_world.sleep,
            timeout,
            str(tmp_path),
            progress=progress,
            slice_s=10,
        )[0]

    first = piece(world, 60)
    assert (first.ready, first.detail, first.phase) == (False, "", "loading the checkpoint")
    assert world.now - world.start == pytest.approx(10, abs=1)
    piece(world, 60)
    assert (piece(world, 60).seconds, world.now - world.start) == (22.0, 22.0)
    late, progress = World(ready_at=1e9), waiter.Progress()
    for _ in range(3):
        result = piece(late, 25)
    assert "no answer (timed out) after 25 s" in result.detail
    crashing, progress = World(ready_at=1e9, restart_at=(4, 14)), waiter.Progress()
    piece(crashing, 100)
    assert piece(crashing, 100).detail


def test_gives_up_after_the_bound(tmp_path: Path) -> None:
    world = World(ready_at=1e9)
    result = world.wait(tmp_path, timeout=30)
    assert not result.ready
    assert world.now - world.start <= 31
    assert "no answer (timed out) after 30 s" in result.detail


def test_what_never_serves_is_told_with_what_it_answers_and_what_to_do(tmp_path: Path) -> None:
    """Such as a router that listens and has no worker: found, needed, what to do, the variable, the journal."""
    world = World(ready_at=1e9, journal="Router ready\n\x1b[2mno\x1b[0m healthy prefill workers\n")
    target = waiter.Target("router-0", "pd-router.service", "http://h:8000/readiness")
    get = lambda url, access: Reply(503, '{"status":\n "not ready"}')  # noqa: E731
    look = (world.runner, get, lambda: world.now, world.sleep, 30, str(tmp_path))
    (result,) = waiter.wait([target], *look, setting="pd_service_router_ready_timeout")
    assert not result.ready
    assert world.now - world.start <= 31
    assert result.detail.splitlines() == [
        'found: http://h:8000/readiness answers 503: {"status": "not ready"} after 30 s',
        "needed: an answer with status 200",
        "do: read the last lines for what it is waiting for, and `ss -ltnp` for whether it listens; `systemctl restart "
        "pd-router.service` where it hangs; raise pd_service_router_ready_timeout where they show that it was still at "
        "work",
        "last lines of `journalctl -u pd-router.service`:",
        "  Router ready",
        "  no healthy prefill workers",
    ]


@pytest.mark.parametrize(
    ("reply", "journal", "word"),
    [
        (Reply(503, ""), "", "active (running), answers 503"),
        (Reply(503, ""), "Load weight begin", "loading the checkpoint, answers 503"),
        (Reply(0, "refused"), "", "active (running)"),
    ],
)
def test_while_it_waits_it_says_what_is_known(tmp_path: Path, reply: Reply, journal: str, word: str) -> None:
    world = World(ready_at=1e9, journal=journal)
    look = (world.runner, lambda url, access: reply, lambda: world.now, world.sleep, 60, str(tmp_path))
    (result,) = waiter.wait([TARGET], *look, slice_s=5)
    assert (result.ready, result.detail, result.phase) == (False, "", word)


@pytest.mark.parametrize(
    ("content", "found"), [(None, "cannot be read"), (b"", "is empty"), (b"\xff\xfe", "cannot be read"), (b"k", "")]
)
def test_a_key_that_cannot_be_read_ends_the_wait_at_once(
    tmp_path: Path, content: str | bytes | None, found: str
) -> None:
    key = tmp_path / "api_key"
    if content is not None:
        key.write_bytes(content if isinstance(content, bytes) else content.encode())
    world, asked = World(ready_at=3), []
    get = lambda url, access: asked.append(url) or world.http(url, access)  # noqa: E731
    target = waiter.Target("decode-0", "pd-decode@0.service", "http://h/health", key_file=str(key))
    (result,) = waiter.wait([target], world.runner, get, lambda: world.now, world.sleep, 60, str(tmp_path))
    assert result.ready is (found == "")
    assert bool(asked) is result.ready
    if found:
        assert world.now == world.start
        assert f"found: {key} {found}" in result.detail
        assert "needed: the key that it was started with\ndo: run playbooks/serve.yml" in result.detail


def test_a_key_that_is_not_taken_ends_the_wait_at_once(tmp_path: Path) -> None:
    world = World(ready_at=1e9)
    get = lambda url, access: Reply(401, "Unauthorized")  # noqa: E731
    (result,) = waiter.wait([TARGET], world.runner, get, lambda: world.now, world.sleep, 60, str(tmp_path))
    assert world.now == world.start
    assert "found: http://h/health answers 401: Unauthorized\nneeded: the key that it was started with" in result.detail


def test_the_terminal_tells_what_is_going_on_how_long_and_of_how_much(
    monkeypatch: pytest.MonkeyPatch, project_root: Path
) -> None:
    """A line when it changes and once a minute, with the seconds that have passed and the bound."""
    plugin = _plugin(project_root)
    phases = [(10, "loading shard 1 of 46"), *((20 + 10 * i, "compiling kernels") for i in range(8)), (100, "")]
    found = [
        {
            "waited": waited,
            "progress": {"begin": 1.0},
            "pending": bool(phase),
            "instances": [{"name": "d", "ready": not phase, "phase": phase, "state": ""}],
        }
        for waited, phase in phases
    ]
    shown: list[str] = []
    monkeypatch.setattr(plugin.display, "display", shown.append)
    action = object.__new__(plugin.ActionModule)
    action._task = SimpleNamespace(args={"timeout": "1800", "targets": []}, check_mode=False)
    asked: list[dict[str, object]] = []
    action._execute_module = lambda **words: asked.append(dict(words["module_args"])) or found.pop(0)
    monkeypatch.setattr(plugin.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    assert action.run(task_vars={"inventory_hostname": "gpu1"})["pending"] is False
    assert shown == [
        "  gpu1: d: loading shard 1 of 46 (10 s of at most 1800 s)",
        "  gpu1: d: compiling kernels (20 s of at most 1800 s)",
        "  gpu1: d: compiling kernels (80 s of at most 1800 s)",
    ]
    assert [args.get("progress") for args in asked] == [None] + [{"begin": 1.0}] * 9


def test_every_wait_of_a_role_is_bounded_by_a_variable_that_it_names(project_root: Path) -> None:
    waits = []
    for path in sorted((project_root / "roles").glob("*/tasks/*.yml")):
        for task in yaml.safe_load(path.read_text()):
            if "pd_service_wait" in task:
                waits.append(task["pd_service_wait"])
                role = path.parent.parent
                assert waits[-1]["setting"] in waits[-1]["timeout"], path
                assert waits[-1]["setting"] in yaml.safe_load((role / "defaults/main.yml").read_text()), path
                router = "router" in waits[-1]["targets"]
                assert ("router" in waits[-1]["setting"]) is router, f"{path}: a router is not given an engine's time"
    assert len(waits) >= 4


def _plugin(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("pd_service_wait_action", root / "action_plugins/pd_service_wait.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_failed_unit_ends_the_wait_at_once_with_the_journal_and_a_cause(tmp_path: Path) -> None:
    world = World(ready_at=1e9, fails_at=3, journal="loading\nModuleNotFoundError: No module named 'sgl_kernel'\n")
    result = world.wait(tmp_path)
    assert world.now - world.start < 5
    assert "likely cause: the release is incomplete" in result.detail
    assert "No module named 'sgl_kernel'" in result.detail


def test_a_start_that_systemd_refuses_is_told_with_the_journal_of_what_does_not_run() -> None:
    step = "pd-decode@0.service: Failed at step NUMA_POLICY spawning /opt/pdstack/current/venv/bin/python"
    failed = World(ready_at=1e9, fails_at=0, journal=f"{step}\n")
    told = waiter.why_not_running(["pd-decode@0.service"], failed.runner)
    assert told.startswith("pd-decode@0.service is failed (failed).\nlikely cause: systemd could not apply a setting")
    assert step in told
    assert waiter.why_not_running(["pd-decode@0.service"], World(ready_at=1).runner) == ""
    assert waiter.why_not_running(["x.service"], lambda argv: Completed(1, "", "Failed to connect to bus")) == ""


def test_a_unit_that_restarts_over_and_over_has_failed(tmp_path: Path) -> None:
    world = World(ready_at=1e9, restart_at=(4, 9))
    assert not world.wait(tmp_path).ready
    assert world.now - world.start < 12


@pytest.mark.parametrize(
    ("line", "means"),
    [
        (
            "thread 'main' panicked: failed to install Prometheus metrics exporter: Address already in use",
            "metrics port",
        ),
        ("OSError: [Errno 98] Address already in use", "port of this instance"),
        ("launch_server.py: error: unrecognized arguments: --cuda-graph-max-bs", "argument is unknown"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "memory does not hold"),
        ("ValueError: DSpark dense speculative decoding requires setting --speculative-draft-model-path.", "no draft"),
        ("ModuleNotFoundError: No module named 'sgl_kernel'", "release is incomplete"),
        ("OSError: libnuma.so.1: cannot open shared object file: No such file", "release is incomplete"),
        (
            "ValueError: User-specified context_length (8192) is greater than the derived context_length (4096).",
            "more than the model was made for",
        ),
        ("NVML: Driver/library version mismatch", "driver and the CUDA libraries do not fit"),
        ("[rank1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", "NCCL failed or hung"),
        ("Scheduler watchdog timeout (self.watchdog_timeout=300.0, self.soft=False)", "a rank hung or never joined"),
        ("/tmp/x/cuda_utils.c:9:10: fatal error: Python.h: No such file or directory", "Python's headers"),
        ("RuntimeError: Failed to find C compiler. Please specify via CC", "Python's headers or the compiler"),
        ("NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.", "a GPU failed"),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "a GPU failed"),
        ("ImportError: cuda_utils.so: failed to map segment from shared object", "mounted noexec"),
        ("PermissionError: [Errno 13] Permission denied: '/tmp/sglang_temp_file_17.sh'", "mounted noexec"),
        ("RuntimeError: No CUDA GPUs are available", "shows the service no GPU"),
        ("RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment", "no GPU"),
        ("torch.distributed.DistBackendError: NCCL communicator was aborted", "a rank hung or never joined"),
        ("pd-decode@0.service: A process of this unit has been killed by the OOM killer.", "host's memory ran out"),
        ("OSError: [Errno 28] No space left on device: '/var/lib/pdstack/jit/x'", "a disk is full"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "no kernels for this"),
        ("/bin/sh: 1: /opt/pdstack/cuda/bin/nvcc: not found", "could not be compiled"),
        ("NIXL_ERR_BACKEND", "no usable transport"),
        ("pd-decode@0.service: Failed at step NUMA_POLICY spawning", "could not apply a setting"),
    ],
)
def test_known_patterns_name_their_cause(line: str, means: str) -> None:
    cause = causes.likely(f"something\n{line}\nsomething")
    assert cause is not None
    assert means in cause.means


def test_an_unknown_journal_names_no_cause() -> None:
    assert causes.likely("all is well") is None


def test_modules_that_an_engine_does_without_are_no_cause() -> None:
    """sglang 0.5.23 prints these at each start and goes on; they must not hide what it failed of."""
    usual = (
        "[2026-11-30 11:43:13] Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'\n"
        "[2026-11-30 11:43:14] OpenAI Responses API (/v1/responses) disabled: OpenAIServingResponses init failed "
        "(ModuleNotFoundError: No module named 'openai_harmony')\n"
    )
    assert causes.likely(usual) is None
    cause = causes.likely(usual + "torch.OutOfMemoryError: CUDA out of memory\n")
    assert cause is not None
    assert "memory" in cause.means
