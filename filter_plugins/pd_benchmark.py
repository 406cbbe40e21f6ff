# Copyright: the pdstack contributors
# SPDX-License-Identifier: Apache-2.0
"""From the variable pd_benchmark to measurements: which steps, by which client, with which load."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, Mapping

from ansible.errors import AnsibleFilterError
from ansible.module_utils.pdstack.bench import advice

CLIENTS = {"pdstack": ["pdstack"], "bench_serving": ["bench_serving"], "both": ["pdstack", "bench_serving"]}


def steps(settings: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """Return one entry for each measurement. Repeats are the outer loop, so that a slow drift hits all steps alike."""
    places = [{"rate": rate} for rate in settings["rates"]] or [{"concurrency": n} for n in settings["concurrency"]]
    found = []
    for repeat in range(1, settings["repeats"] + 1):
        for place in places:
            for client in CLIENTS[settings["client"]]:
                words = f"C={place['concurrency']}" if "concurrency" in place else f"{place['rate']:g}/s"
                label = f"{words}, repeat {repeat} of {settings['repeats']}, {client}"
                found.append({**place, "repeat": repeat, "client": client, "label": label})
    return found


def workload(settings: Mapping[str, Any], salt: str) -> Dict[str, Any]:
    """Return the load as pd_benchmark takes it; a user's file by its name alone."""
    dataset = settings["dataset"]
    return {
        "dataset": dataset if dataset in ("fixed", "sharegpt-like") else os.path.basename(dataset),
        "input_len": settings["input_len"],
        "output_len": settings["output_len"],
        "requests": settings["requests"],
        "shared_prefix": settings["shared_prefix"],
        "ignore_eos": not settings["stop_at_eos"],
        "salt": salt,
    }


def advise(measured: List[Mapping[str, Any]], plan: Mapping[str, Any], settings: Mapping[str, Any], gpus: int) -> str:
    """Return the P:D advice from a prefill and a decode measurement, with its assumptions."""
    runs = {item["item"]["name"]: item["result"]["runs"][0] for item in measured}
    roles = {role: [item for item in plan["instances"] if item["role"] == role] for role in ("prefill", "decode")}
    rates = advice.Rates(
        runs["prefill"]["input_tokens"] / runs["prefill"]["duration_s"] / len(roles["prefill"]),
        runs["decode"]["output_tok_s"] / len(roles["decode"]),
        len(roles["prefill"][0]["gpus"]),
        len(roles["decode"][0]["gpus"]),
    )
    measured_at = (
        f"measured at C={runs['decode']['concurrency']}, decode TPOT {runs['decode']['tpot_ms']['p50']:.1f} ms"
    )
    input_len, output_len = settings["input_len"], settings["output_len"]
    try:
        found = advice.advise(rates, input_len, output_len, int(gpus), settings["shared_prefix"])
    except advice.AdviceError as error:
        raise AnsibleFilterError(str(error)) from None
    return advice.text(found, rates, input_len, output_len, measured_at)


def report_path(folder: str, *parts: str) -> str:
    """Return a path below the report folder as seen from where ansible-playbook was called; modules run elsewhere."""
    return os.path.abspath(os.path.join(folder or "reports", *parts))


class FilterModule:
    """The filters of the benchmark."""

    def filters(self) -> Dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "pd_report_path": report_path,
            "pd_benchmark_advice": advise,
            "pd_benchmark_steps": steps,
            "pd_benchmark_workload": workload,
        }
