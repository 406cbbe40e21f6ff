"""What the engine makes of the plan for eight RTX PRO 6000 and DeepSeek-V4-Flash, before it touches a GPU.

The parser (test_engine_flags.py) takes an argument that the engine's own resolution then refuses for this model on this
GPU. Needs the cpu release's wheels (0.5 GB) and two minutes, so it runs where PDSTACK_LONG is set.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
from pdstack import plan
from unit.plan import inventories as inv, wheels
from unit.plan.recorded import recorded

RELEASE = "sglang-0.5.23"  # the cpu release has the same engine
PYTHON = "3.11"  # which that release is locked for
TOPOLOGIES = {"pair": inv.pd(4, 4), "one": inv.aggregated(8), "replicas": inv.replicas(4, 2)}

pytestmark = [
    pytest.mark.skipif(not os.environ.get("PDSTACK_LONG"), reason="two minutes, 1.8 GB; set PDSTACK_LONG=1"),
    pytest.mark.skipif(not shutil.which(f"python{PYTHON}"), reason=f"no Python {PYTHON}, which the release is for"),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An environment with the engine as it is locked for the CPU: torch without CUDA."""
    command = [sys.executable, str(wheels.ROOT / "tools/wheelhouse"), "cpu-0.5.23", "--python", PYTHON]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    house = pathlib.Path(told.stdout.strip().splitlines()[-1])
    folder = tmp_path_factory.mktemp("engine") / "venv"
    uv = str(pathlib.Path(sys.prefix) / "bin/uv")
    lock = wheels.ROOT / f"releases/cpu-0.5.23/engine-py{PYTHON.replace('.', '')}.txt"
    subprocess.run([uv, "venv", "--quiet", "--python", PYTHON, str(folder)], check=True)
    install = [uv, "pip", "install", "--quiet", "--offline", "--no-index", "--no-deps", "--find-links", str(house)]
    subprocess.run([*install, "--python", str(folder / "bin/python"), "--requirement", str(lock)], check=True)
    return folder / "bin/python"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """DeepSeek-V4-Flash's widths, layers and positions: its configuration, and the tiny model's tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "v4"
    tool = str(wheels.ROOT / "tools/reduced_deepseek_v4")
    subprocess.run([sys.executable, tool, "--layers", "43", "--positions", "1048576", str(folder)], check=True)
    return folder


def planned(**changes: Any) -> list[plan.Instance]:
    return list(inv.planned(recorded()["rtx-pro-6000-8"], pd_release=RELEASE, **changes).instances)


def ask(python: pathlib.Path, model: pathlib.Path, instances: list[plan.Instance]) -> list[dict[str, Any]]:
    # Of the host, not of the resolution.
    kept = ("SGLANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HOME", "SGLANG_PLUGINS", "CUDA_VISIBLE_DEVICES")
    requests = [
        {"args": item.args, "env": {name: value for name, value in item.env.items() if name not in kept}}
        for item in instances
    ]
    script = str(pathlib.Path(__file__).with_name("real_resolution.py"))
    surroundings = {**os.environ, "HOME": str(python.parents[2]), "SGLANG_PLUGINS": "none"}
    done = subprocess.run(
        [str(python), script, str(model)], input=json.dumps(requests), capture_output=True, text=True, env=surroundings
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(answers) == len(instances)
    return answers


def test_the_engine_takes_the_plan_and_resolves_it_as_we_say(python: pathlib.Path, model: pathlib.Path) -> None:
    instances = [item for topology in TOPOLOGIES.values() for item in planned(pd_topology=topology)]
    instances += planned(pd_speculative={"algorithm": "EAGLE"})
    for item, answer in zip(instances, ask(python, model, instances), strict=True):
        assert "error" not in answer, f"{item.name}: {answer['error']}"
        values = answer["values"]
        assert values["device"] == "cuda"
        assert values["attention_backend"] == "dsv4"
        assert values["page_size"] == "256"
        assert values["kv_cache_dtype"] == "fp8_e4m3"
        assert values["moe_runner_backend"] == "flashinfer_mxfp4", "what flags.ENGINES says that this release picks"
        assert values["chunked_prefill_size"] == "8192", "what the plan's reason for prefill's NCCL counts with"
        decode, _, prefill = values["cuda_graph_config"].partition("prefill=")
        assert "backend='disabled'" in prefill
        assert ("backend='disabled'" in decode) is (item.role == "prefill")
        assert ("max_bs=32" in decode) is (item.role != "prefill")


def test_dspark_takes_the_number_of_tokens_from_the_draft(python: pathlib.Path, model: pathlib.Path) -> None:
    wanted = {"algorithm": "DSPARK"}
    instances = planned(pd_speculative=wanted) + planned(pd_speculative={**wanted, "num_draft_tokens": 4})
    without = ask(python, model, instances[:1])
    assert "speculative-draft-model-path" in without[0]["error"], "this checkpoint brings none"
    config = model / "config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), "dspark_block_size": 5, "dspark_target_layer_ids": [1]}))
    try:
        left, right, *given = ask(python, model, instances)
    finally:
        config.write_text(before)
    assert {answer["values"]["speculative_num_draft_tokens"] for answer in (left, right)} == {"6"}
    assert all("must equal gamma + 1" in answer["error"] for answer in given)


def test_what_the_engine_refuses_is_seen(python: pathlib.Path, model: pathlib.Path) -> None:
    bad = planned(pd_engine={"extra_args": {"dsv4-attn-backend": "trtllm"}})
    assert all("requires an SM100" in answer["error"] for answer in ask(python, model, bad))
