"""Compile a release's JIT modules ahead of its first start, for the architectures of a host's GPUs.

What flashinfer compiles is known by name and needs nvcc and the architecture alone, no GPU: the service that runs is
left alone, but for CPU time. Triton, TileLang and DeepGEMM compile for the shapes that an engine meets, on its GPU, so
that the first start does those whatever happens here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping

from .facts import HostFacts
from .runner import Runner

#: File of the cache that says what was compiled for which question.
RECORD = "warm-up.json"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class WarmUpFailed(RuntimeError):
    """A module did not compile; the engine would meet the same at its start."""


@dataclass(frozen=True)
class Request:
    """What to compile: ``modules`` are generators by architecture, such as {"12.0": ["flashinfer.jit.mla:gen_x"]}."""

    python: str
    script: str  # text of roles/sglang_runtime/files/warm_up.py
    modules: Dict[str, List[str]]
    architectures: List[str]  # compute capabilities of the host's GPUs that will serve, such as "12.0"
    environment: Dict[str, str]  # the engine's; SGLANG_CACHE_DIR is the cache
    user: str

    @property
    def cache(self) -> str:
        return self.environment["SGLANG_CACHE_DIR"]

    @property
    def wanted(self) -> Dict[str, List[str]]:
        """The generators for each architecture of the host that the release has some for."""
        return {name: list(self.modules[name]) for name in sorted(set(self.architectures)) if self.modules.get(name)}

    @property
    def question(self) -> Dict[str, Any]:
        """What a record answers: another release, toolkit or list asks anew."""
        return {"python": os.path.realpath(os.path.dirname(self.python)), "modules": self.wanted}


@dataclass(frozen=True)
class Module:
    """A compiled module; ``seconds`` is 0 where it was there."""

    name: str
    library: str
    seconds: float
    architecture: str = ""


@dataclass(frozen=True)
class Outcome:
    """What was compiled, by architecture."""

    modules: List[Module] = field(default_factory=list)


def architectures(plan: Mapping[str, Any], host: str, found: HostFacts) -> List[str]:
    """Return the compute capabilities of the GPUs that serve on a host, each once; none in the cpu profile."""
    if plan["profile"] != "gpu":
        return []
    used = {gpu["position"] for item in plan["instances"] if item["host"] == host for gpu in item["gpus"]}
    return sorted({found.gpus[position].compute_capability or "" for position in used} - {""})


def reason(request: Request) -> str:
    """Say why there is nothing to compile; "" where there is something."""
    if not request.architectures:
        return "this host has no GPU that will serve: there is nothing to compile"
    if not request.wanted:
        listed = ", ".join(sorted(request.modules)) or "none"
        return f"the release lists no modules for {', '.join(request.architectures)} (it does for {listed})"
    return ""


def done(request: Request) -> bool:
    """Whether the cache holds what this request asks for, by its record and the libraries that it names."""
    try:
        with open(os.path.join(request.cache, RECORD), encoding="utf-8") as stream:
            record = json.load(stream)
        return bool(record["question"] == request.question) and all(map(os.path.exists, record["libraries"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def apply(request: Request, runner: Runner) -> Outcome:
    """Compile as the service's user, at the lowest priority, and record it. Raises WarmUpFailed."""
    found: List[Module] = []
    for architecture, generators in request.wanted.items():
        settings = {
            "PATH": PATH,
            **request.environment,
            # The architecture by name, so that no GPU is touched; it names the same folder as the GPU would.
            "FLASHINFER_CUDA_ARCH_LIST": architecture,
            "CUDA_VISIBLE_DEVICES": "",
        }
        argv = ["setpriv", f"--reuid={request.user}", f"--regid={request.user}", "--init-groups", "nice", "-n", "19"]
        argv += ["env", "-i", *(f"{name}={value}" for name, value in sorted(settings.items()))]
        answer = runner([*argv, request.python, "-c", request.script, json.dumps(generators)])
        try:
            modules = json.loads(answer.out.strip().splitlines()[-1]) if answer.rc == 0 else None
        except (ValueError, IndexError):
            modules = None
        if modules is None:
            words = (answer.err or answer.out).strip()[-1500:]
            raise WarmUpFailed(f"compiling for {architecture} ended with status {answer.rc}: {words}")
        found += [Module(architecture=architecture, **module) for module in modules]
    record = {"question": request.question, "libraries": [module.library for module in found]}
    draft = os.path.join(request.cache, f".{RECORD}.{os.getpid()}")
    with open(draft, "w", encoding="utf-8") as stream:
        json.dump(record, stream, indent=1)
        stream.write("\n")
    os.replace(draft, os.path.join(request.cache, RECORD))
    return Outcome(found)
