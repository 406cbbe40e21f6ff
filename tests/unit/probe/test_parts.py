"""The pure parts: PCI ids, ACS, NUMA rule, joins, merging of documents."""

import pytest
from hosts.catalogue import config_space
from pdstack import codec, codes, fabric, facts, gpu, pci, sysfs
from pdstack.answers import CudaAnswers, CudaDevice, NvmlAnswers, NvmlDevice


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("00000000:06:00.0", "0000:06:00.0"),
        ("0000:F4:00.0", "0000:f4:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("10000:01:00.0", "10000:01:00.0"),
        ("0:6:0", "0000:06:00.0"),
    ],
)
def test_pci_ids_have_one_spelling(given, wanted):
    assert pci.normalise(given) == wanted
    assert pci.normalise(pci.nvml(wanted)) == wanted


@pytest.mark.parametrize("text", ["", "GPU-1234", "0000:06:00.9", "xx:06:00.0"])
def test_what_is_no_pci_id_is_refused(text):
    with pytest.raises(ValueError, match="not a PCI id"):
        pci.normalise(text)


def test_only_what_bears_on_gpus_is_kept_of_the_kernel_command_line():
    line = (
        "BOOT_IMAGE=/vmlinuz root=UUID=1 ro iommu=pt amd_iommu=on pci=realloc=off rd.luks.key=x password=y -- --pci z"
    )
    assert sysfs.kernel_options(line) == "iommu=pt amd_iommu=on pci=realloc=off"


def test_pci_ids_sort_by_number():
    assert sorted(["10000:01:00.0", "0000:f4:00.0", "0000:06:00.0"], key=pci.sort_key)[-1] == "10000:01:00.0"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (config_space(0x1000, 0x1D), True),
        (config_space(0x1000, 0x19), False),  # all but request redirect
        (config_space(0x1000), False),  # no ACS capability
        (config_space(0x1000, 0x1D)[:64], None),  # what a user without root may read
        (b"", None),
        (config_space(0x1000)[:0x100] + b"\xff" * 3840, False),  # fell off the bus
    ],
)
def test_acs_request_redirect(config, wanted):
    assert sysfs.acs_request_redirect(config) is wanted


def test_a_loop_in_the_capability_list_ends():
    space = bytearray(config_space(0x1000))
    space[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    assert sysfs.acs_request_redirect(bytes(space)) is False


NODES = [facts.NumaNode(0, "0-3"), facts.NumaNode(1, "4-7"), facts.NumaNode(2, "")]


@pytest.mark.parametrize(
    ("reported", "local", "nodes", "wanted"),
    [
        (1, "4-7", NODES, (1, "sysfs")),
        (-1, "4-7", NODES, (1, "local_cpulist")),
        (-1, "0-7", NODES, (None, "none")),  # what a kernel says that does not know
        (-1, "", NODES, (None, "none")),
        (-1, "", NODES[:1], (0, "only-node")),
        (None, "", [NODES[1], NODES[2]], (1, "only-node")),  # a node without CPUs is no candidate
        (-1, "", [], (None, "none")),
    ],
)
def test_numa_rule(reported, local, nodes, wanted):
    assert sysfs.numa_node(reported, local, nodes) == wanted


def a_gpu(address, path=(), root="", node=None):
    return facts.Gpu(pci=address, pci_path=list(path), pci_root=root, numa_node=node)


A = a_gpu("0000:06:00.0", ["0000:03:01.1", "0000:04:00.0", "0000:05:00.0"], "pci0000:03", 0)


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        (A, "X"),
        (a_gpu("0000:07:00.0", ["0000:03:01.1", "0000:04:00.0", "0000:05:01.0"], "pci0000:03", 0), "PIX"),
        (
            a_gpu("0000:0a:00.0", ["0000:03:01.1", "0000:04:00.0", "0000:05:02.0", "0000:08:00.0"], "pci0000:03", 0),
            "PXB",
        ),
        (a_gpu("0000:10:00.0", ["0000:03:02.1"], "pci0000:03", 0), "PHB"),
        (a_gpu("0000:20:00.0", ["0000:1f:01.1"], "pci0000:1f", 0), "NODE"),
        (a_gpu("0000:84:00.0", ["0000:81:01.1"], "pci0000:81", 1), "SYS"),
        (a_gpu("0000:84:00.0", ["0000:81:01.1"], "pci0000:81", None), "?"),
    ],
)
def test_link_types_by_sysfs_alone(other, wanted):
    assert fabric.link_type(A, other) == wanted
    assert fabric.link_type(other, A) == wanted


@pytest.mark.parametrize("path", ["rtx-pro-6000-8", "five-gpus", "uneven-8", "pci-domain", "eight-nodes-8"])
def test_sysfs_and_nvml_agree_on_link_types(path, project_root):
    import json

    found = codec.load(facts.HostFacts, json.loads((project_root / f"tests/fixtures/facts/{path}.json").read_text()))
    without_nvml = [[fabric.link_type(a, b) for b in found.gpus] for a in found.gpus]
    assert without_nvml == found.p2p.link_type


def test_join_is_by_pci_id_whatever_the_order():
    bus = [sysfs.PciGpu(f"0000:0{i}:00.0", 0, "sysfs", "0-3", [], "", None, facts.PcieLink()) for i in (6, 7)]
    cuda = CudaAnswers("ok", devices=[CudaDevice(0, "0000:07:00.0", name="b"), CudaDevice(1, "0000:06:00.0", name="a")])
    nvml = NvmlAnswers("ok", devices=[NvmlDevice("0000:06:00.0", 0), NvmlDevice("0000:07:00.0", 1)])
    joined = gpu.join(bus, cuda, nvml, NODES)
    assert [(g.pci, g.name, g.index, g.nvml_index) for g in joined] == [
        ("0000:06:00.0", "a", 1, 0),
        ("0000:07:00.0", "b", 0, 1),
    ]
    order = [device.pci for device in cuda.devices]
    assert gpu.by_position(joined, order, [[None, True], [False, None]]) == [[None, False], [True, None]]


def test_a_gpu_that_sysfs_hides_is_still_there():
    cuda = CudaAnswers("ok", devices=[CudaDevice(0, "0000:06:00.0", name="a")])
    (found,) = gpu.join([], cuda, NvmlAnswers(), NODES[:1])
    assert (found.numa_node, found.numa_source) == (0, "only-node")
    assert found.problems == ["sysfs does not show this GPU"]


def test_unknown_codes_keep_their_number():
    assert codes.cuda(4711) == "CUDA error 4711"
    assert codes.nvml(4711) == "NVML error 4711"
    for code in (34, 100, 800, 801, 802, 803, 804):
        assert not codes.cuda(code).startswith("CUDA error")
    for code in (4, 9, 12, 15, 17, 18):
        assert not codes.nvml(code).startswith("NVML error")


def test_merge_joins_sections():
    whole = facts.merge(
        [
            {
                "host": "a",
                "schema": 1,
                "simulated": True,
                "gpus": [{"pci": "0000:06:00.0"}],
                "probe_seconds": {"x": 1.0},
            },
            {"host": "a", "schema": 1, "simulated": False, "ports": [], "probe_seconds": {"y": 2.0}},
        ]
    )
    assert whole.simulated is True
    assert [g.pci for g in whole.gpus] == ["0000:06:00.0"]
    assert whole.probe_seconds == {"x": 1.0, "y": 2.0}


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ([], "no facts document"),
        ([{"host": "a"}, {"host": "b"}], "host differs"),
        ([{"host": "a", "schema": 2}], "schema 2"),
    ],
)
def test_merge_refuses_what_does_not_belong_together(documents, words):
    with pytest.raises(facts.FactsError, match=words):
        facts.merge(documents)


def test_merge_refuses_unknown_sections():
    with pytest.raises(codec.CodecError, match="gpuz"):
        facts.merge([{"host": "a", "gpuz": []}])
