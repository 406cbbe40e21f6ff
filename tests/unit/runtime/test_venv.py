"""pd_venv's engine: real uv and real environments, hand-made wheels."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from pdstack import release, runner, turns, venv, venv_build


def actions(steps):
    return [step.action for step in steps]


def refusals(caught):
    return {item.subject: item for item in caught.value.refusals}


def test_installs_proves_and_activates(fake):
    steps = fake.apply()
    assert actions(steps) == ["build", "activate"]
    seen = fake.observe()
    assert seen.state == "intact"
    assert seen.current == seen.id
    python = fake.root / "current/venv/bin/python"
    answer = runner.run([str(python), "-c", "import alpha, beta; print(alpha.__version__, beta.__version__)"])
    assert answer.out == "1.0 2.0\n"
    assert (fake.root / "current/router/bin/python").exists()
    assert release.parse_lock((fake.root / "current/lock.txt").read_text()) == fake.pins["engine"]
    assert release.read_manifest(seen.path).environments["engine"].imports == {"alpha": "1.0", "beta": "2.0"}
    assert not [name for name in os.listdir(fake.root / "releases") if name.startswith(".")]


def test_a_second_run_has_nothing_to_do_and_starts_no_process(installed):
    def no_process(argv):
        raise AssertionError(argv)

    seen = venv.observe(installed.request(), installed.host(runner=no_process))
    assert venv.plan(seen, installed.request()) == []
    before, after = venv.diff(seen, installed.request())
    assert before == after


def test_everybody_may_read_the_release(fake):
    old = os.umask(0o077)
    try:
        fake.apply()
    finally:
        os.umask(old)
    path = fake.site() / "alpha/__init__.py"
    assert path.stat().st_mode & 0o044 == 0o044
    assert all(parent.stat().st_mode & 0o055 == 0o055 for parent in path.parents if fake.root in parent.parents)


def test_a_dry_run_shows_the_packages(fake):
    seen = fake.observe()
    assert actions(venv.plan(seen, fake.request())) == ["build", "activate"]
    before, after = venv.diff(seen, fake.request())
    assert before == "current -> nothing\n"
    assert after == f"engine: alpha 1.0\nengine: beta 2.0\nrouter: gamma 3.0\ncurrent -> {seen.id}\n"
    assert not (fake.root / "releases").exists()


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda site: (site / "alpha/__init__.py").write_text("__version__ = '6.6'\n"), "alpha: files changed"),
        (lambda site: (site / "alpha/extra.py").write_text(""), "alpha: files changed"),
        (lambda site: (site / "alpha/__init__.py").unlink(), "alpha: files changed"),
        (lambda site: (site / "leftpad.py").write_text(""), "leftpad.py: files changed"),
        (lambda site: os.rename(site / "beta-2.0.dist-info", site / "beta-2.1.dist-info"), "beta 2.0 -> 2.1"),
        (lambda site: os.rename(site / "beta-2.0.dist-info", site / "b"), "beta 2.0: not installed"),
        (lambda site: os.mkdir(site / "leftpad-1.0.dist-info"), "leftpad 1.0: not in the lock"),
    ],
)
def test_what_was_changed_by_hand_is_found(installed, break_it, why):
    break_it(installed.site())
    steps = venv.plan(installed.observe(), installed.request())
    assert actions(steps) == ["repair"]
    assert why in steps[0].why


def test_what_was_changed_by_hand_is_repaired(installed):
    (installed.site() / "alpha/__init__.py").write_text("raise SystemExit\n")
    (installed.root / "current/manifest.json").rename(installed.root / "elsewhere")
    assert installed.observe().state == "unfinished"
    assert actions(installed.apply()) == ["repair"]
    assert installed.observe().state == "intact"
    assert runner.run([str(installed.root / "current/venv/bin/python"), "-c", "import alpha, beta"]).rc == 0


def test_an_environment_that_is_wanted_later_is_added_and_the_others_stay(fake):
    """Another router: the engines run on from the files that they have, and their units see no newer release."""
    fake.apply(environments=["engine"])
    manifest = fake.root / "current/manifest.json"
    before = {path: path.stat() for path in (fake.root / "current/venv", manifest)}
    time.sleep(0.02)
    assert fake.observe().state == "incomplete"
    assert actions(fake.apply()) == ["build"]
    after = {path: path.stat() for path in before}
    assert after[manifest].st_mtime_ns == before[manifest].st_mtime_ns
    assert after[fake.root / "current/venv"].st_ino == before[fake.root / "current/venv"].st_ino
    assert set(release.read_manifest(str(fake.root / "current")).environments) == {"engine", "router"}
    assert fake.observe().state == "intact"
    assert fake.apply() == []
    assert runner.run([str(fake.root / "current/router/bin/python"), "-c", "import gamma"]).rc == 0
    assert not [name for name in os.listdir(fake.root / "releases") if name.startswith(".")]


def test_what_is_damaged_is_built_with_what_lacks(fake):
    fake.apply(environments=["engine"])
    (fake.site() / "alpha/__init__.py").write_text("raise SystemExit\n")
    assert fake.observe().state == "damaged"
    assert actions(fake.apply()) == ["repair"]
    assert fake.observe().state == "intact"


def test_an_environment_that_was_never_proven_is_built_again(installed):
    """As a kill leaves it between the environment's name and the manifest's."""
    path = installed.root / "current/manifest.json"
    document = json.loads(path.read_text())
    del document["environments"]["router"]
    path.write_text(json.dumps(document))
    (installed.site("router") / "gamma/__init__.py").write_text("raise SystemExit\n")
    assert installed.observe().state == "incomplete"
    assert actions(installed.apply()) == ["build"]
    assert installed.observe().state == "intact"
    assert runner.run([str(installed.root / "current/router/bin/python"), "-c", "import gamma"]).rc == 0


def test_bytecode_is_no_drift(installed):
    runner.run([str(installed.root / "current/venv/bin/python"), "-m", "compileall", "-q", str(installed.site())])
    assert list(installed.site().rglob("*.pyc"))
    assert installed.observe().state == "intact"


def test_a_foreign_package_is_left_alone(installed):
    (installed.site() / "pdstack_kernels-1.0.dist-info").mkdir()
    (installed.site() / "pdstack_kernels").mkdir()
    (installed.site() / "pdstack_kernels/__init__.py").write_text("")
    assert installed.observe().state == "damaged"
    assert installed.observe(foreign={"engine": ["pdstack-kernels"]}).state == "intact"


def test_an_altered_wheel_is_named_and_nothing_is_touched(fake):
    path = fake.wheelhouse / fake.pins["engine"][0].file
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(release.ReleaseRefused) as caught:
        fake.apply()
    refusal = refusals(caught)[f"wheel {path.name}"]
    assert fake.pins["engine"][0].sha256 in refusal.needed
    assert os.listdir(fake.root / "releases") == []


def test_missing_wheels_are_all_named(fake):
    for pin in fake.pins["engine"]:
        (fake.wheelhouse / pin.file).unlink()
    with pytest.raises(release.ReleaseRefused) as caught:
        fake.apply()
    assert set(refusals(caught)) == {f"wheel {pin.file}" for pin in fake.pins["engine"]}


def test_a_wheelhouse_of_other_locks_is_refused(fake):
    fake.pins["engine"][0] = release.Pin("alpha", "1.0", fake.pins["engine"][0].file, "0" * 64)
    with pytest.raises(release.ReleaseRefused, match="belongs to other locks"):
        fake.apply()


def test_no_wheelhouse_at_all(fake):
    (fake.wheelhouse / "manifest.json").unlink()
    with pytest.raises(release.ReleaseRefused, match="make wheelhouse"):
        fake.apply()


def test_the_wrong_python_is_refused_with_what_is_there(fake, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/python3.6").write_text("")
    with pytest.raises(release.ReleaseRefused) as caught:
        venv.observe(fake.request(), fake.host(search=[str(tmp_path / "old")]))
    assert refusals(caught)["python"].found == "python3.6"


def test_a_python_without_its_standard_library_is_refused(fake):
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (fake.search / name).unlink()
    (fake.search / name).write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'ctypes'\" >&2\nexit 1\n")
    (fake.search / name).chmod(0o755)
    with pytest.raises(release.ReleaseRefused) as caught:
        fake.apply()
    assert "No module named 'ctypes'" in refusals(caught)[str(fake.search / name)].found


def test_a_full_disk_is_refused_with_what_is_short(fake):
    with pytest.raises(release.ReleaseRefused) as caught:
        venv.apply(fake.request(), fake.host(free=lambda path: 10))
    assert f"disk space at {fake.root}" in refusals(caught)


@pytest.mark.parametrize(
    ("changes", "subject"), [({"glibc": lambda: "2.16"}, "glibc"), ({"machine": lambda: "aarch64"}, "processor")]
)
def test_a_host_that_cannot_run_the_wheels_is_refused(fake, changes, subject):
    with pytest.raises(release.ReleaseRefused) as caught:
        venv.apply(fake.request(), fake.host(**changes))
    assert subject in refusals(caught)


def test_a_release_that_does_not_import_is_never_activated(installed):
    fake = installed
    before = fake.observe().id
    fake.lock(alpha="1.1", beta="2.0")
    fake.imports["engine"] = ["alpha", "nothing_of_that_name"]
    with pytest.raises(venv_build.InstallFailed, match="nothing_of_that_name: ModuleNotFoundError"):
        fake.apply()
    assert venv.linked(str(fake.root), "current") == before


def test_a_module_that_kills_the_interpreter_is_named(fake):
    fake.imports["engine"] = ["alpha", "beta.dies"]
    files = {"beta/__init__.py": b"", "beta/dies.py": b"import os\nos.abort()\n"}
    conftest = sys.modules[type(fake).__module__]
    fake.pins["engine"][1] = conftest.make_wheel(fake.wheelhouse, "beta", "2.0", files)
    fake.write_manifest()
    with pytest.raises(venv_build.InstallFailed, match=r"importing beta\.dies"):
        fake.apply()


def orphan(fake, seconds):
    """A process that installs and goes on: what a killed run leaves on the host."""
    program = (
        "import os, sys, time; sys.path.insert(0, sys.argv[1]); from pdstack import venv_links\n"
        "with venv_links.turn(sys.argv[2], 'pd_venv for fake'):\n"
        "    print(os.getpid(), flush=True); time.sleep(float(sys.argv[3]))"
    )
    package = str(pathlib.Path(venv.__file__).parent.parent)
    command = [sys.executable, "-c", program, package, str(fake.root), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert int(process.stdout.readline()) == process.pid
    return process


def test_a_run_waits_for_the_installation_that_a_killed_one_left(fake):
    with orphan(fake, 1.0) as before:
        lock = str(fake.root / venv.LOCK)
        assert turns.holder(lock).pid == before.pid
        assert actions(venv.apply(fake.request(wait_s=30.0), fake.host())) == ["build", "activate"]
        assert before.wait() == 0
        assert turns.holder(lock) is None


def test_a_run_that_waited_in_vain_says_who_installs_what_and_since_when(fake):
    with orphan(fake, 60.0) as before:
        with pytest.raises(release.ReleaseRefused) as caught:
            venv.apply(fake.request(wait_s=0.7), fake.host())
        text = str(caught.value)
        assert f"it is held by process {before.pid} (pd_venv for fake) since 20" in text
        assert re.search(r"UTC, \d+ s; waited \d+ s for it", text)
        assert f"kill {before.pid}" in text
        assert not os.listdir(fake.root / "releases"), "it has touched nothing"
        before.kill()
    assert turns.holder(str(fake.root / venv.LOCK)) is None, "a dead process holds nothing, whatever its file says"
    assert actions(fake.apply()) == ["build", "activate"]


def test_switching_back_and_pruning(installed):
    fake = installed
    first = fake.observe().id
    fake.lock(alpha="1.1", beta="2.0")
    fake.apply()
    second = fake.observe().id
    assert (venv.linked(str(fake.root), "current"), venv.linked(str(fake.root), "previous")) == (second, first)

    fake.lock(alpha="1.0", beta="2.0")
    assert actions(fake.apply()) == ["activate"]  # nothing is built for the way back
    assert venv.linked(str(fake.root), "current") == first

    fake.lock(alpha="1.2", beta="2.0")
    assert "prune" in actions(fake.apply(keep=1))
    assert second not in os.listdir(fake.root / "releases")  # first is previous, and stays
    assert first in os.listdir(fake.root / "releases")


def test_a_release_in_use_is_not_pruned(installed):
    """Four older releases beside the active one: the one in use stays, the others go, oldest first."""
    folder = installed.root / "releases"
    manifest = json.loads((installed.root / "current/manifest.json").read_text())
    for number in range(4):
        (folder / f"fake-{number:012d}").mkdir()
        text = json.dumps({**manifest, "id": f"fake-{number:012d}", "built": f"2026-01-0{number + 1}T00:00:00Z"})
        (folder / f"fake-{number:012d}/manifest.json").write_text(text)
    (installed.root / "current").unlink()
    steps = venv.apply(installed.request(keep=2), installed.host(in_use=lambda path: ["fake-000000000001"]))
    assert actions(steps) == ["activate", "prune", "prune"]
    left = {"fake-000000000001", "fake-000000000003", installed.observe().id}
    assert set(os.listdir(folder)) == left


def test_in_use_is_read_from_the_processes_maps(tmp_path):
    library = next(path for path in _mapped() if path.endswith(".so") or ".so." in path)
    folder = os.path.dirname(os.path.dirname(library))
    assert os.path.basename(os.path.dirname(library)) in venv.releases_in_use(folder)
    assert venv.releases_in_use(str(tmp_path)) == []


def _mapped():
    with open("/proc/self/maps") as stream:
        return [line.split(None, 5)[5].strip() for line in stream if line.count("/") > 2]


def test_installing_beside_leaves_current_alone(installed):
    fake = installed
    first = fake.observe().id
    fake.lock(alpha="1.1", beta="2.0")
    assert actions(fake.apply(activate=False)) == ["build"]
    assert venv.linked(str(fake.root), "current") == first


def test_a_host_that_only_routes_gets_the_router_alone(fake):
    for pin in fake.pins["engine"]:
        (fake.wheelhouse / pin.file).unlink()
    fake.apply(environments=["router"])
    assert not (fake.root / "current/venv").exists()
    assert runner.run([str(fake.root / "current/router/bin/python"), "-c", "import gamma"]).rc == 0
    assert fake.observe(environments=["router"]).state == "intact"
    assert fake.observe().id == fake.observe(environments=["router"]).id
    assert fake.observe().state == "incomplete"  # once it is to serve as well


def test_absent_takes_everything_of_the_release(installed):
    fake = installed
    (fake.caches / "fake/13.0").mkdir(parents=True)
    assert actions(fake.apply(wanted=False)) == ["remove", "remove", "remove"]
    assert os.listdir(fake.caches) == []
    assert os.listdir(fake.root) == []
    assert not fake.wheelhouse.exists()
    assert venv.plan(fake.observe(wanted=False), fake.request(wanted=False)) == []


def test_place_without_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(venv_build, "_exchange", lambda first, second: False)
    for name in ("new", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
    venv_build.place(str(tmp_path / "new"), str(tmp_path / "final"))
    assert (tmp_path / "final/who").read_text() == "new"
    assert os.listdir(tmp_path) == ["final"]


def test_place_exchanges_in_one_step_here(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b/file").write_text("")
    assert venv_build._exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    assert os.listdir(tmp_path / "a") == ["file"]


KILLED = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import conftest
made = conftest.Fake(**{name: conftest.pathlib.Path(value) for name, value in json.loads(sys.argv[2]).items()},
                     pins=None, imports=json.loads(sys.argv[3]))
house = conftest.release.read_wheelhouse(str(made.wheelhouse))
made.pins = json.loads(sys.argv[4])
made.pins = {name: [conftest.release.Pin(**pin) for pin in pins] for name, pins in made.pins.items()}
print("go", flush=True)
made.apply()
"""


def test_killed_at_any_moment(installed, project_root):
    """SIGKILL during an upgrade, at moments spread over it: current is always whole, and the last run finishes."""
    fake = installed
    old = fake.observe().id
    fake.lock(alpha="1.1", beta="2.0")
    new = release.release_id("fake", f"{sys.version_info[0]}.{sys.version_info[1]}", fake.pins)
    places = {name: str(getattr(fake, name)) for name in ("root", "wheelhouse", "search")}
    pins = {name: [vars(pin) for pin in items] for name, items in fake.pins.items()}
    paths = [str(project_root / "module_utils"), os.path.dirname(__file__)]
    arguments = [json.dumps(value) for value in (paths, places, fake.imports, pins)]
    killed = 0
    for delay in (0.0, 0.05, 0.15, 0.3, 0.5):
        with subprocess.Popen([sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"go\n"
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
        current = venv.linked(str(fake.root), "current")
        assert current in (old, new)
        assert release.read_manifest(str(fake.root / "releases" / current)) is not None
        assert runner.run([str(fake.root / "current/venv/bin/python"), "-c", "import alpha, beta"]).rc == 0
    assert killed >= 2
    fake.apply()
    assert fake.observe().current == new
    # A uv that outlived its killed parent may still have written for a moment; one more run clears that away.
    fake.apply()
    assert fake.observe().partial == []


@pytest.fixture
def based(fake, tmp_path):
    """A release whose engine imports gamma, which only the host's own Python has."""
    base = tmp_path / "base"
    (base / "gamma-3.0.dist-info").mkdir(parents=True)
    (base / "gamma.py").write_text("__version__ = '3.0'\n")
    fake.imports["engine"].append("gamma")
    return fake, {"base": str(base), "provided": {"gamma": "3.0"}}


def test_the_engine_sees_the_packages_of_a_base_behind_its_own(based):
    fake, given = based
    (pathlib.Path(given["base"]) / "alpha.py").write_text("__version__ = 'of the base'\n")
    venv.apply(fake.request(**given), fake.host())
    seen = venv.observe(fake.request(**given), fake.host())
    assert seen.state == "intact"
    imports = release.read_manifest(seen.path).environments["engine"].imports
    assert imports["gamma"] == "3.0"
    assert imports["alpha"] == "1.0"
    assert venv.observe(fake.request(), fake.host()).id != seen.id


@pytest.mark.parametrize("change", ["gamma-3.1.dist-info", None])
def test_a_base_without_what_the_release_counts_on_is_refused_and_is_drift(based, change):
    fake, given = based
    venv.apply(fake.request(**given), fake.host())
    dist = pathlib.Path(given["base"]) / "gamma-3.0.dist-info"
    dist.rename(dist.with_name(change)) if change else dist.rmdir()
    seen = venv.observe(fake.request(**given), fake.host())
    assert actions(venv.plan(seen, fake.request(**given))) == ["repair"]
    with pytest.raises(release.ReleaseRefused, match="the host's own packages"):
        venv.apply(fake.request(**given), fake.host())
    assert (fake.root / "current/venv/bin/python").exists()


def test_says_whether_the_wheels_lie_on_the_host_already(fake):
    seen, request = fake.observe(), fake.request()
    assert venv.delivered(seen, request)
    wheel = next(fake.wheelhouse.glob("alpha*"))
    content = bytearray(wheel.read_bytes())
    content[-1] ^= 1
    wheel.write_bytes(content)
    assert not venv.delivered(seen, request)
    wheel.unlink()
    assert not venv.delivered(seen, request)
