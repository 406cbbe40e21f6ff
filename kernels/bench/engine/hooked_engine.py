"""The hooks inside a real engine: SGLang 0.5.13.post1 with and without them, tokens and step times beside each other.

    python3 hooked_engine.py --model FOLDER --out FOLDER [--variants release hooked nudged ...] [--kernels on]
                             [--steps 1x512 16x2048] [--engine '{"disable_cuda_graph": true}']

FOLDER of --model: what tools/reduced_deepseek_v4 writes. Needs the release's engine on the path (sglang, sglang-kernel,
tilelang, flashinfer, sgl-deep-gemm, nvcc for its JIT) and one GPU. Variants, each an engine of its own:

release  the release's own sm_120 path on this card, as `pdstack_sm120_route` makes it take it
hooked   the same, with the plugin of the wheel: hooks applied by the engine's registry from its entry point
nudged   the release again, each weight of its norms one bf16 step off: what last bits do to this model's answers
native   what the release runs on this card (FlashMLA, DeepGEMM on sm_90), for scale
spoiled  hooked, with an attention that is wrong inside captured graphs: the comparison has to find it

Every engine answers the same prompts greedily, twice: what differs between the two is the engine's own noise. Written
per variant: tokens, log-probabilities, step times, the plugin's report. Printed at the end: the comparison as JSON.

Two engines that round differently never agree bit by bit, and FP8 activations make of a last bit a step of a
sixteenth now and then. So the tolerance is measured in the same run: `nudged` beside `release`. Exit code 1 when an
engine did not come up, when the hooked engine's log-probabilities lie further from the release's than `ALLOWED` times
the nudged one's do, when one of its tokens differs where the release was surer than `SURE` times that, or when neither
is so for the spoiled engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import IO, Any

HERE = pathlib.Path(__file__).resolve().parent
KERNELS = HERE.parent.parent
# How much further the hooked engine may lie from the release than the nudged one, in root mean squares of differences
# of log-probabilities. Rounding gives 1, more or less; a wrong kernel several times that.
ALLOWED = 2.0
# A token may differ where the release's two best lie within this many of the nudged engine's root mean squares: each of
# the two is off by one, so this is over four standard deviations of their difference.
SURE = 6.0
# Above this root mean square, in nats, the model itself is so chaotic that nothing is compared.
CHAOS = 0.3
# (requests, tokens of each prompt): the window alone, top-k as identity, top-k that selects. Answers part early in a
# random model, so that many prompts are what gives many tokens to compare.
PROMPTS = [(40, 40), (8, 500), (2, 3000), (2, 5000)]
ANSWER = 48
# (requests, tokens of context) whose decode steps are timed; the release's path prefills 4,100 tokens/s on an H200.
STEPS = [(1, 512), (16, 2048), (64, 512)]
# The torch indexer's time follows this, not the context: 16,384 compressed keys.
CONTEXT = 65536
ENGINE = {
    "attention_backend": "dsv4",
    "chunked_prefill_size": 8192,
    "context_length": CONTEXT,
    "cuda_graph_bs": [1, 2, 8, 16, 64],
    "cuda_graph_max_bs": 64,
    "disable_radix_cache": True,
    "fp8_gemm_runner_backend": "triton",
    "load_format": "dummy",
    "log_level": "info",
    "max_running_requests": 64,
    "mem_fraction_static": 0.6,
    "moe_runner_backend": "triton",
    "random_seed": 0,
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,
}
PLUGINS = {
    "release": "pdstack_sm120_route",
    "hooked": "pdstack_sm120_route,pdstack_kernels",
    "nudged": "pdstack_sm120_route",
    "native": "pdstack_dummy_weights",
    "spoiled": "pdstack_sm120_route,pdstack_kernels,pdstack_spoil",
}
HOOKED = ("hooked", "spoiled")
TIMED = ("release", "hooked", "native")


def install(folder: pathlib.Path) -> pathlib.Path:
    """Both plugins as installed distributions in a folder for PYTHONPATH: the wheel's own files, and the route's."""
    sys.path.insert(0, str(KERNELS))
    import build_backend

    _, files = build_backend.contents()
    files["pdstack_sm120_route.py"] = (HERE / "pdstack_sm120_route.py").read_bytes()
    info = "pdstack_sm120_route-0.dist-info"
    files[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: pdstack-sm120-route\nVersion: 0\n"
    files[f"{info}/entry_points.txt"] = (
        b"[sglang.srt.plugins]\n"
        b"pdstack_sm120_route = pdstack_sm120_route:route\n"
        b"pdstack_dummy_weights = pdstack_sm120_route:weights\n"
        b"pdstack_spoil = pdstack_sm120_route:spoil\n"
    )
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def environment(variant: str, site: pathlib.Path, out: pathlib.Path, mode: str) -> dict[str, str]:
    """What the engine of a variant is started with."""
    sys.path.insert(0, str(HERE))
    import pdstack_sm120_route

    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [env.get("PYTHONPATH")])])
    env["SGLANG_PLUGINS"] = PLUGINS[variant]
    # Minutes of compilation for what is not measured here: DeepGEMM, and Marlin's kernel for FP4 experts (over three
    # minutes on one core of an H200's machine). Experts are FP8, in every variant.
    env["SGLANG_ENABLE_JIT_DEEPGEMM"] = "0"
    env["SGLANG_DSV4_FP4_EXPERTS"] = "0"
    if variant != "native":
        env |= pdstack_sm120_route.ROUTE
    if variant == "nudged":
        env["PDSTACK_NUDGE"] = "1"
    if variant in HOOKED:
        env["PDSTACK_KERNELS"] = mode
        env["PDSTACK_KERNELS_REPORT"] = str(out / "report.json")
    return env


def prompts() -> list[list[int]]:
    """The same for every variant: ids of printable tokens of tools/tiny_model's vocabulary."""
    draw = random.Random(0)
    return [[draw.randrange(40, 500) for _ in range(size)] for count, size in PROMPTS for _ in range(count)]


def measure(options: argparse.Namespace) -> None:
    """In the engine's process: answer, time, write."""
    import sglang

    engine = sglang.Engine(model_path=str(options.model), **{**ENGINE, **options.engine})
    greedy = {"temperature": 0, "ignore_eos": True}
    answers = []
    for _ in range(2):
        got = engine.generate(
            input_ids=prompts(),
            sampling_params=greedy | {"max_new_tokens": ANSWER},
            return_logprob=True,
            top_logprobs_num=2,
        )
        answers.append([_answer(one) for one in got])
    steps = []
    for requests, context in options.steps:
        ids = [[40 + (i * 7 + j * 13) % 460 for j in range(context)] for i in range(requests)]
        times = {}
        for tokens in (65, 1, 65):  # the last of each is what counts: the first compiles
            begin = time.perf_counter()
            engine.generate(input_ids=ids, sampling_params=greedy | {"max_new_tokens": tokens})
            times[tokens] = time.perf_counter() - begin
        steps.append({"requests": requests, "context": context, "step_ms": (times[65] - times[1]) / 64 * 1e3})
    (options.out / "result.json").write_text(json.dumps({"answers": answers, "steps": steps}))
    engine.shutdown()


def _answer(one: dict[str, Any]) -> dict[str, Any]:
    meta = one["meta_info"]
    top = [[pair[0] for pair in pairs] for pairs in meta["output_top_logprobs"]]
    logprobs = meta["output_token_logprobs"]
    return {"ids": [item[1] for item in logprobs], "logprobs": [item[0] for item in logprobs], "top": top}


def compare(mine: list[dict[str, Any]], theirs: list[dict[str, Any]], sure: float = math.inf) -> dict[str, Any]:
    """Token by token up to the first that differs: from there on the two answer different questions.

    ``rms`` and ``largest`` are of the differences of log-probabilities of equal tokens, in nats. ``parted`` answers
    ended early in another token, ``widest`` is the largest of their margins: by how much the other's best token led its
    second. ``wrong`` are those with a margin above ``sure``, and log-probabilities that are no numbers: two engines
    that compute NaN agree on every token. ``different`` counts the tokens that occur; one alone would make the
    comparison empty.
    """
    equal = parted = wrong = 0
    squares = largest = widest = 0.0
    seen: set[int] = set()
    for a, b in zip(mine, theirs, strict=True):
        for i, (x, y) in enumerate(zip(a["ids"], b["ids"], strict=True)):
            seen.add(x)
            if not (math.isfinite(a["logprobs"][i]) and math.isfinite(b["logprobs"][i])):
                wrong += 1
                break
            if x != y:
                margin = b["top"][i][0] - b["top"][i][1]
                parted, widest, wrong = parted + 1, max(widest, margin), wrong + (margin > sure)
                break
            difference = abs(a["logprobs"][i] - b["logprobs"][i])
            equal, squares, largest = equal + 1, squares + difference**2, max(largest, difference)
    rms = math.sqrt(squares / equal) if equal else math.inf
    found = {"equal": equal, "rms": rms, "largest": largest, "parted": parted, "widest": widest, "wrong": wrong}
    return {**found, "different": len(seen)}


def judge(answers: dict[str, list[list[dict[str, Any]]]]) -> tuple[dict[str, Any], list[str]]:
    """Compare what the variants answered; return the comparisons, and what is wrong in words.

    Each variant beside itself and beside the release. Without `release` and `nudged` there is no measure, and nothing
    is judged but that the log-probabilities are numbers.
    """
    found = {f"{name} against itself": compare(*pair) for name, pair in answers.items()}
    problems = [f"{name}: {item['wrong']} answers hold no numbers" for name, item in found.items() if item["wrong"]]
    release, nudged = answers.get("release"), answers.get("nudged")
    if not release:
        return found, problems
    scale = math.nan
    if nudged:
        found["nudged against release"] = control = compare(nudged[0], release[0])
        scale = control["rms"]
        if not scale < CHAOS or control["different"] < 2:
            problems.append(f"last bits move this model by {scale:.3f} nats, {control['different']} tokens: no measure")
    for name in sorted(set(answers) - {"release", "nudged"}):
        item = compare(answers[name][0], release[0], SURE * scale)
        found[f"{name} against release"] = item
        if not (nudged and name in HOOKED):
            continue
        item["times_the_nudged"] = item["rms"] / scale
        faults = []
        if not item["rms"] <= ALLOWED * scale:
            faults.append(f"{name}: {item['rms']:.3f} nats from the release, last bits {scale:.3f}")
        if item["wrong"]:
            faults.append(f"{name}: {item['wrong']} tokens differ where the release was surer than {SURE * scale:.3f}")
        if name != "spoiled":
            problems += faults
        elif not faults:
            problems.append("spoiled: a wrong attention was not told from the release's: this comparison is blind")
    return found, problems


def bounded(command: list[str], env: dict[str, str], log: IO[str], timeout: float) -> int:
    """Run to the end or for ``timeout`` seconds; no child survives, since each holds most of a GPU's memory."""
    process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        print(f"no end within {timeout:.0f} s: killed", file=log, flush=True)
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """One variant in a process of its own; its engine's log goes to a file."""
    out = options.out / variant
    out.mkdir(parents=True, exist_ok=True)
    site = install(options.out / "site")
    command = [sys.executable, str(HERE / "hooked_engine.py"), "--model", str(options.model), "--out", str(out)]
    command += ["--engine", json.dumps(options.engine)]
    command += ["--steps", *(f"{requests}x{context}" for requests, context in options.steps if variant in TIMED)]
    begin = time.perf_counter()
    with open(out / "engine.log", "w") as log:
        code = bounded([*command, "--inside"], environment(variant, site, out, options.kernels), log, options.timeout)
    text = (out / "engine.log").read_text(errors="replace")
    print(f"{variant}: exit {code} after {time.perf_counter() - begin:.0f} s", flush=True)
    for line in text.splitlines():
        if "pdstack-kernels" in line or "Applied" in line:
            print("   ", line, flush=True)
    if code:
        print(text[-6000:], flush=True)
        return {}
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    for step in result["steps"]:
        print("   ", json.dumps(step), flush=True)
    if (out / "report.json").exists():
        result["report"] = json.loads((out / "report.json").read_text())
    return result


def _sizes(words: str) -> tuple[int, int]:
    requests, _, context = words.partition("x")
    return int(requests), int(context)


def main() -> int:
    """Run the variants and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=sorted(PLUGINS), default=["release", "hooked", "nudged"])
    parser.add_argument("--kernels", choices=["auto", "on"], default="on")
    parser.add_argument("--timeout", type=float, default=480, help="seconds for a variant; a cold start takes 200")
    parser.add_argument("--steps", nargs="*", type=_sizes, default=STEPS, help="REQUESTSxCONTEXT of timed steps")
    parser.add_argument("--engine", type=json.loads, default={}, help="arguments of the engine to change, as JSON")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        measure(options)
        return 0
    results = {variant: run(variant, options) for variant in options.variants}
    outcome: dict[str, Any] = {"steps": {name: result.get("steps") for name, result in results.items()}}
    outcome["reports"] = {name: result["report"] for name, result in results.items() if "report" in result}
    found, problems = judge({name: result["answers"] for name, result in results.items() if result})
    problems += [f"{name}: the engine did not come up or did not end" for name, result in results.items() if not result]
    outcome |= {**found, "problems": problems}
    (options.out / "outcome.json").write_text(json.dumps(outcome, indent=1) + "\n")
    print(json.dumps(outcome))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
