"""Time by kernel family: a trace of the lab's decode engine, and constructed GPU traces with known answers."""

import gzip
import json
import xml.etree.ElementTree as ElementTree

import pytest
from pdstack import trace_cli
from pdstack.bench import plots, trace

RECORDED = "tests/fixtures/traces/cpu-decode.trace.json.gz"  # sglang 0.5.23, cpu profile, 5 decode steps of 4 requests


def event(name, ts, dur, cat="kernel", **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7, "args": args}


def gpu(events, device="NVIDIA H200"):
    return {"deviceProperties": [{"name": device}], "traceEvents": events}


def steps(count, every):
    return [event(f"step[DECODE bs=8 n={n}]", n * every, 10, "user_annotation") for n in range(count)]


def rows(table):
    return {row.name: row for row in table.families}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-reduce"),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 4>", "all-reduce"),
        ("c10d::allreduce_", "all-reduce"),
        ("_tiled_sparse_decode_kernel", "attention"),
        ("decode_kernel", "attention"),
        ("merge_kernel", "attention"),
        ("void flash::flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64>>", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("_fwd_kernel_stage2", "attention"),
        ("create_flashinfer_kv_indices_triton", "attention"),
        ("void (anonymous namespace)::store_kvcache<256l, 1, true, long>(...)", "attention"),
        ("void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_ke", "copy"),
        ("void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16, long, unsigned int>", "copy"),
        ("logits_kernel", "indexer"),
        ("void sm90_fp8_paged_mqa_logits<64, 1>", "indexer"),
        ("topk_transform_decode_kernel", "indexer"),
        ("void marlin_moe_wna16::Marlin<__nv_bfloat16>", "MoE"),
        ("fused_moe_kernel", "MoE"),
        ("void topkGatingSoftmax<float, 8, 256>", "MoE"),
        ("void cutlass::device_kernel<GroupProblemShape>", "MoE"),
        ("void act_and_mul_kernel<__nv_bfloat16, silu>", "MoE"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "dense"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "dense"),
        ("aten::mm", "dense"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8, __nv_bfloat16>", "norm and rope"),
        ("product_kernel", "norm and rope"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>", "other"),
        ("void at_cuda_detail::cub::DeviceScanKernel", "other"),
        ("aten::argmax", "sampling"),
        ("aten::_to_copy", "copy"),
        ("aten::t", "other"),
        ("aten::slice", "other"),
    ],
)
def test_kernels_are_known_by_name(name, family):
    assert trace.family_of(name) == family


def test_gpu_kernels_by_step_with_shares_and_idle_time():
    kernels = [event("fused_moe_kernel", 1000 * n + 100, 300) for n in range(4)]
    kernels += [event("decode_kernel", 1000 * n + 300, 200) for n in range(4)]  # 100 us beside the other stream
    kernels += [event("cudaLaunchKernel", 5, 5, "cuda_runtime")]
    table = trace.analyse(gpu([*steps(4, 1000), *kernels]))
    assert (table.device, table.hardware, table.stage, table.steps) == ("gpu", "NVIDIA H200", "DECODE", 4)
    assert table.span_ms == pytest.approx(1.0)
    assert table.busy_ms == pytest.approx(0.4)
    assert rows(table)["MoE"].ms == pytest.approx(0.3)
    assert rows(table)["MoE"].share == pytest.approx(0.6)
    assert rows(table)["attention"].calls == 1
    assert table.families[0].name == "MoE"
    assert "idle 60%" in trace.text(table)


def test_operators_count_their_own_time_once():
    operators = [
        event("aten::linear", 0, 100, "cpu_op"),
        event("aten::mm", 10, 60, "cpu_op"),
        event("aten::empty", 20, 10, "cpu_op"),
        event("aten::add", 100, 50, "cpu_op"),
    ]
    table = trace.analyse({"traceEvents": operators}, steps=1)
    assert {row.name: row.ms for row in table.kernels} == pytest.approx(
        {"aten::linear": 0.04, "aten::mm": 0.05, "aten::empty": 0.01, "aten::add": 0.05}
    )
    assert table.busy_ms == pytest.approx(0.15)
    assert table.device == "cpu"


def test_a_collective_beside_the_measured_link():
    # 4 ranks, 1 MB: a ring sends 2 * 3/4 MB over each link; at 50 GB/s that takes 30 us of the 150
    nccl = event("ncclDevKernel_AllReduce", 0, 150, dtype="BFloat16", **{"Collective name": "allreduce"})
    nccl["args"].update({"In msg nelems": 500_000, "Group size": 4})
    table = trace.analyse(gpu([*steps(1, 0), nccl]), limits=trace.Limits(link_gb_s=50.0))
    assert rows(table)["all-reduce"].roofline == pytest.approx(0.2)
    assert trace.analyse(gpu([*steps(1, 0), nccl])).families[0].roofline is None


def test_a_product_beside_the_memory_by_the_shapes_of_its_operator():
    # (8 x 4096) x (4096 x 4096) in bf16: 33.6 MB and a little; at 4800 GB/s 7.03 us of the 14.06
    size = 2 * (8 * 4096 + 4096 * 4096 + 8 * 4096)
    operator = event("aten::mm", 0, 5, "cpu_op", **{"External id": 3, "Input Dims": [[8, 4096], [4096, 4096]]})
    operator["args"]["Input type"] = ["c10::BFloat16", "c10::BFloat16"]
    kernel = event("nvjet_tst", 0, 2 * size / 4800e3, **{"External id": 3})
    table = trace.analyse(gpu([*steps(1, 0), operator, kernel]))
    assert rows(table)["dense"].roofline == pytest.approx(0.5)
    graph = event("nvjet_tst", 0, 10)  # from a CUDA graph: nobody knows its operator
    assert rows(trace.analyse(gpu([*steps(1, 0), operator, graph])))["dense"].roofline is None


def test_bytes_that_the_user_knows():
    kernel = event("fused_moe_kernel", 0, 1000)
    limits = trace.Limits(memory_gb_s=1000.0, family_bytes={"MoE": 5e8})
    assert rows(trace.analyse(gpu([kernel]), steps=1, limits=limits))["MoE"].roofline == pytest.approx(0.5)


def test_ranks_are_averaged():
    tables = [trace.analyse(gpu([*steps(2, 1000), event("fused_moe_kernel", 0, dur)])) for dur in (200, 400)]
    mean = trace.combine(tables)
    assert rows(mean)["MoE"].ms == pytest.approx(0.15)
    assert mean.source == "2 ranks"


def test_what_is_no_trace_of_steps_is_said(tmp_path, capsys):
    with pytest.raises(ValueError, match="neither GPU kernels nor CPU operators"):
        trace.analyse(gpu([]))
    assert "marks no steps" in trace.text(trace.analyse(gpu([event("x", 0, 1)])))
    bad = tmp_path / "bad.json"
    bad.write_text("[]")
    assert trace_cli.main([str(bad)]) == 2
    assert "no Chrome trace" in capsys.readouterr().err
    assert trace_cli.main([str(tmp_path / "none.json")]) == 2
    bad.write_text(json.dumps(gpu([event("x", 0, 1)])))
    assert trace_cli.main([str(bad), "--bytes", "moe=1"]) == 2
    assert "known: attention" in capsys.readouterr().err


def test_memory_bandwidth_by_the_cards_name():
    assert trace.memory_of("NVIDIA RTX PRO 6000 Blackwell Server Edition") == 1597
    assert trace.memory_of("NVIDIA RTX PRO 6000 Blackwell Workstation Edition") == 1792
    assert trace.memory_of("NVIDIA Something") is None


def test_the_recorded_trace_of_the_lab(project_root, tmp_path, capsys):
    facts, out, drawing = tmp_path / "facts.json", tmp_path / "t.json", tmp_path / "t.svg"
    facts.write_text(json.dumps({"p2p": {"measured_gb_s": [[None, 40.0], [38.5, None]]}}))
    path = str(project_root / RECORDED)
    assert trace_cli.main([path, "--facts", str(facts), "--json", str(out), "--svg", str(drawing)]) == 0
    table = json.loads(out.read_text())
    assert (table["device"], table["stage"], table["steps"]) == ("cpu", "DECODE", 5)
    families = {row["name"]: row for row in table["families"]}
    # two layers, four projections each and the head: nine products a step
    assert families["dense"]["calls"] == 26.0
    assert next(row for row in table["kernels"] if row["name"] == "aten::mm")["calls"] == 9.0
    assert sum(row["share"] for row in table["families"]) == pytest.approx(1.0)
    events = json.loads(gzip.decompress((project_root / RECORDED).read_bytes()))["traceEvents"]
    outer = sum(row["ms"] for row in table["families"]) * 5 * 1000
    assert outer <= sum(item["dur"] for item in events if item["cat"] == "cpu_op")
    assert "5 DECODE steps" in capsys.readouterr().out
    words = "".join(ElementTree.fromstring(drawing.read_text()).itertext())
    assert "attention" in words
    assert "dense" in words
    assert trace_cli.link_of(str(facts)) == 38.5


def test_the_drawing_names_each_family_with_its_time():
    table = trace.analyse(gpu([*steps(2, 1000), event("fused_moe_kernel", 0, 400), event("decode_kernel", 500, 100)]))
    root = ElementTree.fromstring(plots.families(table, "Decode"))
    words = [item.text for item in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"MoE", "attention", "Decode"} <= set(words)
    assert any("0.2 ms, 80%" in word for word in words)
    assert "MoE 0.2 ms" in root.get("aria-label")
