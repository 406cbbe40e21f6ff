"""A CUDA toolkit from hash-locked wheels, laid out as the vendor's packages lay one out, and proven by compiling.

The wheels hold the toolkit's files under ``nvidia/cu13``. What they lack of a toolkit is added: ``lib64`` (flashinfer
and others hardcode it), the linker's names ``libX.so``, and ``lib64/stubs/libcuda.so``, which is the driver's own
library. The toolkit is built beside its place, proven there, and put in place by one rename; a reader of the link
``cuda`` sees the whole old one or the whole new one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import zipfile
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

from . import codec, release, turns
from .refusal import Refusal, Refused
from .runner import Runner

MANIFEST = "pdstack-toolkit.json"
PREFIX = "nvidia/cu13/"
SLACK = 64 << 20  # bytes beyond the unpacked size
DRIVER = "/proc/driver/nvidia/version"

#: Includes and links what flashinfer's kernels do; with a GPU it computes, and checks what it computed.
PROGRAM = r"""
#include <cstdio>
#include <cublasLt.h>
#include <cuda/std/array>
#include <cuda_runtime.h>
#include <curand_kernel.h>
#include <nvrtc.h>
__global__ void square(int *values) { values[threadIdx.x] *= values[threadIdx.x]; }
int main() {
  int nvrtc_major = 0, nvrtc_minor = 0;
  if (nvrtcVersion(&nvrtc_major, &nvrtc_minor) != NVRTC_SUCCESS) return 3;
  std::printf("nvrtc %d.%d cublasLt %zu\n", nvrtc_major, nvrtc_minor, cublasLtGetVersion());
  int *values = nullptr, sum = 0;
  cudaError_t error;
  int on_host[32];
  for (int i = 0; i < 32; ++i) on_host[i] = i;
  if ((error = cudaMalloc(&values, sizeof on_host)) != cudaSuccess) {
    std::printf("no GPU: %s\n", cudaGetErrorString(error));
    return 2;
  }
  cudaMemcpy(values, on_host, sizeof on_host, cudaMemcpyHostToDevice);
  square<<<1, 32>>>(values);
  if ((error = cudaMemcpy(on_host, values, sizeof on_host, cudaMemcpyDeviceToHost)) != cudaSuccess) {
    std::printf("kernel: %s\n", cudaGetErrorString(error));
    return 4;
  }
  for (int value : on_host) sum += value;
  std::printf("sum of squares %d\n", sum);
  return sum == 10416 ? 0 : 5;
}
"""
ARCHITECTURES = ("sm_90", "sm_120")


class ToolkitRefused(Refused):
    """The toolkit cannot be had as asked; the one that was there, if any, still is."""

    title = "The toolkit was refused; this host's toolkit has not been changed"


@dataclass(frozen=True)
class Request:
    """What to keep. ``pins`` empty: the toolkit at ``path`` is the vendor's package's, and only proven and linked."""

    path: str
    link: str
    pins: Sequence[release.Pin] = ()
    wheels: str = ""  # folder of the wheels
    wanted: bool = True
    release: str = "13.0"  # what nvcc has to say


@dataclass(frozen=True)
class Manifest:
    """Written last; without it a folder is no toolkit. ``files``: relative path -> bytes, -1 for a link."""

    id: str
    files: Dict[str, int]
    proof: str = ""
    schema: int = 1


@dataclass(frozen=True)
class Step:
    """One step: build, prove, link, unlink or remove, with the reason."""

    action: str
    reason: str


@dataclass(frozen=True)
class Host:
    """What the functions need of a machine."""

    runner: Runner
    driver: str = DRIVER  # exists where a driver is loaded


def identity(pins: Sequence[release.Pin]) -> str:
    """Return 12 hex digits that follow from the pins alone."""
    return release.release_id("toolkit", "any", {"toolkit": list(pins)}).rsplit("-", 1)[1]


def plan(request: Request) -> List[Step]:
    """Return what is to be done on this machine."""
    linked = os.readlink(request.link) if os.path.islink(request.link) else ""
    if not request.wanted:
        gone = [Step("unlink", f"{request.link} is not wanted")] if linked == request.path else []
        mine = request.pins and os.path.isdir(request.path)
        return gone + ([Step("remove", f"{request.path} is not wanted")] if mine else [])
    steps: List[Step] = []
    if request.pins:
        reason = _difference(request)
        if reason:
            steps.append(Step("build", reason))
    elif not os.path.exists(os.path.join(request.path, "bin/nvcc")):
        raise ToolkitRefused(
            [Refusal(request.path, "no bin/nvcc", "the vendor's toolkit", "see whether its package is installed")]
        )
    elif linked != request.path:
        steps.append(Step("prove", f"{request.path} has not been used before"))
    if linked != request.path:
        steps.append(Step("link", f"{request.link} pointed to {linked or 'nothing'}"))
    return steps


def read_manifest(path: str) -> Optional[Manifest]:
    """Return a toolkit's manifest, None where the folder is no finished toolkit."""
    return codec.kept(Manifest, os.path.join(path, MANIFEST))


def _difference(request: Request) -> str:
    manifest = read_manifest(request.path)
    if manifest is None:
        return f"{request.path} is missing or unfinished"
    if manifest.id != identity(request.pins):
        return "it was built from other wheels"
    for name, size in manifest.files.items():
        try:
            found = os.lstat(os.path.join(request.path, name))
        except OSError:
            return f"{name} is gone"
        if (size == -1) != stat.S_ISLNK(found.st_mode) or (size != -1 and found.st_size != size):
            return f"{name} was changed"
    return ""


def apply(request: Request, host: Host, steps: Sequence[Step], wait_s: float = 0.0) -> None:
    """Take the steps. Raises ToolkitRefused; then the toolkit that was there is untouched."""
    os.makedirs(os.path.dirname(request.path), exist_ok=True)
    lock = os.path.join(os.path.dirname(request.path), ".toolkit.lock")
    try:
        with turns.turn(lock, f"pd_cuda_toolkit for {request.path}", wait_s) as waited:
            for step in plan(request) if waited else steps:  # whom it waited for may have done it
                _take(step, request, host)
    except turns.Busy as busy:
        remedy = "wait until it is done, then run again"
        raise ToolkitRefused([Refusal(request.path, str(busy), "one run at a time", remedy)]) from None


def _take(step: Step, request: Request, host: Host) -> None:
    if step.action == "build":
        _build(request, host)
    elif step.action == "prove":
        prove(request.path, host, request.release)
    elif step.action == "link":
        draft = f"{request.link}.new"
        if os.path.lexists(draft):
            os.unlink(draft)
        os.symlink(request.path, draft)
        os.replace(draft, request.link)
    elif step.action == "unlink":
        os.unlink(request.link)
    elif step.action == "remove":
        shutil.rmtree(request.path)
        shutil.rmtree(request.wheels, ignore_errors=True)


def _build(request: Request, host: Host) -> None:
    if host.runner(["g++", "--version"]).rc != 0:  # said before a gigabyte is unpacked
        raise ToolkitRefused(
            [Refusal("host compiler", "g++ does not run", "one", "apt-get install g++, or dnf install gcc-c++")]
        )
    size = _check(request)
    home, name = os.path.split(request.path)
    for stray in os.listdir(home):  # of a run that was killed
        if stray.startswith(f".{name}."):
            shutil.rmtree(os.path.join(home, stray))
    space = os.statvfs(home)
    free = space.f_bavail * space.f_frsize
    if free < size + SLACK:
        needed = f"{(size + SLACK) / 1e6:.0f} MB"
        raise ToolkitRefused([Refusal(home, f"{free / 1e6:.0f} MB free", needed, "free space, then run again")])
    staged, old = os.path.join(home, f".{name}.new"), os.path.join(home, f".{name}.old")
    try:
        for pin in request.pins:
            unpack(os.path.join(request.wheels, pin.file), staged)
        complete(staged, driver_library(host.runner))
        proof = prove(staged, host, request.release)
        manifest = Manifest(identity(request.pins), _files(staged), proof)
        with open(os.path.join(staged, MANIFEST), "w", encoding="utf-8") as stream:
            json.dump(codec.dump(manifest), stream)
            stream.flush()
            os.fsync(stream.fileno())
        if os.path.isdir(request.path):
            os.rename(request.path, old)
        os.rename(staged, request.path)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        remedy = "free space, then run again" if error.errno == errno.ENOSPC else "see the error, then run again"
        raise ToolkitRefused([Refusal(request.path, str(error), "a toolkit on disk", remedy)]) from error
    except ToolkitRefused:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _check(request: Request) -> int:
    """Compare every wheel with its hash and return what they unpack to, in bytes."""
    problems, size = [], 0
    for pin in request.pins:
        path = os.path.join(request.wheels, pin.file)
        try:
            found = release.sha256_of(path)
            size += _unpacked(path) if found == pin.sha256 else 0
        except OSError:
            found = ""
        if found != pin.sha256:
            words = f"sha256 {found} in {request.wheels}" if found else f"missing from {request.wheels}"
            problems.append(
                Refusal(f"wheel {pin.file}", words, f"sha256 {pin.sha256}", "run the playbook again: it copies it anew")
            )
    if problems:
        raise ToolkitRefused(problems)
    return size


def _unpacked(path: str) -> int:
    with zipfile.ZipFile(path) as archive:
        return sum(entry.file_size for entry in archive.infolist())


def unpack(wheel: str, folder: str) -> None:
    """Unpack a wheel's part of the toolkit: no metadata, no Python. A path that would leave the folder is refused."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = entry.filename
            if not name.startswith(PREFIX) or name.endswith(("/", ".py")) or "/.metadata/" in name:
                continue
            target = os.path.normpath(os.path.join(folder, name[len(PREFIX) :]))
            if not target.startswith(folder + os.sep):
                raise ToolkitRefused([Refusal(wheel, f"a file named {name}", f"files below {PREFIX}", "do not use it")])
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with archive.open(entry) as source, open(target, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            os.chmod(target, 0o755 if (entry.external_attr >> 16) & 0o100 else 0o644)


def driver_library(runner: Runner) -> str:
    """Return the path of libcuda.so.1 as the loader knows it, "" on a host without a driver."""
    match = re.search(r"libcuda\.so\.1 \(.*x86-64\) => (\S+)", runner(["ldconfig", "-p"]).out)
    return match.group(1) if match else ""


def complete(folder: str, driver: str) -> None:
    """Add what a toolkit has and the wheels have not: lib64, the linker's names, the driver's library as a stub."""
    home = os.path.join(folder, "lib")
    os.symlink("lib", os.path.join(folder, "lib64"))
    for name in sorted(os.listdir(home)):
        match = re.fullmatch(r"(lib[A-Za-z0-9_]+\.so)\.\d+", name)
        if match and not os.path.lexists(os.path.join(home, match.group(1))):
            os.symlink(name, os.path.join(home, match.group(1)))
    os.makedirs(os.path.join(home, "stubs"))
    if driver:
        os.symlink(driver, os.path.join(home, "stubs", "libcuda.so"))


def prove(path: str, host: Host, wanted: str) -> str:
    """Compile the program for each architecture and, where a driver is loaded, run it. Returns what was seen.

    Raises ToolkitRefused with the compiler's words.
    """
    nvcc = os.path.join(path, "bin/nvcc")
    said = host.runner([nvcc, "--version"])
    match = re.search(r"release (\d+\.\d+)", said.out)
    if match is None or match.group(1) != wanted:
        words = f"release {match.group(1)}" if match else (said.err or said.out).strip()[-400:]
        raise ToolkitRefused([Refusal(nvcc, words, f"release {wanted}", "see the toolkit's package or lock")])
    scratch = os.path.join(os.path.dirname(path), f".proof-{os.getpid()}")
    os.makedirs(scratch)
    try:
        source, program = os.path.join(scratch, "proof.cu"), os.path.join(scratch, "proof")
        with open(source, "w", encoding="utf-8") as stream:
            stream.write(PROGRAM)
        codes = [word for arch in ARCHITECTURES for word in ("-gencode", f"arch=compute_{arch[3:]},code={arch}")]
        rpath = ["-Xlinker", "-rpath", "-Xlinker", os.path.join(path, "lib64")]
        done = host.runner([nvcc, *codes, "-o", program, source, "-lnvrtc", "-lcublasLt", "-lcurand", *rpath])
        if done.rc != 0:
            words = (done.err + done.out).strip()[-800:]
            remedy = "install a host compiler (g++) that this CUDA release supports, or see the words"
            raise ToolkitRefused([Refusal(f"{nvcc} on a small program", words, "exit 0", remedy)])
        proof = f"nvcc {wanted} compiled for {', '.join(ARCHITECTURES)}"
        if not os.path.exists(host.driver):
            return f"{proof}; no driver, so it was not run"
        ran = host.runner([program])
        if ran.rc != 0:
            words = f"exit {ran.rc}: {(ran.out + ran.err).strip()[-400:]}"
            raise ToolkitRefused([Refusal("the compiled program on a GPU", words, "exit 0", "see nvidia-smi")])
        return f"{proof}; it ran: {' '.join(ran.out.split())}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _files(folder: str) -> Dict[str, int]:
    found: Dict[str, int] = {}
    for place, folders, names in os.walk(folder):
        for name in names + [item for item in folders if os.path.islink(os.path.join(place, item))]:
            path = os.path.join(place, name)
            status = os.lstat(path)
            found[os.path.relpath(path, folder)] = -1 if stat.S_ISLNK(status.st_mode) else status.st_size
    return found
