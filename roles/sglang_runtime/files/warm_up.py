"""Compile flashinfer's JIT modules for one GPU architecture, without a GPU. Runs under the release's Python.

The argument is JSON: a list of generators, such as ``flashinfer.jit.sampling:gen_sampling_module``. Each returns a
specification that says whether it is compiled and compiles itself. FLASHINFER_CUDA_ARCH_LIST names the architecture.
The last line of the output is JSON: name, library and seconds of each module; 0 seconds where it was there.
"""

import importlib
import json
import sys
import time


def compiled(generator):
    module, _, function = generator.partition(":")
    spec = getattr(importlib.import_module(module), function)()
    started = time.monotonic()
    there = spec.is_compiled
    if not there:
        print("compiling", spec.name, file=sys.stderr, flush=True)
        spec.build(False)
    return {
        "name": spec.name,
        "library": str(spec.get_library_path()),
        "seconds": 0.0 if there else round(time.monotonic() - started, 1),
    }


if __name__ == "__main__":
    print(json.dumps([compiled(generator) for generator in json.loads(sys.argv[1])]))
