"""The hooks inside a real engine: SGLang 0.5.13.post1 with and without them, tokens and step times beside each other.

    python3 hooked_engine.py --model FOLDER --out FOLDER [--variants release hooked nudged ...] [--kernels on]
                             [--gpus 0 1] [--steps 1x512 16x2048] [--engine '{"disable_cuda_graph": true}']

FOLDER of --model: what tools/reduced_deepseek_v4 writes. Needs the release's engine on the path (sglang, sglang-kernel,
tilelang, flashinfer, sgl-deep-gemm, nvcc for its JIT) and one GPU. Variants run one after another, or as many at a time
as --gpus names GPUs; each is an engine of its own on one GPU:

release  the release's own sm_120 path on this card, as `pdstack_sm120_route` makes it take it
hooked   the same, with the plugin of the wheel: hooks applied by the engine's registry from its entry point
nudged   the release again, each weight of its norms one bf16 step off: what last bits do to this model's answers
native   what the release runs on this card (FlashMLA, DeepGEMM on sm_90), for scale
spoiled  hooked, with an attention that is wrong inside captured graphs: the comparison has to find it

Every engine answers the same prompts greedily, twice: what differs between the two is the engine's own noise. Written
per variant: tokens, log-probabilities, step times, the plugin's report. Printed at the end: the comparison as JSON, and
in it which engines ran at the same time on other GPUs (`beside`). A step time is the median of REPEATS stretches of an
answer; where these do not agree it is null, with the reason beside it. Step times never decide the exit code.

Two engines that round differently never agree bit by bit, and FP8 activations make of a last bit a step of a
sixteenth now and then. So the tolerance is measured in the same run: `nudged` beside `release`. Exit code 1 when an
engine did not come up, when the hooked engine's log-probabilities lie further from the release's than `ALLOWED` times
the nudged one's do, when one of its tokens differs where the release was surer than `SURE` times that, or when neither
is so for the spoiled engine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

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
GREEDY = {"temperature": 0, "ignore_eos": True}
# (requests, tokens of context) whose decode steps are timed; the release's path prefills 4,100 tokens/s on an H200.
STEPS = [(1, 512), (16, 2048), (64, 512)]
# Decode steps between two chunks of an answer, and how many such stretches count: the one before them warms up. Every
# step would be a chunk a request, which for 64 requests costs the receiver more than the hooked step takes.
STRETCH = 32
REPEATS = 4
# A step time is one where all stretches but one lie within this share of their median.
AGREE = 0.1
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
    answers = []
    for _ in range(2):
        got = engine.generate(
            input_ids=prompts(),
            sampling_params={**GREEDY, "max_new_tokens": ANSWER},
            return_logprob=True,
            top_logprobs_num=2,
        )
        answers.append([_answer(one) for one in got])
    steps = []
    for requests, context in options.steps:
        try:
            timed = summary(stretches(engine, requests, context))
        except Exception as error:  # the answers are what counts, and they are there
            timed = {"step_ms": None, "stretches_ms": [], "not_measured": f"{type(error).__name__}: {error}"}
        steps.append({"requests": requests, "context": context, **timed})
    (options.out / "result.json").write_text(json.dumps({"answers": answers, "steps": steps}))
    engine.shutdown()


def stretches(engine: Any, requests: int, context: int) -> list[float]:
    """Milliseconds per decode step in each stretch of the streamed answers to ``requests`` prompts.

    The clock runs from chunk to chunk of the slowest request, so that no prefill is in it: on the release's path that
    takes ten times as long as all steps, and its noise alone was more than a hooked step.
    """
    ids = [[40 + (i * 7 + j * 13) % 460 for j in range(context)] for i in range(requests)]
    marks = [1 + STRETCH * i for i in range(REPEATS + 2)]
    sampling = {**GREEDY, "max_new_tokens": marks[-1], "stream_interval": STRETCH}
    reached: dict[int, dict[int, float]] = {mark: {} for mark in marks}
    for chunk in engine.generate(input_ids=ids, sampling_params=sampling, stream=True):
        now = time.perf_counter()
        for mark in marks:
            if chunk["meta_info"]["completion_tokens"] >= mark:
                reached[mark].setdefault(chunk["index"], now)
    if any(len(times) < requests for times in reached.values()):
        return []
    ends = [max(times.values()) for times in reached.values()]
    return [(end - begin) / STRETCH * 1e3 for begin, end in itertools.pairwise(ends)]


def summary(values: list[float]) -> dict[str, Any]:
    """``step_ms``, the median of the stretches that count, or null and why it is not measured; always what was seen.

    ``stretches_ms``: all values, the first of them the warm-up.
    """
    counted = values[1:]
    middle = statistics.median(counted) if counted else 0.0
    near = sum(abs(value - middle) <= AGREE * middle for value in counted)
    why = ""
    if len(counted) < REPEATS:
        why = "the stream ended before every request had all its tokens"
    elif not middle > 0:
        why = "the clock saw no time between chunks"
    elif near < REPEATS - 1:
        why = f"only {near} of {REPEATS} stretches lie within {AGREE:.0%} of their median"
    return {"step_ms": None if why else middle, "stretches_ms": values, **({"not_measured": why} if why else {})}


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


@dataclasses.dataclass
class Started:
    """A variant's process. ``beside``: the variants that ran on other GPUs at some time while this one did."""

    variant: str
    out: pathlib.Path
    process: subprocess.Popen[bytes]
    begin: float
    beside: set[str]


def start(variant: str, gpu: str | None, options: argparse.Namespace) -> Started:
    """Start one variant in a process of its own, on one GPU; its engine's log goes to a file."""
    out = options.out / variant
    out.mkdir(parents=True, exist_ok=True)
    for name in ("result.json", "report.json"):
        (out / name).unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "hooked_engine.py"), "--model", str(options.model), "--out", str(out)]
    command += ["--engine", json.dumps(options.engine), "--inside"]
    command += ["--steps", *(f"{requests}x{context}" for requests, context in options.steps if variant in TIMED)]
    env = environment(variant, options.out / "site", out, options.kernels)
    if gpu is not None:
        # Caches of compiled kernels are shared: Triton, Inductor and TileLang rename finished files into place,
        # flashinfer and tvm-ffi hold a flock on a module while they build it. An engine that needs a module which
        # another one builds waits for it, which takes no longer than to build it in a cache of its own. Ports need no
        # care either: an engine binds one, of the kernel's choice, and talks over sockets of its own in /tmp.
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu}
    with open(out / "engine.log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    return Started(variant, out, process, time.perf_counter(), set())


def stop(started: Started) -> None:
    """End a process with all its children, since each holds most of a GPU's memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.process.pid, signal.SIGKILL)
    started.process.wait()


def run(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every variant's result, {} where it has none: in the order given, each on the next GPU that is free.

    Each has ``options.timeout`` seconds. Whatever ends this function, no engine outlives it.
    """
    waiting = list(options.variants)
    results: dict[str, dict[str, Any]] = {variant: {} for variant in waiting}
    running: dict[str | None, Started] = {}
    install(options.out / "site")
    try:
        while waiting or running:
            for gpu in options.gpus:
                if waiting and gpu not in running:
                    others = list(running.values())
                    running[gpu] = started = start(waiting.pop(0), gpu, options)
                    for other in others:
                        started.beside.add(other.variant)
                        other.beside.add(started.variant)
            time.sleep(0.1)
            for gpu, started in list(running.items()):
                code = ended(started, options.timeout)
                if code is not None:
                    del running[gpu]
                    results[started.variant] = finish(started, code)
    finally:
        for started in running.values():
            stop(started)
    return results


def ended(started: Started, timeout: float) -> int | None:
    """The exit code of a process that ended, or that ran for ``timeout`` seconds and was killed; None while it runs."""
    code = started.process.poll()
    late = time.perf_counter() - started.begin > timeout
    if code is None and not late:
        return None
    stop(started)
    if code is None:
        with open(started.out / "engine.log", "a") as log:
            print(f"no end within {timeout:.0f} s: killed", file=log)
        return 124
    return code


def finish(started: Started, code: int) -> dict[str, Any]:
    """What a variant measured; its messages are printed together, however many run."""
    text = (started.out / "engine.log").read_text(errors="replace")
    seconds = round(time.perf_counter() - started.begin, 1)
    lines = [f"{started.variant}: exit {code} after {seconds:.0f} s"]
    lines += [f"    {line}" for line in text.splitlines() if "pdstack-kernels" in line or "Applied" in line]
    if code:
        print("\n".join([*lines, text[-6000:]]), flush=True)
        return {}
    result: dict[str, Any] = json.loads((started.out / "result.json").read_text())
    lines += [f"    {json.dumps(step)}" for step in result["steps"]]
    print("\n".join(lines), flush=True)
    result |= {"seconds": seconds, "beside": sorted(started.beside)}
    if (started.out / "report.json").exists():
        result["report"] = json.loads((started.out / "report.json").read_text())
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
    parser.add_argument(
        "--gpus",
        nargs="+",
        default=[None],
        help="GPUs to run variants on at the same time, as nvidia-smi counts them: name the longest variant first; "
        "without it they run one after another on the first GPU that there is",
    )
    parser.add_argument("--timeout", type=float, default=480, help="seconds for a variant; a cold start takes 200")
    parser.add_argument("--steps", nargs="*", type=_sizes, default=STEPS, help="REQUESTSxCONTEXT of timed steps")
    parser.add_argument("--engine", type=json.loads, default={}, help="arguments of the engine to change, as JSON")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        measure(options)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` ends its engines
    results = run(options)
    outcome: dict[str, Any] = {
        part: {name: result.get(part) for name, result in results.items()} for part in ("steps", "seconds", "beside")
    }
    outcome["reports"] = {name: result["report"] for name, result in results.items() if "report" in result}
    found, problems = judge({name: result["answers"] for name, result in results.items() if result})
    problems += [f"{name}: the engine did not come up or did not end" for name, result in results.items() if not result]
    outcome |= {**found, "problems": problems}
    (options.out / "outcome.json").write_text(json.dumps(outcome, indent=1) + "\n")
    print(json.dumps(outcome))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
