"""tools/wheelhouse with the real pip and a folder as its only source."""

import argparse
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import sys
import tarfile

import pytest
import yaml
from pdstack import release

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
TOOL = pathlib.Path(__file__).resolve().parents[3] / "tools/wheelhouse"
conftest = importlib.machinery.SourceFileLoader("runtime_conftest", str(pathlib.Path(__file__).parent / "conftest.py"))


def load(name, loader):
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


make_wheel = load("runtime_conftest", conftest).make_wheel


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A project with one release of two wheels and one package of its own, and a folder that has them."""
    tool = load("wheelhouse", importlib.machinery.SourceFileLoader("wheelhouse", str(TOOL)))
    project, links = tmp_path / "project", tmp_path / "links"
    (project / "releases/fake").mkdir(parents=True)
    (project / "own/src").mkdir(parents=True)
    (project / "own/pyproject.toml").write_text('[project]\nname = "own"\nversion = "1.0"\n')
    (project / "own/src/own.py").write_text("")
    links.mkdir()
    monkeypatch.setattr(tool, "ROOT", project)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(links)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    file, data = tool.wheel.build(str(project / "own"))
    own = release.Pin("own", "1.0", file, hashlib.sha256(data).hexdigest())
    pins = [make_wheel(links, "alpha", "1.0"), make_wheel(links, "beta", "2.0+cpu"), own]
    spec = {
        "profile": "cpu",
        "engine": "1",
        "router": "1",
        "pythons": [PYTHON],
        "platform": f"{os.uname().machine}-manylinux_2_17",
        "imports": {"engine": ["alpha"]},
        "local_packages": {"engine": ["own"]},
        "torch_index": "",
    }
    (project / "releases/fake/release.yml").write_text(yaml.safe_dump(spec))
    lock = project / f"releases/fake/engine-py{PYTHON.replace('.', '')}.txt"
    lock.write_text("".join(pin.line + "\n" for pin in pins))
    (project / "releases/uv.txt").write_text(make_wheel(links, "uv", "0").line + "\n")

    archive = tmp_path / f"cpython-{PYTHON}.9+20260101-x86_64.tar.gz"
    with tarfile.open(archive, "w:gz") as stream:
        stream.add(TOOL, "python/bin/python")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    (project / "python.txt").write_text(f"cpython=={PYTHON}.9+20260101 --hash=sha256:{digest}  # {archive.name}\n")
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", (tmp_path / "mirror").as_uri())

    def build(verify=False, **changes):
        values = {"release": "fake", "python": None, "output": None, "torch_index": None, "verify": verify}
        values.update(with_python=False, interpreters=project / "python.txt")
        return tool.build(argparse.Namespace(**{**values, **changes}))

    return argparse.Namespace(
        tool=tool, build=build, links=links, pins=pins, lock=lock, cache=tmp_path / "cache", archive=archive
    )


@pytest.fixture
def no_pip(shop, monkeypatch):
    def refuse(*arguments):
        raise AssertionError(arguments)

    return lambda: monkeypatch.setattr(shop.tool, "pip", refuse)


def test_builds_once_and_then_asks_nobody(shop, no_pip, capsys):
    folder = shop.build()
    assert folder == shop.cache / f"pdstack/wheelhouse/fake-py{PYTHON.replace('.', '')}"
    house = release.read_wheelhouse(str(folder))
    assert {item.file for item in house.wheels} == {pin.file for pin in shop.pins} | {"uv-0-py3-none-any.whl"}
    assert house.id == release.release_id("fake", PYTHON, {"engine": shop.pins})
    assert release.check_wheels(str(folder), house.wheels, hashes=True) == []
    assert all(item.unpacked > 0 for item in house.wheels)
    assert "4 of them fetched or built" in capsys.readouterr().out
    no_pip()
    assert shop.build(verify=True) == folder
    assert "fetched or built" not in capsys.readouterr().out


def test_damage_is_repaired(shop, capsys):
    folder = shop.build()
    short, altered = folder / shop.pins[0].file, folder / shop.pins[1].file
    short.write_bytes(short.read_bytes()[:-1])
    data = bytearray(altered.read_bytes())
    data[-40] ^= 1
    altered.write_bytes(data)
    (folder / "stray-1.0-py3-none-any.whl").write_bytes(b"")
    (folder / shop.pins[2].file).unlink()
    capsys.readouterr()
    shop.build(verify=True)
    words = capsys.readouterr().out
    assert f"{altered.name} was altered" in words
    assert "3 of them fetched or built" in words
    house = release.read_wheelhouse(str(folder))
    assert release.check_wheels(str(folder), house.wheels, hashes=True) == []
    assert not (folder / "stray-1.0-py3-none-any.whl").exists()


def test_a_wheel_that_nobody_has_is_named_and_the_rest_is_kept(shop):
    missing = shop.links / shop.pins[0].file
    data = missing.read_bytes()
    missing.unlink()
    with pytest.raises(release.ReleaseRefused) as caught:
        shop.build()
    assert [item.subject for item in caught.value.refusals] == [f"wheel {missing.name}"]
    assert "alpha" in caught.value.refusals[0].found
    folder = next((shop.cache / "pdstack/wheelhouse").iterdir())
    assert (folder / shop.pins[1].file).exists()
    assert not (folder / "manifest.json").exists()
    missing.write_bytes(data)
    shop.build()  # goes on where it stopped
    (folder / "manifest.json").unlink()
    shop.build()  # even where every wheel is there already
    assert (folder / "manifest.json").exists()


def test_a_source_with_another_file_of_that_name_is_refused(shop):
    make_wheel(shop.links, "alpha", "1.0", {"alpha.py": b"evil"})
    with pytest.raises(release.ReleaseRefused, match=r"(?i)hash"):
        shop.build()


def test_a_local_version_is_looked_for_in_the_torch_index_only_when_pip_has_it_not(shop, monkeypatch):
    calls = []

    def pip(pins, folder, spec, python, *options):
        calls.append(([pin.name for pin in pins], options))
        if "beta" in [pin.name for pin in pins] and not options:
            return "No matching distribution found for beta==2.0+cpu"
        for pin in pins:
            (folder / pin.file).write_bytes((shop.links / pin.file).read_bytes())
        return ""

    monkeypatch.setattr(shop.tool, "pip", pip)
    shop.build(torch_index="https://index.example/cpu")
    assert (["beta"], ("--index-url", "https://index.example/cpu")) in calls
    assert not [names for names, options in calls if options and names != ["beta"]]


def test_own_packages_must_be_the_locked_ones(shop):
    (shop.tool.ROOT / "own/src/own.py").write_text("changed = True\n")
    with pytest.raises(release.ReleaseRefused, match="make lock"):
        shop.build()


def test_another_lock_gives_another_manifest(shop):
    folder = shop.build()
    before = json.loads((folder / "manifest.json").read_text())["id"]
    shop.lock.write_text("".join(pin.line + "\n" for pin in shop.pins[1:]))
    shop.build()
    assert json.loads((folder / "manifest.json").read_text())["id"] != before
    assert not (folder / shop.pins[0].file).exists()


@pytest.mark.parametrize(("changes", "subject"), [({"release": "fak"}, "release"), ({"python": "3.9"}, "python")])
def test_bad_arguments_say_what_there_is(shop, changes, subject):
    with pytest.raises(release.ReleaseRefused) as caught:
        shop.build(**changes)
    assert caught.value.refusals[0].subject == subject


def test_a_constraint_of_the_machine_does_not_overrule_the_lock(shop, tmp_path, monkeypatch):
    (tmp_path / "constraints.txt").write_text("alpha<1\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    assert (shop.build() / shop.pins[0].file).exists()


def test_a_wheel_of_another_release_is_linked_and_not_fetched(shop, no_pip):
    folder = shop.build()
    no_pip()
    other = shop.build(output=folder.parent / "other-py")
    for pin in shop.pins[:2]:
        assert (other / pin.file).stat().st_ino == (folder / pin.file).stat().st_ino


def place(shop, where):
    target = {"cache": shop.cache / "pdstack/python", "mirror": shop.archive.parent / "mirror/20260101"}[where]
    target.mkdir(parents=True)
    (target / shop.archive.name).write_bytes(shop.archive.read_bytes())
    return target / shop.archive.name


@pytest.mark.parametrize("where", ["cache", "mirror"])
def test_an_interpreter_is_carried_where_it_was_asked_for(shop, where):
    place(shop, where)
    assert release.read_wheelhouse(str(shop.build())).interpreter is None
    folder = shop.build(with_python=True)
    house = release.read_wheelhouse(str(folder))
    assert house.interpreter.file == shop.archive.name
    assert release.check_wheels(str(folder), [house.interpreter], hashes=True) == []
    assert house.interpreter.unpacked == TOOL.stat().st_size
    shop.build()  # for a host that has a Python of its own: another one may need it still
    assert release.read_wheelhouse(str(folder)).interpreter == house.interpreter


def test_another_interpreter_than_the_locked_one_is_refused(shop):
    place(shop, "cache").write_bytes(b"other")
    with pytest.raises(release.ReleaseRefused, match="sha256 " + hashlib.sha256(b"other").hexdigest()):
        shop.build(with_python=True)


def test_an_interpreter_that_nobody_has_says_where_to_put_it(shop):
    with pytest.raises(release.ReleaseRefused) as caught:
        shop.build(with_python=True)
    assert str(shop.cache / "pdstack/python" / shop.archive.name) in caught.value.refusals[0].remedy
