"""How GPUs and pairs talk: fusion, NCCL, the kernel extension."""

from __future__ import annotations

import pathlib
import tomllib
from dataclasses import replace

import pytest
from pdstack import flags
from pdstack.facts import Fabric, P2p, ProbeStep
from unit.plan import inventories as inv
from unit.plan.asking import named, reasons
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
