"""Measured peer-to-peer on the fake driver, whose clock is virtual and whose memory is real."""

import json
from dataclasses import replace

import pytest
from hosts.calls import outstanding
from pdstack import codec, facts, hostchecks, intent, p2p, probe

WHEN = "2026-11-30T12:00:00Z"
MIB = 1 << 20


def run(request, **options):
    found = probe.probe(request)
    return replace(found, p2p=p2p.measured(found, request.folder, False, 60, WHEN, size=MIB, repeats=2, **options))


def test_pairs_and_both_sets_at_once(simulated, calls):
    request, folder = simulated("rtx-pro-6000-8", "bandwidth -1 -1 40", "bandwidth 0 1 55", "concurrent -1 -1 11")
    found = run(request).p2p
    assert found.measured_gb_s[0][1] == pytest.approx(55, rel=0.01)
    assert found.measured_gb_s[1][0] == pytest.approx(40, rel=0.01)
    assert found.measured_gb_s[3][3] is None
    assert found.concurrent_sets == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found.concurrent_gb_s == pytest.approx(11, rel=0.01)
    assert found.concurrent_total_gb_s == pytest.approx(16 * 11, rel=0.01)
    assert (found.data_ok, found.note, found.measured_at) == (True, "", WHEN)
    assert outstanding(calls(folder)) == {}


def test_a_collapse_that_the_pairs_alone_do_not_show(simulated):
    request, _ = simulated("rtx-pro-6000-8", "bandwidth -1 -1 37", "concurrent -1 -1 37", "concurrent 2 6 3")
    found = run(request).p2p
    assert min(speed for row in found.measured_gb_s for speed in row if speed) == pytest.approx(37, rel=0.01)
    assert found.concurrent_gb_s == pytest.approx(3, rel=0.01)


def test_wrong_bytes_are_found_though_the_driver_says_ok(simulated, calls):
    request, folder = simulated("rtx-pro-6000-8", "corrupt 2 5 1")
    found = run(request)
    assert found.p2p.claimed[2][5] is True
    assert found.p2p.data_ok is False
    assert found.p2p.note == "the copied bytes are wrong: 0000:75:00.0 to 0000:85:00.0"
    assert p2p.baseline(found) is None
    assert outstanding(calls(folder)) == {}


def test_no_peer_access_is_still_measured(simulated):
    request, _ = simulated("rtx-4090-8")
    found = run(request).p2p
    assert found.claimed[0][1] is False
    assert found.data_ok is True


def test_an_error_in_the_middle_releases_and_says_where(simulated, calls):
    request, folder = simulated("h200-vm-2", "rc.cuMemcpyPeerAsync 1 0 719")
    found = run(request).p2p
    assert found.note == "CudaFailed: cuMemcpyPeerAsync: launch failed (719)"
    assert found.measured_gb_s[0][1] is not None
    assert outstanding(calls(folder)) == {}


def test_a_copy_that_hangs_is_abandoned(simulated):
    request, _ = simulated("h200-vm-2", "hang -1 -1 cuEventSynchronize")
    found = probe.probe(request)
    measured = p2p.measured(found, request.folder, False, 1.0, WHEN, size=MIB, repeats=1)
    assert measured.note == "measurement wedged: cuEventSynchronize did not return within 1 s"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("busy", "GPU 0000:06:00.0 is in use by vllm (pid 4242)"),
        ("acs-translating", "iommu=pt"),
        ("mismatch", "the driver's state is mismatch"),
        ("p4-1", "1 usable GPU"),
    ],
)
def test_refusals_say_what_to_do_and_touch_no_gpu(name, words, simulated, calls):
    request, folder = simulated(name)
    found = probe.probe(request)
    before = len(calls(folder))
    measured = p2p.measured(found, request.folder, False, 60, WHEN)
    assert measured.note.startswith("not measured: ")
    assert words in measured.note
    assert measured.measured_gb_s is None
    assert len(calls(folder)) == before


def test_force_lifts_acs_but_never_a_busy_gpu(simulated):
    acs = probe.probe(simulated("acs-translating")[0])
    assert p2p.refusal(acs, False)
    assert p2p.refusal(acs, True) == ""
    assert "in use" in p2p.refusal(probe.probe(simulated("busy")[0]), True)


def test_passthrough_with_acs_is_measured(simulated):
    assert p2p.refusal(probe.probe(simulated("acs-passthrough")[0]), False) == ""


def test_sets_follow_the_nodes():
    def gpus(*nodes):
        return [facts.Gpu(pci=f"0000:{i:02x}:00.0", index=i, numa_node=node) for i, node in enumerate(nodes)]

    assert p2p.halves(gpus(0, 0, 1, 1)) == [[0, 1], [2, 3]]
    assert p2p.halves(gpus(1, 0, 0, 0, 0)) == [[1, 2, 3, 4], [0]]
    assert p2p.halves(gpus(3, 3)) == [[0], [1]]
    assert p2p.halves(gpus(None, None, None)) == [[0, 1], [2]]
    assert p2p.halves(gpus(3, 2, 1, 0, 7, 6, 5, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_later_run_is_compared_with_the_baseline(simulated):
    request, folder = simulated("rtx-pro-6000-8", "bandwidth -1 -1 50", "concurrent -1 -1 12")
    first = run(request)
    kept = p2p.baseline(first)
    assert kept.gpus[0] == "0000:06:00.0"
    assert p2p.regressions(kept, first) == []
    with (folder / "driver/fake_driver.conf").open("a") as stream:
        stream.write("bandwidth 6 7 30\nconcurrent 0 4 2\n")
    worse = run(request, before=kept).p2p
    assert len(worse.regressions) == 2
    assert worse.regressions[0].startswith("0000:f4:00.0 to 0000:f5:00.0: 30.0 GB/s, 50.0 on 2026")
    assert worse.regressions[1].startswith("all pairs at once, slowest: 2.0 GB/s, 12.0")


def test_a_baseline_of_other_gpus_is_not_compared(simulated):
    request, _ = simulated("h200-vm-2")
    other = p2p.Baseline(["0000:01:00.0"], WHEN)
    (words,) = run(request, before=other).p2p.regressions
    assert "of other GPUs" in words


def test_payloads_differ_between_gpus_and_blocks():
    size = 3 * MIB
    one, two = p2p.payload(0, size), p2p.payload(1, size)
    assert len(one) == len(two) == size
    assert one != two
    assert len({one[i : i + MIB] for i in range(0, size, MIB)}) == 3


def test_a_simulated_host_without_a_driver_is_not_measured(simulated):
    request, _ = simulated("rtx-pro-6000-8")
    request = replace(request, library=None)
    found = probe.with_measurement(probe.probe(request), request, False, 10, WHEN)
    assert found.p2p.note == "not measured: a simulated host has no driver to copy with"


def test_what_is_kept_holds_while_nothing_below_has_changed(simulated, tmp_path):
    request, _ = simulated("h200-vm-2")
    looked, path = probe.probe(request), tmp_path / "p2p-last.json"
    assert p2p.kept(looked) is None
    measured = run(request)
    path.write_text(json.dumps(codec.dump(p2p.kept(measured))))
    later = p2p.recalled(looked, p2p.read_kept(str(path)))
    assert later.p2p == measured.p2p
    other = replace(looked, system=replace(looked.system, iommu_translating=True))
    assert p2p.recalled(other, p2p.read_kept(str(path))) == other
    path.write_text("{")
    assert p2p.recalled(looked, p2p.read_kept(str(path))) == looked


def test_a_measurement_that_broke_off_proves_nothing_and_a_wrong_byte_stays_wrong(simulated):
    request, _ = simulated("h200-vm-2", "rc.cuMemcpyPeerAsync 1 0 719")
    found = run(request)
    assert found.p2p.data_ok is True
    assert p2p.kept(found).p2p.data_ok is None
    request, _ = simulated("rtx-pro-6000-8", "corrupt 2 5 1")
    assert p2p.kept(run(request)).p2p.data_ok is False


def test_proven_copies_lift_the_refusal_over_iommu_and_acs(simulated):
    request, _ = simulated("acs-translating")
    looked = probe.probe(request)
    host = intent.Host("gpu1", "192.0.2.1")
    assert hostchecks._iommu(host, looked)[0] != []
    measured = replace(
        looked, p2p=p2p.measured(looked, request.folder, True, 60, WHEN, size=MIB, repeats=1)
    )  # pd_probe_force
    refused, notes = hostchecks._iommu(host, p2p.recalled(looked, p2p.kept(measured)))
    assert refused == []
    assert "ACS redirect" in notes[0]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"gpus": ["a", "b"], "measured_at": "2026", "measured_gb_s": [[null, 1.0]]}']
)
def test_a_damaged_baseline_says_what_to_do(text, tmp_path):
    path = tmp_path / "p2p.json"
    assert p2p.read_baseline(str(path)) is None
    path.write_text(text)
    with pytest.raises(ValueError, match=r"p2p\.json: found a file that is no baseline .* measure again"):
        p2p.read_baseline(str(path))
