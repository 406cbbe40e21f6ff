"""What only tests call is no check: somebody's rule, tested and documented, that no playbook ever reaches."""

import ast
import collections
import functools
import re

import pytest
from policy import tree

PACKAGE = tree.matching("module_utils/pdstack/**/*.py")
SHIPPED = (
    "module_utils/**/*.py",
    "library/*.py",
    "action_plugins/*.py",
    "callback_plugins/*.py",
    "filter_plugins/*.py",
    "playbooks/**/*.yml",
    "roles/**/*",
    "tools/**/*",
    "engine/**/*",
)
# What nothing that ships uses, and why it is there all the same. An entry that is used, or gone, fails too.
FOR_TESTS = {
    "metrics_of": "the names of metrics in what observe.py writes, compared with recorded scrapes",
    "expressions": "all expressions in what observe.py writes, for metrics_of",
}


@functools.cache
def shipped():
    return [path.read_text(errors="replace") for path in tree.matching(*SHIPPED)]


def words(texts):
    return collections.Counter(word for text in texts for word in re.findall(r"\w+", text))


def defined(source):
    """Names of functions, classes and constants of a module."""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def unreached(sources, texts):
    """Names that stand nowhere in ``texts`` but where they are defined; two of one name hide each other."""
    found = words(texts)
    return sorted({name for source in sources for name in defined(source) if found[name] <= 1})


def unread(tasks, texts):
    """Names that results are registered as and that nothing reads."""
    named = collections.Counter(task.body["register"] for task in tasks if task.body.get("register"))
    found = words(texts)
    return sorted(name for name, times in named.items() if found[name] <= times)


def test_what_the_package_defines_is_used_by_more_than_its_tests():
    assert unreached([path.read_text() for path in PACKAGE], shipped()) == sorted(FOR_TESTS)


def test_what_is_registered_is_read():
    tasks = [task for task in tree.tasks() if not task.where.startswith("molecule/")]
    assert len(tasks) > 100
    assert unread(tasks, shipped()) == []


@pytest.mark.parametrize(
    ("source", "other", "found"),
    [
        ("def refuse(): pass", "", ["refuse"]),
        ("BOUND: int = 3", "", ["BOUND"]),
        ("class Rule: pass", "rules.Rule()", []),
        ("def refuse(): pass\nrefuse()", "", []),
    ],
)
def test_what_nobody_calls_is_found(source, other, found):
    assert unreached([source], [source, other]) == found


def test_a_result_that_nobody_reads_is_found():
    text = "[{name: Do it, pd_files: {}, register: a}, {name: Do it, pd_files: {}, register: b, when: a.changed}]"
    assert unread(list(tree.tasks_in(tree.parse(text), "x")), [text]) == ["b"]
