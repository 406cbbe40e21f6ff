"""Move host memory between two NIXL agents in two processes, once in each direction, and prove every byte.

Runs under the release's Python with the engines' own UCX environment. A prefill server writes (PUT) the KV cache into
a decode server's memory, so each direction is one WRITE. Arguments: bytes per transfer, repetitions. The last line of
the output is JSON: per direction the best and the median bandwidth (bytes/s), and what UCX said about its lanes
(UCX_PROTO_INFO=y).
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


def side(name, peer, parent, size, repetitions, log):
    """One process: an agent with one registered buffer; writes when told to, hashes what it was written."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    buffer = ctypes.create_string_buffer(size)
    address = ctypes.addressof(buffer)
    registration = agent.register_memory([(address, size, 0, "")], "DRAM")
    peer.send((agent.get_agent_metadata(), address))
    metadata, remote_address = peer.recv()
    remote = agent.add_remote_agent(metadata)
    parent.send("ready")
    while True:
        order, seed = parent.recv()
        if order == "write":
            pattern = hashlib.shake_256(seed).digest(1 << 16)
            ctypes.memmove(address, pattern * (size // len(pattern)), size)
            parent.send(write(agent, address, remote, remote_address, size, repetitions))
        elif order == "hash":
            parent.send(hashlib.sha256(buffer).hexdigest())
        else:
            break
    agent.deregister_memory(registration)


def write(agent, address, remote, remote_address, size, repetitions):
    """Seconds of each WRITE of the whole buffer."""
    local = agent.get_xfer_descs([(address, size, 0)], "DRAM")
    there = agent.get_xfer_descs([(remote_address, size, 0)], "DRAM")
    seconds = []
    for _ in range(repetitions):
        handle = agent.initialize_xfer("WRITE", local, there, remote)
        started = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            if time.perf_counter() - started > 60:
                raise TimeoutError(f"a transfer of {size} bytes did not end within 60 s")
            state = agent.check_xfer_state(handle)
        seconds.append(time.perf_counter() - started)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended in state {state}")
        agent.release_xfer_handle(handle)
    return seconds


def expected(seed, size):
    pattern = hashlib.shake_256(seed).digest(1 << 16)
    return hashlib.sha256(pattern * (size // len(pattern))).hexdigest()


def main():
    size, repetitions = int(sys.argv[1]) & ~0xFFFF, int(sys.argv[2])
    names = ("prefill", "decode")
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
                side(name, links[position], there, size, repetitions, logs[name])
                status = 0
            except BaseException as error:
                there.send(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            finally:
                os._exit(status)
        children[name] = pid
        there.close()

    def answer(name):
        if not pipes[name].poll(120):
            raise TimeoutError(f"the {name} side did not answer within 120 s")
        reply = pipes[name].recv()
        if isinstance(reply, Exception):
            raise reply
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
            best, median = size / min(seconds), size / statistics.median(seconds)
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
                words[name] = stream.read()[-20000:]
            os.unlink(path)
    os.rmdir(folder)
    versions = {}
    for package in ("nixl", "nixl-cu13", "nixl-cu12"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    print(json.dumps({"failure": failure, "bytes": size, "directions": directions, "ucx": words, "versions": versions}))


if __name__ == "__main__":
    main()
