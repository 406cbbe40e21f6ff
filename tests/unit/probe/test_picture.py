"""The pictures: every fixture host can be drawn, and what matters is in them."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hosts import build, catalogue
from pdstack import codec, facts, picture, svg

NAMES = sorted(catalogue.BY_NAME)
SVG = "{http://www.w3.org/2000/svg}"


def on_file(name: str) -> facts.HostFacts:
    return codec.load(facts.HostFacts, json.loads((build.FIXTURES / "facts" / f"{name}.json").read_text()))


@pytest.fixture(scope="module")
def planned():
    """A plan of the reference host, by the real planner."""
    from unit.plan import inventories

    return inventories.planned(on_file("rtx-pro-6000-8"))


def words(drawing: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(drawing).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", NAMES)
def test_every_host_as_text(name):
    host = on_file(name)
    lines = picture.text(host).split("\n")
    assert lines[0].startswith(f"{name} (simulated): ")
    assert max(map(len, lines)) <= picture.WIDTH
    assert not [line for line in lines if line != line.rstrip()]  # YAML output would quote the whole block
    for gpu in host.gpus:
        assert sum(gpu.pci in line for line in lines) >= 1


@pytest.mark.parametrize("name", NAMES)
def test_every_host_as_drawing(name):
    host = on_file(name)
    shown = words(svg.svg(host))
    assert shown[0] == name
    assert "simulated" in shown
    for gpu in host.gpus:
        assert gpu.pci in shown
    for node in host.numa:
        if node.cpus:
            assert f"NUMA node {node.node}" in shown


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_drawn_outside_the_sheet(name):
    root = ET.fromstring(svg.svg(on_file(name)))
    width, height = float(root.get("width")), float(root.get("height"))
    assert len(list(root.iter(f"{SVG}rect"))) > 2
    assert len(list(root.iter(f"{SVG}text"))) > 2
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.get("width")) <= width
        assert float(box.get("y", 0)) + float(box.get("height")) <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.get("y")) < height
        # an average glyph of the font is 0.62 of its size; what does not fit would run off the sheet
        if text.get("text-anchor") == "start":
            assert float(text.get("x")) + len(text.text or "") * float(text.get("font-size")) * 0.5 < width, text.text


def test_the_drawing_needs_nothing_from_elsewhere():
    drawing = svg.svg(on_file("rtx-pro-6000-8")).replace("http://www.w3.org/2000/svg", "")
    for reference in ("http", "href", "url(", "<image", "<script", "<style"):
        assert reference not in drawing


def test_names_from_the_driver_cannot_break_the_drawing():
    host = on_file("h200-vm-2")
    evil = replace(host.gpus[0], name='</text><script>"&')
    assert '</text><script>"&' in words(svg.svg(replace(host, gpus=[evil, *host.gpus[1:]])))


def test_roles(planned):
    host = on_file("rtx-pro-6000-8")
    rows = [line for line in picture.text(host, planned).split("\n") if "0000:" in line]
    assert [("prefill-0" in row, "decode-0" in row) for row in rows] == [(True, False)] * 4 + [(False, True)] * 4
    drawing = svg.svg(host, planned)
    shown = words(drawing)
    assert (shown.count("prefill-0"), shown.count("decode-0")) == (4, 4)
    assert {drawing.count(f'fill="{svg.ROLES[role].fill}"') for role in ("prefill", "decode")} == {5}  # and the legend
    for item in planned.instances:
        for why in item.why:
            assert any(why.reason[:40] in line for line in shown), why


def test_a_plan_of_other_hosts_gives_no_roles(planned):
    other = replace(on_file("rtx-pro-6000-8"), host="another")
    assert "prefill-0" not in picture.text(other, planned)


def test_refusals_are_drawn():
    assert "needed: a GPU that answers" in words(svg.svg(on_file("gpu-lost"), refused="x\nneeded: a GPU that answers"))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gpu-lost", "GPU 5 (0000:85:00.0): NVML 15: GPU is lost"),
        ("mig-on", "MIG on"),
        ("wedged", "cuInit did not return within 1 s"),
        ("mismatch", "(803)"),
        ("busy", "in use: vllm (4242)"),
        ("busy", "not known: out of memory"),
        ("acs-translating", "IOMMU                 translates"),
        ("acs-translating", "request redirect on 0000:03:01.1"),
        ("nvswitch-802", "Fabric Manager inactive"),
        ("numa-unknown", "No known NUMA node"),
        ("gb200-4", "Memory without CPUs: node 2 186 GiB"),
        ("no-driver", "nouveau"),
        ("no-driver", "NVIDIA device 2bb5"),
        ("no-driver", "Secure Boot           on"),
        ("cpuset-limited", "only CPUs 0-7,128-135 are allowed"),
        ("rtx-4090-8", "the driver denies peer access"),
        ("no-gpu", "No NVIDIA GPU on the PCI bus"),
        ("h200-vm-2", "no IMEX channel"),
        ("h200-vm-2", "node by local cpulist"),
    ],
)
def test_what_is_out_of_the_ordinary_is_said(name, wanted):
    assert wanted in picture.text(on_file(name))


def test_measured_speeds_and_regressions():
    host = on_file("h200-vm-2")
    p2p = replace(
        host.p2p,
        measured_gb_s=[[None, 387.9], [386.0, None]],
        concurrent_gb_s=380.0,
        concurrent_total_gb_s=380.0,
        concurrent_sets=[[0], [1]],
        data_ok=False,
        measured_at="2026-11-30T06:20:09Z",
        regressions=["0000:00:06.0 to 0000:00:07.0: 100.0 GB/s, 387.9 on 2026-11-29"],
    )
    host = replace(host, p2p=p2p)
    text = picture.text(host)
    for wanted in ("387.9", "WRONG", "Slower than the baseline", "slowest 380.0 GB/s"):
        assert wanted in text
        assert any(wanted in line for line in words(svg.svg(host)))


def test_a_port_that_holds_a_gpu_back_is_named():
    gpu = facts.Gpu("0000:01:00.0", link=facts.PcieLink(5, 16, 1, 8, 4, 8))
    assert picture.link(gpu) == "Gen4 x8 (port limits the generation and width)"
