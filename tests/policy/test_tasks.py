"""How tasks are written, in playbooks, roles and scenarios alike."""

import collections
import re

import pytest
from policy import tree

FREE_FORM = {"shell", "raw", "script", "expect"}
# (file, task) -> why nothing better will do. An entry that matches no task fails too.
FREE_FORM_REASONS = {
    ("playbooks/tasks/python.yml", "See whether Python is there and complete"): "modules need the Python it looks for",
    ("playbooks/tasks/python.yml", "Install a complete Python"): "modules need the Python it installs",
}
COLLECTION_NAME = re.compile(r"\w+\.\w+\.\w+")
NOT_IMPERATIVE = re.compile(r"^(?!Bring|String|Ping)\w+(ing|ed)\b|^(The|A|An|This)\b")
FORBIDDEN_KEYWORDS = {
    "ignore_errors": "a failure is either handled (rescue, failed_when) or it stops the run",
    "ignore_unreachable": "a host that is gone is reported, not passed over",
    "local_action": "write delegate_to: localhost",
}


def task_problems(task, own_modules):
    """What is wrong with one task, as sentences."""
    module = task.module
    if not module:
        return
    if not COLLECTION_NAME.fullmatch(module) and module not in own_modules:
        yield f"{module} is neither fully qualified nor a module in library/"
    if module.startswith("ansible.legacy."):
        yield f"{module}: ansible.legacy picks up whatever lies in the search path"
    name = module.rpartition(".")[2]
    if name in FREE_FORM and (task.where, task.title) not in FREE_FORM_REASONS:
        yield f"{module} where a module would do, or without a reason in this test"
    if name in {"command", *FREE_FORM} and "changed_when" not in task.body:
        yield f"{module} without changed_when"
    if name == "reboot" and (task.body.get("vars") or {}).get("ansible_ssh_retries") != 0:
        yield "reboot without ansible_ssh_retries: 0: asked again after the cut, it fails on a host that goes down"
    for keyword, reason in FORBIDDEN_KEYWORDS.items():
        if task.body.get(keyword):
            yield f"{keyword}: {reason}"
    if not task.name:
        yield "no name"
    else:
        yield from name_problems(task.title)


def name_problems(words):
    if not words[:1].isupper() and not words.startswith("{{"):
        yield "the name does not start with a capital letter"
    if NOT_IMPERATIVE.match(words):
        yield "the name does not say what to do (imperative)"
    if words.endswith("."):
        yield "the name ends with a full stop"


def repeated_names(tasks):
    counted = collections.Counter((task.where, task.name) for task in tasks if task.name)
    return [f"{where}: '{name}' stands there {times} times" for (where, name), times in counted.items() if times > 1]


def role_inputs(specs):
    return {name for spec in specs for entry in spec["argument_specs"].values() for name in entry.get("options") or {}}


def overwritten_inputs(task, inputs):
    if task.module == "ansible.builtin.set_fact":
        yield from (name for name in task.body[task.module] if name in inputs)


def unheard_topics(tasks):
    """Topics that tasks notify and no handler listens to, and handlers that answer to their name only."""
    heard = {topic for task in tasks for topic in tree.listed(task.body.get("listen"))}
    notified = {topic for task in tasks for topic in tree.listed(task.body.get("notify"))}
    return sorted(notified - heard)


def hidden_failures(tasks, text):
    """Tasks of a file that cannot fail, and whose result nothing in it looks at."""
    for item in tasks:
        if item.body.get("failed_when") is False:
            name = item.body.get("register")
            own = [str(item.body.get(key)) for key in ("register", "changed_when")]
            if not name or len(re.findall(rf"\b{name}\b", text)) <= sum(word.count(name) for word in own):
                yield str(item)


def test_no_failure_is_hidden():
    found = [
        problem
        for path in tree.task_files()
        for problem in hidden_failures(
            tree.tasks_in(tree.as_list(tree.load(path)), tree.relative(path)), path.read_text()
        )
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("- {name: Do it, pd_files: {}, failed_when: false}", True),
        ("- {name: Do it, pd_files: {}, failed_when: false, register: x}", True),
        ("- {name: Do it, pd_files: {}, failed_when: false, register: x, changed_when: x.rc == 0}", True),
        ("- {name: Do it, pd_files: {}, failed_when: false, register: x}\n- {name: So, b: {}, when: x.rc == 1}", False),
        ("- {name: Do it, pd_files: {}, failed_when: x.rc > 1, register: x}", False),
    ],
)
def test_a_hidden_failure_is_found(text, hidden):
    assert bool(list(hidden_failures(tree.tasks_in(tree.parse(text), "bad.yml"), text))) is hidden


def test_tasks_are_well_written():
    own, tasks = tree.own_modules(), tree.tasks()
    assert len(tasks) > 20
    assert [f"{task}: {problem}" for task in tasks for problem in task_problems(task, own)] == []


def test_names_are_unique_in_their_file():
    assert repeated_names(tree.tasks()) == []


def test_reasons_are_still_needed():
    present = {(task.where, task.title) for task in tree.tasks()}
    assert [place for place in FREE_FORM_REASONS if place not in present] == []


def test_no_task_overwrites_a_role_input():
    inputs = role_inputs([tree.load(path) for path in tree.matching("roles/*/meta/argument_specs.yml")])
    assert inputs
    assert [f"{task}: {name}" for task in tree.tasks() for name in overwritten_inputs(task, inputs)] == []


def test_notified_topics_are_heard():
    assert unheard_topics(tree.tasks()) == []


def task(text):
    (one,) = tree.tasks_in(tree.parse(text), "bad.yml")
    return one


def test_a_good_task_passes():
    assert list(task_problems(task("- {name: Keep it, pd_files: {}}"), {"pd_files"})) == []
    assert list(task_problems(task("- {name: tasks | keep | Keep it, pd_files: {}}"), {"pd_files"})) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- {name: Copy it, copy: {}}", "copy is neither"),
        ("- {name: Keep it, pd_other: {}}", "pd_other is neither"),
        ("- {name: Keep it, ansible.legacy.copy: {}}", "ansible.legacy"),
        ("- {name: Run it, ansible.builtin.shell: 'ls | wc', changed_when: false}", "where a module would do"),
        ("- {name: Run it, ansible.builtin.raw: ls, changed_when: false}", "where a module would do"),
        ("- {name: Run it, ansible.builtin.command: ls}", "without changed_when"),
        ("- {name: Run it, ansible.builtin.command: ls, changed_when: false, ignore_errors: true}", "ignore_errors"),
        ("- {name: Run it, pd_files: {}, ignore_unreachable: true}", "ignore_unreachable"),
        ("- {pd_files: {}}", "no name"),
        ("- {name: keep it, pd_files: {}}", "capital"),
        ("- {name: keep | keep it, pd_files: {}}", "capital"),
        ("- {name: Installing it, pd_files: {}}", "imperative"),
        ("- {name: The files, pd_files: {}}", "imperative"),
        ("- {name: Keep it., pd_files: {}}", "full stop"),
        ("- {name: Reboot it, ansible.builtin.reboot: {}}", "ansible_ssh_retries"),
        ("- {block: [{name: Deep down, block: [{name: Copy it, copy: {}}]}]}", "copy is neither"),
        ("- {hosts: all, handlers: [{name: Copy it, copy: {}}]}", "copy is neither"),
    ],
)
def test_a_bad_task_fails(text, expected):
    assert any(expected in problem for problem in task_problems(task(text), {"pd_files"}))


def test_a_repeated_name_is_found():
    twice = list(tree.tasks_in(tree.parse("[{name: Do it, pd_files: {}}, {name: Do it, pd_files: {}}]"), "bad.yml"))
    assert repeated_names(twice) == ["bad.yml: 'Do it' stands there 2 times"]


def test_an_overwritten_input_is_found():
    inputs = role_inputs([tree.parse("argument_specs: {main: {options: {web_port: {}}}}")])
    bad = task("- {name: Set it, ansible.builtin.set_fact: {web_port: 1}}")
    assert list(overwritten_inputs(bad, inputs)) == ["web_port"]


def test_an_unheard_topic_is_found():
    assert unheard_topics([task("- {name: Keep it, pd_files: {}, notify: Restart it}")]) == ["Restart it"]
