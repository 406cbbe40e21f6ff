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


def steps_of(play):
    return [step for part in ("pre_tasks", "roles", "tasks", "post_tasks") for step in play.get(part) or []]


def included(step):
    """The file whose tasks a step includes or imports."""
    body = step.get("ansible.builtin.include_tasks") or step.get("ansible.builtin.import_tasks")
    return body.get("file") if isinstance(body, dict) else body


def first_steps(plays):
    """What a playbook does first: a playbook that it imports, a task file, or a module."""
    for play in plays[:1]:
        if "ansible.builtin.import_playbook" in play:
            yield play["ansible.builtin.import_playbook"]
        for task in list(tree.tasks_in([play], "first"))[:1]:
            yield included(task.body) or task.module


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
        if task.module not in STATIC and included(task.body) != "tasks/intent.yml":
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


def gives_back(step):
    """Whether a block gives the hosts back where it fails: by a rescue that ends the run, or by an `always`."""
    if any(task.body.get("pd_lock") == {"state": "released"} for task in tree.tasks_in(step.get("always"), "always")):
        return True
    rescue = list(tree.tasks_in(step.get("rescue"), "rescue"))
    return bool(rescue) and included(rescue[-1].body) == "tasks/failed.yml" and "always" in rescue[-1].tags


def unguarded(play):
    """Steps of a play that may fail while the hosts are held and leave their lock, at which the canary looks away."""
    for step in steps_of(play):
        if not isinstance(step, dict) or not gives_back(step):
            if not isinstance(step, dict) or "ansible.builtin.debug" not in step:
                yield str(step)[:80]
            continue
        # Ansible fails the hosts of such a task twice: through this block's rescue and out of it, but for one.
        yield from (f"run_once in the block itself: {inner['name']}" for inner in step["block"] if "run_once" in inner)


def lock_problems(plays, imported):
    """Where a playbook that takes the lock may end without giving it back; `imported` gives a playbook's plays."""
    names = [play.get("ansible.builtin.import_playbook") for play in plays]
    if "lock.yml" in names:
        if names[-1] != "unlock.yml":
            yield "does not end with unlock.yml"
        for play in plays[names.index("lock.yml") :]:
            name = play.get("ansible.builtin.import_playbook")
            if name != "unlock.yml":
                yield from (step for inner in (imported(name) if name else [play]) for step in unguarded(inner))
    for play in plays:
        taking = [
            any(included(task.body) == "tasks/lock.yml" for task in tree.tasks_in([step], ""))
            for step in steps_of(play)
        ]
        if any(taking):
            yield from unguarded({"tasks": steps_of(play)[taking.index(True) :]})


TAKING = ["ab", "deploy_pd", "drain", "lock", "resume", "retire", "rollback"]


def test_who_takes_the_lock_is_known():
    found = [path.stem for path in tree.matching("playbooks/*.yml") if "lock.yml" in path.read_text()]
    assert sorted(found) == TAKING


@pytest.mark.parametrize("name", TAKING)
def test_who_takes_the_lock_gives_it_back_on_every_path(name):
    def plays(file):
        return tree.plays(tree.ROOT / "playbooks" / file)

    assert list(lock_problems(plays(f"{name}.yml"), plays)) == []


GUARD = "rescue: [{ansible.builtin.include_tasks: {file: tasks/failed.yml}, tags: [always]}]"
HELD = "{block: [{ansible.builtin.include_tasks: tasks/lock.yml}], " + GUARD + "}"


@pytest.mark.parametrize(
    "text",
    [
        "[{ansible.builtin.import_playbook: lock.yml}, {ansible.builtin.import_playbook: good.yml}]",
        "[{ansible.builtin.import_playbook: lock.yml}, {hosts: all, roles: [x]}, "
        "{ansible.builtin.import_playbook: unlock.yml}]",
        "[{hosts: all, tasks: [{ansible.builtin.include_tasks: tasks/lock.yml}]}]",
        "[{hosts: all, tasks: [{block: [{ansible.builtin.include_tasks: tasks/lock.yml}], rescue: [{pd_lock: {}}]}]}]",
        "[{hosts: all, tasks: [" + HELD.replace(", tags: [always]", "") + "]}]",
        "[{hosts: all, tasks: [" + HELD + ", {pd_files: {}}]}]",
        "[{hosts: all, tasks: [{block: [{ansible.builtin.include_tasks: tasks/lock.yml}, "
        "{name: Refuse, ansible.builtin.fail: {}, run_once: true}], " + GUARD + "}]}]",
    ],
)
def test_a_path_that_keeps_the_lock_is_found(text):
    assert list(lock_problems(tree.parse(text), lambda name: []))


@pytest.mark.parametrize("step", [HELD, HELD.replace(GUARD, "always: [{pd_lock: {state: released}}]")])
def test_a_block_that_gives_the_hosts_back_passes(step):
    text = "[{hosts: all, tasks: [{pd_validate: {}}, " + step + ", {ansible.builtin.debug: {}}]}]"
    assert list(lock_problems(tree.parse(text), lambda name: [])) == []


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
    wanted = (["validate.yml"], ["tasks/plan.yml"], ["tasks/intent.yml"], ["pd_validate"])
    looks = list(first_steps(tree.plays(path))) in wanted
    assert looks is (path.stem not in UNVALIDATED)


def test_the_variables_are_checked_in_one_place():
    """Beside it stand the playbooks that judge only what they act by."""
    whole = [
        str(task)
        for path in tree.matching("playbooks/*.yml", "playbooks/tasks/*.yml")
        for task in tree.tasks_in(tree.load(path), path.name)
        if task.module == "pd_validate" and not task.body["pd_validate"]
    ]
    assert whole == ["intent.yml: 'intent | Check every variable of the inventory'"]
    first = next(tree.tasks_in(tree.load(tree.ROOT / "playbooks/tasks/plan.yml"), "plan.yml"))
    assert included(first.body) == "intent.yml"


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
