"""UCX's words as nixl 1.5.1 printed them here, on the CPU profile (UCX_PROTO_INFO=y)."""

import pytest
from pdstack import nixl

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
