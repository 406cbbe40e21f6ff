"""The reduced DeepSeek-V4: the widths that kernels are written for stay, all kinds of layers are in it."""

import json
import pathlib
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools/reduced_deepseek_v4"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reduced")
    subprocess.run([sys.executable, TOOL, "--layers", "6", folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def config(model):
    return json.loads((model / "config.json").read_text())


def test_the_engine_finds_its_architecture(config):
    assert config["architectures"] == ["DeepseekV4ForCausalLM"]
    assert config["quantization_config"]["quant_method"] == "fp8"
    # DeepSeek-V4's experts are FP4 unless a checkpoint's header says otherwise; there is no checkpoint here.


def test_every_kind_of_layer_is_in_it(config):
    assert config["compress_ratios"] == [0, 4, 128, 4, 128, 4]
    assert len(config["compress_ratios"]) == config["num_hidden_layers"]
    assert config["num_hash_layers"] == 0  # dummy weights leave a hash layer's table unset


def test_the_kernels_shapes_are_the_models_own(config):
    """What kernels/src/pdstack_kernels fixes: 512 = 448 + 64, indexer heads of 128, 4 streams."""
    source = (ROOT / "kernels/src/pdstack_kernels/layout.py").read_text()
    for line in ("NOPE = 448", "ROPE = 64", "INDEX_DIM = 128"):
        assert line in source
    assert config["head_dim"] - config["qk_rope_head_dim"] == 448
    assert (config["qk_rope_head_dim"], config["index_head_dim"], config["hc_mult"]) == (64, 128, 4)
    assert (config["num_attention_heads"], config["index_n_heads"], config["index_topk"]) == (64, 64, 512)


def test_the_gate_finds_as_many_experts_as_it_compares(config):
    """sglang 0.5.13.post1 compares the results of 8, 12 or 16 warps of 32 experts each, however many there are."""
    assert -(-config["n_routed_experts"] // 32) in (8, 12, 16)


def test_the_tokenizer_fits_the_vocabulary(model, config):
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    assert max(vocabulary.values()) < config["vocab_size"]
    assert (model / "tokenizer_config.json").exists()


def test_too_few_layers_are_refused(tmp_path):
    command = [sys.executable, TOOL, "--layers", "2", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs at least 3 layers" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_file_is_the_function(config):
    made = runpy.run_path(str(TOOL))["config"](6, 65536, 512)
    assert made == config
