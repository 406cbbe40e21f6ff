"""The order of a deployment: nothing connects before the inventory is validated, nothing changes before the plan."""

import pytest
from policy import tree

PHASES = ["validate", "preflight", "host", "runtime", "checkpoint", "serve", "verify"]
# What stands between them: the hosts are held before anything is read of them that the run acts on.
ORDER = ["validate", "lock", *PHASES[1:], "unlock"]
DEPLOY = tree.ROOT / "playbooks/deploy_pd.yml"
# Modules that run on the controller alone.
STATIC = {"pd_validate", "ansible.builtin.assert", "ansible.builtin.fail", "ansible.builtin.debug"}
PLAYBOOKS = [path for path in tree.matching("playbooks/*.yml") if path != DEPLOY]


# Why a playbook may act before anybody has looked for slips in its variables.
UNVALIDATED = {
    "lab_up": "no variable of the bundle",
    "lab_down": "no variable of the bundle",
    "lock": "imported behind validate.yml",
    "unlock": "imported at the end",
    "support_bundle": "what is wrong with the inventory goes into the bundle",
}


def first_steps(plays):
    """What a playbook does first: a playbook that it imports, a task file, or a module."""
    for play in plays[:1]:
        if "ansible.builtin.import_playbook" in play:
            yield play["ansible.builtin.import_playbook"]
        for task in list(tree.tasks_in([play], "first"))[:1]:
            body = task.body[task.module]
            included = body.get("file") if isinstance(body, dict) else body
            yield included if task.module == "ansible.builtin.include_tasks" else task.module


def order_problems(plays):
    """What a deployment's top playbook does other than import the phases in their order."""
    if any("ansible.builtin.import_playbook" not in play for play in plays):
        yield "has a play of its own; it only imports phases"
    imported = [play.get("ansible.builtin.import_playbook", "") for play in plays]
    expected = [f"{phase}.yml" for phase in ORDER]
    if imported != expected:
        yield f"imports {imported}, and not {expected}"


def static_problems(plays):
    """What in the first phase opens a connection."""
    for play in plays:
        if play.get("gather_facts") is not False:
            yield "gather_facts is not false"
        if play.get("roles"):
            yield "roles connect"
    for task in tree.tasks_in(plays, "validate.yml"):
        if task.module not in STATIC:
            yield f"{task.module} connects"


def play_problems(play, phase=None):
    """What is wrong with one play; `phase` if it belongs to one of the deployment."""
    if "hosts" not in play:
        return
    name = str(play.get("name", ""))
    if not name[:1].isupper():
        yield "the play has no name that starts with a capital letter"
    if "gather_facts" not in play:
        yield "the play does not say whether it gathers facts"
    if phase and phase not in tree.listed(play.get("tags")):
        yield f"the play is not tagged {phase}"
    if phase and play.get("any_errors_fatal") is not True:
        yield "any_errors_fatal is not true: prefill and decode would be left one old, one new"


def test_deployment_imports_the_phases_in_order():
    assert list(order_problems(tree.plays(DEPLOY))) == []


def test_one_file_runs_the_service():
    """Keys, the certificate and the hardware go with the plan: who includes the role past this file leaves them out."""
    found = {
        str(path.relative_to(tree.ROOT))
        for path in tree.matching("playbooks/*.yml", "playbooks/tasks/*.yml")
        for task in tree.tasks_in(tree.load(path), path.name)
        if task.module == "ansible.builtin.include_role"
        and task.body[task.module].get("name") == "pd_service"
        and "tasks_from" not in task.body[task.module]
    }
    assert found == {"playbooks/tasks/run_serve.yml"}


@pytest.mark.parametrize("path", [DEPLOY, *PLAYBOOKS], ids=lambda path: path.stem)
def test_a_slip_in_a_variable_is_found_before_anything_else(path):
    """A misspelt pd_retire_keep would take the checkpoints along, a misspelt bound would bound nothing."""
    looks = list(first_steps(tree.plays(path))) in (["validate.yml"], ["tasks/plan.yml"], ["pd_validate"])
    assert looks is (path.stem not in UNVALIDATED)


def test_the_look_at_the_hosts_begins_with_the_variables():
    first = next(tree.tasks_in(tree.load(tree.ROOT / "playbooks/tasks/plan.yml"), "plan.yml"))
    assert first.module == "pd_validate"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[{hosts: all, tasks: [{pd_lock: {}}, {pd_validate: {}}]}]", ["pd_lock"]),
        ("[{hosts: all, pre_tasks: [{ansible.builtin.include_tasks: {file: a.yml}}], tasks: [{x: {}}]}]", ["a.yml"]),
        ("[{ansible.builtin.import_playbook: a.yml}, {ansible.builtin.import_playbook: validate.yml}]", ["a.yml"]),
        ("[{hosts: all, roles: [x]}]", []),
    ],
)
def test_first_steps_are_found(text, expected):
    assert list(first_steps(tree.parse(text))) == expected


@pytest.mark.parametrize("phase", PHASES)
def test_phase_exists(phase):
    assert tree.plays(tree.ROOT / f"playbooks/{phase}.yml")


def test_validation_opens_no_connection():
    assert list(static_problems(tree.plays(tree.ROOT / "playbooks/validate.yml"))) == []


@pytest.mark.parametrize("path", PLAYBOOKS, ids=lambda path: path.stem)
def test_plays_are_well_written(path):
    phase = path.stem if path.stem in PHASES else None
    assert [problem for play in tree.plays(path) for problem in play_problems(play, phase)] == []


@pytest.mark.parametrize("path", [DEPLOY, *PLAYBOOKS], ids=lambda path: path.stem)
def test_imported_playbooks_exist(path):
    imported = [play.get("ansible.builtin.import_playbook") for play in tree.plays(path)]
    assert [name for name in imported if name and not (path.parent / name).exists()] == []


def in_order():
    return [{"ansible.builtin.import_playbook": f"{phase}.yml"} for phase in ORDER]


def test_a_good_deployment_passes():
    assert list(order_problems(in_order())) == []


@pytest.mark.parametrize("change", [lambda p: p.reverse(), lambda p: p.pop(0), lambda p: p.insert(0, {"hosts": "all"})])
def test_a_bad_deployment_fails(change):
    plays = in_order()
    change(plays)
    assert list(order_problems(plays))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[{hosts: all}]", "gather_facts"),
        ("[{hosts: all, gather_facts: true}]", "gather_facts"),
        ("[{hosts: all, gather_facts: false, roles: [x]}]", "roles connect"),
        ("[{hosts: all, gather_facts: false, tasks: [{pd_gpu_info: {}}]}]", "pd_gpu_info connects"),
        ("[{hosts: all, gather_facts: false, pre_tasks: [{block: [{ansible.builtin.ping: {}}]}]}]", "ping connects"),
    ],
)
def test_a_validation_that_connects_fails(text, expected):
    assert any(expected in problem for problem in static_problems(tree.parse(text)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{hosts: all, gather_facts: false, tags: serve, any_errors_fatal: true}", "no name"),
        ("{name: Serve, hosts: all, tags: serve, any_errors_fatal: true}", "gathers facts"),
        ("{name: Serve, hosts: all, gather_facts: false, any_errors_fatal: true}", "not tagged serve"),
        ("{name: Serve, hosts: all, gather_facts: false, tags: serve}", "any_errors_fatal"),
    ],
)
def test_a_bad_play_fails(text, expected):
    assert any(expected in problem for problem in play_problems(tree.parse(text), "serve"))
