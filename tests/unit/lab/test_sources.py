"""apt sources of Debian and Ubuntu machines, old format and new."""

from __future__ import annotations

import pathlib

import pytest
from lab import base, sources
from lab.sources import Source

DEBIAN_12 = """\
Types: deb
# a snapshot's address
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://security.example:8080/debian-security
Suites: bookworm-security
Components: main
"""

UBUNTU_24_04 = """\
Types: deb deb-src
URIs: http://ubuntu.example/ubuntu/
Suites: noble noble-updates noble-backports
Components: main restricted universe multiverse
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBFufwdoBEADv/Gxytx/LcSXYuM0MwKojbBye81s0G1nEx+lz6VAUpIUZnbkq
 -----END PGP PUBLIC KEY BLOCK-----

Enabled: no
Types: deb
URIs: http://off.example/ubuntu/
Suites: noble
Components: main
"""

UBUNTU_22_04 = """\
# deb cdrom:[Ubuntu 22.04]/ jammy main
deb http://ubuntu.example/ubuntu/ jammy main restricted   # the archive
# deb-src http://ubuntu.example/ubuntu/ jammy main
deb-src http://ubuntu.example/ubuntu/ jammy main
deb [arch=amd64 signed-by=/usr/share/keyrings/x.gpg] https://vendor.example/apt stable main
deb http://security.example/ubuntu jammy-security main
"""


def test_deb822_gives_one_source_for_each_suite():
    assert sources.parse_deb822(DEBIAN_12) == [
        Source("http://mirror.example/debian", "bookworm", ("main",)),
        Source("http://mirror.example/debian", "bookworm-updates", ("main",)),
        Source("http://security.example:8080/debian-security", "bookworm-security", ("main",)),
    ]


def test_deb822_skips_what_is_disabled_and_survives_an_embedded_key():
    found = sources.parse_deb822(UBUNTU_24_04)
    assert [source.suite for source in found] == ["noble", "noble-updates", "noble-backports"]
    assert {source.uri for source in found} == {"http://ubuntu.example/ubuntu/"}


def test_one_line_format_ignores_comments_sources_and_options():
    assert sources.parse_one_line(UBUNTU_22_04) == [
        Source("http://ubuntu.example/ubuntu/", "jammy", ("main", "restricted")),
        Source("https://vendor.example/apt", "stable", ("main",)),
        Source("http://security.example/ubuntu", "jammy-security", ("main",)),
    ]


def test_another_debian_suite_comes_from_the_same_archives():
    assert sources.debian_lines(sources.parse_deb822(DEBIAN_12), "trixie") == [
        "deb http://mirror.example/debian trixie main",
        "deb http://mirror.example/debian trixie-updates main",
        "deb http://security.example:8080/debian-security trixie-security main",
    ]


def test_the_old_name_of_the_security_suite_is_not_taken_for_the_archive():
    machine = sources.parse_one_line(
        "deb http://mirror.example/debian buster main\ndeb http://mirror.example/security buster/updates main\n"
    )
    assert sources.debian_lines(machine, "bookworm") == [
        "deb http://mirror.example/debian bookworm main",
        "deb http://mirror.example/security bookworm-security main",
    ]


@pytest.mark.parametrize(
    "machine",
    [sources.parse_deb822(UBUNTU_24_04), sources.parse_one_line("deb cdrom:[Debian 12] bookworm main"), []],
    ids=["ubuntu", "cdrom", "none"],
)
def test_a_machine_without_debian_archives_leaves_the_mirror_to_mmdebstrap(machine):
    assert sources.debian_lines(machine, "bookworm") == []


def test_endpoints_join_the_ports_of_a_host():
    found = sources.endpoints(
        [
            Source("http://a.example/x", "s", ()),
            Source("https://a.example/y", "s", ()),
            Source("http://b.example:3142/z", "s", ()),
            Source("file:/srv/debian", "s", ()),
        ]
    )
    assert found == {"a.example": (80, 443), "b.example": (3142,)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('Acquire::http::Proxy "http://proxy.example:3128/";', ("proxy.example", 3128)),
        ('Acquire::http::proxy "proxy.example";', ("proxy.example", 80)),
        ('Acquire::http::Proxy "DIRECT";', None),
        ('Acquire::http::Proxy::internal.example "DIRECT";', None),
        ('Acquire "";', None),
    ],
)
def test_proxy_of_apt(line, expected):
    assert sources.proxy_endpoint(f'APT "";\n{line}\n') == expected


def test_machine_sources_reads_both_formats_and_nothing_disabled_by_its_name(tmp_path: pathlib.Path):
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (tmp_path / "sources.list").write_text("deb http://one.example/ bookworm main\n")
    (parts / "a.sources").write_text(DEBIAN_12)
    (parts / "b.list").write_text("deb http://two.example/ bookworm main\n")
    (parts / "c.list.disabled").write_text("deb http://off.example/ bookworm main\n")
    hosts = sources.endpoints(base.machine_sources(tmp_path))
    assert hosts == {"mirror.example": (80,), "one.example": (80,), "security.example": (8080,), "two.example": (80,)}


def test_the_tree_is_keyed_by_all_that_decides_its_content():
    lines = ["deb http://mirror.example/debian bookworm main"]
    keys = {
        base.key("bookworm", "full", lines),
        base.key("trixie", "full", lines),
        base.key("bookworm", "minimal", lines),
        base.key("bookworm", "none", lines),
        base.key("bookworm", "full", []),
    }
    assert len(keys) == 5
    assert base.key("bookworm", "full", lines) in keys
    assert not {"python3", "python3-apt", "python3-minimal"} & set(base.packages("none"))
    assert "python3" not in base.packages("minimal")
