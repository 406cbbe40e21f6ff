"""The child process that may be killed."""

import json
import os
import subprocess
import sys
import time
import zipfile

import pytest
from pdstack import isolate


class Unkillable:
    """A process that is blocked in the kernel: SIGKILL changes nothing."""

    pid = 77
    killed = False

    def __init__(self, command, **options):
        os.write(options["stdout"].fileno(), b"\n@pdstack call cuInit\n")

    def wait(self, timeout):
        raise subprocess.TimeoutExpired("probe", timeout)

    def kill(self):
        Unkillable.killed = True


def entry(request, announce):
    """Runs in the child: __module__ is what the child imports."""
    announce("first")
    if request["do"] == "sleep":
        announce("sleep")
        time.sleep(60)
    if request["do"] == "raise":
        raise RuntimeError("no luck")
    if request["do"] == "exit":
        os._exit(3)
    return {"echo": request["do"], "order": os.environ.get("CUDA_DEVICE_ORDER")}


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Start `entry` from a module file of its own, as a child imports it."""
    import importlib
    import inspect

    name = "isolate_entry"
    (tmp_path / f"{name}.py").write_text("import os, time\n" + inspect.getsource(entry))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)
    yield lambda do, timeout=10.0, **options: isolate.Child(module.entry, {"do": do}, timeout, **options).collect()
    sys.modules.pop(name)


def test_result_and_environment(child):
    outcome = child("hello", environment={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert (outcome.status, outcome.value) == ("ok", {"echo": "hello", "order": "PCI_BUS_ID"})


def test_deadline(child):
    started = time.monotonic()
    outcome = child("sleep", timeout=0.5)
    assert time.monotonic() - started < 2
    assert (outcome.status, outcome.at) == ("wedged", "sleep")
    assert outcome.detail == "sleep did not return within 0.5 s"


def test_exception_and_status(child):
    assert "RuntimeError: no luck" in child("raise").detail
    assert child("exit").detail == "the probe ended with status 3 in first"


def test_a_process_that_cannot_be_killed_is_left_behind(child):
    started = time.monotonic()
    outcome = child("sleep", timeout=0.1, popen=Unkillable)
    assert time.monotonic() - started < 1
    assert Unkillable.killed
    assert outcome.status == "wedged"
    assert "process 77 cannot be killed" in outcome.detail


def test_from_a_zip_file(tmp_path, project_root):
    """Ansible sends the package inside a zip file: the child must find it there, and nowhere else."""
    archive = tmp_path / "payload.zip"
    with zipfile.ZipFile(archive, "w") as payload:
        for path in (project_root / "module_utils/pdstack").glob("*.py"):
            payload.write(path, f"ansible/module_utils/pdstack/{path.name}")
        for package in ("ansible", "ansible/module_utils"):
            payload.writestr(f"{package}/__init__.py", "")
    program = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "from ansible.module_utils.pdstack import cuda, isolate\n"
        "o = isolate.Child(cuda.survey, {'folder': '/nowhere'}, 10).collect()\n"
        "print(json.dumps([cuda.__file__, o.status, o.value and o.value['status'], o.detail]))\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program, str(archive)], stdout=subprocess.PIPE, check=True)
    where, status, answer, _detail = json.loads(done.stdout)
    assert str(archive) in where
    assert (status, answer) == ("ok", "missing")
