"""Whether there is a way back, and what is said where there is none."""

import json
import os

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


def test_a_run_goes_back_only_where_it_switched_every_host_from_one_release():
    def back(**former):
        return rollback.switched(former, {}, {"release": "cpu-0.5.23"})

    assert back(a=OLD, b=OLD).release == "cpu-0.5.22"
    assert back(a=OLD, b=None) is None
    assert back(a=OLD, b=OLDER) is None
    assert back(a=None) is None
    assert back() is None


MODEL = {"repo": "a/b", "revision": 40 * "1", "served_name": "b", "path": "/models/a--b@1"}
PLANNED = {"release": "cpu-0.5.23", "model": {**MODEL, "revision": 40 * "2", "path": "/models/a--b@2"}}


def test_another_commit_of_the_model_has_a_way_back_where_all_hosts_served_the_same_one():
    before = {"a": {"model": MODEL}, "b": {"model": MODEL}}
    way = rollback.switched({"a": None, "b": None}, before, PLANNED)
    assert way == rollback.WayBack("cpu-0.5.23", {}, {"revision": 40 * "1", "served_name": "b"})
    told = rollback.words(way, PLANNED)
    assert (told["tried"], told["back"]) == (
        "commit 222222222222 of the model",
        "commit 111111111111 of the model",
    )
    assert f"Set pd_model.revision: {40 * '1'} in the inventory until the cause is found" in told["advice"]
    both = rollback.switched({"a": OLD, "b": OLD}, before, PLANNED)
    assert (both.release, both.model) == ("cpu-0.5.22", way.model)
    told = rollback.words(both, PLANNED)
    assert told["back"] == "cpu-0.5.22 with commit 111111111111 of the model"
    assert f"Set pd_release: cpu-0.5.22 and pd_model.revision: {40 * '1'} in the inventory" in told["advice"]


@pytest.mark.parametrize(
    "before",
    [
        {"a": {"model": MODEL}, "b": None},  # a new host
        {"a": {"model": MODEL}, "b": {"model": {**MODEL, "revision": 40 * "3"}}},
        {host: {"model": {**MODEL, "repo": "another/one"}} for host in "ab"},
        {host: {"model": PLANNED["model"]} for host in "ab"},  # nothing changed
        {},
    ],
)
def test_otherwise_there_is_none(before):
    assert rollback.switched({"a": None, "b": None}, before, PLANNED) is None


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
