"""Hosts without any of the release's Pythons: the wheelhouse carries one."""

import dataclasses
import hashlib
import os
import pathlib
import sys
import sysconfig
import tarfile

import pytest
from pdstack import release, runner, venv

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
LINE = "cpython==3.12.16+20261110 --hash=sha256:" + "a" * 64 + "  # cpython-3.12.16+20261110-x86_64-linux.tar.gz"


def test_the_lock_of_interpreters():
    pins = release.parse_interpreters(f"# title\n{LINE}\n")
    assert list(pins) == ["3.12"]
    assert pins["3.12"].version == "3.12.16+20261110"
    for wrong in (LINE.replace("cpython==", "pypy=="), LINE.replace("a" * 64, "a" * 63), f"{LINE}\n{LINE}"):
        with pytest.raises(release.ReleaseRefused, match="make lock"):
            release.parse_interpreters(wrong)


def test_every_python_of_every_release_has_an_interpreter(project_root):
    pins = release.parse_interpreters((project_root / "releases/python.txt").read_text())
    assert set(pins) == {"3.11", "3.12", "3.13"}
    assert all("x86_64-unknown-linux-gnu-install_only" in pin.file for pin in pins.values())


@pytest.fixture
def bare(fake, carried_python, tmp_path):
    """A host without Pythons, and a wheelhouse that carries one."""
    folder, pin = carried_python
    os.link(folder / pin.file, fake.wheelhouse / pin.file)
    size = (folder / pin.file).stat().st_size
    fake.write_manifest(interpreter=release.Wheel(pin.file, pin.sha256, size, 4 * size))
    (tmp_path / "empty").mkdir()
    return dataclasses.replace(fake, search=tmp_path / "empty"), pin


def apply(made, pin, **changes):
    return venv.apply(made.request(carried={PYTHON: pin}), made.host(**changes))


def test_a_host_with_none_gets_the_carried_one(bare):
    made, pin = bare
    assert [step.action for step in apply(made, pin)] == ["unpack", "build", "activate"]
    seen = venv.observe(made.request(carried={PYTHON: pin}), made.host())
    assert (seen.state, seen.carried) == ("intact", pin.file)
    assert venv.plan(seen, made.request(carried={PYTHON: pin})) == []
    python = made.root / "current/venv/bin/python"
    code = "import alpha, ssl, ctypes, sys; print(sys.base_prefix)"
    base = pathlib.Path(runner.run([str(python), "-c", code]).out.strip())
    assert base.parent == made.root / "python"
    assert base.stat().st_uid == os.getuid()
    assert sorted(os.listdir(made.root / "python")) == [base.name]


def test_it_is_not_used_where_the_host_has_its_own(fake, carried_python):
    _folder, pin = carried_python
    seen = venv.observe(fake.request(carried={PYTHON: pin}), fake.host())
    assert seen.carried == ""


def test_a_wheelhouse_without_it_is_refused(bare):
    made, pin = bare
    made.write_manifest()
    with pytest.raises(release.ReleaseRefused, match="--with-python"):
        apply(made, pin)
    assert os.listdir(made.root / "releases") == []


def test_an_altered_archive_is_named_and_nothing_is_unpacked(bare):
    made, pin = bare
    data = bytearray((made.wheelhouse / pin.file).read_bytes())
    data[1000] ^= 1
    (made.wheelhouse / pin.file).unlink()
    (made.wheelhouse / pin.file).write_bytes(data)
    with pytest.raises(release.ReleaseRefused, match=hashlib.sha256(data).hexdigest()):
        apply(made, pin)
    assert not (made.root / "python").exists()


def test_one_that_does_not_start_is_refused(bare):
    made, pin = bare
    words = runner.Completed(127, "", "libssl.so.3: cannot open shared object file")
    with pytest.raises(release.ReleaseRefused, match=r"libssl\.so\.3"):
        apply(made, pin, runner=lambda argv: words)
    assert [step.action for step in apply(made, pin)] == ["clean", "unpack", "build", "activate"]
    assert len(os.listdir(made.root / "python")) == 1


def test_it_goes_with_the_last_release_that_uses_it(bare):
    made, pin = bare
    apply(made, pin)
    venv.apply(made.request(carried={PYTHON: pin}, wanted=False), made.host())
    assert os.listdir(made.root) == []


def test_a_python_without_the_headers_that_triton_needs_is_refused(bare):
    """Triton's helper includes Python.h: without it an engine ends at its first kernel, after minutes of loading."""
    made, pin = bare
    made.lock(alpha="1.0", beta="2.0", triton="3.8.0")
    made.write_manifest(interpreter=release.Wheel(pin.file, pin.sha256, (made.wheelhouse / pin.file).stat().st_size, 1))
    with pytest.raises(release.ReleaseRefused) as caught:
        apply(made, pin)
    (found,) = caught.value.refusals
    assert found.found.endswith(f"/include/python{PYTHON}/Python.h")
    assert f"python{PYTHON}-dev" in found.remedy
    assert not os.path.lexists(made.root / "current")
    with tarfile.open(made.wheelhouse / pin.file) as archive:
        assert not [name for name in archive.getnames() if name.endswith("Python.h")]  # what the refusal is about


def test_a_python_with_its_headers_serves_triton(fake, tmp_path):
    """The path that is looked at is the one that Triton gives to the compiler, a real Python's own."""
    folder = pathlib.Path(sysconfig.get_path("include", "posix_prefix"))
    fake.lock(alpha="1.0", beta="2.0", triton="3.8.0")
    asked = []

    def runner_with_headers(argv):
        answer = runner.run(argv)
        if "sysconfig" in argv[-1]:
            version, header = answer.out.split()
            asked.append(header)
            (tmp_path / "Python.h").write_text("")
            answer = dataclasses.replace(answer, out=f"{version}\n{tmp_path / 'Python.h'}\n")
        return answer

    steps = venv.apply(fake.request(), fake.host(runner=runner_with_headers))
    assert [step.action for step in steps] == ["build", "activate"]
    assert asked == [str(folder / "Python.h")]
