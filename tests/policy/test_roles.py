"""A role's interface is its argument specification, and the specification says what the defaults say."""

import pytest
from policy import tree

MISSING = object()
INCLUDES = ("ansible.builtin.include_role", "ansible.builtin.import_role")


def spec_problems(role, spec, defaults):
    """Differences between meta/argument_specs.yml (parsed) and defaults/main.yml (parsed)."""
    entry_points = (spec or {}).get("argument_specs") or {}
    if "main" not in entry_points:
        return ["no specification of the entry point 'main'"]
    problems, options = [], {}
    for entry_point, body in entry_points.items():
        if not body.get("short_description"):
            problems.append(f"{entry_point}: no short_description")
        options.update(body.get("options") or {})
    for name, option in options.items():
        problems += [f"{name}: {problem}" for problem in option_problems(option, defaults.get(name, MISSING))]
        if not name.startswith(f"{role}_"):
            problems.append(f"{name}: public variables of the role start with {role}_")
    problems += [f"{name}: in defaults, not in the specification" for name in defaults if name not in options]
    return problems


def option_problems(option, default):
    for key in ("description", "type"):
        if not option.get(key):
            yield f"no {key}"
    if option.get("type") == "list" and not option.get("elements"):
        yield "a list without elements"
    if option.get("required"):
        if "default" in option or default is not MISSING:
            yield "required, and yet it has a default"
    elif default is MISSING:
        yield "not required, and defaults/main.yml has no value"
    elif is_template(default):  # computed, or "{{ omit }}": the specification says in words what it comes to
        return
    elif "default" not in option:
        yield "the specification does not state the default"
    elif option["default"] != default:
        yield f"the specification says {option['default']!r}, defaults/main.yml {default!r}"


def is_template(value):
    return isinstance(value, str) and "{{" in value


def read(path):
    return tree.load(path) or {} if path.exists() else {}


ROLES = tree.roles()


def test_there_are_roles():
    assert {"pd_service", "pd_verify", "checkpoint", "sglang_runtime", "gpu_host"} <= {role.name for role in ROLES}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_specification_equals_defaults(role):
    spec, defaults = read(role / "meta/argument_specs.yml"), read(role / "defaults/main.yml")
    assert spec_problems(role.name, spec, defaults) == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_internal_variables_are_marked(role):
    assert [name for name in read(role / "vars/main.yml") if not name.startswith(f"__{role.name}_")] == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_role_is_used_and_tagged_with_its_name(role):
    playbooks = tree.matching("playbooks/*.yml", "playbooks/tasks/*.yml")
    uses = [(tree.relative(path), tags) for path in playbooks for tags in uses_of(role.name, path)]
    assert uses, "no playbook uses the role"
    assert [place for place, tags in uses if role.name not in tags] == []


def uses_of(role, path):
    """Tags of each use of the role in a playbook: under `roles:` or by include_role and import_role."""
    for play in tree.plays(path):
        tags = tree.listed(play.get("tags"))  # a play's tags are those of all it holds
        for entry in play.get("roles") or []:
            if isinstance(entry, dict) and role in (entry.get("role"), entry.get("name")):
                yield tags + tree.listed(entry.get("tags"))
            elif entry == role:
                yield tags
        for task in tree.tasks_in([play], tree.relative(path)):
            if task.module in INCLUDES and task.body[task.module].get("name") == role:
                yield task.tags


GOOD = """
argument_specs:
  main:
    short_description: Do it
    options:
      web_port: {description: The port., type: int, default: 80}
      web_name: {description: The name., type: str, required: true}
"""


def test_a_good_role_passes():
    assert spec_problems("web", tree.parse(GOOD), {"web_port": 80}) == []


@pytest.mark.parametrize(
    ("old", "new", "defaults", "expected"),
    [
        ("", "", {}, "web_port: not required, and defaults/main.yml has no value"),
        ("", "", {"web_port": 81}, "web_port: the specification says 80, defaults/main.yml 81"),
        ("", "", {"web_port": 80, "web_path": "/"}, "web_path: in defaults, not in the specification"),
        ("", "", {"web_port": 80, "web_name": "x"}, "web_name: required, and yet it has a default"),
        (
            "required: true",
            "required: true, default: x",
            {"web_port": 80},
            "web_name: required, and yet it has a default",
        ),
        (", default: 80", "", {"web_port": 80}, "web_port: the specification does not state the default"),
        ("type: int, ", "", {"web_port": 80}, "web_port: no type"),
        ("description: The port., ", "", {"web_port": 80}, "web_port: no description"),
        ("type: int", "type: list", {"web_port": 80}, "web_port: a list without elements"),
        ("web_name", "name", {"web_port": 80}, "name: public variables of the role start with web_"),
        ("short_description: Do it", "author: me", {"web_port": 80}, "main: no short_description"),
        ("main:", "other:", {"web_port": 80}, "no specification of the entry point 'main'"),
    ],
)
def test_a_bad_role_fails(old, new, defaults, expected):
    problems = spec_problems("web", tree.parse(GOOD.replace(old, new, 1) if old else GOOD), defaults)
    assert any(problem.startswith(expected) for problem in problems)


def test_tags_of_blocks_count():
    text = "[{hosts: a, tags: p, tasks: [{tags: [b], block: [{name: X, x: {}, tags: t}]}]}]"
    (one,) = tree.tasks_in(tree.parse(text), "x.yml")
    assert one.tags == ("p", "b", "t")
