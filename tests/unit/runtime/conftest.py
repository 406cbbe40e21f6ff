"""A wheelhouse of hand-made wheels and the real uv: what pd_venv does, in a fraction of a second."""

import dataclasses
import hashlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from pdstack import codec, release, runner, venv, wheel

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
UV = pathlib.Path(sys.prefix) / "bin/uv"


def make_wheel(folder, name, version, files=None):
    """Write a wheel into a folder and return its pin."""
    module = name.replace("-", "_")
    content = files or {f"{module}/__init__.py": f"__version__ = {version!r}\n".encode()}
    file, data = wheel.build_from({"Name": name, "Version": version}, content)
    (folder / file).write_bytes(data)
    return release.Pin(release.normal_name(name), version, file, hashlib.sha256(data).hexdigest())


def uv_wheel(folder):
    """A wheel whose uv is a door to the environment's own: the real program without its 50 MB."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("uv-0.data/scripts/uv", f'#!/bin/sh\nexec {UV} "$@"\n')
    (folder / "uv-0-py3-none-any.whl").write_bytes(buffer.getvalue())
    return release.Pin("uv", "0", "uv-0-py3-none-any.whl", hashlib.sha256(buffer.getvalue()).hexdigest())


@dataclasses.dataclass
class Fake:
    """A release named ``fake`` in a root of its own."""

    root: pathlib.Path
    wheelhouse: pathlib.Path
    search: pathlib.Path
    pins: dict
    imports: dict

    @property
    def caches(self):
        return self.root.parent / "jit"

    def request(self, **changes):
        values = {
            "name": "fake",
            "locks": {PYTHON: self.pins},
            "imports": self.imports,
            "root": str(self.root),
            "wheelhouse": str(self.wheelhouse),
            "caches": str(self.caches),
        }
        return venv.Request(**{**values, **changes})

    def host(self, **changes):
        return venv.Host(
            **{
                "runner": runner.run,
                "search": [str(self.search)],
                "hidden": (),  # a developer's Python may lie in a home folder
                "in_use": lambda folder: [],
                "sync": lambda: None,
                **changes,
            }
        )

    def lock(self, **versions):
        """Pin these versions of alpha and beta, and write the wheelhouse anew for them."""
        self.pins["engine"] = [make_wheel(self.wheelhouse, name, version) for name, version in versions.items()]
        self.write_manifest()
        return self

    def write_manifest(self, **changes):
        pins = {pin.file: pin for items in self.pins.values() for pin in items}
        tool = uv_wheel(self.wheelhouse)
        wheels = [
            release.Wheel(pin.file, pin.sha256, (self.wheelhouse / pin.file).stat().st_size, 1000)
            for pin in [*pins.values(), tool]
        ]
        manifest = release.Wheelhouse(
            release="fake",
            id=release.release_id("fake", PYTHON, self.pins),
            python=PYTHON,
            platform=f"{os.uname().machine}-manylinux_2_17",
            uv=tool.file,
            wheels=wheels,
        )
        manifest = dataclasses.replace(manifest, **changes)
        (self.wheelhouse / "manifest.json").write_text(json.dumps(codec.dump(manifest)))

    def observe(self, **changes):
        return venv.observe(self.request(**changes), self.host())

    def apply(self, **changes):
        return venv.apply(self.request(**changes), self.host())

    def site(self, environment="engine"):
        return pathlib.Path(release.site_packages(str(self.root / "current" / release.folder_of(environment)), PYTHON))


def make_fake(folder):
    """An uninstalled release in a folder: two packages for the engine, one for the router."""
    wheelhouse, search, root = folder / "wheelhouse", folder / "bin", folder / "root"
    for path in (wheelhouse, search, root):
        path.mkdir()
    base = pathlib.Path(sys.base_prefix) / "bin"
    (search / f"python{PYTHON}").symlink_to(shutil.which(f"python{PYTHON}", path=str(base)))
    pins, imports = {"router": [make_wheel(wheelhouse, "gamma", "3.0")]}, {"router": ["gamma"]}
    made = Fake(root, wheelhouse, search, pins, imports)
    made.imports["engine"] = ["alpha", "beta"]
    return made.lock(alpha="1.0", beta="2.0")


@pytest.fixture
def fake(tmp_path):
    return make_fake(tmp_path)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Installed once; tests get copies."""
    made = make_fake(tmp_path_factory.mktemp("built"))
    made.apply()
    return made


@pytest.fixture
def installed(built, tmp_path):
    shutil.copytree(built.root.parent, tmp_path / "copy", symlinks=True)
    places = {name: tmp_path / "copy" / getattr(built, name).name for name in ("root", "wheelhouse", "search")}
    return dataclasses.replace(built, **places, pins=dict(built.pins), imports=dict(built.imports))


def python_archive(folder, python=PYTHON):
    """A relocatable interpreter as an archive like python-build-standalone's, made from this machine's own; its pin.

    Not a real one: those cannot be fetched everywhere. Its layout, python/bin and python/lib, is theirs.
    """
    code = "import os, sys, sysconfig; print(os.path.realpath(sys.executable)); print(sysconfig.get_path('stdlib'))"
    found = shutil.which(f"python{python}", path=f"{sys.base_prefix}/bin:/usr/bin:/usr/local/bin")
    told = subprocess.run([found, "-I", "-c", code], check=True, capture_output=True, text=True).stdout
    program, library = told.split()
    name = f"cpython-{python}.99+20260101-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz"
    skipped = ("test", "tests", "idlelib", "__pycache__", "site-packages", "dist-packages")

    def wanted(member):
        member.uid = member.gid = 1234
        return None if set(member.name.split("/")) & set(skipped) or member.name.endswith(".a") else member

    with tarfile.open(folder / name, "w:gz", compresslevel=1) as archive:
        archive.add(program, f"python/bin/python{python}")
        archive.add(library, f"python/lib/python{python}", filter=wanted)
        for shared in pathlib.Path(library).parent.glob(f"libpython{python}*.so*"):
            archive.add(shared, f"python/lib/{shared.name}")
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return release.Pin("cpython", f"{python}.99+20260101", name, digest)


@pytest.fixture(scope="session")
def carried_python(tmp_path_factory):
    """(folder, pin) of such an archive."""
    folder = tmp_path_factory.mktemp("python")
    return folder, python_archive(folder)
