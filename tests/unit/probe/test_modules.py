"""The modules and the playbook through a real ansible-playbook, on this machine with fake drivers."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import yaml
from hosts import build, catalogue
from pdstack import codec, facts, p2p, trace_cli

BIN = pathlib.Path(sys.executable).parent
ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def ansible(tmp_path):
    """A function that runs a playbook (a path, or tasks) on an inventory, and returns the process."""
    if not (BIN / "ansible-playbook").exists():
        pytest.skip("ansible-core is not in this environment")

    def run(inventory, playbook, *words):
        (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
        if isinstance(playbook, list):
            path = tmp_path / "play.yml"
            path.write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": playbook}]))
            playbook = path
        return subprocess.run(
            [BIN / "ansible-playbook", "-i", tmp_path / "hosts.yml", playbook, *words],
            env={
                **os.environ,
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_HOME": str(tmp_path / "home"),
                "NO_COLOR": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.fixture
def local(tmp_path, libraries):
    """A function that puts a fixture host on disk and returns its inventory variables."""

    def host(name, **more):
        build.build(catalogue.BY_NAME[name], tmp_path / name, libraries)
        return {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "pd_sysfs_root": str(tmp_path / name / "root"),
            "pd_driver_library": str(tmp_path / name / "driver"),
            **more,
        }

    return host


FROM = {"sysfs_root": "{{ pd_sysfs_root }}", "driver_library": "{{ pd_driver_library }}"}


def test_both_modules_and_the_baseline(ansible, local, tmp_path):
    kept, found = tmp_path / "baseline.json", tmp_path / "found.json"
    ask = {"measure": True, "baseline": str(kept), **FROM}
    keep = {"ansible.builtin.copy": {"content": "{{ one.baseline | to_json }}", "dest": str(kept)}}
    slow = {
        "ansible.builtin.lineinfile": {"path": "{{ pd_driver_library }}/fake_driver.conf", "line": "bandwidth 0 1 20"}
    }
    show = {
        "ansible.builtin.copy": {"content": "{{ {'gpu': gpu, 'one': one, 'two': two} | to_json }}", "dest": str(found)}
    }
    done = ansible(
        {"all": {"hosts": {"gpu1": local("h200-vm-2")}}},
        [
            {"pd_gpu_info": FROM, "register": "gpu"},
            {"pd_fabric_info": ask, "register": "one"},
            keep,
            slow,
            {"pd_fabric_info": ask, "register": "two"},
            show,
        ],
    )
    assert done.returncode == 0, done.stdout
    result = json.loads(found.read_text())
    whole = facts.merge([{**result[name]["facts"], "host": "gpu1"} for name in ("gpu", "one")])
    assert whole.driver.state == "ok"
    assert whole.gpus[1].name == "NVIDIA H200"
    assert whole.p2p.data_ok is True
    assert result["one"]["changed"] is False
    assert codec.load(p2p.Baseline, json.loads(kept.read_text())).gpus == result["one"]["gpus"]
    (regression,) = [line for line in result["two"]["facts"]["p2p"]["regressions"] if "at once" not in line]
    assert regression.startswith("0000:00:06.0 to 0000:00:07.0: 20.0 GB/s, 50.0 on ")


TRANSFER = """
import json, sys
names = [side["name"] for side in json.loads(sys.argv[1])["sides"]]
speed = {" to ".join(order): {"best": BEST * 10**9, "median": BEST * 10**9} for order in (names, names[::-1])}
print(json.dumps({"failure": "", "bytes": 1 << 30, "directions": speed, "ucx": {}, "versions": {}}))
"""


def test_what_the_probe_measured_is_what_the_transport_is_held_against(ansible, local, tmp_path):
    """From the measurement to the refusal by the same steps as the playbooks, with a script that tells a bandwidth."""
    last = str(tmp_path / "p2p-last.json")
    look = {"pd_gpu_info": {"measured": last, **FROM}, "register": "gpu"}
    gpu = [{"position": at, "pci": f"0000:00:0{6 + at}.0", "index": at} for at in (0, 1)]
    instance = {"host": "gpu1", "set": "pair-0", "env": {}}
    both = [
        {**instance, "name": "prefill-0", "role": "prefill", "gpus": gpu[:1]},
        {**instance, "name": "decode-0", "role": "decode", "gpus": gpu[1:]},
    ]
    plan = {"profile": "gpu", "instances": both}

    def proof(name, best):
        return {
            "pd_nixl_check": {
                "script": TRANSFER.replace("BEST", str(best)),
                "python": sys.executable,
                "pairs": "{{ plan | pd_nixl_pairs(inventory_hostname, gpu.facts) }}",
                "cache": str(tmp_path / "cache"),
            },
            "register": name,
            "ignore_errors": True,
        }

    seen = "{{ [early.failed, slow.failed, slow.msg | default(''), fair.failed] | to_json }}"
    done = ansible(
        {"all": {"hosts": {"gpu1": local("h200-vm-2", plan=plan)}}},
        [
            look,
            proof("early", 20),
            {"pd_fabric_info": {"measure": True, **FROM}, "register": "one"},
            {"ansible.builtin.copy": {"content": "{{ one.kept | to_json }}", "dest": last}},
            look,
            proof("slow", 20),
            proof("fair", 40),
            {"ansible.builtin.copy": {"content": seen, "dest": str(tmp_path / "seen.json")}},
        ],
    )
    assert done.returncode == 0, done.stdout
    early, slow, words, fair = json.loads((tmp_path / "seen.json").read_text())
    assert (early, slow, fair) == (False, True, False), done.stdout
    assert "NIXL bandwidth prefill-0.gpu0 to decode-0.gpu1" in words
    assert "80% of a plain copy's 50.0" in words
    assert "remove /var/lib/pdstack/nixl" in words


def test_what_the_probe_measured_is_what_plans_and_profiles_go_by(ansible, local, tmp_path):
    """From the measurement to the refusal by the same steps as the playbooks."""
    last = tmp_path / "p2p-last.json"
    model = {"repo": "a/small", "revision": "0123456789" * 4, "size_bytes": 10**9, "heads": 8}
    shapes = {"prefill": {"tp": 1}, "decode": {"tp": 1}}
    host = local("h200-vm-2", ansible_host="192.0.2.1", pd_model=model, pd_topology=shapes)
    config = "{{ pd_driver_library }}/fake_driver.conf"
    of_host = "(['gpu1'] | pd_facts_of(hostvars))"

    def look(name):
        told = f"{{{{ {{'said': planned.msg, 'facts': {of_host}.gpu1}} | to_json }}}}"
        return [
            {"pd_gpu_info": {"measured": str(last), **FROM}, "register": "pd_gpu"},
            {"pd_plan": {"facts": f"{{{{ {of_host} }}}}"}, "register": "planned", "failed_when": False},
            {"ansible.builtin.copy": {"content": told, "dest": str(tmp_path / name)}},
        ]

    def measure(corrupt, name):
        return [
            {"ansible.builtin.lineinfile": {"path": config, "line": f"corrupt 0 1 {corrupt}", "regexp": "^corrupt"}},
            {"pd_fabric_info": {"measure": True, **FROM}, "register": name},
            {"ansible.builtin.copy": {"content": f"{{{{ {name}.kept | to_nice_json }}}}", "dest": str(last)}},
        ]

    tasks = [{"pd_host_info": {}, "register": "pd_host"}]
    tasks += look("before") + measure(1, "wrong") + look("wrong") + measure(0, "right") + look("right")
    tasks += [{"ansible.builtin.set_fact": {"pd_fabric": "{{ wrong }}"}}, *look("the run that measures")]
    groups = {name: {"hosts": {"gpu1": host}} for name in ("gpu_hosts", "router_hosts")}
    done = ansible(groups, tasks)
    assert done.returncode == 0, done.stdout
    names = ("before", "wrong", "right", "the run that measures")
    found = {name: json.loads((tmp_path / name).read_text()) for name in names}
    assert {name: "arrived with other bytes" in item["said"] for name, item in found.items()} == dict(
        zip(names, (False, True, False, True))
    )
    assert "decode-0" in found["before"]["said"]
    assert "decode-0" in found["right"]["said"]
    assert [item["facts"]["p2p"]["data_ok"] for item in found.values()] == [None, False, True, False]
    path = tmp_path / "facts.json"  # as profile.yml writes it beside its traces
    path.write_text(json.dumps(found["right"]["facts"]))
    assert trace_cli.link_of(str(path)) == pytest.approx(50, rel=0.01)


def test_a_deployment_reads_the_files_that_the_probe_keeps():
    kept = yaml.safe_load((ROOT / "playbooks/probe.yml").read_text())[0]["vars"]

    def default(module, option):
        text = (ROOT / f"library/{module}.py").read_text().split('r"""')[1].split('"""')[0]
        return yaml.safe_load(text)["options"][option]["default"]

    assert default("pd_gpu_info", "measured") == kept["__probe_last"]


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        ("pd_gpu_info", {"timeout": 0}, "timeout: found 0, needed a positive number of seconds."),
        ("pd_fabric_info", {"measure_timeout": -1}, "measure_timeout: found -1, needed a positive number"),
        ("pd_fabric_info", {"baseline": "{{ pd_sysfs_root }}/proc/cmdline"}, "no baseline"),
        ("pd_gpu_info", {"sysfs_root": "{{ pd_sysfs_root }}/broken"}, "pdstack-simulated.json"),
    ],
)
def test_bad_input_says_what_was_found(module, arguments, words, ansible, local, tmp_path):
    host = local("no-gpu")
    broken = pathlib.Path(host["pd_sysfs_root"]) / "broken"
    broken.mkdir()
    (broken / "pdstack-simulated.json").write_text('{"cuda": {"status": 7}}')
    done = ansible({"all": {"hosts": {"gpu1": host}}}, [{module: arguments}], "--check")
    assert done.returncode == 2
    assert words in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout


def test_the_playbook_shows_every_host_that_answers(ansible, local, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o755)
    hosts = {
        "good": local("h200-vm-2", ansible_host="192.0.2.1"),
        "stuck": local("stub-library", ansible_host="192.0.2.2"),
        "gone": {"ansible_connection": "ssh", "ansible_ssh_executable": str(ssh), "ansible_host": "192.0.2.3"},
    }
    model = {"repo": "deepseek-ai/DeepSeek-V4-Flash", "revision": "0123456789" * 4}
    inventory = {
        "gpu_hosts": {"hosts": hosts, "vars": {"pd_model": model}},
        "router_hosts": {"hosts": {"good": {}}},
    }
    reports = tmp_path / "reports"
    done = ansible(inventory, ROOT / "playbooks/probe.yml", "--check", "-e", f"pd_report_dir={reports}")
    assert done.returncode == 4, done.stdout  # gone is unreachable, and says so
    assert "good (simulated): driver 580.159.04 open" in done.stdout
    assert "stuck (simulated): driver: error" in done.stdout
    assert "a stub library answered" in done.stdout
    assert "needed:" in done.stdout  # why there is no plan
    assert {path.name.split(".")[0] for path in reports.iterdir()} == {"good", "stuck"}
    whole = codec.load(facts.HostFacts, json.loads((reports / "good.json").read_text()))
    assert (whole.host, len(whole.gpus), whole.simulated) == ("good", 2, True)
    assert whole.ports != [] or whole.disks != []  # of pd_host_info
    assert (reports / "good.svg").read_text().startswith("<svg")
    assert "Refused" in (reports / "stuck.svg").read_text()
    assert "failed=0" in done.stdout
