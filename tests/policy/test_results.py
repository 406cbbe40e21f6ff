"""Results that playbooks register are read by name in filters: each name has a task that makes it.

The pure package takes results as arguments: a name of a playbook in it would be an interface that nothing checks.
"""

import ast

import pytest
from pdstack import inventory, settings
from policy import tree

PREFIXES = (settings.PREFIX, f"__{settings.PREFIX}", *inventory.ROLE_PREFIXES)


def made_by(task):
    """The names of the variables that a task makes."""
    if "register" in task.body:
        yield task.body["register"]
    if task.module == "ansible.builtin.set_fact":
        yield from task.body[task.module]


def known():
    made = {name for task in tree.tasks() if not task.where.startswith("molecule") for name in made_by(task)}
    options = {
        name
        for path in tree.matching("roles/*/meta/argument_specs.yml")
        for entry in tree.load(path)["argument_specs"].values()
        for name in entry.get("options", {})
    }
    return made, {*settings.variable_names(), *options}


def read_from_hostvars(source):
    """The names of our variables that stand in functions which are given all variables of all hosts."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and "hostvars" in [item.arg for item in function.args.args]:
            for node in ast.walk(function):
                if isinstance(node, ast.Constant) and str(node.value).startswith(PREFIXES):
                    yield node.value


def named_in(source, names):
    return [
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and node.value in names
    ]


def test_what_filters_read_is_made_by_a_task_or_is_a_variable():
    made, variables = known()
    found = {
        (path.name, name)
        for path in tree.matching("filter_plugins/*.py")
        for name in read_from_hostvars(path.read_text())
    }
    assert ("pdstack.py", "sglang_runtime_switched") in found
    assert [item for item in found if item[1] not in made | variables] == []


def test_the_pure_package_knows_no_playbooks_results():
    made, variables = known()
    results = made - variables
    assert "pd_planned" in results
    found = {
        path.name: names
        for path in tree.matching("module_utils/pdstack/**/*.py")
        if (names := named_in(path.read_text(), results))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(hosts, hostvars):\n    return hostvars['a']['pd_gpu']", ["pd_gpu"]),
        ("def f(hosts, hostvars):\n    return [hostvars[h].get('__pd_x') for h in hosts]", ["__pd_x"]),
        ("def f(hosts, hostvars):\n    return hostvars['a']['ansible_host']", []),
        ("def f(plan):\n    return plan['pd_gpu']", []),
    ],
)
def test_names_are_found_in_functions_that_get_hostvars(source, expected):
    assert list(read_from_hostvars(source)) == expected


def test_a_result_in_the_pure_package_is_found():
    assert named_in("STEPS = {'pd_host': 1}", {"pd_host"}) == ["pd_host"]
    assert named_in("# pd_host\nX = 'host'", {"pd_host"}) == []
