"""Hints about the page cache: the kernel takes them, and what cannot take them is no error."""

from __future__ import annotations

import os

from pdstack.checkpoint import pages


def test_writeback_is_started_where_there_is_a_file(tmp_path):
    with (tmp_path / "file").open("wb") as stream:
        stream.write(bytes(1 << 20))
        stream.flush()
        assert pages.start_writeback(stream.fileno(), 0, 1 << 20)
    reader, writer = os.pipe()
    assert not pages.start_writeback(writer, 0, 1 << 20)
    os.close(reader)
    os.close(writer)


def test_a_read_past_the_cache_is_said_and_taken_back(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    fd = os.open(path, os.O_RDONLY)
    taken = pages.bypass(fd, True)
    assert not pages.bypass(fd, taken), "it is so already"
    assert pages.bypass(fd, not taken) == taken
    os.close(fd)
