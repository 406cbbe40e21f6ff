"""Every managed file and setting of a lab host, how to break it, and what its repair may restart.

``covers`` is a pattern of the names that drift.yml reports as compared. A managed item that no row covers fails
test_every_managed_item_is_broken_here.
"""

from __future__ import annotations

from dataclasses import dataclass

ENGINES = ("pd-prefill@0.service", "pd-decode@0.service")
ROUTER = ("pd-router.service",)
ALL = (*ENGINES, *ROUTER)
SYSTEM = "/etc/systemd/system"


@dataclass(frozen=True)
class Breakage:
    """One thing that goes wrong. ``sees`` are parts of "KIND ITEM: FOUND WHY" of items that drift.yml must name."""

    name: str
    covers: str  # pattern (fnmatch) of managed items; "" for what no role compares by name
    command: str
    sees: tuple[str, ...]
    restarts: tuple[str, ...] = ()  # units that run another process afterwards


def mode(path: str) -> Breakage:
    return Breakage(f"mode of {path}", path, f"chmod 0700 {path}", (path,))


def edit(path: str, line: str, restarts: tuple[str, ...] = (), covered: bool = True) -> Breakage:
    """``covered`` is False for what pd_checkpoint keeps: it reports its files under one name."""
    return Breakage(f"edited {path}", path if covered else "", f"echo '{line}' >> {path}", (path,), restarts)


# Nothing that runs is touched by these.
QUIET = [
    *(
        mode(path)
        for path in (
            "/etc/pdstack",
            "/etc/pdstack/instances",
            "/opt/pdstack",
            "/opt/pdstack/releases",
            "/var/lib/pdstack",
            "/var/lib/pdstack/models",
            "/var/lib/pdstack/jit",
            f"{SYSTEM}/pd-prefill@0.service.d",
            f"{SYSTEM}/pd-decode@0.service.d",
        )
    ),
    Breakage(
        "owner of the JIT cache", "/var/lib/pdstack/jit", "chown root /var/lib/pdstack/jit", ("/var/lib/pdstack/jit",)
    ),
    Breakage(
        "owner of a release's JIT cache",
        "/var/lib/pdstack/jit/*",
        "chown root /var/lib/pdstack/jit/*/",
        ("/var/lib/pdstack/jit/cpu-",),
    ),
    Breakage(
        "mode of a file that a unit reads", "", "chmod 0666 /etc/pdstack/instances/decode-0.yaml", ("decode-0.yaml",)
    ),
    Breakage("the user's shell", "user: *", "usermod --shell /bin/bash pdstack", ("Make the service user",)),
    Breakage(
        "no baseline", "/etc/pdstack/baseline.json", "rm /etc/pdstack/baseline.json", ("/etc/pdstack/baseline.json",)
    ),
    edit("/etc/pdstack/plan.json", ""),
    edit(f"{SYSTEM}/pd.target", "Documentation=man:by-hand"),
    Breakage(
        "units disabled",
        "pd.target",
        "systemctl disable pd.target pd-router pd-decode@0",
        ("unit pd.target:", "unit pd-router.service:", "unit pd-decode@0.service:"),
    ),
    Breakage(
        "unit enabled until the next boot",
        "",
        "systemctl disable pd-prefill@0; systemctl enable --runtime pd-prefill@0",
        ("unit pd-prefill@0.service:",),
    ),
    Breakage(
        "unit masked until the next boot",
        "",
        "systemctl mask --runtime pd-router",
        ("/run/systemd/system/pd-router.service",),
    ),
    Breakage("scrub timer stopped", "", "systemctl stop pd-scrub.timer", ("pd-scrub.timer",)),
    edit(f"{SYSTEM}/pd-scrub.service", "Nice=0", covered=False),
    edit(f"{SYSTEM}/pd-checkpoint@.service", "# by hand", covered=False),
    Breakage(
        "scrub by hand",
        "",
        f"mkdir {SYSTEM}/pd-scrub.timer.d; printf '[Timer]\\nOnCalendar=\\n' > {SYSTEM}/pd-scrub.timer.d/x.conf",
        ("pd-scrub.timer.d",),
    ),
    Breakage(
        "agent cut short",
        "",
        "truncate --size 100 /usr/local/lib/pdstack/pdstack-checkpoint.pyz",
        ("pdstack-checkpoint.pyz",),
    ),
    Breakage("no proof of the transport", "transport: *", "rm /var/lib/pdstack/nixl/*.json", ("Prove that NIXL",)),
    edit("/etc/pdstack/canary.json", ""),
    edit(f"{SYSTEM}/pd-canary.service", "# by hand"),
    edit(f"{SYSTEM}/pd-canary.timer", "# by hand"),
    Breakage("canary off", "pd-canary.timer", "systemctl disable --now pd-canary.timer", ("unit pd-canary.timer:",)),
    Breakage(
        "the canary's program",
        "/opt/pdstack/lib/pdstack/*.py",
        "for file in /opt/pdstack/lib/pdstack/*.py; do echo >> $file; done",
        ("lib/pdstack/__init__.py", "lib/pdstack/canary.py", "lib/pdstack/completion.py", "lib/pdstack/verify.py"),
    ),
    Breakage("firewall rules flushed", "table inet pdstack", "nft flush ruleset", ("firewall table inet pdstack",)),
    edit("/etc/pdstack/firewall.nft", "# by hand"),
    edit(f"{SYSTEM}/pd-firewall.service", "Nice=0"),
    Breakage(
        "firewall disabled", "pd-firewall.service", "systemctl disable pd-firewall", ("unit pd-firewall.service:",)
    ),
    Breakage(
        "a configuration of nobody", "", "echo a: 1 > /etc/pdstack/instances/ghost.yaml", ("instances/ghost.yaml",)
    ),
]

# The router restarts, decode is started, and prefill runs on.
ROUTER_AND_DECODE = [
    edit(f"{SYSTEM}/pd-router.service", "Environment=BY=HAND", ROUTER),
    Breakage(
        "router: drop-in",
        "pd-router.service",
        f"mkdir {SYSTEM}/pd-router.service.d; printf '[Service]\\nNice=5\\n' > {SYSTEM}/pd-router.service.d/x.conf",
        ("pd-router.service.d",),
        ROUTER,
    ),
    Breakage(
        "router: drop-in until the next boot",
        "",
        "systemctl set-property --runtime pd-router CPUWeight=50",
        ("/run/systemd/system.control/pd-router.service.d",),
        ROUTER,
    ),
    Breakage(
        "decode stopped",
        "pd-decode@0.service",
        "systemctl stop pd-decode@0",
        ("unit pd-decode@0.service:",),
        ENGINES[1:],
    ),
]

# The pair restarts as one set, and the router runs on.
PAIR = [
    # An engine that started after the file was last proven may have read the wrong bytes.
    Breakage(
        "a file of the checkpoint",
        "checkpoint: *",
        "echo x >> /var/lib/pdstack/models/*/generation_config.json",
        ("Bring the checkpoint",),
        ENGINES,
    ),
    *(edit(f"{SYSTEM}/pd-{role}@.service", "Environment=BY=HAND", ENGINES) for role in ("prefill", "decode")),
    *(
        edit(f"{SYSTEM}/pd-{role}@0.service.d/placement.conf", "CPUAffinity=0 1", ENGINES)
        for role in ("prefill", "decode")
    ),
    *(edit(f"/etc/pdstack/instances/{role}-0.env", 'OMP_NUM_THREADS="2"', ENGINES) for role in ("prefill", "decode")),
    Breakage(
        "prefill: no configuration",
        "/etc/pdstack/instances/prefill-0.yaml",
        "rm /etc/pdstack/instances/prefill-0.yaml",
        ("prefill-0.yaml",),
        ENGINES,
    ),
    edit("/etc/pdstack/instances/decode-0.yaml", "watchdog-timeout: 1", ENGINES),
    Breakage(
        "decode: drop-in",
        "",
        f"printf '[Service]\\nNice=5\\n' > {SYSTEM}/pd-decode@0.service.d/zz.conf",
        ("zz.conf",),
        ENGINES,
    ),
    Breakage(
        "prefill moved to other CPUs",
        "pd-prefill@0.service",
        "taskset --all-tasks --pid --cpu-list 0-1 $(systemctl show --value -p MainPID pd-prefill@0)",
        ("process pd-prefill@0.service CPUs of",),
        ENGINES,
    ),
]

# Everything restarts.
EVERYTHING = [
    Breakage(
        "all of ours: drop-in",
        "",
        f"mkdir {SYSTEM}/pd-.service.d; printf '[Service]\\nNice=5\\n' > {SYSTEM}/pd-.service.d/x.conf",
        ("pd-.service.d",),
        ALL,
    ),
    edit("/opt/pdstack/launch.py", "# by hand", ALL),
    Breakage(
        "a file of the release",
        "release: *",
        "echo 'x = 1' >> $(ls /opt/pdstack/current/venv/lib/python3*/site-packages/sglang/version.py)",
        ("cpu-0.5.23-",),
        ALL,
    ),
    Breakage("no key", "credentials: *", "rm /etc/pdstack/credentials/admin_key", ("Write the keys",), ALL),
]

# Units that a row of these groups stops itself, before anybody looks.
STOPPED = {row.name: row.restarts for row in ROUTER_AND_DECODE if "systemctl stop" in row.command}
