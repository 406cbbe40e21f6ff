"""The import shim, on stand-ins for the modules that it changes."""

import importlib
import importlib.machinery
import pathlib
import subprocess
import sys
import types

import pytest

SOURCE = pathlib.Path(__file__).resolve().parents[3] / "engine/cpu_shim/src"

# Runs in an interpreter of its own: the shim changes sys.meta_path.
PREFIX = """
import sys
sys.path[:0] = [SOURCE, PACKAGES]
import pdstack_cpu_shim
pdstack_cpu_shim.install(); pdstack_cpu_shim.install()
assert sum(isinstance(finder, pdstack_cpu_shim.CpuFinder) for finder in sys.meta_path) == 1
"""


@pytest.fixture
def run(tmp_path):
    """Write modules, run a program under the shim, return what it printed."""

    def inner(program, **modules):
        for name, text in modules.items():
            path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            for parent in path.relative_to(tmp_path).parents:
                if parent.name:
                    (tmp_path / parent / "__init__.py").touch()
            path.write_text(text)
        head = PREFIX.replace("SOURCE", repr(str(SOURCE))).replace("PACKAGES", repr(str(tmp_path)))
        done = subprocess.run([sys.executable, "-I", "-c", head + program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return inner


def test_a_missing_kernel_package_imports_and_raises_when_called(run):
    program = """
from sgl_kernel import silu_and_mul
from sgl_kernel.mamba import causal_conv1d
assert not hasattr(sys.modules["sgl_kernel"], "__version__")
try:
    silu_and_mul(1)
except NotImplementedError as error:
    print(error)
"""
    assert run(program).startswith("sgl_kernel.silu_and_mul: the package has no CPU build")


def test_a_real_kernel_package_is_left_alone(run):
    assert run("import sgl_kernel; print(sgl_kernel.REAL)", sgl_kernel="REAL = 7\n") == "7"


AGENT = """
class nixlBind:
    VRAM_SEG = 2
    class nixlAgentConfig:
        pass

def configure(delay):
    config = nixlBind.nixlAgentConfig()
    config.pthrDelay = delay
    config.other = delay
    return config

class nixl_agent:
    def register_memory(self, descs, mem_type=None, backends=()): return mem_type
    def get_xfer_descs(self, descs, mem_type=None): return mem_type
    def get_reg_descs(self, descs, mem_type=None): return mem_type
    def prep_xfer_dlist(self, name, descs, mem_type=None): return name, mem_type
"""


def test_video_memory_becomes_host_memory(run):
    program = """
from nixl_cu13._api import nixl_agent
agent = nixl_agent()
print(agent.register_memory([], "VRAM"), agent.get_xfer_descs([], mem_type="VRAM"), agent.get_reg_descs([], "DRAM"),
      agent.register_memory([], "FILE"), *agent.prep_xfer_dlist("peer", [], "VRAM"))
"""
    assert run(program, nixl_cu13___api=AGENT) == "DRAM DRAM DRAM FILE peer DRAM"


def test_the_progress_thread_waits_for_events_and_nothing_else_changes(run):
    program = """
from nixl_cu13._api import configure, nixlBind
print(configure(0).pthrDelay, configure(0).other, configure(50_000).pthrDelay, nixlBind.VRAM_SEG)
"""
    assert run(program, nixl_cu13___api=AGENT) == "10000 0 50000 2"


def test_mooncake_indices_stay_on_the_host(run):
    module = "class MooncakeKVSender:\n    supports_host_tensor_indices = True\n"
    program = "from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender as S\n"
    program += "print(S.supports_host_tensor_indices)"
    triton = {"triton": ""}  # present, so that the mock is not asked for
    assert run(program, sglang__srt__disaggregation__mooncake__conn=module, **triton) == "False"


def test_the_triton_mock_is_installed_once_sglang_is_imported_and_platform_is_restored(run):
    stubs = """
import platform, sys
def install_platform_stubs():
    import torch
    assert (sys.platform, platform.machine(), torch.backends.mps.is_available()) == ("darwin", "arm64", True)
    import types
    sys.modules["triton"] = types.ModuleType("triton")
"""
    program = """
import sglang, platform, torch
print("triton" in sys.modules, sys.platform, platform.machine() == "arm64", torch.backends.mps.is_available())
"""
    mps = {"torch__backends__mps": "def is_available():\n    return False\n"}
    torch = {"torch____init__": "from . import backends\n", "torch__backends____init__": "from . import mps\n"}
    assert run(program, sglang___platform_stubs=stubs, **mps, **torch) == "True linux False False"


def test_torchvision_operators_are_declared_only_where_they_are_missing(monkeypatch):
    monkeypatch.syspath_prepend(str(SOURCE))
    patches = importlib.import_module("pdstack_cpu_shim.patches")
    declared = []

    class Library:
        def __init__(self, name, kind):
            declared.append((name, kind))

        def define(self, schema):
            declared.append(schema.split("(")[0])

    torch = types.SimpleNamespace(library=types.SimpleNamespace(Library=Library))
    monkeypatch.setitem(sys.modules, "torch", torch)
    patches.declare_torchvision_operators(types.SimpleNamespace(_has_ops=lambda: True))
    assert declared == []
    extension = types.SimpleNamespace(_has_ops=lambda: False)
    patches.declare_torchvision_operators(extension)
    assert declared == [("torchvision", "DEF"), "nms", "qnms"]
    assert isinstance(extension.pdstack_library, Library)


def test_other_imports_are_untouched(monkeypatch):
    monkeypatch.syspath_prepend(str(SOURCE))
    finder = importlib.import_module("pdstack_cpu_shim").CpuFinder()
    assert [finder.find_spec(name) for name in ("json", "torch", "sglang.srt", "nixl_cu13")] == [None] * 4
