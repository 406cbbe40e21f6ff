"""Small plans as documents, for tests of what is made from a plan."""

from __future__ import annotations

from typing import Any

from pdstack import codec, settings

UNIT_TEXTS = {
    "pd.target": "target\n",
    "pd-prefill@.service": "prefill\n",
    "pd-decode@.service": "decode\n",
    "pd-aggregated@.service": "aggregated\n",
    "pd-router.service": "router\n",
    "pd-canary.service": "canary\n",
    "pd-canary.timer": "timer\n",
    "launch.py": "launch\n",
}
OPEN = {"api_key": False, "admin_key": "random", "tls": "off", "tls_names": []}


def instance(role: str, index: int, host: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": f"{role}-{index}",
        "role": role,
        "index": index,
        "host": host,
        "unit": f"pd-{role}@{index}.service",
        "set": f"pair-{index}",
        "address": "10.0.0.1",
        "gpus": [],
        "numa_nodes": [0],
        "memory_nodes": "0",
        "cpus": "0-31",
        "ports": {"http": 30000 + index},
        "args": {
            "model-path": "/m",
            "tp-size": 4,
            "trust-remote-code": True,
            "mem-fraction-static": 0.7,
            "odd": "a: #b",
        },
        "env": {
            "UCX_TLS": "cuda_copy,cuda_ipc",
            "QUOTED": 'a "b" \\ c',
            "SGLANG_CACHE_DIR": "/var/lib/pdstack/jit/r/cuda-13.0",
        },
        "why": [
            {"decision": "cpus", "reason": "GPUs 0-3 hang on node 0"},
            {"decision": "env", "reason": "not placement"},
        ],
        **changes,
    }


PLAN: dict[str, Any] = {
    "release": "r",
    "profile": "cpu",
    "model": {"served_name": "tiny"},
    "canary": codec.dump(settings.Canary()),
    "security": OPEN,
    "instances": [instance("decode", 0, "a"), instance("prefill", 0, "a"), instance("decode", 1, "b")],
    "routers": [
        {
            "name": "router-0",
            "host": "b",
            "unit": "pd-router.service",
            "address": "10.0.0.2",
            "ports": {"http": 8000},
            "argv": ["--port", "8000"],
            "workers": {},
            "env": {},
            "why": [],
        }
    ],
}


def pairs(count: int, hosts: str = "a") -> dict[str, Any]:
    """A plan of pairs behind one router, pair i on host i."""
    found = [
        instance(role, i, hosts[i % len(hosts)], ports={"http": base + i}, address=f"10.0.0.{i}")
        for i in range(count)
        for role, base in (("prefill", 30000), ("decode", 30100))
    ]
    workers = {
        role: [{"url": f"http://{item['address']}:{item['ports']['http']}"} for item in found if item["role"] == role]
        for role in ("prefill", "decode")
    }
    router = {**PLAN["routers"][0], "host": hosts[0], "workers": workers}
    return {**PLAN, "instances": found, "routers": [router]}
