"""UCX's words (UCX_PROTO_INFO=y): those in tests/fixtures/ucx came from nixl 1.1.0 and 1.5.1, between two processes'
host memory; those with GPUs here have the forms of UCX's source (1.20 and 1.22) and of public logs."""

import json
import pathlib

import pytest
from pdstack import facts, nixl, runner

PREFIX = "[1796018588.867154] [vm:12597:0]   "


def table(title, *rows):
    lines = ["+--------+-------------+-----+", "| prefill self cfg#0 |", f"| {title} |", "+--------+----+-----+"]
    lines += ["| Range  | Description | Config |", "+--------+----+-----+", *rows, "+--------+----+-----+"]
    return "".join(f"{PREFIX}{line}\n" for line in lines)


SEND = table(
    "active message by ucp_am_send* from host memory", "|  0 | short | tcp/lo |", "| 1..inf | copy-in | tcp/lo |"
)
PUT = table("remote memory write by ucp_put* from host memory to host", "| 0..inf | zero-copy   | cma/memory |")
PUT_GPU = table(
    "remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda",
    "|    0..511 | short       | cuda_copy/cuda |",
    "|  512..inf | zero-copy   | cuda_ipc/cuda  |",
)
FAILED = (
    f"{PREFIX}  ucp_context.c:1508 UCX  WARN  network device 'eth9' is not available, please use one or more of: "
    "'lo'(tcp)\n"
    f"{PREFIX}       select.c:722  UCX  ERROR   no active messages transport to <no debug data>\n"
)


UCX = pathlib.Path(__file__).parents[2] / "fixtures/ucx"
OLD_GPU = "".join(
    f"[1784556793.091727] [host:286911:0]   {line}\n"
    for line in """\
+--------------------------------+----------------------------------------+
| ucp_context_0 intra-node cfg#2 | remote memory write by ucp_put* from host memory to host |
+--------------------------------+--------------------------+-------------+
|                         0..inf | software emulation       | tcp/eth0    |
+--------------------------------+--------------------------+-------------+
+--------------------------------+----------------------------------------+
| ucp_context_0 intra-node cfg#2 | remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda/dev[1] |
+--------------------------------+--------------------------+-------------+
|                             0  | no data fetch            |             |
|                         1..inf | zero-copy                | cuda_ipc/cuda |
+--------------------------------+--------------------------+-------------+
| ucp_context_0 intra-node cfg#2 | active message by ucp_am_send* from cuda/GPU0            |
|                         0..inf | multi-frag copy-in       | tcp/eth0    |
""".splitlines()
)
OLD_RDMA = OLD_GPU.replace("intra-node", "inter-node").replace(
    "cuda_ipc/cuda", "rc_mlx5/mlx5_11:1 50% on path0 and 50% on path1"
)
TCP = "50% on tcp/pdl-m837eecf and 50% on tcp/pdl-mb"  # of the network devices of that machine
SPLIT = "72% on rc_mlx5/mlx5_2:1 and 28% on tcp/eth0"


@pytest.mark.parametrize(
    ("words", "memory", "lane"),
    [
        ((UCX / "nixl-1.1.0-host.txt").read_text(), "DRAM", "cma/memory"),
        ((UCX / "nixl-1.5.1-host.txt").read_text(), "DRAM", "cma/memory"),
        ((UCX / "nixl-1.1.0-tcp.txt").read_text(), "DRAM", TCP),
        ((UCX / "nixl-1.5.1-tcp.txt").read_text(), "DRAM", TCP),
        ((UCX / "nixl-1.1.0-host.txt").read_text(), "VRAM", nixl.UNKNOWN),
        (OLD_GPU, "VRAM", "cuda_ipc/cuda"),
        (OLD_GPU, "DRAM", "tcp/eth0"),
        (OLD_RDMA, "VRAM", "rc_mlx5/mlx5_11:1 50% on path0 and 50% on path1"),
        (OLD_GPU.replace("cuda_ipc/cuda", SPLIT), "VRAM", SPLIT),
        (OLD_GPU.replace("from cuda/GPU0", "from cuda-managed/GPU0"), "VRAM", "cuda_ipc/cuda"),
        # The last block of a buffered log was lost on a real GPU host: the table's title without its rows.
        (OLD_GPU[: OLD_GPU.index("|                             0 ")], "VRAM", nixl.UNKNOWN),
        (PUT + SEND, "DRAM", "cma/memory"),
        (PUT + SEND + PUT_GPU, "VRAM", "cuda_ipc/cuda"),
        (PUT_GPU + PUT, "VRAM", "cuda_ipc/cuda"),  # a table for host memory, after the one that counts
        (PUT_GPU.replace("|    0..511 |", "| 0 | 0..511 |").replace("|  512..inf", "| 5 | 512..inf"), "VRAM",
         "cuda_ipc/cuda"),  # with a column of counts
        (PUT, "VRAM", nixl.UNKNOWN),
        (SEND, "", nixl.UNKNOWN),
        ("", "VRAM", nixl.UNKNOWN),
        ("| remote memory write by ucp_put* in another form |\n| nothing like a range | x | y |", "VRAM", nixl.UNKNOWN),
    ],
)  # fmt: skip
def test_the_lane_of_large_writes(words, memory, lane):
    assert nixl.bulk_lane(nixl.put_lanes(words, memory)) == lane


def test_all_ranges_are_kept_and_another_process_counts_before_the_own_one():
    assert nixl.put_lanes(PUT_GPU, "VRAM") == [
        nixl.Lane("0..511", "short", "cuda_copy/cuda"),
        nixl.Lane("512..inf", "zero-copy", "cuda_ipc/cuda"),
    ]
    other = PUT.replace("prefill self cfg#0", "prefill intra-node cfg#1").replace("cma/memory", "tcp/lo")
    assert nixl.bulk_lane(nixl.put_lanes(other + PUT, "DRAM")) == "tcp/lo"


def test_complaints():
    assert nixl.complaints(FAILED + FAILED) == [
        "network device 'eth9' is not available, please use one or more of: 'lo'(tcp)",
        "no active messages transport to <no debug data>",
    ]


@pytest.mark.parametrize(
    ("lane", "refused"),
    [("tcp/eth0", True), (TCP, True), (SPLIT, True), ("tcp", True), ("cuda_ipc/cuda", False), (nixl.UNKNOWN, False)],
)
def test_tcp_is_refused_where_it_is_forbidden(lane, refused):
    assert bool(nixl.check_lane(lane, ["tcp"])) is refused
    assert nixl.check_lane(lane, []) == []


def test_expandable_segments_are_refused():
    (problem,) = nixl.check_environment({"PYTORCH_CUDA_ALLOC_CONF": "foo:1,expandable_segments:True"})
    assert problem.subject == "PYTORCH_CUDA_ALLOC_CONF"
    assert nixl.check_environment({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}) == []


def answering(ucx, best=50_000_000_000, failure=""):
    """A runner that stands for the transfer script; the request that it was sent is kept."""
    asked = []

    def run(argv):
        request = json.loads(argv[-1])
        asked.append(request)
        names = [side["name"] for side in request["sides"]]
        directions = {
            " to ".join(order): {"best": best, "median": best // 2} for order in (names, names[::-1]) if not failure
        }
        answer = {
            "failure": failure,
            "bytes": request["bytes"],
            "directions": directions,
            "ucx": {names[0]: ucx, names[1]: PUT},
            "versions": {"nixl": "1.5.1"},
        }
        return runner.Completed(0, f"noise\n{json.dumps(answer)}\n", "")

    run.asked = asked
    return run


GPU_PAIR = nixl.Pair("VRAM", [nixl.Side("prefill-0.gpu0", {"A": "1"}, 0), nixl.Side("decode-0.gpu4", {}, 0)])
COPY = 60e9  # bytes/s of a plain copy between the two
SIZE = 1 << 30


def test_a_result_says_what_the_writer_saw():
    run = answering(PUT_GPU)
    result = nixl.measure("script", "python", GPU_PAIR, SIZE, 3, run)
    assert (result.lane, result.lane_back, result.words) == ("cuda_ipc/cuda", nixl.UNKNOWN, [])
    assert run.asked[0]["in_flight"] == 16
    assert run.asked[0]["sides"][0] == {"name": "prefill-0.gpu0", "environment": {"A": "1"}, "device": 0}
    assert nixl.check_result(result, COPY, ["tcp"]) == []  # 50 of 60 GB/s


@pytest.mark.parametrize(
    ("best", "ucx", "copy", "subjects"),
    [
        # 1 GiB at 60 GB/s takes 17.9 ms, 16 blocks 1.6 more: 80% of that is 44.1 GB/s.
        (44_000_000_000, PUT_GPU, 60e9, ["NIXL bandwidth prefill-0.gpu0 to decode-0.gpu4"]),
        (44_200_000_000, PUT_GPU, 60e9, []),
        (44_000_000_000, PUT_GPU, None, []),
        # What two H200s gave over NVLink, and the same staged through the host.
        (243_700_000_000, PUT_GPU, 388.3e9, []),
        (50_000_000_000, PUT_GPU, 388.3e9, ["NIXL bandwidth prefill-0.gpu0 to decode-0.gpu4"]),
        (49_000_000_000, PUT_GPU.replace("cuda_ipc/cuda", "tcp/eth0"), 60e9, ["data lane"]),
        (
            500_000_000,
            PUT_GPU.replace("cuda_ipc/cuda", "tcp/eth0"),
            60e9,
            ["data lane", "NIXL bandwidth prefill-0.gpu0 to decode-0.gpu4"],
        ),
    ],
)
def test_a_slow_or_forbidden_lane_is_refused_with_the_fix(best, ucx, copy, subjects):
    result = nixl.measure("script", "python", GPU_PAIR, SIZE, 3, answering(ucx, best))
    problems = nixl.check_result(result, copy, ["tcp"])
    assert [problem.subject for problem in problems] == subjects
    assert all("UCX_TLS" in problem.remedy for problem in problems)


def test_a_host_that_serves_is_warned_and_not_refused():
    plan = {"profile": "gpu", "instances": [instance("prefill", "a", [0, 1]), instance("decode", "a", [2, 3])]}
    serving, idle = nixl.pairs(plan, "a", host(2))
    assert (serving.busy, idle.busy) == ("GPU 0000:02:00.0 is in use by sglang (pid 7)", "")
    slow, quick = [answering(PUT_GPU, best) for best in (20_000_000_000, 50_000_000_000)]
    result = nixl.measure("script", "python", serving, SIZE, 3, slow)
    assert nixl.check_result(result, COPY, ["tcp"]) == []
    (words,) = nixl.warnings(result, COPY)
    assert "20.0 GB/s where 44.1 are needed, but GPU 0000:02:00.0 is in use by sglang (pid 7)" in words
    assert nixl.warnings(result, None) == []
    assert nixl.warnings(nixl.measure("script", "python", serving, SIZE, 3, quick), COPY) == []
    assert nixl.check_result(nixl.measure("script", "python", idle, SIZE, 3, slow), COPY, ["tcp"]) != []
    tcp = answering(PUT_GPU.replace("cuda_ipc/cuda", "tcp/eth0"))
    assert nixl.check_result(nixl.measure("script", "python", serving, SIZE, 3, tcp), COPY, ["tcp"]) != []


def test_an_unknown_lane_keeps_ucx_words_and_is_a_warning_between_gpus():
    result = nixl.measure("script", "python", GPU_PAIR, SIZE, 3, answering("| a new form |\nlast words\n"))
    assert (result.lane, result.words) == (nixl.UNKNOWN, ["| a new form |", "last words"])
    assert nixl.check_result(result, COPY, ["tcp"]) == []  # 50 of 60 GB/s: the rule is kept
    (words,) = nixl.warnings(result, COPY)
    assert "50.0 GB/s over a lane that UCX did not name" in words
    assert "last words" in words
    assert "pd_probe_measure" in nixl.warnings(result, None)[0]
    slow = nixl.measure("script", "python", GPU_PAIR, SIZE, 3, answering("", best=20_000_000_000))
    assert slow.words == ["UCX said nothing"]
    assert "an unknown lane" in nixl.check_result(slow, COPY, ["tcp"])[0].found


def test_a_known_lane_and_host_memory_warn_of_nothing():
    known = nixl.measure("script", "python", GPU_PAIR, 1 << 20, 3, answering(PUT_GPU))
    host = nixl.Pair("DRAM", GPU_PAIR.sides)
    assert nixl.warnings(known, None) == []
    assert nixl.warnings(nixl.measure("script", "python", host, 1 << 20, 3, answering("")), None) == []


def test_a_failed_transfer_is_refused_with_ucx_words():
    with pytest.raises(nixl.TransportRefused, match="'eth9' is not available"):
        nixl.measure("script", "python", GPU_PAIR, 1 << 20, 3, answering(FAILED, failure="TimeoutError: x"))
    with pytest.raises(nixl.TransportRefused, match="No module named nixl"):
        nixl.measure("s", "p", GPU_PAIR, 1, 1, lambda argv: runner.Completed(1, "", "No module named nixl"))


def host(*in_use, data_ok=True):
    """Facts of four GPUs; a plain copy from a to b reached 10 a + b GB/s. Some are in use."""
    gpus = [
        facts.Gpu(pci=f"0000:0{at}:00.0", processes=[facts.GpuProcess(pid=7, command="sglang")] if at in in_use else [])
        for at in range(4)
    ]
    matrix = [[None if row == column else 10.0 * row + column for column in range(4)] for row in range(4)]
    return facts.HostFacts(host="a", gpus=gpus, p2p=facts.P2p(measured_gb_s=matrix, data_ok=data_ok))


def instance(role, host, positions, name="0"):
    gpus = [{"position": position, "pci": f"0000:0{position}:00.0", "index": position} for position in positions]
    visible = ",".join(map(str, positions))
    return {
        "name": f"{role}-{name}", "role": role, "host": host, "set": f"pair-{name}", "gpus": gpus,
        "env": {"CUDA_VISIBLE_DEVICES": visible},
    }  # fmt: skip


def test_pairs_follow_the_plan_rank_by_rank():
    plan = {"profile": "gpu", "instances": [instance("prefill", "a", [0, 1]), instance("decode", "a", [2, 3])]}
    found = nixl.pairs(plan, "a", host())
    assert [(pair.sides[0].name, pair.sides[1].name, pair.copied) for pair in found] == [
        ("prefill-0.gpu0", "decode-0.gpu2", 2e9),
        ("prefill-0.gpu1", "decode-0.gpu3", 13e9),
    ]
    # Copies that arrived with wrong bytes are no measure.
    assert [pair.copied for pair in nixl.pairs(plan, "a", host(data_ok=False))] == [None, None]
    # No cache of the driver's: this runs as root, and the engine's own would lie below root's folders.
    environment = {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_CACHE_DISABLE": "1"}
    assert found[1].sides[1] == nixl.Side("decode-0.gpu3", environment, 1)
    assert nixl.pairs(plan, "b", host()) == []


def test_a_host_with_one_side_uses_its_own_gpus():
    plan = {"profile": "gpu", "instances": [instance("prefill", "a", [0, 1]), instance("decode", "b", [3])]}
    (first,), (second,) = nixl.pairs(plan, "a", host()), nixl.pairs(plan, "b", host())
    assert [side.device for side in first.sides] == [0, 1]
    assert [side.device for side in second.sides] == [0, 0]
    assert len({side.name for side in second.sides}) == 2


def test_without_gpus_host_memory_is_moved():
    plan = {"profile": "cpu", "instances": [instance("prefill", "a", [0, 1])]}
    (pair,) = nixl.pairs(plan, "a", facts.HostFacts(host="a"))
    assert (pair.memory, pair.copied) == ("DRAM", None)
    assert len({side.name for side in pair.sides}) == 2
