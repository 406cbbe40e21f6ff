"""A toolkit from wheels: what is built, proven, refused and repaired. The wheels and the compiler are stand-ins."""

from __future__ import annotations

import hashlib
import os
import pathlib
import zipfile

import pytest
from pdstack import release, runner, toolkit

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent
FILES = {
    "nvidia_cuda_nvcc": {"nvidia/cu13/bin/nvcc": 0o755, "nvidia/cu13/bin/nvcc.profile": 0o644},
    "nvidia_cuda_runtime": {"nvidia/cu13/lib/libcudart.so.13": 0o644, "nvidia/cu13/include/cuda.h": 0o644},
    "nvidia_nvvm": {"nvidia/cu13/nvvm/bin/cicc": 0o755, "nvidia/cu13/.metadata/x": 0o644, "nvidia/__init__.py": 0o644},
}


class Compiler:
    """Answers as nvcc, g++, ldconfig and the compiled program would."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.answers: dict[str, runner.Completed] = {
            "nvcc --version": runner.Completed(0, "Cuda compilation tools, release 13.0, V13.0.88", ""),
            "ldconfig": runner.Completed(0, "\tlibcuda.so.1 (libc6,x86-64) => /lib/libcuda.so.1\n", ""),
            "proof": runner.Completed(0, "sum of squares 10416\n", ""),
        }

    def __call__(self, argv):
        self.calls.append(list(argv))
        name = os.path.basename(argv[0])
        key = f"{name} --version" if argv[1:] == ["--version"] else name
        return self.answers.get(key, runner.Completed(0, "", ""))


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def host(tmp_path, compiler) -> toolkit.Host:
    return toolkit.Host(runner=compiler, driver=str(tmp_path / "no driver"))


@pytest.fixture
def request_(tmp_path) -> toolkit.Request:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    pins = []
    for name, files in FILES.items():
        path = wheels / f"{name}-13.0.88-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for file, mode in files.items():
                entry = zipfile.ZipInfo(file)
                entry.external_attr = (0o100000 | mode) << 16
                archive.writestr(entry, f"{file}\n")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        pins.append(release.Pin(name.replace("_", "-"), "13.0.88", path.name, digest))
    (tmp_path / "opt").mkdir()
    return toolkit.Request(str(tmp_path / "opt/cuda-13.0"), str(tmp_path / "opt/cuda"), pins, str(wheels))


def run(request, host) -> list[str]:
    steps = toolkit.plan(request)
    toolkit.apply(request, host, steps)
    return [step.action for step in steps]


def test_it_is_laid_out_as_the_vendor_lays_one_out(request_, host):
    assert run(request_, host) == ["build", "link"]
    home = pathlib.Path(request_.link)
    assert os.access(home / "bin/nvcc", os.X_OK)
    assert not os.access(home / "bin/nvcc.profile", os.X_OK)
    assert (home / "lib64/libcudart.so").resolve().name == "libcudart.so.13"
    assert os.readlink(home / "lib64/stubs/libcuda.so") == "/lib/libcuda.so.1"
    assert not (home / ".metadata").exists()
    assert not list(home.rglob("*.py"))
    assert run(request_, host) == []
    assert sorted(os.listdir(home.parent)) == [".toolkit.lock", "cuda", "cuda-13.0"]


def test_the_proof_compiles_for_what_is_served_on_and_runs_where_a_driver_is(request_, host, compiler, tmp_path):
    run(request_, host)
    assert "was not run" in toolkit.read_manifest(request_.path).proof
    compiled = next(call for call in compiler.calls if "-lnvrtc" in call)
    assert "arch=compute_120,code=sm_120" in compiled
    (tmp_path / "no driver").write_text("NVRM version")
    assert "it ran: sum of squares 10416" in toolkit.prove(request_.path, host, "13.0")


@pytest.mark.parametrize(
    ("key", "answer", "words"),
    [
        ("g++ --version", runner.Completed(127, "", "g++: command not found"), "g\\+\\+ does not run"),
        ("nvcc --version", runner.Completed(0, "release 13.5, V13.5.37", ""), "release 13.5"),
        ("nvcc", runner.Completed(255, "", "ptxas fatal: Unsupported .version 9.5"), "Unsupported .version"),
        ("proof", runner.Completed(2, "no GPU: forward compatibility", ""), "forward compatibility"),
    ],
)
def test_one_that_does_not_work_is_not_put_in_place(request_, host, compiler, tmp_path, key, answer, words):
    (tmp_path / "no driver").write_text("NVRM version")
    compiler.answers[key] = answer
    with pytest.raises(toolkit.ToolkitRefused, match=words):
        run(request_, host)
    assert os.listdir(tmp_path / "opt") == [".toolkit.lock"]


def test_the_old_one_stays_when_the_new_one_is_refused(request_, host, compiler):
    run(request_, host)
    os.unlink(os.path.join(request_.path, "include/cuda.h"))
    compiler.answers["nvcc"] = runner.Completed(1, "", "no")
    with pytest.raises(toolkit.ToolkitRefused):
        run(request_, host)
    assert os.path.exists(os.path.join(request_.link, "bin/nvcc"))


@pytest.mark.parametrize("change", ["delete", "grow", "unlink", "manifest"])
def test_what_was_changed_by_hand_is_built_anew(request_, host, change):
    run(request_, host)
    home = pathlib.Path(request_.path)
    if change == "delete":
        (home / "include/cuda.h").unlink()
    elif change == "grow":
        (home / "bin/nvcc").write_text("patched")
    elif change == "unlink":
        (home / "lib64").unlink()
        (home / "lib64").mkdir()
    else:
        (home / toolkit.MANIFEST).unlink()
    assert run(request_, host) == ["build"]
    assert (home / "include/cuda.h").exists()
    assert (home / "bin/nvcc").read_text() == "nvidia/cu13/bin/nvcc\n"


@pytest.mark.parametrize("harm", ["altered", "missing"])
def test_a_bad_wheel_is_named_before_anything_is_touched(request_, host, tmp_path, harm):
    wheel = tmp_path / "wheels" / request_.pins[1].file
    wheel.write_bytes(b"x") if harm == "altered" else wheel.unlink()
    with pytest.raises(toolkit.ToolkitRefused, match=request_.pins[1].file):
        run(request_, host)
    assert os.listdir(tmp_path / "opt") == [".toolkit.lock"]


def test_a_wheel_cannot_write_outside(tmp_path):
    wheel = tmp_path / "bad.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nvidia/cu13/../../../evil", "x")
    with pytest.raises(toolkit.ToolkitRefused, match="evil"):
        toolkit.unpack(str(wheel), str(tmp_path / "toolkit"))
    assert not (tmp_path / "evil").exists()


def test_what_a_killed_run_left_is_removed(request_, host, tmp_path):
    (tmp_path / "opt/.cuda-13.0.new").mkdir()
    (tmp_path / "opt/.cuda-13.0.new/half").write_text("x")
    assert run(request_, host) == ["build", "link"]
    assert not (tmp_path / "opt/.cuda-13.0.new").exists()


def test_the_vendors_toolkit_is_proven_once_and_linked(tmp_path, host):
    vendor = tmp_path / "usr/cuda-13.0"
    wanted = toolkit.Request(str(vendor), str(tmp_path / "cuda"))
    with pytest.raises(toolkit.ToolkitRefused, match="no bin/nvcc"):
        toolkit.plan(wanted)
    (vendor / "bin").mkdir(parents=True)
    (vendor / "bin/nvcc").touch()
    assert run(wanted, host) == ["prove", "link"]
    assert run(wanted, host) == []


def test_absent_removes_link_and_wheels_but_not_the_vendors(request_, host, tmp_path):
    run(request_, host)
    gone = toolkit.Request(request_.path, request_.link, request_.pins, request_.wheels, wanted=False)
    assert run(gone, host) == ["unlink", "remove"]
    assert os.listdir(tmp_path / "opt") == [".toolkit.lock"]
    assert not os.path.exists(request_.wheels)
    assert run(gone, host) == []


def test_the_lock_holds_one_release_of_the_compiler_and_the_engines_libraries():
    pins = {pin.name: pin for pin in release.parse_lock((ROOT / "releases/cuda-13.0/toolkit.txt").read_text())}
    assert {pins[name].version for name in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt")} == {"13.0.88"}
    engine = {
        pin.name: pin for pin in release.parse_lock((ROOT / "releases/sglang-0.5.23/engine-py312.txt").read_text())
    }
    for name in ("nvidia-cublas", "nvidia-curand", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"):
        assert pins[name] == engine[name]
