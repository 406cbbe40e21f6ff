"""What the probe does to a driver: each call is on the fake driver's log."""

import os
import time

import pytest
from hosts.calls import outstanding
from pdstack import answers, codec, cuda, isolate, nvml, probe


@pytest.mark.parametrize("name", ["rtx-pro-6000-8", "h200-vm-2", "fabric-ok", "busy"])
def test_everything_created_is_released(name, simulated, calls):
    request, folder = simulated(name)
    probe.probe(request)
    log = calls(folder)
    assert sum(line.startswith("created") for line in log) >= 2
    assert outstanding(log) == {}
    assert any(line.startswith("exported") for line in log)
    assert not [line for line in log if "leaked" in line]


def test_a_failed_export_still_releases(simulated, calls):
    request, folder = simulated("h200-vm-2", "rc.cuMemExportToShareableHandle -1 -1 999")
    found = probe.probe(request)
    assert {step.name: step.code for step in found.fabric.steps[0]}["fd_export"] == 999
    assert outstanding(calls(folder)) == {}


def test_never_a_multicast_object_nor_managed_memory_nor_a_context(simulated, calls):
    request, folder = simulated("nvswitch-8")
    probe.probe(request)
    log = calls(folder)
    assert "cuMulticastGetGranularity" in log  # so the log would show a creation
    forbidden = ("cuMulticastCreate", "cuMemAllocManaged", "cuDevicePrimaryCtxRetain", "cuCtxCreate", "cuMemAlloc_v2")
    assert not [line for line in log if line.startswith(forbidden)]


def test_allocations_are_rdma_capable_as_the_engines_are(simulated, calls):
    request, folder = simulated("fabric-ok")
    probe.probe(request)
    created = [line for line in calls(folder) if line.startswith("created")]
    assert [line.split(" ", 2)[2] for line in created] == [
        f"device {device} handles {kind} rdma 1" for device in (0, 1) for kind in (1, 8)
    ]


def test_without_fabric_nothing_is_allocated(simulated, calls):
    request, folder = simulated("h200-vm-2")
    found = probe.probe(codec.load(probe.Request, {**codec.dump(request), "fabric": False}))
    assert "cuMemCreate" not in calls(folder)
    assert (found.fabric.steps, found.p2p.claimed) == ([], [])
    assert found.gpus[0].index == 0


@pytest.mark.parametrize("where", ["cuInit", "cuMemCreate", "nvmlDeviceGetName"])
def test_a_wedged_driver_is_a_result_within_the_timeout(where, simulated):
    request, _ = simulated("h200-vm-2", f"hang -1 -1 {where}", timeout=1.0)
    started = time.monotonic()
    found = probe.probe(request)
    assert time.monotonic() - started < 8.0  # not for ever; a busy machine is slow
    assert found.driver.state == "wedged"
    assert where in found.driver.detail
    assert "did not return within 1 s" in found.driver.detail
    assert [gpu.pci for gpu in found.gpus] == ["0000:00:06.0", "0000:00:07.0"]  # sysfs still answers


def test_one_library_that_hangs_does_not_hide_the_other(simulated):
    request, _ = simulated("h200-vm-2", "hang -1 -1 cuInit", timeout=1.0)
    found = probe.probe(request)
    assert found.gpus[0].name == "NVIDIA H200"


def test_a_crash_inside_the_driver_is_a_result(simulated):
    request, _ = simulated("h200-vm-2", "crash -1 -1 cuInit")
    found = probe.probe(request)
    assert found.driver.state == "error"
    assert "died by signal 6 in cuInit" in found.driver.detail


def test_the_children_see_every_gpu_whatever_the_caller_masks():
    environment = isolate.driver_environment({"CUDA_VISIBLE_DEVICES": "3", "PATH": "/bin"})
    assert environment == {"PATH": "/bin", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize("name", ["rtx-pro-6000-8", "gpu-lost", "mig-on", "h200-vm-2", "busy", "gb200-4"])
def test_nvidia_ml_py_and_ctypes_answer_alike(name, simulated):
    pytest.importorskip(
        "pynvml", reason="nvidia-ml-py is not installed: the ctypes stand-in has nothing to be compared with"
    )
    request, folder = simulated(name)
    expected = [gpu.pci for gpu in probe.probe(request).gpus]

    def ask(prefer_package):
        question = {"folder": str(folder / "driver"), "pci": expected, "prefer_package": prefer_package}
        outcome = isolate.Child(nvml.survey, question, 20).collect()
        assert outcome.status == "ok", outcome.detail
        return codec.load(answers.NvmlAnswers, outcome.value)

    package, own = ask(True), ask(False)
    assert package.binding.startswith("nvidia-ml-py")
    assert own.binding == "ctypes"
    assert codec.dump(own) | {"binding": ""} == codec.dump(package) | {"binding": ""}


@pytest.mark.parametrize(("answer", "words"), [("1", "row remapping failed"), ("0", ""), ("-1", "")])
def test_memory_that_cannot_be_mended_is_a_trouble_of_its_gpu(answer, words, simulated):
    """It answers and computes, now and then wrongly: the plan refuses it with the others that have troubles."""
    request, _ = simulated("rtx-pro-6000-8", f"remap_failed 2 0 {answer}")
    found = probe.probe(request).gpus
    assert [bool(gpu.problems) for gpu in found] == [bool(words) and i == 2 for i in range(8)]
    assert words in "; ".join(found[2].problems)


def test_a_missing_function_is_said(simulated, libraries):
    class Old:
        """A library of before multicast."""

        def __init__(self, handle):
            self._handle = handle

        def __getattr__(self, name):
            if name == "cuMulticastGetGranularity":
                raise AttributeError(name)
            return getattr(self._handle, name)

    _, folder = simulated("h200-vm-2")
    library = cuda.Library(Old(cuda.load(cuda.LIBRARY, str(folder / "driver"))))
    found = cuda.ask(library, "", True)
    last = found.devices[0].steps[-1]
    assert (last.code, last.words) == (None, "not called: this driver's library has no cuMulticastGetGranularity")


def test_every_struct_is_as_long_as_the_header_says():
    import ctypes

    assert ctypes.sizeof(cuda.AllocationProp) == ctypes.sizeof(cuda.MulticastProp) == 32
    assert cuda.AllocationProp.location.offset == 8
    assert cuda.AllocationProp.gpu_direct_rdma.offset == 25
    assert cuda.MulticastProp.handle_types.offset == 16
    assert ctypes.sizeof(nvml._FabricInfo) == nvml.FABRIC_INFO_V2 & 0xFFFFFF
    assert ctypes.sizeof(nvml._MemoryV2) == nvml.MEMORY_V2 & 0xFFFFFF


def test_library_versions_come_from_the_file():
    assert cuda.file_version("/usr/lib/x86_64-linux-gnu/libcuda.so.595.58.03") == "595.58.03"
    assert cuda.file_version("/usr/lib/libcuda.so.1") is None


def test_the_simulated_lab_answers_what_the_fake_driver_answers(libraries, tmp_path):
    import json

    from hosts import build, catalogue
    from lab import answers as lab_answers

    host = catalogue.REFERENCE
    build.build(host, tmp_path, libraries)
    replayed = json.loads(lab_answers.rtx_pro_6000(host.machine))
    folder = str(tmp_path / "driver")
    question = {"folder": folder, "fabric": True, "pci": [], "prefer_package": False}
    asked = {
        "cuda": isolate.Child(cuda.survey, question, 20).collect().value,
        "nvml": isolate.Child(nvml.survey, question, 20).collect().value,
    }
    kinds = {"cuda": answers.CudaAnswers, "nvml": answers.NvmlAnswers}
    for name, kind in kinds.items():
        told = {**codec.dump(codec.load(kind, replayed[name])), "library": "", "binding": ""}
        real = {**asked[name], "library": "", "binding": ""}
        real = {key: value for key, value in real.items() if key in told}
        told.pop("version", None), real.pop("version", None)
        assert {key: told[key] for key in real} == real
    assert os.path.exists(folder)
