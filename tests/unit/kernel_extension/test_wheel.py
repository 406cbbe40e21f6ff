"""The wheel that the controller builds, and its installation file by file."""

import importlib.util
import io
import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


module = load(ROOT / "library/pd_kernel_wheel.py")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run = [sys.executable, str(ROOT / "kernels/build_backend.py"), str(folder)]
    return pathlib.Path(subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip())


@pytest.fixture
def site(tmp_path):
    (tmp_path / "pyvenv.cfg").touch()
    packages = tmp_path / "lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    (packages / "other.py").write_text("untouched")
    return module.site_packages(tmp_path)


def settle(site, want, files):
    written, removed = module.plan(module.installed(site, files), want)
    module.apply(site, want, written, removed)
    return written, removed


def test_the_same_sources_give_the_same_bytes(wheel, tmp_path):
    run = [sys.executable, str(ROOT / "kernels/build_backend.py"), str(tmp_path)]
    again = pathlib.Path(subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip())
    assert again.read_bytes() == wheel.read_bytes()


def test_the_engine_finds_the_plugin_in_what_is_installed(wheel, site):
    files = module.files_of(wheel.read_bytes())
    settle(site, files, files)
    code = (
        "from importlib.metadata import distribution, entry_points\n"
        "print(*[p.value for p in entry_points(group='sglang.srt.plugins')])\n"
        "print(all(f.hash is None or f.locate().is_file() for f in distribution('pdstack-kernels').files))"
    )
    run = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{code}"]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    assert out == ["pdstack_kernels.plugin:register", "True"]


def test_an_installed_wheel_is_left_alone(wheel, site):
    files = module.files_of(wheel.read_bytes())
    assert settle(site, files, files)[0] == sorted(files)
    (site / "pdstack_kernels/__pycache__").mkdir()
    (site / "pdstack_kernels/__pycache__/plugin.cpython-312.pyc").touch()
    assert settle(site, files, files) == ([], [])


def test_drift_is_repaired(wheel, site):
    files = module.files_of(wheel.read_bytes())
    settle(site, files, files)
    (site / "pdstack_kernels/plugin.py").write_text("edited")
    (site / "pdstack_kernels/mhc.py").unlink()
    (site / "pdstack_kernels/stray.py").touch()
    old = site / "pdstack_kernels-0.0.9.dist-info"
    old.mkdir()
    (old / "METADATA").touch()
    written, removed = settle(site, files, files)
    assert written == ["pdstack_kernels/mhc.py", "pdstack_kernels/plugin.py"]
    assert removed == ["pdstack_kernels-0.0.9.dist-info/METADATA", "pdstack_kernels/stray.py"]
    assert not old.exists()
    assert settle(site, files, files) == ([], [])


def test_absent_takes_everything_away(wheel, site):
    files = module.files_of(wheel.read_bytes())
    settle(site, files, files)
    (site / "pdstack_kernels/__pycache__").mkdir()
    (site / "pdstack_kernels/__pycache__/plugin.cpython-312.pyc").touch()
    settle(site, {}, files)
    assert sorted(path.name for path in site.iterdir()) == ["other.py"]


def test_what_is_no_environment_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no virtual environment with one Python"):
        module.site_packages(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.py": b""}, "not a pure wheel"),
        ({"a-1.dist-info/WHEEL": b"Root-Is-Purelib: false"}, "not a pure wheel"),
        ({"a-1.dist-info/WHEEL": b"Root-Is-Purelib: true", "../a.py": b""}, "outside its package"),
        ({"a-1.dist-info/WHEEL": b"Root-Is-Purelib: true", "a-1.data/scripts/a": b""}, "outside its package"),
    ],
)
def test_what_is_no_pure_wheel_is_refused(files, message):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as out:
        for name, data in files.items():
            out.writestr(name, data)
    with pytest.raises(ValueError, match=message):
        module.files_of(archive.getvalue())
    with pytest.raises(ValueError, match="not a wheel"):
        module.files_of(b"junk")
