"""How GPUs and pairs talk: fusion, NCCL, the kernel extension."""

from __future__ import annotations

import pathlib
import tomllib
from dataclasses import replace
from typing import Any

import pytest
from pdstack import flags
from pdstack.facts import Fabric, P2p, ProbeStep
from unit.plan import inventories as inv
from unit.plan.asking import SMALL, named, reasons
from unit.plan.recorded import recorded


def steps(codes: dict[str, int | None]) -> list[ProbeStep]:
    return [ProbeStep(name, code, "words", 1 if name.startswith("attr") else None) for name, code in codes.items()]


@pytest.mark.parametrize(
    ("capability", "codes", "off", "said"),
    [
        ("12.0", {"multicast_granularity": 0, "fd_create": 0}, True, "gate"),
        ("9.0", {"multicast_granularity": 0, "fd_create": 0}, False, "answers 0"),
        ("9.0", {"multicast_granularity": 800, "fd_create": 0}, True, "multicast_granularity answers 800 on GPU 4"),
        ("10.0", {"multicast_granularity": 0, "fd_create": 801}, True, "fd_create answers 801"),
        ("9.0", {"multicast_granularity": 0, "fd_create": 2}, False, "proves nothing"),
        ("9.0", {"multicast_granularity": None, "fd_create": 0}, False, "proves nothing"),
        ("9.0", {}, False, "proves nothing"),
        (None, {}, False, "not known"),
        # The attribute says that there are fabric handles; without an IMEX channel there are none.
        (
            "9.0",
            {"attr_fabric": 0, "multicast_granularity": 0, "fd_create": 0, "fabric_create": 800},
            True,
            "answers 800",
        ),
        ("9.0", {"multicast_granularity": 0, "fd_create": 0, "fabric_create": 800}, False, "answers 0"),
    ],
)
def test_fusion_is_decided_by_gate_and_probe(
    capability: str | None, codes: dict[str, int | None], off: bool, said: str
) -> None:
    facts = inv.host(fabric=Fabric([steps(codes)] * 8))
    facts = replace(facts, gpus=[replace(gpu, compute_capability=capability) for gpu in facts.gpus])
    item = named(inv.planned(facts), "decode-0")
    assert ("enforce-disable-flashinfer-allreduce-fusion" in item.args) is off
    assert said in reasons(item, "fusion")


def test_nvlink_leaves_nccl_alone() -> None:
    item = named(inv.planned(recorded()["nvswitch-8"]), "decode-0")
    assert not [name for name in item.env if name.startswith("NCCL_")]
    assert "disable-custom-all-reduce" not in item.args
    assert "NVLink" in reasons(item, "NCCL")


def test_all_that_is_compiled_at_run_time_goes_to_one_folder() -> None:
    """Only the JIT cache is writable in a unit, and not every compiler asks SGLANG_CACHE_DIR."""
    env = named(inv.planned(inv.host()), "decode-0").env
    assert env["HOME"] == env["SGLANG_CACHE_DIR"]
    assert env["HOME"].startswith("/var/lib/pdstack/jit/")
    assert env["TORCHINDUCTOR_CACHE_DIR"] == env["HOME"] + "/inductor", "torch would take the unit's own /tmp"


@pytest.mark.parametrize(
    ("answer", "level", "said"), [(True, "SYS", "claims"), (False, None, "denies"), (None, None, "not known")]
)
def test_peer_access_decides_nccls_level(answer: bool | None, level: str | None, said: str) -> None:
    facts = inv.host()
    claimed = [[None if a == b else answer for b in range(8)] for a in range(8)]
    item = named(inv.planned(replace(facts, p2p=P2p(claimed=claimed, link_type=facts.p2p.link_type))), "decode-0")
    assert item.env.get("NCCL_P2P_LEVEL") == level
    assert said in reasons(item, "NCCL_P2P_LEVEL")
    if answer is False:
        assert "staged through host memory" in reasons(item, "KV lane")


def test_one_switch_needs_no_level() -> None:
    item = named(inv.planned(inv.host(switch=4), pd_topology=inv.pd(4, 4)), "prefill-0")
    assert "NCCL_P2P_LEVEL" not in item.env
    assert "disable-custom-all-reduce" not in item.args


@pytest.mark.parametrize(
    ("host", "release", "role", "said"),
    [
        ("rtx-pro-6000-8", "sglang-0.5.23", "decode-0", "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1"),
        ("rtx-pro-6000-8", "sglang-0.5.23", "prefill-0", ""),  # its messages are larger than those kernels take
        ("rtx-pro-6000-8", "sglang-0.5.13.post1", "decode-0", ""),  # has none
        ("nvswitch-8", "sglang-0.5.23", "decode-0", ""),  # has NVLink
    ],
)
def test_kernels_for_gpus_without_nvlink_are_offered_and_stay_off(
    host: str, release: str, role: str, said: str
) -> None:
    item = named(inv.planned(recorded()[host], pd_release=release), role)
    assert "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE" not in item.env
    found = [why.reason for why in item.why if why.decision == "PCIe all-reduce"]
    assert [said in reason for reason in found] == ([True] if said else [])


@pytest.mark.parametrize(
    ("gigabytes", "topology", "jobs"),
    [
        (1024, inv.pd(4, 4), 32),  # each of the node's 32 CPUs
        (128, inv.pd(4, 4), 10),  # the node's memory is what is short
        (512, inv.pd(2, 2, p=2, d=2), 16),  # 16 CPUs of the node's 32
        (128, inv.aggregated(8), 21),  # over both nodes
        (2, inv.pd(4, 4), 1),
    ],
)
def test_compilers_of_the_first_start_fit_into_the_instances_memory(gigabytes: int, topology: Any, jobs: int) -> None:
    """ninja starts one for each CPU: 128 of them on one node of the reference's host, at gigabytes each."""
    facts = inv.host()
    facts = replace(facts, numa=[replace(node, memory_bytes=gigabytes * 10**9) for node in facts.numa])
    for item in inv.planned(facts, pd_topology=topology, pd_model=SMALL).instances:
        assert item.env["MAX_JOBS"] == str(jobs), item.name


def test_nothing_is_said_of_compilers_where_the_memory_is_not_known() -> None:
    facts = inv.host()
    facts = replace(facts, numa=[replace(node, memory_bytes=None) for node in facts.numa])
    assert "MAX_JOBS" not in named(inv.planned(facts), "decode-0").env


@pytest.mark.parametrize(
    ("release", "topology", "variable"),
    [
        ("sglang-0.5.23", inv.pd(4, 4), "0"),  # pinned by its unit
        ("sglang-0.5.23", inv.aggregated(8), None),  # over both nodes: the engine pins each rank
        ("sglang-0.5.13.post1", inv.pd(4, 4), None),  # does nothing where a unit has pinned it
    ],
)
def test_ranks_are_pinned_once(release: str, topology: Any, variable: str | None) -> None:
    """The engine's own way runs numactl by a script in /tmp, and ends where that is mounted noexec."""
    for item in inv.planned(inv.host(), pd_release=release, pd_topology=topology).instances:
        assert item.env.get("SGLANG_AUTO_NUMA_BIND") == variable
        assert ("numa-node" in item.args) is (topology["mode"] == "aggregated")


def test_a_server_that_does_all_has_as_long_for_its_first_request_as_a_pair() -> None:
    """The engine gives prefill and decode 1800 s for it and others 600, after which it ends itself."""
    for topology in (inv.aggregated(8), inv.replicas(4, 2)):
        for item in inv.planned(inv.host(), pd_topology=topology).instances:
            assert item.env["SGLANG_WARMUP_TIMEOUT"] == "1800"
    for item in inv.planned(inv.host()).instances:
        assert "SGLANG_WARMUP_TIMEOUT" not in item.env


@pytest.mark.parametrize(
    ("host", "release", "wanted", "on", "said"),
    [
        ("rtx-pro-6000-8", "sglang-0.5.13.post1", "auto", True, "tensor cores"),
        ("rtx-pro-6000-8", "sglang-0.5.23", "auto", True, "kernels of its own"),
        ("rtx-pro-6000-8", "sglang-0.5.23", "on", True, "pd_kernel_extension: on"),
        ("rtx-pro-6000-8", "sglang-0.5.13.post1", "off", False, "pd_kernel_extension: off"),
        ("nvswitch-8", "sglang-0.5.13.post1", "auto", False, "compute capability 9.0"),
        ("nvswitch-8", "sglang-0.5.13.post1", "on", True, "pd_kernel_extension: on"),
    ],
)
def test_the_kernel_extension_is_named_or_nothing_is(host: str, release: str, wanted: str, on: bool, said: str) -> None:
    made = inv.planned(recorded()[host], pd_release=release, pd_kernel_extension=wanted)
    assert made.kernel_extension is on
    item = named(made, "decode-0")
    assert item.env["SGLANG_PLUGINS"] == ("pdstack_kernels" if on else "none")
    assert item.env.get("PDSTACK_KERNELS") == (wanted if on else None)
    report = item.env.get("PDSTACK_KERNELS_REPORT")
    assert report == ("/run/pdstack/decode-0/kernels-{pid}.json" if on else None)
    assert said in reasons(item, "kernel extension")


def test_the_plugin_and_its_switch_are_called_as_the_kernels_say(project_root: pathlib.Path) -> None:
    package = project_root / "kernels"
    entry = tomllib.loads((package / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    assert list(entry) == [flags.KERNEL_PLUGIN]
    item = named(inv.planned(recorded()["rtx-pro-6000-8"]), "decode-0")
    text = (package / "src/pdstack_kernels/plugin.py").read_text()
    assert [name for name in item.env if name.startswith("PDSTACK_") and name not in text] == []
    releases = (package / "src/pdstack_kernels/releases.py").read_text()
    served = {item.engine.version for item in flags.RELEASES.values() if item.profile == "gpu"}
    assert all(f'"{version}": Release(' in releases for version in served)


@pytest.mark.parametrize(
    ("release", "path"), [("sglang-0.5.13.post1", "/get_server_info"), ("sglang-0.5.23", "/server_info")]
)
def test_the_plan_says_where_an_engine_of_its_release_tells_its_configuration(release: str, path: str) -> None:
    assert inv.planned(recorded()["rtx-pro-6000-8"], pd_release=release).info_path == path
