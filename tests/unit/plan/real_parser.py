"""Parse arguments with the real parser of an unpacked engine or router, without its gigabytes of dependencies.

Run as a script of its own, since it changes what can be imported::

    python real_parser.py engine|router|smg FOLDER < requests.json > answers.json

FOLDER holds the unpacked wheels. A request is a mapping (engine: what stands in the instance's YAML) or a list of words
(router: its command line). The answer has the parser's long options, where
each is kept, and for each request the parsed values or the
parser's own error. Argument parsers need none of the packages named in ABSENT: they are stood in for by objects that
accept everything. Everything else that is missing stays missing, so that a parser which begins to need more fails here.
"""

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import json
import pathlib
import sys
import tempfile
import types

ABSENT = {
    "IPython", "PIL", "fastapi", "numpy", "openai", "orjson", "partial_json_parser", "psutil", "pybase64", "pydantic",
    "pydantic_core", "requests", "safetensors", "setproctitle", "sgl_kernel", "starlette", "torch", "torchvision",
    "tqdm", "transformers", "triton", "uvicorn", "xgrammar", "zmq",
}  # fmt: skip
# Parts of the engine that only run models.
ABSENT_PARTS = (
    "sglang.srt.configs",
    "sglang.srt.distributed",
    "sglang.srt.layers",
    "sglang.srt.utils.hf_transformers_utils",
)


class Anything:
    """Stands for whatever an absent package would have given."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        decorated = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if decorated else Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __mro_entries__(self, bases):
        return ()

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False

    def __getitem__(self, item):
        return Anything()

    def __or__(self, other):
        return object

    __ror__ = __or__


class AbsentModule(types.ModuleType):
    __version__ = "2.14.1"  # torch's is parsed at import

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        part = any(name == item or name.startswith(item + ".") for item in ABSENT_PARTS)
        if name.partition(".")[0] in ABSENT or part:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return AbsentModule(spec.name)

    def exec_module(self, module):
        module.__path__ = []


class ParserError(Exception):
    pass


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ParserError(message)


def engine(folder):
    """Return the engine's parser and a function that parses what stands in a YAML file, as the engine does."""
    # The package's own __init__ imports the client library, which starts torch.
    package = types.ModuleType("sglang")
    package.__path__ = [str(folder / "sglang")]
    sys.modules["sglang"] = package
    from sglang.srt.server_args import ServerArgs

    if (folder / "sglang/srt/server_args_config_parser.py").exists():
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger
    else:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
    parser = Parser(prog="sglang", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)

    def parse(config):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            json.dump(config, file)  # every JSON document is a YAML document
            file.flush()
            words = ConfigArgumentMerger(parser).merge_config_with_args(["--config", file.name])
        return parser.parse_args(words)

    return parser, parse


def router(folder):
    """Return the router's parser and a function that parses its command line, workers included."""
    if (folder / "smg").exists():
        from smg.router_args import RouterArgs
    else:
        from sglang_router.router_args import RouterArgs

    parser = Parser(prog="router", allow_abbrev=False)
    # As in launch_router of both packages.
    RouterArgs.add_cli_args(parser, use_router_prefix=False)

    def parse(words):
        return RouterArgs.from_cli_args(parser.parse_args(words), use_router_prefix=False)

    return parser, parse


def main():
    kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, Absent())
    requests = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        parser, parse = {"engine": engine, "router": router, "smg": router}[kind](folder)
        answers = []
        for request in requests:
            try:
                values = vars(parse(request))
                answers.append({"values": json.loads(json.dumps(values, default=str))})
            except (ParserError, ValueError) as error:
                answers.append({"error": str(error)})
    options = sorted(word[2:] for action in parser._actions for word in action.option_strings if word.startswith("--"))
    attributes = {word[2:]: action.dest for action in parser._actions for word in action.option_strings}
    json.dump({"options": options, "attributes": attributes, "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
