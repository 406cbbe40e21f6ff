"""tools/gpu_host boots a system tree with a real systemd beside this machine; no GPUs here, but all else is real."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOOL = ROOT / "tools/gpu_host"
pytestmark = pytest.mark.lab


def call(*words, **options):
    return subprocess.run([sys.executable, TOOL, *words], capture_output=True, text=True, timeout=120, **options)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the lab's base tree: a host writes into its tree."""
    sys.path.insert(0, str(ROOT / "tools"))
    from lab import base

    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "pdstack/lab"
    cache.mkdir(parents=True, exist_ok=True)
    source = base.tree(cache, "bookworm", "full", print)
    target = tmp_path_factory.mktemp("gpuhost") / "tree"
    subprocess.run(["cp", "-a", "--reflink=auto", source, target], check=True)
    yield target
    call("down")
    shutil.rmtree(target)


def test_units_run_in_it_and_nothing_is_left(tree, tmp_path):
    (tmp_path / "given").write_text("from the machine\n")
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho simulated\n")
    smi.chmod(0o755)
    mounts = pathlib.Path("/proc/self/mounts").read_text()
    machine = {**os.environ, "NCCL_NVLS_ENABLE": "0", "PATH": f"{smi.parent}:{os.environ['PATH']}"}
    up = call("up", str(tree), "--python", "", "--bind", str(tmp_path), env=machine)
    assert up.returncode == 0, up.stderr
    assert json.loads(up.stdout)["state"] in ("running", "degraded")
    assert call("up", str(tree)).returncode != 0, "a second one must be refused"
    inside = call(
        "exec",
        "--",
        "sh",
        "-c",
        "cat /proc/1/comm given; echo ${CC:-clean}",
        cwd=tmp_path,
        env={**os.environ, "CC": "x"},
    )
    assert inside.stdout == "systemd\nfrom the machine\nclean\n"
    wanted = "grep Cpus_allowed_list /proc/self/status; env | grep NCCL; touch /usr/x 2>&1; exit 3"
    options = ["-p", "CPUAffinity=0", "-p", "ProtectSystem=strict", "-p", "User=nobody"]
    unit = call("exec", "--", "systemd-run", "--quiet", "--wait", "--pipe", *options, "sh", "-c", wanted)
    assert unit.returncode == 3
    assert unit.stdout.splitlines()[0] == "Cpus_allowed_list:\t0"
    assert "NCCL_NVLS_ENABLE=0" in unit.stdout
    assert "touch: cannot touch" in unit.stdout
    assert call("exec", "--", "nvidia-smi").stdout == "simulated\n"
    # systemd mounts credentials apart; only where mounts are shared does the unit see them.
    options = ["-p", f"LoadCredential=key:{tmp_path}/given", "-p", "DynamicUser=yes"]
    words = ["sh", "-c", "cat $CREDENTIALS_DIRECTORY/key"]
    unit = call("exec", "--", "systemd-run", "--quiet", "--wait", "--pipe", *options, *words)
    assert unit.stdout == "from the machine\n", unit.stderr
    state = json.loads(call("status").stdout)
    assert state["running"]
    assert call("down").returncode == 0
    assert not pathlib.Path(f"/proc/{state['pid']}").exists()
    assert not state["group"] or not pathlib.Path(state["group"]).exists()
    assert pathlib.Path("/proc/self/mounts").read_text() == mounts
    assert call("status").returncode == 1
