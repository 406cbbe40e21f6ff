"""Inventory variables: defaults, every kind of error, and that all of them are found at once."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pathlib
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st
from pdstack import flags, folders, intent, inventory, options, refusal, rules, settings
from unit.plan import inventories as inv

ROLES = pathlib.Path(__file__).parents[3] / "roles"
ROLE_SPECS = sorted(ROLES.glob("*/meta/argument_specs.yml"))


def refused(**changes: Any) -> list[refusal.Refusal]:
    """Return why an inventory of one host with these variables is refused."""
    with pytest.raises(refusal.IntentError) as error:
        inv.read("gpu1", **changes)
    return error.value.refusals


def only(found: list[refusal.Refusal]) -> refusal.Refusal:
    assert len(found) == 1, found
    return found[0]


def test_the_checkpoint_alone_is_enough() -> None:
    wanted = inv.read("gpu1")
    assert wanted.release.name == "sglang-0.5.23"
    assert wanted.topology.mode == "pd"
    assert (wanted.topology.prefill.tp, wanted.topology.decode.tp) == (4, 4)
    assert wanted.topology.context_length == 8192
    assert wanted.settings.ports == settings.Ports(8000, 29001, 30000, 30100, 30200, 8998)
    assert (wanted.heads, wanted.size_bytes) == (64, 146_000_000_000)
    assert wanted.gpu_hosts[0].address == "192.0.2.1"


def test_the_profile_chooses_the_release() -> None:
    assert inv.read("gpu1", pd_profile="cpu").release.name == "cpu-0.5.23"


def test_the_inventory_name_is_the_address_of_last_resort() -> None:
    wanted = intent.parse(
        {"gpu1.example": inv.variables()}, {"gpu_hosts": ["gpu1.example"], "router_hosts": ["gpu1.example"]}
    )
    assert wanted.gpu_hosts[0].address == "gpu1.example"


WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    # variables, subject, a word of found or needed, a word of the remedy
    ({"pd_modle": 1}, "pd_modle", "unknown variable", "'pd_model'"),
    ({"pd_topology": {"mod": "pd"}}, "pd_topology.mod", "unknown key", "'mode'"),
    ({"pd_topology": {"prefill": {"tpp": 4}}}, "pd_topology.prefill.tpp", "unknown key", "'tp'"),
    ({"pd_topology": {"mode": "dp"}}, "pd_topology.mode", "'dp'", "choose one"),
    ({"pd_topology": {"mode": "replica"}}, "pd_topology.mode", "'replica'", "'replicas'"),
    ({"pd_topology": "pd"}, "pd_topology", "a mapping", "below it"),
    ({"pd_topology": {"context_length": "8192"}}, "pd_topology.context_length", "whole number", "quotes"),
    ({"pd_topology": {"context_length": True}}, "pd_topology.context_length", "True", "whole number"),
    ({"pd_topology": {"prefill": {"tp": 0}}}, "pd_topology.prefill.tp", "1 to 64", "range"),
    ({"pd_topology": {"decode": {"count": "some"}}}, "pd_topology.decode.count", "auto", "quotes"),
    ({"pd_topology": inv.aggregated(3)}, "pd_topology.aggregated.tp", "64 attention heads", "1, 2, 4, 8"),
    ({"pd_topology": {"prefill": {"context_length": 4096}}}, "pd_topology.prefill.context_length", "unknown", "pair"),
    ({"pd_topology": {"prefill": {"tp": 8}, "decode": {"tp": 3}}, "pd_model": {**inv.FLASH, "heads": 24}},
     "pd_topology", "multiple of the other", "both to 3"),
    ({"pd_model": None}, "pd_model", "nothing", "set pd_model"),
    ({"pd_model": {"repo": "x/y"}}, "pd_model.revision", "nothing", "set pd_model.revision"),
    ({"pd_model": {"repo": "x/y", "revision": "main"}}, "pd_model.revision", "'main'", "40 hex digits"),
    ({"pd_model": {"repo": "flash", "revision": inv.COMMIT}}, "pd_model.repo", "'flash'", "owner/name"),
    ({"pd_model": {**inv.FLASH, "source": "ftp://x"}}, "pd_model.source", "'ftp://x'", "dir:///"),
    ({"pd_release": "sglang-0.5.32"}, "pd_release", "one of", "'sglang-0.5.23'"),
    ({"pd_release": "cpu-0.5.23"}, "pd_release", "cpu profile", "pd_profile"),
    ({"pd_profile": "cpu", "pd_release": "sglang-0.5.23"}, "pd_release", "gpu profile", "pd_profile"),
    ({"pd_ports": {"router": 80}}, "pd_ports.router", "1024 to 65535", "range"),
    ({"pd_ports": {"router": 8000.5}}, "pd_ports.router", "float", "whole number"),
    ({"pd_transfer": "mooncake_tcp"}, "pd_transfer", "KV lane", "nixl"),
    ({"pd_transfer": "nixel"}, "pd_transfer", "one of", "'nixl'"),
    ({"pd_engine": {"mem_fraction_static": 1.5}}, "pd_engine.mem_fraction_static", "0.98", "range"),
    ({"pd_engine": {"extra_args": {"port": 1}}}, "pd_engine.extra_args.port", "plan sets", "variable"),
    ({"pd_engine": {"extra_args": {"api-key": "s3cret"}}}, "pd_engine.extra_args.api-key", "secret", "pd_security"),
    ({"pd_engine": {"extra_args": {"page-sise": 64}}}, "pd_engine.extra_args.page-sise", "unknown", "'page-size'"),
    ({"pd_engine": {"extra_args": {"page_size": 64}}}, "pd_engine.extra_args.page_size", "'-'", "page-size"),
    ({"pd_engine": {"extra_args": {"ep-size": {"a": 1}}}}, "pd_engine.extra_args.ep-size", "list of them", "one value"),
    ({"pd_engine": {"extra_env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}},
     "pd_engine.extra_env.PYTORCH_CUDA_ALLOC_CONF", "600 times slower", "remove"),
    ({"pd_topology": {"decode": {"extra_args": {"page-size": 64}}}},
     "pd_topology.decode.extra_args.page-size", "both sides of a pair", "pd_engine.extra_args"),
    ({"pd_router": {"extra_args": {"polcy": "random"}}}, "pd_router.extra_args.polcy", "unknown", "'policy'"),
    ({"pd_router": {"health_interval_s": 2}}, "pd_router.health_timeout_s", "5", "lower"),
    ({"pd_router": {"health_interval_s": 999999}}, "pd_router.health_interval_s", "600", "range"),
    ({"pd_release": "sglang-0.5.13.post1", "pd_speculative": {"algorithm": "EAGLE"}},
     "pd_speculative.algorithm", "sm_100", "pd_release"),
    ({"pd_security": {"tls_cert_file": "/c"}}, "pd_security.tls_cert_file", "with tls: off", "pd_security.tls"),
    ({"pd_security": {"tls": "given", "tls_key_file": "/k"}}, "pd_security.tls_cert_file", "nothing", "set tls_cert"),
    ({"pd_security": {"tls": "own", "tls_names": ["a b"]}}, "pd_security.tls_names", "'a b'", "one for each"),
    ({"pd_security": {"client_networks": ["10.0.0.1/8"]}}, "pd_security.client_networks", "host bits", "10.1.0.0/16"),
    ({"pd_security": {"firewall": False, "metrics_networks": ["10.0.0.0/8"]}},
     "pd_security.metrics_networks", "firewall: false", "remove"),
    ({"pd_security": {"firewall_open_ports": [0]}}, "pd_security.firewall_open_ports", "65535", "port number"),
    ({"pd_security": {"api_key": 12345678}}, "pd_security.api_key", "(not shown)", "a string"),
    ({"pd_security": {"api_key": "too short"}}, "pd_security.api_key", "16 to 256", "bearer token"),
    ({"pd_security": {"api_key": "k" * 20, "admin_api_key": "k" * 20}},
     "pd_security.admin_api_key", "the same as api_key", "leave it out"),
    ({"pd_probe_measure": "perhaps"}, "pd_probe_measure", "true or false", "quotes"),
    ({"pd_service_interface": "a name much too long"}, "pd_service_interface on gpu1", "interface name", "network"),
    ({"pd_service_address": "0.0.0.0"}, "pd_service_address on gpu1", "IP address", "service network"),
    ({"pd_bootstrap_python": "perhaps"}, "pd_bootstrap_python on gpu1", "true or false", "quotes"),
    ({"pd_service_address": "gpu1.example"}, "pd_service_address on gpu1", "IP address", "service network"),
    ({"pd_sysfs_root": "sys"}, "pd_sysfs_root on gpu1", "absolute", "root of the sysfs"),
    ({"pd_excluded_gpus": "0000:06:00.0"}, "pd_excluded_gpus on gpu1", "a list", "YAML list"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "subject", "said", "remedy"), WRONG, ids=[case[1] + " " + case[2] for case in WRONG]
)
def test_wrong_input_says_what_was_found_needed_and_how_to_mend_it(
    changes: dict[str, Any], subject: str, said: str, remedy: str
) -> None:
    found = only(refused(**changes))
    assert found.subject == subject
    assert said in f"{found.found} {found.needed}"
    assert remedy in found.remedy


def test_all_errors_at_once() -> None:
    every = {name: value for changes, *_ in WRONG[:4] for name, value in changes.items()}
    found = refused(**every, pd_ports={"router": 1, "prefil": 2}, pd_transfer="x")
    assert len(found) >= 4
    text = refusal.render("title", found)
    assert all(item.subject in text and item.remedy in text for item in found)


def test_no_secret_is_ever_said() -> None:
    found = refused(
        pd_security={"api_key": ["s3cret"], "admin_api_key": 4711}, pd_engine={"extra_args": {"api-key": "s3cret"}}
    )
    assert len(found) == 3
    text = refusal.render("title", found)
    assert "s3cret" not in text
    assert "4711" not in text
    assert "s3cret" not in refusal.render("title", refused(pd_security={"api_key": "s3cret"}))
    assert "security" not in intent.public(inv.read("gpu1"))


@pytest.mark.parametrize("group", ["gpu_hosts", "router_hosts"])
def test_groups_must_exist_and_have_members(group: str) -> None:
    hosts = {"gpu1": inv.variables()}
    for members in (None, []):
        groups: dict[str, list[str]] = {"gpu_hosts": ["gpu1"], "router_hosts": ["gpu1"]}
        if members is None:
            del groups[group]
        else:
            groups[group] = members
        with pytest.raises(refusal.IntentError) as error:
            intent.parse(hosts, groups)
        assert only(error.value.refusals).subject == f"group {group}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pd_release", "sglang-0.5.13.post1"),
        ("pd_topology", {"context_length": 4096}),
        ("pd_model", {**inv.FLASH, "revision": "f" * 40}),
    ],
)
def test_hosts_must_agree(name: str, value: Any) -> None:
    """A pair with two releases, commits or context lengths is a hang or garbage at the client."""
    with pytest.raises(refusal.IntentError) as error:
        inv.read("gpu1", "gpu2", "gpu3", per_host={"gpu2": {name: value}})
    found = error.value.refusals[0]
    assert found.subject == name
    assert "gpu2" in found.found
    assert "gpu1, gpu3" in found.found


def test_a_router_host_may_leave_unset_what_the_gpu_hosts_have() -> None:
    hosts = {
        "gpu1": inv.variables(ansible_host="192.0.2.1", pd_transfer="nixl"),
        "front": {"ansible_host": "192.0.2.9"},
    }
    groups = {"gpu_hosts": ["gpu1"], "router_hosts": ["front"]}
    assert intent.parse(hosts, groups).model.repo == inv.FLASH["repo"]
    hosts["gpu2"] = inv.variables(ansible_host="192.0.2.2")
    with pytest.raises(refusal.IntentError) as error:
        intent.parse(hosts, {**groups, "gpu_hosts": ["gpu1", "gpu2"]})
    assert only(error.value.refusals).subject == "pd_transfer"


def test_a_misspelt_group() -> None:
    with pytest.raises(refusal.IntentError) as error:
        intent.parse({"gpu1": inv.variables()}, {"gpu_host": ["gpu1"], "router_hosts": ["gpu1"]})
    assert only(error.value.refusals).remedy == "did you mean 'gpu_host'?"


def test_hosts_need_addresses_of_their_own() -> None:
    with pytest.raises(refusal.IntentError) as error:
        inv.read("gpu1", "gpu2", per_host={"gpu2": {"pd_service_address": "192.0.2.1"}})
    assert "gpu1, gpu2" in only(error.value.refusals).found
    with pytest.raises(refusal.IntentError) as error:
        inv.read("gpu1", "gpu2", per_host={"gpu2": {"ansible_host": "127.0.0.1"}})
    assert "other hosts can reach" in only(error.value.refusals).needed
    assert inv.read("gpu1", per_host={"gpu1": {"ansible_host": "127.0.0.1"}}).gpu_hosts[0].address == "127.0.0.1"


def test_a_switch_given_on_the_command_line_is_a_string() -> None:
    assert inv.read("gpu1", pd_probe_measure="true").settings.probe_measure is True
    assert inv.read("gpu1", pd_probe_measure="no").settings.probe_measure is False
    assert inv.read("gpu1", pd_bootstrap_python="false")


def test_role_variables_are_known_and_their_misspellings_are_not() -> None:
    groups = {"gpu_hosts": ["gpu1"], "router_hosts": ["gpu1"]}
    roles, prefixes = ["checkpoint_root", "pd_service_ready_timeout"], ["checkpoint_"]
    fine = inv.variables(
        checkpoint_root="/var/lib/pdstack/models", pd_service_ready_timeout=3, other_root="/y", ansible_port=22
    )
    intent.parse({"gpu1": fine}, groups, roles, prefixes)
    wrong = inv.variables(checkpoint_rot="/x", pd_service_redy_timeout=3)
    with pytest.raises(refusal.IntentError) as error:
        intent.parse({"gpu1": wrong}, groups, roles, prefixes)
    assert [(item.subject, item.remedy) for item in error.value.refusals] == [
        ("checkpoint_rot", "did you mean 'checkpoint_root'?"),
        ("pd_service_redy_timeout", "did you mean 'pd_service_ready_timeout'?"),
    ]


def test_gpus_are_excluded_by_any_spelling_of_their_pci_id() -> None:
    given = ["00000000:F4:00.0", "0:6:0"]  # nvidia-smi's, and a person's
    assert inv.read("gpu1", pd_excluded_gpus=given).gpu_hosts[0].excluded_gpus == ("0000:f4:00.0", "0000:06:00.0")
    (item,) = refused(pd_excluded_gpus=["GPU-5fa2"])
    assert (item.subject, item.found) == ("pd_excluded_gpus on gpu1", "not a PCI id: 'GPU-5fa2'")


def read_with(**changes: Any) -> intent.Intent:
    """Return the intent of an inventory of two hosts, the second of which has these role variables."""
    hosts = {"gpu1": inv.variables(), "gpu2": inv.variables(**changes)}
    hosts = {name: {**found, "ansible_host": f"10.0.0.{i}"} for i, (name, found) in enumerate(hosts.items(), 1)}
    groups = {"gpu_hosts": ["gpu1", "gpu2"], "router_hosts": ["gpu1"]}
    return intent.parse(hosts, groups, [*rules.PLACES, *rules.USERS], inventory.ROLE_PREFIXES)


@pytest.mark.parametrize("name", sorted(rules.PLACES))
def test_a_place_that_the_others_do_not_go_by_is_refused(name: str) -> None:
    assert read_with(**{name: rules.PLACES[name] + "/"})
    with pytest.raises(refusal.IntentError) as error:
        read_with(**{name: "/data"})
    refused = only(error.value.refusals)
    assert (refused.subject, refused.found) == (f"{name} on gpu2", "/data")
    assert rules.PLACES[name] in refused.needed
    assert rules.PLACES[name] in refused.remedy


@pytest.mark.parametrize("name", rules.USERS)
def test_one_user_has_one_name(name: str) -> None:
    assert read_with(**dict.fromkeys(rules.USERS, "llm"))
    with pytest.raises(refusal.IntentError) as error:
        read_with(**{name: "llm"})
    assert f"{name}: llm" in only(error.value.refusals).found


def test_places_and_user_are_those_of_the_plan_and_of_the_roles() -> None:
    assert (rules.PLACES["checkpoint_root"], rules.PLACES["sglang_runtime_caches"]) == (
        folders.MODELS_DIR,
        folders.JIT_DIR,
    )
    defaults: dict[str, Any] = {}
    for path in ROLES.glob("*/defaults/main.yml"):
        defaults |= yaml.safe_load(path.read_text()) or {}
    wanted = {**rules.PLACES, **dict.fromkeys(rules.USERS, rules.USER)}
    assert {name: defaults[name] for name in wanted} == wanted


def test_hosts_are_sorted_as_people_count() -> None:
    names = [f"gpu{i}" for i in (10, 9, 2, 1, 100)]
    assert [host.name for host in inv.read(*names).gpu_hosts] == ["gpu1", "gpu2", "gpu9", "gpu10", "gpu100"]


ROWS = settings.table()
NESTED = sorted({row.name.rpartition(".")[0] for row in ROWS if "." in row.name})
FREE_FORM = {row.name for row in ROWS if row.name.endswith(("extra_args", "extra_env"))}


ODD: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        10**30,
        10**400,
        1.5,
        math.nan,
        math.inf,
        "",
        "auto",
        "x",
        "0",
        "\0",
        "\u00e9",
        "a\nb",
        b"x",
        (1,),
    ),
    *([], [None], [{}], [[1]], ["x"], [1], [True], [math.nan], [""], ["10.0.0.0/99"], ["0000:06:00.0"]),
    *({}, {1: 2}, {None: 1}, {True: {}}, {"a": None}, {"x": [{}]}, "x" * 10000),
]


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_whatever_stands_in_a_variable_is_taken_or_refused_and_never_a_traceback(profile: str) -> None:
    taken = 0
    for row, wrong in itertools.product(ROWS, ODD):
        variables: dict[str, Any] = {**copy.deepcopy(inv.variables()), "pd_profile": profile}
        *places, name = row.name.split(".")
        level = variables
        for place in places:
            level = level.setdefault(place, {})
        level[name] = wrong
        try:
            found = intent.parse({"h": variables}, {"gpu_hosts": ["h"], "router_hosts": ["h"]}, ())
        except refusal.IntentError as error:
            subjects = {item.subject.split(".")[0].split(" ")[0] for item in error.refusals}
        else:
            subjects = {places[0] if places else name}
            taken += 1
            json.dumps(intent.public(found), allow_nan=row.name.endswith(("extra_args", "extra_env")))
            assert intent.summary(found)
        assert (places[0] if places else name) in subjects, (row.name, wrong)
    assert taken > len(ROWS)  # such as None, where a variable may be unset


@given(place=st.sampled_from([*NESTED, ""]), letters=st.text("abcdefghijklmnop_", min_size=1, max_size=12))
def test_an_unknown_key_is_refused_wherever_it_stands(place: str, letters: str) -> None:
    known = {row.name for row in ROWS}
    name = f"{place}.{letters}" if place else f"pd_{letters}"
    if name in known:
        return
    variables: dict[str, Any] = copy.deepcopy(inv.variables())
    if place:
        level = variables
        for part in place.split("."):
            level = level.setdefault(part, {})
        level[letters] = 1
    else:
        variables[name] = 1
    with pytest.raises(refusal.IntentError) as error:
        intent.parse({"h": variables}, {"gpu_hosts": ["h"], "router_hosts": ["h"]}, known_role_variables=())
    assert name in {item.subject for item in error.value.refusals}


@given(row=st.sampled_from([row for row in ROWS if "." not in row.name or row.name.count(".") < 3]), data=st.data())
def test_a_slip_of_one_letter_is_answered_with_the_right_name(row: options.Row, data: st.DataObject) -> None:
    place, _, key = row.name.rpartition(".")
    cut = data.draw(st.integers(1, max(1, len(key) - 1)))
    slip = key[:cut] + key[cut + 1 :] if len(key) > 3 else key + "s"
    siblings = {item.name for item in ROWS}
    if (f"{place}.{slip}" if place else slip) in siblings or len(key) <= 2:
        return
    known = [item.name.rpartition(".")[2] for item in ROWS if item.name.rpartition(".")[0] == place]
    assert options.nearest(slip, known).startswith("did you mean '")


def test_every_variable_is_documented_with_a_reason_for_its_default() -> None:
    assert len(ROWS) > 60
    for row in ROWS:
        assert len(row.doc) > 5, row
        assert row.required or row.why, row
        if row.choices and not row.required and row.default is not None:
            assert row.default in row.choices, row
    assert {row.name for row in ROWS if row.required} == {"pd_model", "pd_model.repo", "pd_model.revision"}
    assert {row.name for row in ROWS if row.secret} == {"pd_security.api_key", "pd_security.admin_api_key"}


def test_releases_are_folders_with_locks(project_root: Any) -> None:
    folders = {path.parent.name for path in (project_root / "releases").glob("*/release.yml")}
    assert folders == set(flags.RELEASES)


@pytest.mark.parametrize(
    ("former", "now", "variables"),
    [
        ("pd_checkpoint", "pd_model", {"pd_checkpoint": {"repo": "a/b"}}),
        ("pd_topology.sequence_length", "pd_topology.context_length", {"pd_topology": {"sequence_length": 4096}}),
        ("pd_interface", "pd_service_interface", {"pd_interface": "eth0"}),
        ("checkpoint_threads", "checkpoint_workers", {"checkpoint_threads": 4}),
    ],
)
def test_a_former_name_is_refused_with_the_new_one(monkeypatch, former: str, now: str, variables: dict) -> None:
    """Top-level, a key, of a host, of a role."""
    monkeypatch.setitem(settings.RENAMED, former, settings.Renamed(now, "0.2.0"))
    hosts = {"h": {**inv.variables(), **variables}}
    groups = {"gpu_hosts": ["h"], "router_hosts": ["h"]}
    with pytest.raises(refusal.IntentError) as error:
        intent.parse(hosts, groups, known_role_variables=["checkpoint_workers"], role_prefixes=["checkpoint_"])
    (told,) = [item for item in error.value.refusals if item.subject.startswith(former)]
    assert told.found == f"a name that is {now} since 0.2.0"
    assert f"write {now} in its place; the value stays as it is" in told.remedy


def test_former_names_lead_to_names_that_there_are() -> None:
    known = {row.name for row in settings.table()} | set(settings.variable_names())
    roles = [yaml.safe_load(path.read_text()) for path in ROLE_SPECS]
    known |= {name for spec in roles for entry in spec["argument_specs"].values() for name in entry.get("options", {})}
    assert len(ROLE_SPECS) > 5
    ever = set((ROLE_SPECS[0].parents[3] / "docs/reference/names.txt").read_text().split())
    gone = ever - known - set(settings.RENAMED)
    assert gone == set(), "an inventory of an earlier version may have them: settings.RENAMED says what they are now"
    assert known <= ever
    for former, became in settings.RENAMED.items():
        assert became.now in known
        assert former not in known
