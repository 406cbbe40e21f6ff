"""Results on the controller: FOLDER/HOST/RELEASE/TIME.json, and the newest one that another may be compared with."""

from __future__ import annotations

import json
import os
import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from .. import codec
from . import compare, results, stats
from .results import Result

# What is worth a line in the report, of the hundreds of packages of a release.
NAMED = (
    "sglang",
    "torch",
    "torch+cpu",
    "sglang-kernel",
    "flashinfer-python",
    "tilelang",
    "nixl",
    "sglang-router",
    "smg",
    "pdstack-kernels",
    "transformers",
)


def path_of(folder: str, host: str, result: Result) -> str:
    """Return the file of a result. Names are made safe: they come from inventories."""
    parts = [re.sub(r"[^\w.+-]", "_", part) or "_" for part in (host, result.release or "unknown")]
    return os.path.join(folder, *parts, re.sub(r"[^\w]", "", result.when) + ".json")


def read(path: str) -> Result:
    """Return a result that was kept. Raises OSError, and codec.CodecError for what is none."""
    with open(path, encoding="utf-8") as stream:
        try:
            document = json.load(stream)
        except ValueError as error:
            raise codec.CodecError(f"{path}: not JSON: {error}") from None
    return results.load(document, path)


def previous(folder: str, host: str, now: Result) -> Tuple[Optional[str], Optional[Result]]:
    """Return the newest kept result of a host, of whatever release, that ``now`` may be compared with."""
    found: List[Tuple[str, str, Result]] = []
    place = os.path.dirname(os.path.dirname(path_of(folder, host, now)))
    for directory, _, names in os.walk(place):
        for name in sorted(names):
            path = os.path.join(directory, name)
            if name.endswith(".json"):
                try:
                    result = read(path)
                except (OSError, codec.CodecError):
                    continue
                if result.when < now.when and compare.incomparable(result, now) is None:
                    found.append((result.when, path, result))
    return max(found, key=lambda item: item[0])[1:] if found else (None, None)


def joined(parts: Sequence[Mapping[str, Any]], **fields: Any) -> Result:
    """Return one result from documents of one measurement each. Raises codec.CodecError."""
    loaded = [results.load(part) for part in parts]
    if not loaded:
        raise codec.CodecError("no measurement; needed: at least one")
    document: Dict[str, Any] = codec.dump(loaded[0])
    document["runs"] = [codec.dump(run) for part in loaded for run in part.runs]
    return results.load({**document, **fields})


def versions(manifest: Mapping[str, Any], driver: Optional[str] = None) -> Dict[str, str]:
    """Return the packages worth naming of a release's manifest.json."""
    found: Dict[str, str] = {}
    for environment in (manifest.get("environments") or {}).values():
        packages = environment.get("packages") or {}
        found.update({name: str(packages[name]) for name in NAMED if name in packages})
    if manifest.get("python"):
        found["python"] = str(manifest["python"])
    if driver:
        found["driver"] = driver
    return found


def topology_line(plan: Mapping[str, Any]) -> str:
    """Return a plan's topology in one line: pd: 1 x prefill TP4, 1 x decode TP4, 1 x router."""
    counted: Dict[str, int] = {}
    for instance in plan.get("instances") or []:
        tp = (instance.get("args") or {}).get("tp") or (instance.get("args") or {}).get("tp-size") or 1
        words = f"{instance['role']} TP{tp} on {len(instance.get('gpus') or [])} GPUs"
        counted[words] = counted.get(words, 0) + 1
    parts = [f"{count} x {words}" for words, count in counted.items()]
    return f"{(plan.get('topology') or {}).get('mode', '?')}: {', '.join(parts)}"


def machine_line(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the hosts' GPUs in one line."""
    parts = []
    for host, document in sorted(facts.items()):
        names: Dict[str, int] = {}
        for gpu in document.get("gpus") or []:
            name = str(gpu.get("name") or "unknown GPU")
            names[name] = names.get(name, 0) + 1
        gpus = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU"
        parts.append(f"{host}: {gpus}" + (" (simulated)" if document.get("simulated") else ""))
    return "; ".join(parts)


def same_answers(quality: Mapping[str, Any]) -> Optional[bool]:
    """Return whether the answers after the load are those before it; None where one side is missing."""
    before = {check["subject"]: check["found"] for check in quality.get("before") or []}
    after = {check["subject"]: check["found"] for check in quality.get("after") or []}
    if not before or not after:
        return None
    return before == after


def text(result: Result) -> str:
    """Return the figures as a table for a terminal: medians over repeats."""
    lines = [f"{result.label}: {result.topology}".rstrip(": ")]
    lines.append(
        f"{'step':<8}{'tok/s':>10}{'TTFT p50':>10}{'p99':>9}{'TPOT p50':>10}{'p99':>9}{'ITL p99':>9}{'failed':>8}"
    )
    for step in stats.steps(result.runs):
        runs = stats.of_step(result.runs, step)

        def middle(metric: str, runs: Sequence[stats.Run] = runs) -> str:
            known = [value for value in map(stats.METRICS[metric], runs) if value is not None]
            return f"{stats.median(known):.1f}" if known else "-"

        lines.append(
            f"{step:<8}{middle('output_tok_s'):>10}{middle('ttft_p50_ms'):>10}{middle('ttft_p99_ms'):>9}"
            f"{middle('tpot_p50_ms'):>10}{middle('tpot_p99_ms'):>9}{middle('itl_p99_ms'):>9}"
            f"{sum(run.failed for run in runs):>8}"
        )
    return "\n".join(lines)
