"""Arguments, environment and reasons of each instance and router. Pure."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from . import checks, communication, cpulist, flags, placement
from .communication import Choices
from .facts import HostFacts
from .folders import JIT_DIR, MODELS_DIR
from .intent import Host, Intent
from .placement import Cpus
from .plan_types import GpuRef, Instance, ModelRef, Router, Seat, SecurityRef, Why, Worker
from .settings_router import Router as RouterSettings

STARTUP_CHECK_S = 2
CPU_BOOTSTRAP_TIMEOUT_S = 10
CPU_WAITING_TIMEOUT_S = 30
GPU_BOOTSTRAP_TIMEOUT_S = 120
GPU_WAITING_TIMEOUT_S = 300
WARM_UP_TIMEOUT_S = 1800
EAGLE_STEPS = 3
COMPILER_BYTES = 9_000_000_000  # measured: docs/releases.md#compiled-ahead-of-the-first-start


def model(intent: Intent) -> ModelRef:
    """Return where the checkpoint lies on every GPU host."""
    wanted = intent.model
    path = f"{MODELS_DIR}/{wanted.repo.replace('/', '--')}@{wanted.revision}"
    return ModelRef(wanted.repo, wanted.revision, path, wanted.served_name or wanted.repo)


SSH_UNITS = ("ssh.service", "ssh.socket", "sshd.service", "sshd.socket")


def security(intent: Intent, facts: Mapping[str, HostFacts]) -> SecurityRef:
    """Return what is protected, without the values of keys."""
    wanted = intent.settings.security
    return SecurityRef(
        api_key=wanted.api_key is not None,
        admin_key="random" if wanted.admin_api_key is None else "given",
        tls=wanted.tls,
        tls_names=list(wanted.tls_names),
        firewall=wanted.firewall,
        client_networks=list(wanted.client_networks),
        metrics_networks=list(wanted.metrics_networks),
        open_ports=sorted(set(wanted.firewall_open_ports)),
        ssh_ports=sorted(
            {
                item.port
                for host in facts.values()
                for item in host.ports
                if (item.command == "sshd" or item.unit in SSH_UNITS) and not item.address.startswith(("127.", "::1"))
            }
        ),
    )


def instance(intent: Intent, seat: Seat, cpus: Cpus, peers: Sequence[Seat]) -> Instance:
    """Return one engine instance. ``peers`` are the seats that a KV cache may come from or go to."""
    ports = _ports(intent, seat)
    chosen = _gpu(intent, seat, cpus, peers) if intent.profile == "gpu" else _cpu(intent, seat)
    args = {**_common(intent, seat, ports), **chosen.args}
    env = {**_addresses(intent, seat), **chosen.env}
    why = [
        Why("gpus", _gpu_reason(seat)),
        Why("cpus", cpus.reason),
        Why("memory_nodes", cpus.memory_reason),
        *_handover_reasons(intent, seat, env),
        *chosen.why,
    ]
    for where, extra in (
        ("pd_engine.extra_args", intent.settings.engine.extra_args),
        (f"pd_topology.{_shape_name(intent, seat)}.extra_args", _shape_args(intent, seat)),
    ):
        for name, value in sorted(extra.items()):
            args[name.replace("_", "-")] = value
            why.append(Why(name, f"given by {where}"))
    for name, value in sorted(intent.settings.engine.extra_env.items()):
        if env.get(name) not in (None, str(value)):
            why.append(Why(name, f"pd_engine.extra_env replaces {env[name]} by {value}"))
        env[name] = str(value)
    facts = seat.view.facts
    return Instance(
        name=seat.name,
        role=seat.role,
        index=seat.index,
        host=seat.host.name,
        unit=f"pd-{seat.role}@{seat.index}.service",
        set=seat.set,
        address=seat.host.address,
        gpus=[GpuRef(i, facts.gpus[i].pci, facts.gpus[i].uuid, facts.gpus[i].index) for i in seat.spot.positions],
        numa_nodes=[node for node in seat.spot.nodes if node is not None],
        memory_nodes=cpus.memory_nodes,
        cpus=cpus.cpus,
        ports=ports,
        offset=seat.offset,
        args=args,
        env=dict(sorted(env.items())),
        why=why,
    )


def routers(intent: Intent, instances: Sequence[Instance]) -> List[Router]:
    """Return one router for each router host."""
    by_host: Dict[str, List[Instance]] = {}
    for item in instances:
        by_host.setdefault(item.host, []).append(item)
    everybody = intent.settings.router.scope == "all"
    all_workers = _workers(instances) if everybody else {}
    return [
        _router(intent, host, i, all_workers if everybody else _workers(by_host.get(host.name, [])))
        for i, host in enumerate(intent.router_hosts)
    ]


def _workers(instances: Sequence[Instance]) -> Dict[str, List[Worker]]:
    workers: Dict[str, List[Worker]] = {}
    for item in instances:
        url = f"http://{_in_url(item.address)}:{item.ports['http']}"
        workers.setdefault(item.role, []).append(Worker(url, item.ports.get("bootstrap")))
    return workers


def _ports(intent: Intent, seat: Seat) -> Dict[str, int]:
    base = intent.settings.ports
    ports = {"http": getattr(base, seat.role) + seat.offset}
    if seat.role == "prefill":
        ports["bootstrap"] = base.bootstrap + seat.offset
    return ports


def _common(intent: Intent, seat: Seat, ports: Dict[str, int]) -> Dict[str, Any]:
    where = model(intent)
    args: Dict[str, Any] = {
        "model-path": where.path,
        "served-model-name": where.served_name,
        "host": seat.host.address,
        "port": ports["http"],
        "context-length": intent.topology.context_length,
        "watchdog-timeout": intent.settings.engine.watchdog_timeout_s,
        "enable-metrics": True,
    }
    if seat.role in ("prefill", "decode"):
        args["disaggregation-mode"] = seat.role
        args["disaggregation-transfer-backend"] = intent.settings.transfer
    if seat.role == "prefill":
        args["disaggregation-bootstrap-port"] = ports["bootstrap"]
    return args


def _addresses(intent: Intent, seat: Seat) -> Dict[str, str]:
    engine = intent.settings.engine
    gpu = intent.profile == "gpu"
    # Without these the engine guesses an interface, and NIXL's control sockets follow the guess.
    env = {
        "SGLANG_HOST_IP": seat.host.address,
        "HOST_IP": seat.host.address,
        # The service never asks the hub: the checkpoint is verified on disk.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if seat.host.interface:
        env["GLOO_SOCKET_IFNAME"] = seat.host.interface
    if seat.role in ("prefill", "decode"):
        bootstrap = engine.bootstrap_timeout_s or (GPU_BOOTSTRAP_TIMEOUT_S if gpu else CPU_BOOTSTRAP_TIMEOUT_S)
        waiting = engine.waiting_timeout_s or (GPU_WAITING_TIMEOUT_S if gpu else CPU_WAITING_TIMEOUT_S)
        env["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] = str(bootstrap)
        env["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] = str(waiting)
    return env


def _handover_reasons(intent: Intent, seat: Seat, env: Dict[str, str]) -> List[Why]:
    if seat.role not in ("prefill", "decode"):
        return []
    bootstrap = env["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"]
    waiting = env["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"]
    return [
        Why(
            "disaggregation-transfer-backend",
            f"pd_transfer: {intent.settings.transfer}; the engine's own default is mooncake",
        ),
        Why(
            "time limits",
            f"a dead peer fails a request after {bootstrap} s, a KV cache that does not come after {waiting} s",
        ),
    ]


def _gpu(intent: Intent, seat: Seat, cpus: Cpus, peers: Sequence[Seat]) -> Choices:
    """Arguments and environment of a real engine on GPUs."""
    release, engine = intent.release.engine, intent.settings.engine
    facts = seat.view.facts
    chosen = communication.all_reduce(seat.view, seat.spot.positions, seat.role, release.pcie_all_reduce)
    args, env = chosen.args, chosen.env
    args["tp-size"] = seat.tp
    args["mem-fraction-static"] = engine.mem_fraction_static
    known = flags.MODELS.get(intent.model.repo)
    if known and known.trust_remote_code:
        args["trust-remote-code"] = True
    args["moe-runner-backend"] = engine.moe_runner_backend or release.moe_runner_backend
    if engine.moe_runner_backend is None:
        chosen.because("moe-runner-backend", f"{release.moe_runner_backend}: {release.moe_reason}")
    if seat.role == "prefill":
        flag = release.spelling[flags.EAGER_PREFILL]
        args[flag] = True
        chosen.because(flag, "prefill runs eagerly: prompt lengths differ too much for graphs (reference)")
    elif engine.cuda_graph_max_bs == 0:
        args["disable-cuda-graph"] = True
        chosen.because("disable-cuda-graph", "pd_engine.cuda_graph_max_bs is 0: a profile then names operators")
    else:
        flag = release.spelling[flags.GRAPH_LIMIT]
        args[flag] = engine.cuda_graph_max_bs
        chosen.because(flag, f"decode runs with CUDA graphs up to batch {engine.cuda_graph_max_bs} (reference)")
    _speculative(intent, chosen)
    _kernel_extension(intent, seat, chosen)
    # Indices and not UUIDs: the engine's custom all-reduce reads them with int().
    env["CUDA_VISIBLE_DEVICES"] = ",".join(str(facts.gpus[i].index) for i in seat.spot.positions)
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    chosen.because("CUDA_VISIBLE_DEVICES", "indices in PCI order, joined to the facts by PCI id")
    env["SGLANG_CACHE_DIR"] = f"{JIT_DIR}/{intent.release.name}/{intent.toolkit}"
    chosen.because(
        "SGLANG_CACHE_DIR", "a JIT cache for each release and toolkit: a stale one gives wrong kernels, flashinfer#5145"
    )
    env["HOME"] = env["SGLANG_CACHE_DIR"]
    chosen.because(
        "HOME",
        "the JIT cache too: Triton, TileLang, tvm-ffi and flashinfer of some releases write below the home folder",
    )
    # By itself torch takes /tmp, which ends with the unit: 0.5.13 would compile anew at each start.
    env["TORCHINDUCTOR_CACHE_DIR"] = f"{env['SGLANG_CACHE_DIR']}/inductor"
    jobs = _compile_jobs(facts, cpus)
    if jobs:
        env["MAX_JOBS"] = str(jobs)
        chosen.because(
            "MAX_JOBS",
            f"{jobs} compilers at once: ninja would start one for each CPU, and each takes up to "
            f"{COMPILER_BYTES / 1e9:.0f} GB of the memory that the instance may use",
        )
    if seat.role == "aggregated":
        env["SGLANG_WARMUP_TIMEOUT"] = str(WARM_UP_TIMEOUT_S)
        chosen.because(
            "SGLANG_WARMUP_TIMEOUT",
            f"{WARM_UP_TIMEOUT_S} s, as the engine gives prefill and decode: after its 600 s it would end while "
            "kernels are compiled, and begin anew",
        )
    if len(seat.spot.nodes) > 1 and None not in seat.spot.nodes:
        args["numa-node"] = [seat.view.gpu_nodes[i] for i in seat.spot.positions]
        if release.strict_numa:
            env[release.strict_numa] = "1"
        chosen.because(
            "numa-node",
            f"the instance {_locality(seat)}: the engine pins each rank; one entry for each visible GPU",
        )
    elif cpus.memory_nodes and release.own_numa:
        env[release.own_numa] = "0"
        chosen.because(
            release.own_numa,
            "0: the unit has pinned CPUs and memory; the engine would do it again by a script in /tmp, which does not "
            "run where that is mounted noexec",
        )
    if seat.role in ("prefill", "decode") and intent.settings.transfer == "nixl":
        local = [i for peer in peers if peer.host.name == seat.host.name for i in peer.spot.positions]
        across = any(peer.host.name != seat.host.name for peer in peers)
        lane = communication.transfer(
            seat.view, seat.spot.positions, local, checks.rdma_devices(facts), seat.host.interface, across
        )
        env.update(lane.env)
        chosen.why += lane.why
    return chosen


def _compile_jobs(facts: HostFacts, cpus: Cpus) -> int:
    """Return how many compilers may run at once on the instance's CPUs and in its memory; 0 where that is not known.

    Of three quarters of it: the engine and the weights in the page cache want the rest. Instances that share it compile
    in turns, since they share the cache and its locks.
    """
    allowed = cpulist.parse(cpus.memory_nodes)
    sizes = [node.memory_bytes for node in facts.numa if node.memory_bytes and (not allowed or node.node in allowed)]
    if not sizes:
        return 0
    processors = len(cpulist.parse(cpus.cpus)) or sum(len(cpulist.parse(node.cpus)) for node in facts.numa)
    return max(1, min(processors or 1, sum(sizes) * 3 // 4 // COMPILER_BYTES))


_LOCALITY = {
    "node": "fits in one NUMA node",
    "near": "covers several NUMA nodes of one socket",
    "spans": "spans sockets",
    "unknown": "has GPUs whose node is not known",
}


def _cpu(intent: Intent, seat: Seat) -> Choices:
    """The functional profile: the same plan on simulated GPUs, the real engine on the CPU."""
    chosen = Choices()
    chosen.args.update(
        {
            "device": "cpu",
            "tp-size": 1,
            "dtype": "float32",
            "attention-backend": "torch_native",
            "max-total-tokens": 8192,
            "max-running-requests": 8,
            "skip-server-warmup": True,
            "disable-overlap-schedule": True,
            "sleep-on-idle": True,
        }
    )
    if seat.role == "decode":
        chosen.args["disaggregation-decode-retraction-backup"] = "none"
    chosen.env.update({"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"})
    if seat.role in ("prefill", "decode"):
        chosen.env["UCX_TLS"] = "posix,cma,self,tcp"
        if seat.host.interface:
            chosen.env["UCX_NET_DEVICES"] = seat.host.interface
    chosen.because(
        "profile cpu",
        f"functional only: {seat.tp} simulated GPUs decide the placement, the engine runs on the CPU (tp 1, float32)",
    )
    chosen.because("max-total-tokens", "the token pool would take most of the memory otherwise")
    chosen.because(
        "disable-overlap-schedule", "without it the second request with a cached prefix ends prefill on a CPU"
    )
    chosen.because("sleep-on-idle", "an idle scheduler polls a whole core away, and this machine has other work")
    if seat.role == "decode":
        chosen.because("disaggregation-decode-retraction-backup", "none: the other choices reach torch.cuda at start")
    return chosen


def _speculative(intent: Intent, chosen: Choices) -> None:
    wanted = intent.settings.speculative
    if wanted.algorithm == "none":
        return
    steps, tokens = wanted.num_steps, wanted.num_draft_tokens
    if wanted.algorithm == "EAGLE":
        steps = steps or EAGLE_STEPS
        tokens = tokens or steps + 1
    else:
        chosen.because(
            "speculative-algorithm",
            "DSPARK: the engine takes the draft and its number of tokens from the checkpoint; another one by "
            "pd_engine.extra_args: speculative-draft-model-path",
        )
    given = {
        "speculative-algorithm": wanted.algorithm,
        "speculative-num-steps": steps,
        "speculative-eagle-topk": wanted.eagle_topk,
        "speculative-num-draft-tokens": tokens,
        "speculative-moe-runner-backend": wanted.moe_runner_backend,
    }
    chosen.args.update({name: value for name, value in given.items() if value is not None})
    if wanted.moe_runner_backend is None:
        chosen.because(
            "speculative-moe-runner-backend",
            "not set: the release takes the model's own, which reads the draft's FP4 experts",
        )


def _kernel_extension(intent: Intent, seat: Seat, chosen: Choices) -> None:
    """Say by name which plugin the engine may load: without a list it loads whatever is installed."""
    wanted = intent.settings.kernel_extension
    capabilities = {seat.view.facts.gpus[i].compute_capability or "?" for i in seat.spot.positions}
    fits = all(capability.startswith("12.") for capability in capabilities)
    on = wanted == "on" or (wanted == "auto" and bool(intent.release.engine.kernel_reason) and fits)
    chosen.env["SGLANG_PLUGINS"] = flags.KERNEL_PLUGIN if on else "none"
    if on:
        chosen.env["PDSTACK_KERNELS"] = wanted  # "on" ends the engine when a kernel is not live
        # A file for each rank, in the unit's own runtime directory: systemd removes it with the processes.
        chosen.env["PDSTACK_KERNELS_REPORT"] = f"/run/pdstack/{seat.name}/kernels-{{pid}}.json"
    if wanted != "auto":
        reason = f"pd_kernel_extension: {wanted}"
    elif fits:
        reason = intent.release.engine.kernel_reason or f"nothing to replace in {intent.release.name}"
    else:
        reason = f"its kernels are for sm_120, the GPUs are of compute capability {', '.join(sorted(capabilities))}"
    chosen.because("kernel extension", f"{'on' if on else 'off'}: {reason}")


def _gpu_reason(seat: Seat) -> str:
    gpus = cpulist.render(seat.spot.positions)
    bridges = len({seat.view.switches[i] for i in seat.spot.positions})
    below = "one PCIe switch or root port" if bridges == 1 else f"{bridges} PCIe switches or root ports"
    return f"tp {seat.tp} on GPU {gpus}: {_locality(seat)}, below {below}"


def _locality(seat: Seat) -> str:
    return _LOCALITY[placement.locality(seat.view, seat.spot)]


def _shape_name(intent: Intent, seat: Seat) -> str:
    return "replicas" if intent.topology.mode == "replicas" else seat.role


def _shape_args(intent: Intent, seat: Seat) -> Dict[str, Any]:
    args: Dict[str, Any] = getattr(intent.topology, _shape_name(intent, seat)).extra_args
    return args


def _router(intent: Intent, host: Host, number: int, workers: Dict[str, List[Worker]]) -> Router:
    wanted = intent.settings.router
    ports = {"http": intent.settings.ports.router, "metrics": intent.settings.ports.router_metrics}
    args: Dict[str, Any] = {
        "host": host.address,
        "port": ports["http"],
        "prometheus-host": host.address,
        "prometheus-port": ports["metrics"],
        "policy": wanted.policy,
        "worker-startup-timeout-secs": wanted.startup_timeout_s,
        "worker-startup-check-interval": STARTUP_CHECK_S,
        "health-check-interval-secs": wanted.health_interval_s,
        "health-check-timeout-secs": wanted.health_timeout_s,
        "health-failure-threshold": wanted.health_failures,
        "health-success-threshold": 1,
        "cb-failure-threshold": wanted.circuit_failures,
        "cb-success-threshold": 1,
        "cb-timeout-duration-secs": wanted.circuit_open_s,
        "retry-max-retries": wanted.attempts,
        "retry-initial-backoff-ms": 200,
        "retry-backoff-multiplier": 2.0,
        "retry-max-backoff-ms": 2000,
        "request-timeout-secs": wanted.request_timeout_s,
        "shutdown-grace-period-secs": wanted.shutdown_grace_s,
        "max-concurrent-requests": wanted.max_concurrent_requests,
    }
    if intent.topology.mode == "pd":
        args["pd-disaggregation"] = True
    why = [
        Why(
            "prometheus-host", f"metrics on the service address {host.address}; the router's default is every interface"
        ),
        Why("prometheus-port", "explicit: a stale router on the default port 29000 makes a new one crash"),
        Why("policy", f"pd_router.policy: {wanted.policy}"),
        Why(
            "health-check-interval-secs",
            f"a dead worker is out after about {wanted.health_interval_s * wanted.health_failures} s; the upstream "
            "recipe's 999999 never notices",
        ),
        Why("health-success-threshold", "1: a /health that answers has generated; the default of 2 costs an interval"),
        Why(
            "circuit breaker",
            f"stays on (the upstream recipe turns it off): a failing worker gets no requests, and is tried again after "
            f"{wanted.circuit_open_s} s",
        ),
        Why(
            "retry-max-retries",
            f"{wanted.attempts} attempts, 0.2 to 2 s apart: the second in which a restarted pair is exchanged costs no "
            "request",
        ),
        Why(
            "request-timeout-secs",
            f"no attempt lasts longer than {wanted.request_timeout_s} s, so no client waits longer than "
            f"{_longest_wait_s(wanted)} s; a worker that hangs is out before the second attempt",
        ),
        Why("worker-startup-check-interval", f"{STARTUP_CHECK_S} s: the router's own 30 s would lengthen each start"),
        Why("worker-startup-timeout-secs", "a worker that is later than this is added at run time"),
        Why(
            "workers",
            "all instances" if wanted.scope == "all" else f"the instances of {host.name} (pd_router.scope: host)",
        ),
    ]
    for name, value in sorted(wanted.extra_args.items()):
        args[name.replace("_", "-")] = value
        why.append(Why(name, "given by pd_router.extra_args"))
    return Router(
        name=f"router-{number}",
        host=host.name,
        address=host.address,
        unit="pd-router.service",
        ports=ports,
        args=args,
        # A worker's model path is not on a router's disk: without this the router asks the hub for it.
        env={"HF_HUB_OFFLINE": "1"},
        workers=workers,
        implementation=wanted.implementation,
        venv=flags.ROUTERS[wanted.implementation].venv,
        argv=flags.command_line(args) + _worker_words(workers),
        why=why,
    )


def _longest_wait_s(wanted: RouterSettings) -> int:
    """Seconds after which a client has its answer or its error: all attempts to their limit, and the pauses between."""
    pauses = sum(min(0.2 * 2.0**number, 2.0) for number in range(wanted.attempts - 1))
    return wanted.attempts * wanted.request_timeout_s + round(pauses)


def _worker_words(workers: Dict[str, List[Worker]]) -> List[str]:
    words: List[str] = []
    for role in ("prefill", "decode"):
        for item in workers.get(role, []):
            words += [f"--{role}", item.url, *([str(item.bootstrap_port)] if item.bootstrap_port else [])]
    urls = [item.url for item in workers.get("aggregated", [])]
    return words + (["--worker-urls", *urls] if urls else [])


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
