"""Resolve an engine's configuration as its start does, on a simulated sm_120 GPU and without one.

Run under a Python that has the cpu release of the engine::

    python real_resolution.py MODEL < requests.json > answers.json

A request has ``args`` (what stands in the instance's YAML) and ``env``. MODEL is a folder with the model's config.json.
The real ``resolve_once`` and ``check_server_args`` run; torch is made to claim GPUs of 96 GB, compute capability 12.0.
The answer to each is what they resolved, or the error that would have ended the engine.
"""

import contextlib
import json
import os
import pathlib
import sys
import tempfile
import types
import warnings

import yaml

MEMORY = 97887 << 20
TOLD = [
    "attention_backend",
    "chunked_prefill_size",
    "cuda_graph_config",
    "device",
    "disable_custom_all_reduce",
    "kv_cache_dtype",
    "moe_runner_backend",
    "page_size",
    "speculative_num_draft_tokens",
]


def pretend_gpus(count):
    """Let torch claim GPUs. What asks its modules at import has been imported before."""
    import torch
    from sglang.srt.utils import common

    card = types.SimpleNamespace(multi_processor_count=188, total_memory=MEMORY, name="simulated", major=12, minor=0)
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: count
    torch.cuda.get_device_capability = lambda *_: (12, 0)
    torch.cuda.get_device_name = lambda *_: card.name
    torch.cuda.get_device_properties = lambda *_: card
    torch.cuda.mem_get_info = lambda *_: (MEMORY, MEMORY)
    for name in dir(common):
        getattr(getattr(common, name), "cache_clear", lambda: None)()
    assert common.is_sm120_supported()


def resolve(request, model):
    """Return what the engine makes of one request."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args

    os.environ.update(request["env"])
    pretend_gpus(request["args"]["tp-size"])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "instance.yaml"
        path.write_text(yaml.safe_dump({**request["args"], "model-path": model}))
        try:
            made = prepare_server_args(["--config", str(path)])
            made.resolve_once()
            made.check_server_args()
        except (Exception, SystemExit) as error:
            return {"error": f"{type(error).__name__}: {error}"}
    view = resolved_view(made)
    return {"values": {name: str(getattr(view, name)) for name in TOLD}}


def in_a_copy(request, model):
    """The same in a process of its own: what is resolved is published for the whole process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = {"error": "it ended without an answer"}
        try:
            answer = resolve(request, model)
        finally:
            with open(writer, "w", encoding="utf-8") as stream:
                json.dump(answer, stream)
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as stream:
        answer = json.load(stream)
    os.waitpid(child, 0)
    return answer


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        import sglang.srt.arg_groups.model_hook
        import sglang.srt.arg_groups.pipeline
        import sglang.srt.configs.model_config  # noqa: F401

        ANSWERS = [in_a_copy(request, sys.argv[1]) for request in json.load(sys.stdin)]
    json.dump(ANSWERS, sys.stdout)
