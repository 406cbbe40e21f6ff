"""tools/gpu_host: what of the machine a booted system tree gets to see."""

import importlib.machinery
import importlib.util
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent


@pytest.fixture(scope="module")
def gpu_host():
    loader = importlib.machinery.SourceFileLoader("gpu_host", str(ROOT / "tools/gpu_host"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_host", loader))
    loader.exec_module(module)
    return module


def listing(*paths):
    """`ldconfig -p` with these libraries."""
    lines = [f"\t{os.path.basename(path)} (libc6,x86-64) => {path}" for path in paths]
    return "\n".join([f"{len(lines)} libs found in cache `/etc/ld.so.cache'", *lines])


def test_a_driver_in_a_folder_of_its_own_is_shown_as_a_folder(gpu_host, tmp_path):
    real = tmp_path / "nvidia"
    real.mkdir()
    (real / "libcuda.so.1").touch()
    (tmp_path / "libcuda.so.1").symlink_to(real / "libcuda.so.1")  # as distributions link into their own folder
    text = listing(str(tmp_path / "libcuda.so.1"), "/usr/local/cuda/lib64/libcudart.so.13")
    assert gpu_host.driver_files(text) == ([str(real)], [])


def test_a_driver_among_the_systems_libraries_is_shown_file_by_file(gpu_host, tmp_path, monkeypatch):
    (tmp_path / "libnvidia-ml.so.580").touch()
    (tmp_path / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580")
    (tmp_path / "libc.so.6").touch()
    monkeypatch.setattr(gpu_host, "SYSTEM_FOLDERS", (str(tmp_path),))
    text = listing(str(tmp_path / "libnvidia-ml.so.1"), str(tmp_path / "libc.so.6"))
    assert gpu_host.driver_files(text) == (
        [],
        [str(tmp_path / "libnvidia-ml.so.1"), str(tmp_path / "libnvidia-ml.so.580")],
    )


def test_links_bring_their_target_and_what_lies_below_another_is_left_out(gpu_host, tmp_path):
    (tmp_path / "cuda-13.0/bin").mkdir(parents=True)
    (tmp_path / "cuda").symlink_to("cuda-13.0")
    given = [tmp_path / "cuda", tmp_path / "cuda-13.0/bin", tmp_path / "not-there"]
    assert gpu_host.shown(map(str, given)) == [str(tmp_path / "cuda"), str(tmp_path / "cuda-13.0")]


def test_python_says_where_it_lies(gpu_host):
    paths = gpu_host.python_paths(sys.executable)
    assert sys.prefix in paths
    assert os.path.realpath(sys.executable) in paths
    assert gpu_host.python_paths("") == gpu_host.python_paths("no-such-python") == []


def test_only_settings_of_the_gpus_libraries_go_to_every_unit(gpu_host):
    for name in ("NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        assert gpu_host.SETTINGS.fullmatch(name)
    for name in ("CC", "LD_LIBRARY_PATH", "MY_NCCL_KEY", "PATH"):
        assert not gpu_host.SETTINGS.fullmatch(name)
