"""tools/gpu_carry: what is carried to a runner, and in which parts."""

import hashlib
import importlib.machinery
import importlib.util
import pathlib
import subprocess
import zipfile

import pytest
from pdstack import release

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent


@pytest.fixture(scope="module")
def carry():
    loader = importlib.machinery.SourceFileLoader("gpu_carry", str(ROOT / "tools/gpu_carry"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_carry", loader))
    loader.exec_module(module)
    return module


def pin(name, version="1.0"):
    return release.Pin(name, version, f"{name}-{version}-py3-none-any.whl", "0" * 64)


def test_a_lock_is_divided_by_what_the_runner_has(carry):
    pins = [
        pin("torch", "2.11.0"),
        pin("numpy", "2.3.5"),
        pin("tokenspeed-mla"),
        pin("transformers"),
        pin("nvidia-ml-py"),
        pin("nvidia-cudnn-cu13", "9.19"),
    ]
    runner = {"torch": "2.11.0+cu130", "numpy": "2.5.2", "transformers": "9", "nvidia-ml-py": "9"}
    carried, provided, left_out = carry.divide([*pins], {**runner, "nvidia-cudnn-cu13": "9.19"})
    assert [item.name for item in carried] == ["transformers", "nvidia-ml-py"]
    assert provided == {"torch": "2.11.0+cu130", "numpy": "2.5.2", "nvidia-cudnn-cu13": "9.19"}
    assert list(left_out) == ["tokenspeed-mla"]


def test_a_runner_with_another_torch_is_refused(carry):
    with pytest.raises(SystemExit, match=r"torch: the release has 2\.11\.0, the runner 2\.12\.0"):
        carry.divide([pin("torch", "2.11.0")], {"torch": "2.12.0"})


def test_a_runner_without_torch_gets_it(carry):
    assert [item.name for item in carry.divide([pin("torch")], {})[0]] == ["torch"]


def test_every_lock_of_the_reference_release_is_accounted_for(carry):
    pins = release.parse_lock((ROOT / "releases/sglang-0.5.13.post1/engine-py312.txt").read_text())
    carried, provided, left_out = carry.divide(pins, {"torch": "2.11.0", "triton": "3.6.0"})
    assert len(carried) + len(provided) + len(left_out) == len(pins)
    assert {"sglang", "sglang-kernel", "nixl-cu13", "tilelang"} <= {item.name for item in carried}


def test_a_trimmed_wheel_is_whole_without_its_files(carry, tmp_path):
    source, target, again = (tmp_path / name for name in ("a.whl", "b.whl", "c.whl"))
    record = "pkg/__init__.py,sha256=x,1\npkg/sm100/big.so,sha256=y,9\npkg-1.dist-info/RECORD,,\n"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("pkg/__init__.py", "x = 1\n")
        archive.writestr("pkg/sm100/big.so", b"\0" * 1000)
        archive.writestr("pkg-1.dist-info/RECORD", record)
    assert carry.repack(source, target, ["pkg/sm100/*"]) == ["pkg/sm100/big.so"]
    assert carry.repack(source, again, ["pkg/sm100/*"]) == ["pkg/sm100/big.so"]
    assert target.read_bytes() == again.read_bytes()
    with zipfile.ZipFile(target) as archive:
        assert archive.namelist() == ["pkg-1.dist-info/RECORD", "pkg/__init__.py"]
        assert "sm100" not in archive.read("pkg-1.dist-info/RECORD").decode()
    assert carry.repack(source, again, []) == []
    assert again.read_bytes() == source.read_bytes()


def test_parts_are_bounded_and_come_together_again(carry, tmp_path):
    (tmp_path / "out").mkdir()
    pieces = []
    for name, size in (("system.tar.xz", 2500), ("engine.tar", 10), ("controller.tar.xz", 990)):
        path = tmp_path / "out" / name
        path.write_bytes(hashlib.sha256(name.encode()).digest() * (size // 32) + b"x" * (size % 32))
        pieces.append(path)
    parts = carry.divide_parts(tmp_path / "out", pieces, 1000)
    payload = [[path for path in part.iterdir() if path.name not in ("sums", "unpack")] for part in parts]
    assert all(sum(path.stat().st_size for path in files) <= 1000 for files in payload)
    together = {path.name: path.read_bytes() for files in payload for path in files}
    for piece in pieces:
        names = sorted(name for name in together if name.startswith(piece.name + "."))
        assert b"".join(together[name] for name in names) == piece.read_bytes()
    for name, content in together.items():
        (tmp_path / name).write_bytes(content)
    check = ["sha256sum", "--quiet", "--check", str(parts[-1] / "sums")]
    assert subprocess.run(check, cwd=tmp_path).returncode == 0
    (tmp_path / "engine.tar.000").write_bytes(b"?")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode != 0
