"""Move memory between two NIXL agents in two processes, once in each direction, and prove every byte.

Runs under the release's Python; each side has its engine's own environment. A prefill server writes (PUT) the KV cache
into a decode server's memory, so each direction is one WRITE. The argument is JSON::

    {"bytes": 67108864, "in_flight": 16, "repetitions": 5, "memory": "DRAM" | "VRAM",
     "sides": [{"name": "prefill-0", "environment": {...}, "device": 0}, {...}]}

``device`` is a GPU's index among those that the side's CUDA_VISIBLE_DEVICES shows. One transfer writes the buffer of
``bytes`` ``in_flight`` times over, as blocks that are posted together; transfers before the timed ones open the other
side's memory and bring clocks up. The last line of the output is JSON: per direction the best and the median bandwidth
(bytes/s), and what UCX said on each side about its lanes (UCX_PROTO_INFO=y).
"""

import ctypes
import hashlib
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from multiprocessing import Pipe

BLOCK = 1 << 24  # bytes copied at once between a GPU and the host
WARM_UP = {"VRAM": 0.3, "DRAM": 0.0}  # seconds; one transfer at least
LINE_BUFFERED = 1  # glibc's _IOLBF


class HostMemory:
    """A buffer of this process."""

    kind, device = "DRAM", 0

    def __init__(self, size, device):
        self.size, self.buffer = size, ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.buffer)

    def fill(self, pattern):
        ctypes.memmove(self.address, pattern * (self.size // len(pattern)), self.size)

    def digest(self):
        return hashlib.sha256(self.buffer).hexdigest()


class DeviceMemory:
    """A buffer on a GPU, by the driver's own API: what cudaMalloc, and so the engine's allocator, gives."""

    kind = "VRAM"

    def __init__(self, size, device):
        self.size, self.device = size, device
        self.cuda = ctypes.CDLL("libcuda.so.1")
        handle, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.address = address.value

    def call(self, name, *arguments):
        status = getattr(self.cuda, name)(*arguments)
        if status:
            words = ctypes.c_char_p()
            self.cuda.cuGetErrorName(status, ctypes.byref(words))
            raise RuntimeError(f"{name} on GPU {self.device} answered {status} ({(words.value or b'?').decode()})")

    def blocks(self):
        for start in range(0, self.size, BLOCK):
            yield ctypes.c_uint64(self.address + start), min(BLOCK, self.size - start)

    def fill(self, pattern):
        for address, count in self.blocks():
            self.call("cuMemcpyHtoD_v2", address, pattern * (count // len(pattern)), ctypes.c_size_t(count))
        self.call("cuCtxSynchronize")

    def digest(self):
        digest, buffer = hashlib.sha256(), ctypes.create_string_buffer(BLOCK)
        self.call("cuCtxSynchronize")
        for address, count in self.blocks():
            self.call("cuMemcpyDtoH_v2", buffer, address, ctypes.c_size_t(count))
            digest.update(memoryview(buffer)[:count])
        return digest.hexdigest()


def side(wanted, memory, peer, parent, request, log):
    """One process: an agent with one registered buffer; writes when told to, hashes what it was written."""
    size = request["bytes"]
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    # UCX writes through the C library, which holds back what fills no block of a file, and this process ends without
    # its exit handlers: the table of the transfer, UCX's last words, would be lost.
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, LINE_BUFFERED, ctypes.c_size_t(0))
    os.environ.update(wanted["environment"], UCX_PROTO_INFO="y")
    from nixl._api import nixl_agent, nixl_agent_config

    # The agent registers in the GPU's context, so that the memory comes first.
    buffer = (DeviceMemory if memory == "VRAM" else HostMemory)(size, wanted["device"])
    # With NIXL's progress thread a transfer between GPUs took up to 1.8 times as long as the copy in it
    # (docs/releases.md). Here the side that waits makes progress instead.
    agent = nixl_agent(wanted["name"], nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    registration = agent.register_memory([(buffer.address, size, buffer.device, "")], buffer.kind)
    peer.send((agent.get_agent_metadata(), buffer.address, buffer.device))
    metadata, address, device = peer.recv()
    remote = agent.add_remote_agent(metadata)
    parent.send("ready")
    while True:
        while not parent.poll(0):
            agent.get_new_notifs()  # what the other side needs of this one, such as the answer to its first message
        order, seed = parent.recv()
        if order == "write":
            buffer.fill(pattern_of(seed))
            local = agent.get_xfer_descs([(buffer.address, size, buffer.device)] * request["in_flight"], buffer.kind)
            there = agent.get_xfer_descs([(address, size, device)] * request["in_flight"], buffer.kind)
            parent.send(write(agent, local, there, remote, request["repetitions"], WARM_UP[memory]))
        elif order == "hash":
            parent.send(buffer.digest())
        else:
            break
    agent.deregister_memory(registration)


def write(agent, local, there, remote, repetitions, warm_up):
    """Seconds of each WRITE of all blocks, after one and as many more as fit into ``warm_up`` seconds."""
    until = time.perf_counter() + warm_up
    transfer(agent, local, there, remote)
    while time.perf_counter() < until:
        transfer(agent, local, there, remote)
    return [transfer(agent, local, there, remote) for _ in range(repetitions)]


def transfer(agent, local, there, remote):
    """Seconds of one WRITE."""
    handle = agent.initialize_xfer("WRITE", local, there, remote)
    started = time.perf_counter()
    state = agent.transfer(handle)
    while state == "PROC":
        if time.perf_counter() - started > 60:
            raise TimeoutError("a transfer did not end within 60 s")
        state = agent.check_xfer_state(handle)
    seconds = time.perf_counter() - started
    if state != "DONE":
        raise RuntimeError(f"the transfer ended in state {state}")
    agent.release_xfer_handle(handle)
    return seconds


def pattern_of(seed):
    return hashlib.shake_256(seed).digest(1 << 16)


def expected(seed, size):
    pattern = pattern_of(seed)
    return hashlib.sha256(pattern * (size // len(pattern))).hexdigest()


def main():
    request = json.loads(sys.argv[1])
    request["bytes"] = size = request["bytes"] & ~0xFFFF
    memory, moved = request["memory"], size * request["in_flight"]
    sides = {wanted["name"]: wanted for wanted in request["sides"]}
    names = list(sides)
    links = Pipe()
    pipes, logs, children = {}, {}, {}
    folder = tempfile.mkdtemp(prefix="pd-nixl-")
    for position, name in enumerate(names):
        here, there = Pipe()
        pipes[name], logs[name] = here, os.path.join(folder, name)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                side(sides[name], memory, links[position], there, request, logs[name])
                status = 0
            except BaseException as error:
                there.send(RuntimeError(f"{type(error).__name__}: {error}"))
            finally:
                os._exit(status)
        children[name] = pid
        there.close()

    def answer(name):
        if not pipes[name].poll(120):
            raise TimeoutError(f"{name} did not answer within 120 s")
        reply = pipes[name].recv()
        if isinstance(reply, Exception):
            raise RuntimeError(f"{name}: {reply}")
        return reply

    failure, directions = "", {}
    try:
        for name in names:
            answer(name)
        for writer, reader in (names, names[::-1]):
            seed = os.urandom(16)
            pipes[writer].send(("write", seed))
            seconds = answer(writer)
            pipes[reader].send(("hash", seed))
            if answer(reader) != expected(seed, size):
                raise RuntimeError(f"{writer} to {reader}: the bytes that arrived are not those that were sent")
            best, median = moved / min(seconds), moved / statistics.median(seconds)
            directions[f"{writer} to {reader}"] = {"best": round(best), "median": round(median)}
        for name in names:
            pipes[name].send(("stop", b""))
    except (Exception, EOFError) as error:
        failure = f"{type(error).__name__}: {error}"
        for pid in children.values():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass
    for pid in children.values():
        os.waitpid(pid, 0)
    words = {}
    for name, path in logs.items():
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as stream:
                words[name] = stream.read()[-40000:]
            os.unlink(path)
    os.rmdir(folder)
    versions = {}
    for package in ("nixl", "nixl-cu13", "nixl-cu12"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    print(
        json.dumps({"failure": failure, "bytes": moved, "directions": directions, "ucx": words, "versions": versions})
    )


if __name__ == "__main__":
    main()
