"""What is read of a host: packages, holds, kernels, and the fingerprints of key files."""

from __future__ import annotations

import base64
import subprocess

import pytest
from pdstack import driver, driver_state, hostinfo, openpgp, runner

DPKG = """install installed nvidia-open-580 580.95.05-0ubuntu1
hold installed libnvidia-compute-580 580.95.05-0ubuntu1
deinstall config-files nvidia-driver-535 535.183.01-1
hold installed cuda-toolkit-13-0 13.0.2-1
install installed libcublas-13-0 13.1.0.3-1
install installed bash 5.2
"""
MODINFO = """filename:       /lib/modules/6.8.0/updates/dkms/nvidia.ko.zst
version:        580.95.05
license:        Dual MIT/GPL
signer:         gpu1 Secure Boot Module Signature key
"""
UNITS = "nvidia-persistenced.service enabled enabled\nnvidia-fabricmanager.service disabled enabled\n"


def answers(table):
    def run(argv):
        for words, out in table.items():
            if " ".join(argv).startswith(words):
                return runner.Completed(0, out, "")
        return runner.Completed(127, "", "not found")

    return run


def test_a_debian_host(tmp_path):
    (tmp_path / "lib/modules/6.8.0-9").mkdir(parents=True)
    (tmp_path / "lib/modules/6.8.0-10").mkdir()
    (tmp_path / "etc/pdstack").mkdir(parents=True)
    (tmp_path / "etc/pdstack/held-packages").write_text("cuda-toolkit-13-0\n")
    for name in ("cuda-13.0/bin/nvcc", "cuda-12.4/lib", "other/bin/nvcc"):
        (tmp_path / "usr/local" / name).mkdir(parents=True)
    run = answers({"dpkg-query": DPKG, "modinfo -k 6.8.0-9 ": MODINFO, "systemctl": UNITS})
    seen = driver_state.observe(run, "6.8.0-9", str(tmp_path))
    assert sorted(seen.packages) == [
        "cuda-toolkit-13-0",
        "libcublas-13-0",
        "libnvidia-compute-580",
        "nvidia-open-580",
    ]
    assert seen.held == ["cuda-toolkit-13-0", "libnvidia-compute-580"]
    assert seen.recorded_holds == ["cuda-toolkit-13-0"]
    assert (seen.kernel, seen.next_kernel) == ("6.8.0-9", "6.8.0-10")  # numbers, not text
    assert list(seen.modules) == ["6.8.0-9"]
    assert seen.modules["6.8.0-9"].open
    assert seen.enabled == [driver.PERSISTENCED]
    assert seen.units == [driver.FABRIC_MANAGER, driver.PERSISTENCED]
    assert seen.toolkits == ["/usr/local/cuda-13.0"]


@pytest.mark.parametrize(("unit", "units", "enabled"), [("static", 1, 1), ("disabled", 1, 0), ("masked", 0, 0)])
def test_a_static_unit_needs_no_enabling_and_a_masked_one_is_left(tmp_path, unit, units, enabled):
    seen = driver_state.observe(answers({"systemctl": f"nvidia-persistenced.service {unit}\n"}), "6", str(tmp_path))
    assert (len(seen.units), len(seen.enabled)) == (units, enabled)


def test_a_red_hat_host(tmp_path):
    locks = tmp_path / "etc/dnf/plugins"
    locks.mkdir(parents=True)
    (locks / "versionlock.list").write_text("# added\nnvidia-open-3:580.95.05-1.el9.*\n")
    run = answers({"rpm -qa": "nvidia-open 580.95.05-1.el9\nlibnvidia-ml 580.95.05-1.el9\nglibc 2.34-1\n"})
    seen = driver_state.observe(run, "5.14", str(tmp_path))
    assert seen.packages == {"nvidia-open": "580.95.05-1.el9", "libnvidia-ml": "580.95.05-1.el9"}
    assert seen.held == ["nvidia-open"]


@pytest.mark.parametrize(
    ("said", "expected"), [("/var/lib/dkms/mok.pub is already enrolled", True), ("is not enrolled", False)]
)
def test_the_machine_owner_key(tmp_path, said, expected):
    assert driver_state.observe(answers({}), "6", str(tmp_path)).mok_enrolled is None  # no EFI
    (tmp_path / "sys/firmware/efi").mkdir(parents=True)
    assert driver_state.observe(answers({}), "6", str(tmp_path)).mok_enrolled is False  # no key at all
    (tmp_path / "var/lib/dkms").mkdir(parents=True)
    (tmp_path / "var/lib/dkms/mok.pub").touch()
    assert driver_state.observe(answers({"mokutil": said}), "6", str(tmp_path)).mok_enrolled is expected


@pytest.fixture(scope="module", params=["ed25519", "rsa3072"])
def key(request, tmp_path_factory):
    """Binary and armored public key, and the fingerprint that gpg itself says."""
    home = tmp_path_factory.mktemp("g")

    def gpg(*words):
        command = ["gpg", "--homedir", home, "--batch", "--quiet", "--passphrase", "", *words]
        return subprocess.run(command, check=True, capture_output=True).stdout

    gpg("--quick-generate-key", "tests", request.param, "default", "never")
    told = gpg("--with-colons", "--list-keys").decode()
    fingerprint = next(line.split(":")[9] for line in told.splitlines() if line.startswith("fpr:"))
    yield gpg("--export"), gpg("--armor", "--export"), fingerprint, gpg("--armor", "--export-secret-keys")
    subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], check=False)


def test_fingerprints_are_those_that_gpg_says(key):
    binary, armored, fingerprint, _ = key
    assert openpgp.fingerprints(binary) == [fingerprint]
    assert openpgp.fingerprints(armored) == [fingerprint]
    assert openpgp.fingerprints(openpgp.armored(binary)) == [fingerprint]


def test_a_second_key_in_the_file_is_seen(key):
    binary, armored, _fingerprint, _ = key
    other = b"\x98\x06\x04\x00\x00\x00\x00\x01"
    assert len(openpgp.fingerprints(binary + other)) == 2
    assert len(openpgp.fingerprints(armored + openpgp.armored(other))) == 2


@pytest.mark.parametrize("data", [b"", b"<html>404</html>", b"-----BEGIN CERTIFICATE-----\nAA==\n", b"\x98\xff\x04"])
def test_what_is_no_key_is_refused(data):
    with pytest.raises(openpgp.KeyFileError):
        openpgp.fingerprints(data)


def test_half_a_key_and_a_secret_key_are_refused(key):
    binary, _armored, _, secret = key
    with pytest.raises(openpgp.KeyFileError, match="cut off"):
        openpgp.fingerprints(binary[:-7])
    with pytest.raises(openpgp.KeyFileError):
        openpgp.fingerprints(secret)
    body = base64.b64decode(b"".join(line for line in secret.split(b"\n")[2:-3] if not line.startswith(b"=")))
    with pytest.raises(openpgp.KeyFileError, match="secret"):
        openpgp.fingerprints(body)


def test_a_user_is_told_and_a_missing_one_too():
    root = hostinfo.user("root")
    assert (root["name"], root["home"]) == ("root", "/root")
    assert root["shell"].startswith("/")
    assert hostinfo.user("nobody-of-that-name") == {}
