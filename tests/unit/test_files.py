"""A declared set of files is written whole or not at all."""

from __future__ import annotations

import errno
import getpass
import grp
import os
import re
from pathlib import Path

import pytest
from pdstack import files

OWNER = getpass.getuser()
GROUP = grp.getgrgid(os.getgid()).gr_name


def entry(path: Path, content: str | None = None, mode: int = 0o644) -> files.Entry:
    return files.Entry(str(path), content, mode, OWNER, GROUP)


def actions(todo: files.FilesPlan) -> dict[str, str]:
    return {os.path.basename(change.path): change.action for change in todo.changes}


def test_writes_what_is_declared_and_is_then_content(tmp_path: Path) -> None:
    declared = [entry(tmp_path / "d", mode=0o750), entry(tmp_path / "d" / "a.yaml", "a: 1\n")]
    todo = files.plan(declared)
    assert actions(todo) == {"d": "create", "a.yaml": "create"}
    files.apply(todo)
    assert (tmp_path / "d" / "a.yaml").read_text() == "a: 1\n"
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o750
    assert files.plan(declared).changes == []


@pytest.mark.parametrize(
    ("damage", "action"),
    [
        (lambda path: path.write_text("edited by hand\n"), "update"),
        (lambda path: path.unlink(), "create"),
        (lambda path: path.chmod(0o666), "attributes"),
        (lambda path: (path.unlink(), path.symlink_to("/dev/null")), "update"),  # what `systemctl mask` does
        (lambda path: path.write_bytes(b"\xff\xfe"), "update"),
        (lambda path: path.write_bytes(b"a: 1\r\n"), "update"),
    ],
    ids=["edited", "deleted", "chmod", "masked", "binary", "line-ends"],
)
def test_sees_and_repairs_each_kind_of_drift(tmp_path: Path, damage, action: str) -> None:
    declared = [entry(tmp_path / "a", "a: 1\n")]
    files.apply(files.plan(declared))
    damage(tmp_path / "a")
    todo = files.plan(declared)
    assert actions(todo) == {"a": action}
    files.apply(todo)
    assert files.plan(declared).changes == []
    assert (tmp_path / "a").read_bytes() == b"a: 1\n"


@pytest.mark.parametrize(
    ("before", "after", "action"),
    [
        ("# old words\na: 1\n", "# new words\na: 1\n", "comments"),
        ("a: 1\n", "# new words\n\na: 1\n", "comments"),
        ("# a: 1\n", "a: 1\n", "update"),
        ("a: 1 # old\n", "a: 1 # new\n", "update"),  # only whole lines are surely comments
        ("[Service]\n", "[Service]\nNice=1\n", "update"),
    ],
    ids=["reworded", "added", "uncommented", "behind-a-value", "setting"],
)
def test_a_file_of_which_only_comments_change_keeps_its_time(tmp_path: Path, before, after, action) -> None:
    path = tmp_path / "a"
    path.write_text(before)
    path.chmod(0o644)
    os.utime(path, ns=(10**18, 10**18))
    todo = files.plan([entry(path, after)])
    assert actions(todo) == {"a": action}
    files.apply(todo)
    assert path.read_text() == after
    assert (path.stat().st_mtime_ns == 10**18) == (action == "comments")


def test_a_file_of_which_only_owner_or_mode_change_keeps_its_time(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("a: 1\n")
    path.chmod(0o666)
    os.utime(path, ns=(10**18, 10**18))
    todo = files.plan([entry(path, "a: 1\n")])
    assert actions(todo) == {"a": "attributes"}
    files.apply(todo)
    assert (path.stat().st_mode & 0o777, path.stat().st_mtime_ns) == (0o644, 10**18)


def test_removes_only_strays_of_what_it_owns(tmp_path: Path) -> None:
    dropins = tmp_path / "pd-decode@0.service.d"
    declared = [entry(dropins, mode=0o755), entry(dropins / "placement.conf", "[Service]\n")]
    files.apply(files.plan(declared))
    (dropins / "override.conf").write_text("by hand")
    (tmp_path / "other.service").write_text("not ours")
    (tmp_path / "pd-decode@1.service.d").mkdir()
    todo = files.plan(declared, [f"{tmp_path}/pd-decode@*", f"{tmp_path}/pd-decode@*/*"])
    assert actions(todo) == {"override.conf": "remove", "pd-decode@1.service.d": "remove"}
    files.apply(todo)
    assert sorted(os.listdir(tmp_path)) == ["other.service", "pd-decode@0.service.d"]
    assert os.listdir(dropins) == ["placement.conf"]


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [entry(tmp_path / name, "new\n") for name in ("a", "b", "c")]
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("old\n")
    calls = []

    def full(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")  # as fsync and write give it, without a path

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(files.FilesError, match=r"/c: No space left.*No file was changed; free space there"):
        files.apply(files.plan(declared))
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]
    assert {(tmp_path / name).read_text() for name in "abc"} == {"old\n"}


@pytest.mark.parametrize(
    ("call", "code", "state", "remedy"),
    [
        ("makedirs", errno.EROFS, "No file was changed", "mount that file system for writing"),
        ("makedirs", errno.ENOSPC, "No file was changed", "`df -i` for inodes"),
        ("fchown", errno.EPERM, "No file was changed", "lsattr"),
        ("fsync", errno.EIO, "No file was changed", "look at the disk"),
        ("fsync", errno.EDQUOT, "No file was changed", "quota"),
        ("replace", errno.EBUSY, "Some of the files were changed", "unmount"),
        ("unlink", errno.EROFS, "Some of the files were changed", "mount that file system for writing"),
        ("_read", errno.EIO, "No file was changed", "look at the disk"),
        ("fsync", errno.EMFILE, "No file was changed", "mend that"),
    ],
)
def test_whatever_the_file_system_says_is_told_with_path_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, state: str, remedy: str
) -> None:
    (tmp_path / "a").write_text("old\n")
    (tmp_path / "stray").write_text("by hand\n")
    declared = [entry(tmp_path / "a", "new\n"), entry(tmp_path / "folder", None)]
    place = files if call.startswith("_") else files.os
    real = getattr(place, call)

    def broken(*arguments: object, **options: object) -> object:
        if call == "unlink" and not str(arguments[0]).endswith("stray"):
            return real(*arguments, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(place, call, broken)
    with pytest.raises(files.FilesError) as told:
        files.apply(files.plan(declared, [f"{tmp_path}/stray"]))
    monkeypatch.undo()
    assert re.search(
        rf"^{tmp_path}/\w+: {os.strerror(code)}\. {state}.*; .*{remedy}.*, then run again\.", str(told.value)
    )
    assert not list(tmp_path.glob(".*")), "nothing that was staged is left"
    if state == "No file was changed":
        assert (tmp_path / "a").read_text() == "old\n"


def test_a_file_where_a_folder_belongs_is_told(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(files.FilesError, match=r"/x: File exists\. No file was changed; move away this file"):
        files.apply(files.plan([entry(tmp_path / "x" / "a", "new\n")]))


def test_a_folder_in_the_way_of_a_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with pytest.raises(files.FilesError, match="is a folder where a file belongs"):
        files.apply(files.plan([entry(tmp_path / "a", "x"), entry(tmp_path / "b", "x")]))
    assert os.listdir(tmp_path) == ["b"]


@pytest.mark.parametrize("path", ["relative", "/etc/../etc/passwd", "/etc//x"])
def test_refuses_paths_that_are_not_plain(path: str) -> None:
    with pytest.raises(files.FilesError):
        files.plan([files.Entry(path, "x")])


def test_refuses_a_path_declared_twice(tmp_path: Path) -> None:
    with pytest.raises(files.FilesError, match="declared twice"):
        files.plan([entry(tmp_path / "a", "1"), entry(tmp_path / "a", "2")])


def test_an_unknown_owner_changes_nothing(tmp_path: Path) -> None:
    wrong = files.Entry(str(tmp_path / "a"), "x", 0o644, "no-such-user", GROUP)
    with pytest.raises(files.FilesError, match="no-such-user"):
        files.apply(files.plan([wrong]))
    assert os.listdir(tmp_path) == []
