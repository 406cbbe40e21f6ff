"""Which releases are pruned, and what goes with them: on real folders, with hand-made wheels."""

import json
import os
import shutil

from pdstack import venv


def test_a_release_that_is_to_be_spared_is_not_pruned(installed):
    """What was proven last is neither current nor previous after a run that was killed and another release."""
    older(installed, "old", "mid")
    wanted = {"keep": 1, "spared": ["old-000000000000"]}
    steps = venv.plan(installed.observe(**wanted), installed.request(**wanted))
    assert [step.subject for step in steps if "/" not in step.subject] == ["mid-000000000001"]


def older(installed, *names):
    """Releases of these names beside the installed one, the first the oldest, each with wheels and a JIT cache."""
    manifest = json.loads((installed.root / "current/manifest.json").read_text())
    suffix = "py" + manifest["python"].replace(".", "")
    for number, name in enumerate(names):
        folder = installed.root / "releases" / f"{name}-{number:012d}"
        for path in (folder, installed.caches / name / "13.0", installed.root / f"wheelhouse/{name}-{suffix}"):
            path.mkdir(parents=True, exist_ok=True)
        changed = {"id": folder.name, "release": name, "built": f"2026-01-0{number + 1}T00:00:00Z"}
        (folder / "manifest.json").write_text(json.dumps({**manifest, **changed}))
    (installed.caches / "profiles").mkdir()  # of library/pd_profile.py


def test_a_pruned_release_takes_its_jit_cache_and_wheels_along(installed):
    older(installed, "old", "old", "mid")
    (installed.caches / "fake").mkdir()
    request = installed.request(keep=2)
    seen = installed.observe(keep=2)
    steps = venv.plan(seen, request)
    caches, house = str(installed.caches), f"old-py{seen.python.replace('.', '')}"
    wanted = ["old-000000000001", f"{caches}/old", f"{installed.root}/wheelhouse/{house}", "old-000000000000"]
    assert sorted(step.subject for step in steps) == sorted(wanted)
    assert {step.action for step in steps} == {"prune"}
    before, after = venv.diff(seen, request)
    assert [subject for subject in wanted if subject in before] == wanted
    assert not [subject for subject in wanted if subject in after]
    assert sorted(os.listdir(installed.caches)) == ["fake", "mid", "old", "profiles"], "looking changes nothing"
    assert venv.apply(request, installed.host()) == steps
    assert sorted(os.listdir(installed.caches)) == ["fake", "mid", "profiles"]
    assert sorted(os.listdir(installed.root / "releases")) == sorted(["mid-000000000002", seen.id])
    assert venv.plan(installed.observe(keep=2), request) == [], "a second run has nothing to do"


def test_a_jit_cache_that_a_process_has_mapped_keeps_its_release(installed):
    older(installed, "old", "mid", "new")
    busy = installed.host(in_use=lambda folder: ["old"] if folder == str(installed.caches) else [])
    steps = venv.apply(installed.request(keep=1), busy)
    assert "old-000000000000" not in [step.subject for step in steps]
    assert sorted(os.listdir(installed.caches)) == ["old", "profiles"]


def test_a_killed_pruning_is_finished(installed):
    older(installed, "old", "mid")
    shutil.rmtree(installed.caches / "old")
    assert "old-000000000000" in [step.subject for step in venv.plan(installed.observe(), installed.request())]
