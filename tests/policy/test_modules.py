"""Our modules: documented as they behave, and able to run on a target (Python 3.9, standard library only)."""

import ast
import importlib.util
import pathlib
import shutil
import subprocess
import sys

import pytest
from policy import tree

MODULES = tree.matching("library/*.py")
TARGET_CODE = tree.matching("library/*.py", "module_utils/**/*.py")
OLDEST_TARGET = (3, 9)
LATER_THAN_OLDEST = {"tomllib", "annotationlib", "compression", "pathlib.types", "string.templatelib"}
FROM_ANSIBLE = ("ansible.module_utils.basic", "ansible.module_utils.common", "ansible.module_utils.pdstack")
LATER_ARGUMENTS = {"dataclass": {"slots", "kw_only"}, "zip": {"strict"}}
TEXTS = ("DOCUMENTATION", "EXAMPLES", "RETURN")
SUPPORT = {"full", "partial", "none", "N/A"}
IMPLIED = {"type": "str", "required": False, "default": None, "elements": None, "choices": None}


def documentation(source):
    """The three texts of a module, parsed; a missing one is None."""
    texts = {
        target.id: ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in TEXTS
    }
    return {name: tree.parse(texts[name]) if name in texts else None for name in TEXTS}


def documentation_problems(name, source):
    texts = documentation(source)
    doc, examples, returned = texts["DOCUMENTATION"], texts["EXAMPLES"], texts["RETURN"]
    if not doc:
        return ["no DOCUMENTATION"]
    problems = [f"no {key}" for key in ("short_description", "description", "author") if not doc.get(key)]
    if doc.get("module") != name:
        problems.append(f"module is {doc.get('module')}, the file {name}")
    for attribute in ("check_mode", "diff_mode"):
        problems += attribute_problems(attribute, (doc.get("attributes") or {}).get(attribute))
    problems += described(doc.get("options"), "option")
    if not any(name in task.modules for task in tree.tasks_in(examples, "EXAMPLES")):
        problems.append("EXAMPLES has no task that uses the module")
    if not returned:
        problems.append("no RETURN")
    problems += described(returned, "return value")
    return problems


def attribute_problems(name, attribute):
    if not attribute:
        return [f"attribute {name} is missing"]
    if attribute.get("support") not in SUPPORT:
        return [f"attribute {name}: support is {attribute.get('support')}"]
    if not (attribute.get("description") or attribute.get("details")):
        return [f"attribute {name}: nothing says how, or why not"]
    return []


def described(options, kind):
    for name, option in (options or {}).items():
        for key in ("description", "type"):
            if not option.get(key):
                yield f"{kind} {name}: no {key}"
        yield from described(option.get("suboptions") or option.get("contains"), f"{kind} {name}.")


def interface_problems(spec, documented, prefix=""):
    """Differences between an argument_spec and the documented options, suboptions included."""
    for name in sorted({*spec, *documented}):
        if name not in documented or name not in spec:
            yield f"{prefix}{name}: only in " + ("the argument_spec" if name in spec else "the documentation")
            continue
        for key, implied in IMPLIED.items():
            coded, told = spec[name].get(key, implied), documented[name].get(key, implied)
            if coded != told:
                yield f"{prefix}{name}: {key} is {coded!r}, documented as {told!r}"
        if "options" in spec[name]:
            yield from interface_problems(spec[name]["options"], documented[name].get("suboptions") or {}, f"{name}.")


def portability_problems(source):
    """What an old target could not run."""
    try:
        parsed = ast.parse(source, feature_version=OLDEST_TARGET)
    except SyntaxError as error:
        return [f"line {error.lineno}: not Python 3.9: {error.msg}"]
    problems, optional = [], optional_imports(parsed)
    for node in ast.walk(parsed):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node not in optional:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            problems += [f"line {node.lineno}: imports {n}" for n in names if not relative and not on_target(n)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            later = {word.arg for word in node.keywords} & LATER_ARGUMENTS.get(node.func.id, set())
            problems += [f"line {node.lineno}: {node.func.id}({word}=) came after 3.9" for word in later]
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if annotation is not None and any(isinstance(part, ast.BitOr) for part in ast.walk(annotation)):
            problems.append(f"line {node.lineno}: X | Y in an annotation; 3.9 cannot evaluate it")
    return problems


def optional_imports(parsed):
    """Imports that the code does without: in a `try` that catches their failure."""
    return {
        node
        for attempt in ast.walk(parsed)
        if isinstance(attempt, ast.Try) and any(catches_import_error(handler) for handler in attempt.handlers)
        for node in attempt.body
    }


def catches_import_error(handler):
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in ("ImportError", "Exception") for kind in caught)


def on_target(name):
    if name.startswith("ansible"):
        return name == "ansible.module_utils" or name.startswith(FROM_ANSIBLE)
    return name.partition(".")[0] in sys.stdlib_module_names and name not in LATER_THAN_OLDEST


def argument_spec(path, monkeypatch):
    """What the module hands to AnsibleModule."""

    class HandedOver(Exception):
        pass

    def capture(*args, **kwargs):
        raise HandedOver(kwargs["argument_spec"] if "argument_spec" in kwargs else args[0])

    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "AnsibleModule", capture)
    with pytest.raises(HandedOver) as handed:
        module.main()
    return handed.value.args[0]


def runs_module(path):
    """False for the documentation-only file beside an action plugin."""
    return "AnsibleModule(" in path.read_text()


def test_there_are_modules():
    assert {"pd_gpu_info", "pd_fabric_info", "pd_venv", "pd_checkpoint"} <= {path.stem for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_module_is_documented(path):
    assert documentation_problems(path.stem, path.read_text()) == []


@pytest.mark.parametrize("path", [path for path in MODULES if runs_module(path)], ids=lambda path: path.stem)
def test_documentation_equals_the_code(path, monkeypatch):
    doc = documentation(path.read_text())["DOCUMENTATION"]
    assert list(interface_problems(argument_spec(path, monkeypatch), doc.get("options") or {})) == []


def test_action_plugins_are_documented():
    documented = {path.stem for path in MODULES}
    assert [path.stem for path in tree.matching("action_plugins/*.py") if path.stem not in documented] == []


@pytest.mark.parametrize("path", TARGET_CODE, ids=tree.relative)
def test_target_code_is_portable(path):
    assert portability_problems(path.read_text()) == []


def oldest_python():
    found = shutil.which("python3.9") or ""
    pyenv = sorted(pathlib.Path.home().glob(".pyenv/versions/3.9.*/bin/python"))
    return str(pyenv[-1]) if pyenv else found


@pytest.mark.skipif(not oldest_python(), reason="no Python 3.9 on this machine")
def test_package_imports_on_the_oldest_python():
    package = tree.ROOT / "module_utils"
    files = [path.relative_to(package) for path in TARGET_CODE if package in path.parents]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    program = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    command = [oldest_python(), "-B", "-c", program, *names]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True)
    assert names
    assert done.returncode == 0, done.stderr


GOOD = '''
DOCUMENTATION = r"""
module: pd_x
short_description: Do it
description: Does it.
author: me
attributes:
  check_mode: {support: full, description: Reads only.}
  diff_mode: {support: none, details: Reads only.}
options:
  path: {description: The path., type: path}
"""
EXAMPLES = "[{name: Do it, pd_x: {}}]"
RETURN = "size: {description: Bytes., type: int, returned: always}"
'''


def test_a_good_module_passes():
    assert documentation_problems("pd_x", GOOD) == []
    assert portability_problems("from __future__ import annotations\nimport os\nfrom . import x\nx: int = 1 | 2") == []
    assert portability_problems("try:\n  import pynvml\nexcept ImportError:\n  pynvml = None") == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("DOCUMENTATION", "DOC", "no DOCUMENTATION"),
        ("module: pd_x", "module: pd_y", "module is pd_y, the file pd_x"),
        ("short_description: Do it\n", "", "no short_description"),
        ("support: full", "support: yes", "attribute check_mode: support is True"),
        ("check_mode: {support: full, description: Reads only.}", "", "attribute check_mode is missing"),
        (", details: Reads only.", "", "attribute diff_mode: nothing says how, or why not"),
        ("description: The path., ", "", "option path: no description"),
        ("type: int, ", "", "return value size: no type"),
        ("pd_x: {}", "pd_y: {}", "EXAMPLES has no task that uses the module"),
        ("RETURN", "RETURNS", "no RETURN"),
    ],
)
def test_a_badly_documented_module_fails(old, new, expected):
    assert expected in documentation_problems("pd_x", GOOD.replace(old, new, 1))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("match x:\n  case 1: pass", "not Python 3.9"),
        ("import yaml", "imports yaml"),
        ("import tomllib", "imports tomllib"),
        ("try:\n  import yaml\nexcept OSError:\n  pass", "imports yaml"),
        ("from ansible.errors import AnsibleError", "imports ansible.errors"),
        ("def f(a: int | None): pass", "X | Y"),
        ("def f() -> 'int': pass\nx: int | None = None", "X | Y"),
        ("@dataclass(slots=True)\nclass A: pass", "dataclass(slots=)"),
        ("zip(a, b, strict=True)", "zip(strict=)"),
    ],
)
def test_unportable_code_fails(source, expected):
    assert any(expected in problem for problem in portability_problems(source))


@pytest.mark.parametrize(
    ("spec", "documented", "expected"),
    [
        ({"a": {}}, {}, "a: only in the argument_spec"),
        ({}, {"a": {}}, "a: only in the documentation"),
        ({"a": {"type": "int"}}, {"a": {}}, "a: type is 'int', documented as 'str'"),
        ({"a": {"required": True}}, {"a": {}}, "a: required is True, documented as False"),
        ({"a": {"default": 1}}, {"a": {"default": 2}}, "a: default is 1, documented as 2"),
        ({"a": {"options": {"b": {}}}}, {"a": {}}, "a.b: only in the argument_spec"),
    ],
)
def test_documentation_that_differs_from_the_code_fails(spec, documented, expected):
    assert expected in list(interface_problems(spec, documented))


# Where the wall clock is read, and why that is no duration: a step of it (NTP after boot) must change no waiting.
WALL_CLOCK = {
    "library/pd_fabric_info.py": "when a host was looked at, for people",
    "library/pd_host_info.py": "since when a run holds the host, for people",
    "library/pd_lock.py": "since when a run holds a host, for people",
    "library/pd_units.py": "compares times of files, which are of that clock, with starts of processes",
    "library/pd_venv.py": "since when somebody else installs, for people",
    "module_utils/pdstack/bench/session.py": "when a measurement began, for people",
    "module_utils/pdstack/checkpoint/agent.py": "when a job ended, for its outcome",
    "module_utils/pdstack/checkpoint/xet.py": "a token says until when it is good by that clock",
    "module_utils/pdstack/probe_cli.py": "when a host was looked at, for people",
    "module_utils/pdstack/checkpoint/transport.py": "Retry-After may be a date of that clock",
}


def wall_clock_reads(source):
    """Count the places that read the wall clock: time.time(), time.time_ns(), datetime.now() and their kin."""
    names = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now", "date.today"}
    return sum(ast.unparse(node) in names for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))


def test_the_reader_of_clocks_finds_them():
    assert wall_clock_reads("import time\nend = time.time() + 5\nwhile time.monotonic() < end: f(time.time)") == 2


def test_durations_do_not_come_from_the_wall_clock():
    found = {tree.relative(path) for path in TARGET_CODE if wall_clock_reads(path.read_text())}
    assert found == set(WALL_CLOCK)
