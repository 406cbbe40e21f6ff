"""What the action plugin does on the controller."""

from __future__ import annotations

import importlib.util
import json
import pathlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from ansible import constants
from ansible.errors import AnsibleActionFail
from hub.server import Fault

SOURCE = pathlib.Path(__file__).resolve().parents[3] / "action_plugins/pd_checkpoint.py"


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("pd_checkpoint_action", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(constants, "DEFAULT_LOCAL_TMP", str(tmp_path))
    return module


def test_a_branch_becomes_one_commit_for_all_hosts_even_if_it_moves(plugin, site):
    args = {"repo": "org/toy", "revision": "main", "endpoint": site.hub.url}
    assert plugin.run_commit(args) == site.toy.commit
    site.hub.refs["main"] = "b" * 40

    assert plugin.run_commit(args) == site.toy.commit
    assert len(site.hub.log) == 1


def test_an_unknown_branch_says_what_to_do(plugin, site):
    with pytest.raises(AnsibleActionFail, match=r"RevisionNotFound.*40 hex digits"):
        plugin.run_commit({"repo": "org/toy", "revision": "nope", "endpoint": site.hub.url})


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_hub_that_is_ill_for_a_moment_is_asked_again(plugin, site, monkeypatch, status):
    """huggingface_hub fails at once where /revision says 429 or 503."""
    monkeypatch.setattr(plugin.time, "sleep", lambda seconds: None)
    site.hub.faults = [Fault("/revision/", "status", times=2, status=status)]

    assert plugin.run_commit({"repo": "org/toy", "revision": "main", "endpoint": site.hub.url}) == site.toy.commit
    assert len(site.hub.requests("/revision/")) == 3


def test_a_branch_that_moves_between_listing_and_fetch_changes_nothing(plugin, site):
    """Its commit is looked up once; then only the commit is asked for."""
    commit = plugin.run_commit({"repo": "org/toy", "revision": "main", "endpoint": site.hub.url})
    site.hub.on_request = lambda path: site.hub.refs.update(main="b" * 40) if "/tree/" in path else None

    site.present(commit=commit)

    assert site.hub.refs["main"] == "b" * 40
    assert site.wrong_files() == []
    assert not [seen for seen in site.hub.log if "main" in seen.path and "/revision/" not in seen.path]


def test_a_gated_branch_needs_the_environments_token(plugin, site, monkeypatch):
    site.hub.token = "hf_secret"
    args = {"repo": "org/toy", "revision": "main", "endpoint": site.hub.url}
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(AnsibleActionFail, match="HF_TOKEN"):
        plugin.run_commit(args)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    assert plugin.run_commit(args) == site.toy.commit


def test_all_hosts_of_a_run_share_one_secret(plugin, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        found = {pool.submit(plugin.run_secret).result() for _ in range(3)}
    (secret,) = found
    assert len(secret) == 64
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("source", "folder"),
    [("controller:///a%20b/c", "/a b/c"), ("hub", None), ("dir:///a", None), ("http://h/x", None)],
)
def test_controller_sources(plugin, source, folder):
    assert plugin.source_folder(source) == folder


def test_a_missing_controller_folder_is_named(plugin):
    with pytest.raises(AnsibleActionFail, match="/nowhere is not a folder"):
        plugin.controller_folder(["hub", "controller:///nowhere"])


def test_progress_in_one_line(plugin):
    status = {"state": "fetching", "files": 46, "files_done": 12, "bytes": 146e9, "bytes_done": 38.2e9}
    status = {**status, "rate": 1.1e9, "eta": 98.0, "bytes": int(146e9), "bytes_done": int(38.2e9)}
    assert plugin.progress_line(json.dumps(status)) == ("fetching 12/46 files  38.20/146.00 GB  1.10 GB/s  ETA 1m38s")
    assert plugin.progress_line("") == ""
    assert plugin.progress_line('{"state": "checking"}') == "checking"
