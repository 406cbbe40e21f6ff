"""Names, addresses, host specifications and settings."""

from __future__ import annotations

import ipaddress
import pathlib

import pytest
from lab import naming, settings
from lab.errors import LabError
from lab.naming import HostSpec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lab1", HostSpec("lab1", "bookworm", "full")),
        ("lab2:trixie", HostSpec("lab2", "trixie", "full")),
        ("bad:bookworm:none", HostSpec("bad", "bookworm", "none")),
        ("bad::minimal", HostSpec("bad", "bookworm", "minimal")),
    ],
)
def test_host_specification(text, expected):
    assert naming.parse_spec(text) == expected


@pytest.mark.parametrize(
    "text", ["", "Lab", "1lab", "a_b", "../x", "lab1:noble", "lab1:trixie:some", "a:trixie:full:x"]
)
def test_a_host_that_cannot_be_is_refused(text):
    with pytest.raises(LabError, match=r"not a host|unknown"):
        naming.parse_spec(text)


def test_two_checkouts_have_two_labs():
    first, second = naming.lab_id("/srv/a/pdstack", None), naming.lab_id("/srv/b/pdstack", None)
    assert first != second
    assert first == naming.lab_id("/srv/a/pdstack", None)
    assert naming.lab_id("/srv/a/pdstack", "mol1") == "mol1"


@pytest.mark.parametrize("chosen", ["TooLoud", "ninechars", "a/b", "a b"])
def test_a_lab_id_that_cannot_be_a_name_is_refused(chosen):
    with pytest.raises(LabError, match="LAB_ID"):
        naming.lab_id("/srv/a", chosen)


def test_every_name_fits_the_kernel_and_holds_the_id():
    names = naming.Names("abcdefgh")
    assert len(names.machine_link) <= 15
    assert len(names.port(253)) <= 15
    assert all("abcdefgh" in name for name in (names.namespace, names.machine_link, names.host("lab1")))


def test_a_subnet_that_is_routed_already_is_passed_over():
    first = naming.pick_subnet("abc", [])
    second = naming.pick_subnet("abc", [first])
    assert first != second
    assert first.prefixlen == 24
    assert first.subnet_of(naming.SUBNETS)
    assert naming.pick_subnet("abc", [ipaddress.IPv4Network("192.168.0.0/16")]) == first


def test_no_free_subnet_says_what_to_set():
    with pytest.raises(LabError, match="LAB_SUBNET"):
        naming.pick_subnet("abc", [ipaddress.IPv4Network("10.0.0.0/8")])


@pytest.mark.parametrize("text", ["10.99.0.0/16", "8.8.8.0/24", "127.0.0.0/24", "10.99.0.1/24", "nonsense"])
def test_only_a_private_24_is_a_subnet(text):
    with pytest.raises(LabError, match="LAB_SUBNET"):
        naming.parse_subnet(text)


def test_addresses_do_not_meet():
    assert naming.next_number([]) == naming.FIRST_HOST
    assert naming.next_number([11, 13]) == 12
    with pytest.raises(LabError, match="full"):
        naming.next_number(range(naming.FIRST_HOST, naming.MACHINE_END))
    assert naming.mirror_address("10.99.7.0/24", 0) == "10.99.7.2"
    assert naming.mirror_address("10.99.7.0/24", 8) == "10.99.7.10"
    with pytest.raises(LabError, match="mirrors"):
        naming.mirror_address("10.99.7.0/24", 9)


def test_hosts_file_names_the_host_itself_first_then_its_peers_and_mirrors():
    text = naming.hosts_file(
        ipaddress.IPv4Network("10.99.7.0/24"), {"lab1": 11, "lab2": 12}, {"mirror.example": "10.99.7.2"}, "lab2"
    )
    assert text.splitlines()[2:] == ["10.99.7.12 lab2", "10.99.7.11 lab1", "10.99.7.2 mirror.example"]


def test_settings_follow_the_environment():
    env = {"HOME": "/home/x", "LAB_ENGINE": "podman", "LAB_ID": "m1", "XDG_CACHE_HOME": "/big/cache"}
    found = settings.load(env, pathlib.Path("/srv/pdstack"))
    assert (found.engine, found.lab) == ("podman", "m1")
    assert found.cache == pathlib.Path("/big/cache/pdstack/lab")
    assert found.state == pathlib.Path("/home/x/.local/state/pdstack/lab/m1")
    with pytest.raises(LabError, match="LAB_ENGINE 'docker'"):
        settings.load({"HOME": "/", "LAB_ENGINE": "docker"})
