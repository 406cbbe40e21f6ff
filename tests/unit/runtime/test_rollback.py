"""Whether there is a way back, and what is said where there is none."""

import json
import os
from dataclasses import replace

import pytest
from pdstack import release, rollback, venv_links


def built(name, problems=()):
    return {"id": f"{name}-0123456789ab", "release": name, "problems": list(problems)}


def host(current, previous):
    return {"current": current, "previous": previous}


NEW, OLD, OLDER = built("cpu-0.5.23"), built("cpu-0.5.22"), built("cpu-0.5.13")


def test_all_hosts_go_back_to_the_same_release_under_their_own_ids():
    other = {**OLD, "id": "cpu-0.5.22-ba9876543210"}
    way = rollback.way_back({"gpu1": host(NEW, OLD), "gpu2": host(NEW, other)})
    assert way == rollback.WayBack("cpu-0.5.22", {"gpu1": OLD["id"], "gpu2": other["id"]})


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ({"gpu1": host(NEW, OLD), "gpu2": host(NEW, None)}, ["gpu2", "only cpu-0.5.23-0123456789ab", "deploy_pd.yml"]),
        ({"gpu1": host(None, None)}, ["only none"]),
        (
            {"gpu1": host(NEW, OLD), "gpu10": host(OLD, OLDER)},
            ["they differ", "gpu1   cpu-0.5.23-0123456789ab  cpu-0.5.22-0123456789ab", "-e pd_release=NAME"],
        ),
        ({"gpu1": host(NEW, built("cpu-0.5.22", ["engine: torch: files changed"]))}, ["torch: files changed"]),
        ({"gpu1": host(NEW, {**built(""), "problems": ["it has no manifest"]})}, ["it has no manifest"]),
    ],
)
def test_no_way_back_is_refused_with_what_is_there(states, words):
    with pytest.raises(rollback.NoWayBack) as caught:
        rollback.way_back(states)
    for word in words:
        assert word in str(caught.value)


MODEL = {"repo": "a/b", "revision": 40 * "1", "served_name": "b", "path": "/models/a--b@1"}
OTHER = {**MODEL, "revision": 40 * "2", "path": "/models/a--b@2"}
PLANNED = {"release": "cpu-0.5.23", "model": MODEL}


def state(before, now, model=MODEL, found=None, plan=None):
    """A host that was proven with one release and has another one now; ``before`` None: never."""
    proven = rollback.record({"release": before["release"], "model": model}, before["id"]) if before else {}
    found = found or before
    return rollback.HostState(plan or {}, proven, found["id"] if found else "", now["id"])


def in_force(release, model=MODEL):
    return {"release": release["release"], "model": model}


def test_a_run_goes_back_only_where_it_switched_every_host_from_one_release():
    def back(**states):
        return rollback.switched(states, PLANNED, True)

    assert back(a=state(OLD, NEW), b=state(OLD, NEW)).release == "cpu-0.5.22"
    assert back(a=state(OLD, NEW), b=state(NEW, NEW)) is None
    assert back(a=state(OLD, NEW), b=state(OLDER, NEW)) is None
    assert back(a=state(OLD, NEW), b=state(None, NEW)) is None  # a new host
    assert back(a=state(NEW, NEW)) is None
    assert back(a=state(OLD, OLD)) is None  # the planned one is installed beside
    assert back() is None
    assert rollback.switched({"a": state(OLD, NEW)}, {}, True) is None  # checkpoint.yml alone


def test_other_locks_of_the_same_release_are_another_release():
    again = {**NEW, "id": "cpu-0.5.23-ba9876543210"}
    way = rollback.switched({"a": state(again, NEW)}, PLANNED, True)
    assert (way.release, way.ids) == ("cpu-0.5.23", {"a": again["id"]})
    assert "deploy with the version of the bundle before" in rollback.words(way, PLANNED)["advice"]


def test_another_commit_of_the_model_has_a_way_back_where_all_hosts_served_the_same_one():
    planned = {**PLANNED, "model": OTHER}
    way = rollback.switched({"a": state(NEW, NEW), "b": state(NEW, NEW)}, planned, True)
    assert way == rollback.WayBack("cpu-0.5.23", {}, {"revision": 40 * "1", "served_name": "b"})
    told = rollback.words(way, planned)
    assert (told["tried"], told["back"]) == (
        "commit 222222222222 of the model",
        "commit 111111111111 of the model",
    )
    assert f"Set pd_model.revision: {40 * '1'} in the inventory until the cause is found" in told["advice"]
    both = rollback.switched({"a": state(OLD, NEW), "b": state(OLD, NEW)}, planned, True)
    assert (both.release, both.model) == ("cpu-0.5.22", way.model)
    told = rollback.words(both, planned)
    assert told["back"] == "cpu-0.5.22 with commit 111111111111 of the model"
    assert f"Set pd_release: cpu-0.5.22 and pd_model.revision: {40 * '1'} in the inventory" in told["advice"]


@pytest.mark.parametrize(
    "states",
    [
        {"a": state(NEW, NEW), "b": state(None, NEW)},  # a new host
        {"a": state(NEW, NEW), "b": state(NEW, NEW, {**MODEL, "revision": 40 * "3"})},
        {"a": state(NEW, NEW, {**MODEL, "repo": "another/one"})},
        {"a": state(NEW, NEW, OTHER)},  # nothing changed
    ],
)
def test_otherwise_there_is_none(states):
    assert rollback.switched(states, {**PLANNED, "model": OTHER}, True) is None


def test_before_anything_restarts_what_serves_is_left_alone():
    plan = in_force(OLD)
    way = rollback.switched({"a": state(OLD, NEW, plan=plan)}, {**PLANNED, "model": OTHER}, False)
    assert way == rollback.WayBack("cpu-0.5.22", {"a": OLD["id"]}, {}, touched=False)
    assert rollback.switched({"a": state(NEW, NEW, plan=in_force(NEW))}, {**PLANNED, "model": OTHER}, False) is None


@pytest.mark.parametrize(
    ("found", "plan"),
    [(NEW, in_force(OLD)), (NEW, in_force(NEW, OTHER)), (OLD, in_force(OLD, OTHER))],
    ids=["after its switch", "after it wrote its plan", "after the plan of the model's commit alone"],
)
def test_what_a_killed_run_switched_is_gone_back_on_by_the_next_one_in_every_phase(found, plan):
    """That run may have restarted something, so that the way back serves and proves."""
    planned = {**PLANNED, "model": OTHER}
    for serves in (False, True):
        way = rollback.switched({"a": state(OLD, NEW, found=found, plan=plan)}, planned, serves)
        assert (way.ids, way.model["revision"], way.touched) == ({"a": OLD["id"]}, 40 * "1", True)


def test_half_of_the_hosts_switched_by_a_killed_run_and_half_by_this_one():
    states = {"a": state(OLD, NEW, found=NEW), "b": state(OLD, NEW)}
    assert rollback.switched(states, PLANNED, False).ids == {"a": OLD["id"], "b": OLD["id"]}


def test_where_an_earlier_version_kept_no_record_what_it_serves_counts():
    bare = rollback.HostState(in_force(OLD), {}, OLD["id"], NEW["id"])
    assert rollback.switched({"a": bare}, PLANNED, True).ids == {"a": OLD["id"]}
    for damaged in ({"release": "x"}, {"release": "x", "id": "x-1", "model": []}, {"id": 1, "release": 2, "model": {}}):
        assert rollback.switched({"a": replace(bare, proven=damaged)}, PLANNED, True).ids == {"a": OLD["id"]}
    # Switched and killed before its plan: what was proven is not known.
    assert rollback.switched({"a": replace(bare, found=NEW["id"])}, PLANNED, True) is None
    assert rollback.switched({"a": replace(bare, plan={}, found="")}, PLANNED, True) is None


def test_switching_links_and_what_is_read_of_them(installed):
    root, first = str(installed.root), installed.observe().id
    installed.lock(alpha="1.1", beta="2.0")
    installed.apply()
    second = installed.observe().id
    assert venv_links.installed(root, first).problems == []
    assert venv_links.installed(root, second).release == "fake"
    venv_links.switch(root, first, rehearse=True)
    assert venv_links.linked(root, "current") == second
    venv_links.switch(root, first)
    assert (venv_links.linked(root, "current"), venv_links.linked(root, "previous")) == (first, second)


def test_a_release_that_is_not_whole_is_never_switched_to(installed):
    root, first = str(installed.root), installed.observe().id
    installed.lock(alpha="1.1", beta="2.0")
    installed.apply()
    second = installed.observe().id
    (installed.site() / "alpha/__init__.py").write_text("__version__ = '6.6'\n")
    venv_links.switch(root, first)
    with pytest.raises(release.ReleaseRefused, match="alpha: files changed"):
        venv_links.switch(root, second)
    with pytest.raises(release.ReleaseRefused, match="it is not installed"):
        venv_links.switch(root, "fake-000000000000")
    os.unlink(os.path.join(root, "releases", second, "manifest.json"))
    with pytest.raises(release.ReleaseRefused, match="no manifest"):
        venv_links.switch(root, second)
    assert venv_links.linked(root, "current") == first


def test_a_switch_and_an_installation_take_turns(installed):
    with (
        venv_links.turn(str(installed.root), "another"),
        pytest.raises(release.ReleaseRefused, match="held by process"),
    ):
        venv_links.switch(str(installed.root), installed.observe().id)


def test_what_other_roles_install_is_no_difference(installed):
    (installed.site() / "pdstack_kernels-1.0.dist-info").mkdir()
    identity = installed.observe().id
    assert venv_links.installed(str(installed.root), identity).problems
    assert venv_links.installed(str(installed.root), identity, {"engine": ["pdstack-kernels"]}).problems == []
    assert venv_links.installed(str(installed.root), "") is None


def test_the_manifest_names_the_release(installed):
    with open(installed.root / "current/manifest.json") as stream:
        assert json.load(stream)["release"] == "fake"
