"""The toolkit on a real Debian host: from the vendor's package (a stub, its nvcc too) and from the real wheels."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import own_lab
import pytest
from fixtures.apt_repository import Repository
from own_lab import PLAYS, OwnLab

LAB = OwnLab("ct")
NVCC = """#!/bin/sh
# Stub of nvcc: says its release, and "compiles" by touching the output.
while [ $# -gt 0 ]; do
  case "$1" in --version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;; -o) shift; touch "$1" ;; esac
  shift
done
"""
pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    file = tmp_path_factory.mktemp("toolkit") / "connection.yml"
    LAB.up(file, "kit")
    yield file
    LAB.down()


def run(command: str, data: bytes = b"") -> str:
    return LAB.on("kit", command, data)


@pytest.fixture(scope="module")
def play(connection: pathlib.Path) -> Callable[..., tuple[int, str]]:
    def run_play(book: str, *options: str, **variables: object) -> tuple[int, str]:
        return LAB.play(connection, PLAYS / book, *options, **{"pd_sysfs_root": "/opt/pdstack-lab", **variables})

    return run_play


def changed(output: str) -> int:
    return own_lab.changed(output)["kit"]


@pytest.fixture(scope="module")
def repository(play, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A signed repository, as it lies on the host, with the stub of the package."""
    made = Repository(tmp_path_factory.mktemp("mirror") / "vendor")
    offer(made, "13.0.2-1")
    yield made
    made.close()


def offer(repository: Repository, version: str) -> None:
    """Add the toolkit in a version, and one of the next release, which nobody asked for."""
    repository.package("cuda-nvcc-13-0", version, scripts={"usr/local/cuda-13.0/bin/nvcc": NVCC})
    repository.package("cuda-toolkit-13-0", version, f"cuda-nvcc-13-0 (= {version})")
    repository.package("cuda-toolkit-13-1", "13.1.0-1")
    repository.sign()
    run("rm -rf /srv/vendor; mkdir -p /srv/vendor; tar -C /srv/vendor -x", repository.archive())


@pytest.fixture(scope="module")
def mirror(repository: Repository) -> dict[str, str]:
    """Variables that name the repository."""
    return {
        "gpu_host_repository_url": "file:///srv/vendor/",
        "gpu_host_key_url": "file:///srv/vendor/key.asc",
        "gpu_host_key_fingerprint": repository.fingerprint,
    }


def test_check_mode_says_what_would_come_and_changes_nothing(play, mirror):
    run("apt-get update -q")
    status, output = play("toolkit.yml", "--check", **mirror)
    assert status == 0, output
    assert "cuda-toolkit-13-0 would be installed" in output
    assert run("ls -d /opt/pdstack /etc/apt/sources.list.d/pdstack-cuda.sources 2>/dev/null || true") == ""


def test_the_vendors_package_is_installed_proven_held_and_linked(play, mirror):
    status, output = play("host.yml")  # the host compiler
    assert status == 0, output
    status, output = play("toolkit.yml", **mirror)
    assert status == 0, output
    assert run("readlink -f /opt/pdstack/cuda") == "/usr/local/cuda-13.0"
    assert run("apt-mark showhold").split() == ["cuda-nvcc-13-0", "cuda-toolkit-13-0"]
    status, output = play("toolkit.yml", **mirror)
    assert (status, changed(output)) == (0, 0), output


def test_an_upgrade_leaves_it(repository):
    offer(repository, "13.0.3-1")
    run("apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get -qy dist-upgrade")
    assert run("dpkg-query -W -f '${Version}' cuda-nvcc-13-0") == "13.0.2-1"


def test_wheels_give_a_toolkit_that_compiles(play):
    """Real: some 680 MB of wheels, unpacked on the host, and real nvcc with the host's g++."""
    status, output = play("toolkit.yml", cuda_toolkit_source="wheels")
    assert status == 0, output
    assert run("readlink -f /opt/pdstack/cuda") == "/opt/pdstack/cuda-13.0"
    proof = "import json; print(json.load(open('/opt/pdstack/cuda/pdstack-toolkit.json'))['proof'])"
    assert "compiled for sm_90, sm_120" in run(f'python3 -c "{proof}"')
    # As flashinfer links: a shared library against lib64, with the kernel code inside.
    run(
        "cd /tmp && echo '__global__ void f(float *x) { *x = 1; }' > k.cu"
        " && /opt/pdstack/cuda/bin/nvcc -shared -Xcompiler -fPIC -arch sm_120 -o k.so k.cu -L/opt/pdstack/cuda/lib64"
        " -lcudart -lcublas -lnvrtc && test -s k.so"
    )
    status, output = play("toolkit.yml", cuda_toolkit_source="wheels")
    assert (status, changed(output)) == (0, 0), output


def test_a_file_that_was_changed_and_a_wheel_that_was_altered_are_mended(play):
    run("rm /opt/pdstack/cuda/include/curand_kernel.h; echo x >> $(ls /opt/pdstack/wheelhouse/cuda-13.0/nvidia_nvvm*)")
    status, output = play("toolkit.yml", cuda_toolkit_source="wheels")
    assert status == 0, output
    assert changed(output) == 2  # the wheel, and the toolkit
    assert run("ls /opt/pdstack/cuda/include/curand_kernel.h")


def test_absent_takes_all_of_it_away_but_the_vendors_package(play, mirror):
    for source in ("wheels", "vendor"):
        status, output = play("toolkit.yml", cuda_toolkit_source=source, cuda_toolkit_state="absent", **mirror)
        assert status == 0, output
    assert run("ls /opt/pdstack; apt-mark showhold").split() == ["releases", "wheelhouse"]
    assert run("ls /opt/pdstack/wheelhouse") == ""
    assert run("ls /usr/local/cuda-13.0/bin/nvcc")
