"""The generated inventory is literal YAML that Ansible and testinfra read alike."""

from __future__ import annotations

import yaml
from lab import inventory
from lab.inventory import Connection

KEY, KNOWN = '/home/o"x/id_ed25519', "/home/x/known_hosts"


def test_each_host_gets_literal_connection_values():
    text = inventory.render([Connection("lab2", "10.99.7.12"), Connection("lab1", "10.99.7.11")], KEY, KNOWN)
    hosts = yaml.safe_load(text)["all"]["hosts"]
    assert list(hosts) == ["lab1", "lab2"]
    assert hosts["lab1"]["ansible_host"] == "10.99.7.11"
    assert hosts["lab1"]["ansible_ssh_private_key_file"] == KEY
    assert "{{" not in text
    assert text.startswith(inventory.HEADER)


def test_host_keys_are_checked_against_the_labs_own_file():
    options = inventory.variables(Connection("lab1", "10.99.7.11"), KEY, KNOWN)["ansible_ssh_common_args"]
    assert f"UserKnownHostsFile={KNOWN}" in options
    assert "StrictHostKeyChecking=yes" in options
    assert "GlobalKnownHostsFile=/dev/null" in options


def test_no_hosts_is_still_an_inventory():
    assert yaml.safe_load(inventory.render([], KEY, KNOWN)) == {"all": {"hosts": {}}}
