"""UCX's words as nixl 1.5.1 printed them here, on the CPU profile (UCX_PROTO_INFO=y)."""

import json

import pytest
from pdstack import nixl, runner

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


def test_the_lane_of_remote_writes():
    lanes = nixl.put_lanes(PUT + SEND)
    assert lanes == [nixl.Lane("0..inf", "zero-copy", "cma/memory")]
    assert nixl.bulk_lane(lanes) == "cma/memory"


def test_the_last_table_counts_and_the_largest_messages():
    assert nixl.bulk_lane(nixl.put_lanes(PUT + SEND + PUT_GPU)) == "cuda_ipc/cuda"


def test_no_table_no_lane():
    assert nixl.put_lanes(SEND) == []
    assert nixl.bulk_lane([]) == ""


def test_complaints():
    assert nixl.complaints(FAILED + FAILED) == [
        "network device 'eth9' is not available, please use one or more of: 'lo'(tcp)",
        "no active messages transport to <no debug data>",
    ]


@pytest.mark.parametrize(("lane", "refused"), [("tcp/eth0", True), ("cuda_ipc/cuda", False), ("", False)])
def test_tcp_is_refused_where_it_is_forbidden(lane, refused):
    assert bool(nixl.check_lane(lane, ["tcp"])) is refused
    assert nixl.check_lane(lane, []) == []


def test_expandable_segments_are_refused():
    (problem,) = nixl.check_environment({"PYTORCH_CUDA_ALLOC_CONF": "foo:1,expandable_segments:True"})
    assert problem.subject == "PYTORCH_CUDA_ALLOC_CONF"
    assert nixl.check_environment({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}) == []


def test_lanes_of_one_kind_of_memory():
    """A GPU transfer prints a table for host memory too, perhaps after the one that counts."""
    assert nixl.bulk_lane(nixl.put_lanes(PUT_GPU + PUT, "VRAM")) == "cuda_ipc/cuda"
    assert nixl.bulk_lane(nixl.put_lanes(PUT_GPU + PUT, "DRAM")) == "cma/memory"
    assert nixl.put_lanes(PUT, "VRAM") == []


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


GPU_PAIR = nixl.Pair("VRAM", [nixl.Side("prefill-0.gpu0", {"A": "1"}, 0), nixl.Side("decode-0.gpu4", {}, 0)], 60e9)


def test_a_result_says_what_the_writer_saw():
    run = answering(PUT_GPU)
    result = nixl.measure("script", "python", GPU_PAIR, 1 << 20, 3, run)
    assert (result.lane, result.lane_back) == ("cuda_ipc/cuda", "")
    assert run.asked[0]["sides"][0] == {"name": "prefill-0.gpu0", "environment": {"A": "1"}, "device": 0}
    assert nixl.check_result(result, GPU_PAIR.baseline, ["tcp"]) == []  # 50 of 60 GB/s


@pytest.mark.parametrize(
    ("best", "ucx", "baseline", "subjects"),
    [
        (47_000_000_000, PUT_GPU, 60e9, ["NIXL bandwidth prefill-0.gpu0 to decode-0.gpu4"]),
        (47_000_000_000, PUT_GPU, None, []),
        (49_000_000_000, PUT_GPU.replace("cuda_ipc/cuda", "tcp/eth0"), 60e9, ["data lane"]),
        (
            500_000_000,
            PUT_GPU.replace("cuda_ipc/cuda", "tcp/eth0"),
            60e9,
            ["data lane", "NIXL bandwidth prefill-0.gpu0 to decode-0.gpu4"],
        ),
    ],
)
def test_a_slow_or_forbidden_lane_is_refused_with_the_fix(best, ucx, baseline, subjects):
    result = nixl.measure("script", "python", GPU_PAIR, 1 << 20, 3, answering(ucx, best))
    problems = nixl.check_result(result, baseline, ["tcp"])
    assert [problem.subject for problem in problems] == subjects
    assert all("UCX_TLS" in problem.remedy for problem in problems)


def test_a_failed_transfer_is_refused_with_ucx_words():
    with pytest.raises(nixl.TransportRefused, match="'eth9' is not available"):
        nixl.measure("script", "python", GPU_PAIR, 1 << 20, 3, answering(FAILED, failure="TimeoutError: x"))
    with pytest.raises(nixl.TransportRefused, match="No module named nixl"):
        nixl.measure("s", "p", GPU_PAIR, 1, 1, lambda argv: runner.Completed(1, "", "No module named nixl"))


def instance(role, host, positions, name="0"):
    gpus = [{"position": position, "pci": "", "index": position} for position in positions]
    visible = ",".join(map(str, positions))
    return {
        "name": f"{role}-{name}", "role": role, "host": host, "set": f"pair-{name}", "gpus": gpus,
        "env": {"CUDA_VISIBLE_DEVICES": visible},
    }  # fmt: skip


def test_pairs_follow_the_plan_rank_by_rank():
    plan = {"profile": "gpu", "instances": [instance("prefill", "a", [0, 1]), instance("decode", "a", [2, 3])]}
    matrix = [[None if row == column else 10 * row + column for column in range(4)] for row in range(4)]
    found = nixl.pairs(plan, "a", matrix)
    assert [(pair.sides[0].name, pair.sides[1].name, pair.baseline) for pair in found] == [
        ("prefill-0.gpu0", "decode-0.gpu2", 2e9),
        ("prefill-0.gpu1", "decode-0.gpu3", 13e9),
    ]
    assert found[1].sides[1] == nixl.Side("decode-0.gpu3", {"CUDA_VISIBLE_DEVICES": "2,3"}, 1)
    assert nixl.pairs(plan, "b") == []


def test_a_host_with_one_side_uses_its_own_gpus():
    plan = {"profile": "gpu", "instances": [instance("prefill", "a", [0, 1]), instance("decode", "b", [3])]}
    (first,), (second,) = nixl.pairs(plan, "a"), nixl.pairs(plan, "b")
    assert [side.device for side in first.sides] == [0, 1]
    assert [side.device for side in second.sides] == [0, 0]
    assert len({side.name for side in second.sides}) == 2


def test_without_gpus_host_memory_is_moved():
    plan = {"profile": "cpu", "instances": [instance("prefill", "a", [0, 1])]}
    (pair,) = nixl.pairs(plan, "a")
    assert pair.memory == "DRAM"
    assert len({side.name for side in pair.sides}) == 2
