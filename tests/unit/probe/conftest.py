"""The probe's tests ask a fake driver, compiled here, on simulated hosts."""

import pathlib
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
for folder in ("tools", "tests/fixtures"):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))


@pytest.fixture(scope="session")
def libraries(tmp_path_factory) -> pathlib.Path:
    """The folder of the compiled fake driver. Without gcc the probe is not tested, and that is a failure."""
    from hosts import build

    if not shutil.which("gcc"):
        pytest.fail("gcc is needed to compile tests/fixtures/fake_driver (Debian, Ubuntu: apt install gcc libc6-dev)")
    return build.compile_driver(tmp_path_factory.mktemp("fake-driver"))


@pytest.fixture
def simulated(libraries, tmp_path):
    """A function that puts a host on disk: name, extra driver lines -> (request, folder)."""
    from dataclasses import replace

    from hosts import build, catalogue

    def put(name: str, *driver: str, **changes):
        host = catalogue.BY_NAME[name]
        host = replace(host, driver=(*host.driver, *driver), **changes)
        folder = tmp_path / name
        return build.build(host, folder, libraries), folder

    return put


@pytest.fixture
def calls():
    """A function that reads the fake driver's log of a host's folder."""

    def read(folder: pathlib.Path) -> list[str]:
        return (folder / "driver/calls.log").read_text().splitlines()

    return read
