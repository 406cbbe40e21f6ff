"""Who is let in, and what a stranger can read: tried for real, on the hosts and from a machine that is no member.

The cluster scenario is the secured one, and is looked at once, before it is broken.
Each test is one command on a host where it can be: the connection costs more than the looking.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
from pathlib import Path

import pytest

FOLDER = "/etc/pdstack/credentials"
ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.skipif(os.environ.get("MOLECULE_SCENARIO_NAME") != "cluster", reason="the secured scenario")


@pytest.fixture(scope="module", autouse=True)
def once(host):
    if host.file("/run/pdstack-test/record.json").exists:
        pytest.skip("looked at before the breakages")


@pytest.fixture(scope="module")
def router(host, plan) -> dict | None:
    """The router of this host, if it has one."""
    return next((item for item in plan["routers"] if item["host"] == host.backend.get_hostname()), None)


@pytest.fixture(scope="module")
def keys(host) -> dict[str, str]:
    """The keys that lie on this host."""
    shown = host.check_output(f"grep -H . {FOLDER}/api_key {FOLDER}/admin_key")
    return {Path(line.partition(":")[0]).name: line.partition(":")[2] for line in shown.splitlines()}


ASK = """
import json, ssl, sys, urllib.request
context = ssl._create_unverified_context()
found = []
for method, url, key in json.loads(sys.argv[1]):
    headers = {"Authorization": "Bearer " + open(key).read().strip() if key[:1] == "/" else key} if key else {}
    try:
        request = urllib.request.Request(url, method=method, headers=headers)
        found.append(urllib.request.urlopen(request, timeout=10, context=context).status)
    except urllib.error.HTTPError as error:
        found.append(error.code)
    except OSError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def statuses(host, requests: list[tuple[str, str, str]]) -> list[int | str]:
    """The status of each request (method, URL, key or the file of a key) from this host, or why none came."""
    return json.loads(host.check_output("python3 -c %s %s", ASK, json.dumps(requests)))


def base(plan, item) -> str:
    tls = plan["security"]["tls"] != "off" and item in plan["routers"]
    return f"{'https' if tls else 'http'}://{item['address']}:{item['ports']['http']}"


EXPOSED = {"router": 1.2, "engine": 2.0}
API_KEY, ADMIN_KEY, WRONG = f"{FOLDER}/api_key", f"{FOLDER}/admin_key", "Bearer wrong-key-0123456789"


def test_clients_need_the_key_at_the_router_and_at_every_worker(host, plan, router):
    asked: dict[tuple[str, str, str], int] = {}
    for item in [*plan["routers"], *plan["instances"]]:
        url = f"{base(plan, item)}/v1/completions"
        asked |= {("POST", url, ""): 401, ("POST", url, WRONG): 401}
        # Let in, and then told that there is no request.
        asked[("POST", url, API_KEY)] = 415 if item in plan["routers"] else 400
        asked[("GET", f"{base(plan, item)}/health", "")] = 200  # health checks carry no key
    for item in plan["instances"]:
        asked[("GET", f"{base(plan, item)}/metrics", "")] = 200  # scrapers carry none
    assert dict(zip(asked, statuses(host, list(asked)), strict=True)) == asked


def test_what_changes_a_server_needs_the_admin_key(host, plan, router, instances):
    asked = {}
    for item in [*instances, *([router] if router else [])]:
        method, path = ("GET", "/workers") if item is router else ("POST", "/flush_cache")
        url = base(plan, item) + path
        asked |= {(method, url, key): 401 for key in ("", WRONG, API_KEY)} | {(method, url, ADMIN_KEY): 200}
    assert dict(zip(asked, statuses(host, list(asked)), strict=True)) == asked


def test_no_key_is_where_others_could_read_it(host, keys):
    """Arguments and environments of all processes, the whole journal, files outside of the folder of credentials.

    The patterns go in by a file, since an argument of grep would be found by it.
    """
    script = f"""
umask 077; cat {FOLDER}/*_key > /run/pdstack-test-patterns
grep -laFf /run/pdstack-test-patterns /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null
journalctl --no-pager -o cat | grep -cFf /run/pdstack-test-patterns | grep -vx 0
grep -rlaFf /run/pdstack-test-patterns --exclude-dir=credentials --exclude=pdstack-test-patterns \
    /etc /opt/pdstack/launch.py /var/lib/pdstack/jit /var/log /var/tmp /tmp /run /root /home 2>/dev/null
rm /run/pdstack-test-patterns"""
    assert set(keys) == {"api_key", "admin_key"}
    assert host.run(script).stdout == ""


def test_an_engine_tells_its_configuration_without_its_keys(host, plan, instances, keys):
    for item in instances:
        header = f"(printf 'Authorization: Bearer '; cat {API_KEY})"
        told = host.check_output(f"{header} | curl -s -m 10 -H @- {base(plan, item)}{plan['info_path']}")
        assert json.loads(told)["admin_api_key"] == "*" * len(keys["admin_key"])
        assert not any(key in told for key in keys.values())


def test_an_unprivileged_user_reads_no_secret(host, units, keys):
    """Real attempts of users without rights; root reads the same paths, so each of them is there."""
    paths = [f"{FOLDER}/admin_key", *(f"/run/credentials/{unit}/admin_key" for unit in units)]
    paths += [f"/proc/$(systemctl show --value -p MainPID {unit})/environ" for unit in units]
    attempts = [f"runuser -u {user} -- head -c 1 {path}" for path in paths for user in ("nobody", "games")]
    attempts += [f"runuser -u nobody -- ls {FOLDER}", f"runuser -u pdstack -- cat {FOLDER}/admin_key"]
    script = [f"head -c 1 {path} >/dev/null && echo root" for path in paths]
    script += [f"{attempt} 2>&1 | grep -q 'Permission denied' && echo denied" for attempt in attempts]
    script += [f"runuser -u nobody -- systemctl show {' '.join(units)}"]
    shown = host.run("\n".join(script)).stdout
    assert shown.splitlines()[: len(paths) + len(attempts)] == ["root"] * len(paths) + ["denied"] * len(attempts)
    assert "ExecStart=" in shown
    assert not any(key in shown for key in keys.values())


def test_the_service_user_cannot_log_in(host):
    script = "getent passwd pdstack; getent shadow pdstack; su pdstack -c id; echo status $?"
    passwd, shadow, *_, ended = host.run(script).stdout.splitlines()
    assert passwd.split(":")[6] in ("/usr/sbin/nologin", "/sbin/nologin")
    assert shadow.split(":")[1][:1] in ("!", "*")
    assert ended == "status 1"


def test_units_are_exposed_no_more_than_the_documents_say(host, units):
    for unit in units:
        line = host.run(f"systemd-analyze security --no-pager {unit}").stdout.strip().splitlines()[-1]
        assert float(line.partition(": ")[2].split()[0]) <= (EXPOSED["router" if "router" in unit else "engine"]), line


def test_plain_http_to_the_tls_port_gets_an_error_and_nothing_hangs(host, plan, router):
    if router is None:
        return
    address = (router["address"], router["ports"]["http"])
    silent = [socket.create_connection(address, timeout=5) for _ in range(20)]  # greet nobody, and stay
    begin = time.monotonic()
    with socket.create_connection(address, timeout=5) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            answer = plain.recv(100)
        except ConnectionResetError:
            answer = b""
    assert not answer.startswith(b"HTTP/1.1 200")
    assert statuses(host, [("GET", f"{base(plan, router)}/health", "")]) == [200]
    assert time.monotonic() - begin < 5
    for connection in silent:
        connection.close()


def test_the_certificate_is_good_for_the_names_of_the_router(host, plan, router, tmp_path):
    if router is None:
        return
    trusted = tmp_path / "router.pem"
    trusted.write_text(host.check_output(f"cat {FOLDER}/tls_cert"))
    for name in (host.backend.get_hostname(), router["address"], *plan["security"]["tls_names"]):
        context = ssl.create_default_context(cafile=str(trusted))
        with (
            socket.create_connection((router["address"], router["ports"]["http"]), timeout=5) as raw,
            context.wrap_socket(raw, server_hostname=name) as connection,
        ):
            assert connection.version() in ("TLSv1.2", "TLSv1.3")
    with (
        socket.create_connection((router["address"], router["ports"]["http"]), timeout=5) as raw,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        ssl.create_default_context().wrap_socket(raw, server_hostname=router["address"])


def test_two_hundred_malformed_requests_leave_it_serving(host, plan, router):
    if router is None:
        return
    words = f"{router['address']} {router['ports']['http']} tls {API_KEY} {plan['model']['served_name']}"
    script = (Path(__file__).parent / "malformed_requests.py").read_text()
    pid = "systemctl show --value -p MainPID pd-router.service"
    ran = host.check_output(f"{pid}; python3 - {words} <<'PDSTACK_END'\n{script}\nPDSTACK_END\n{pid}")
    before, report, after = ran.splitlines()
    found = json.loads(report)["found"]
    assert sum(sum(kinds.values()) for kinds in found.values()) == 200
    for kind, seen in found.items():
        allowed = {"left"} if "left" in seen else {str(code) for code in range(400, 500)}
        allowed |= {"0"} if kind == "huge headers" else set()  # it stops reading and closes
        assert set(seen) <= allowed, (kind, seen)
    assert json.loads(report)["seconds"] < 60
    assert before == after
    assert statuses(host, [("GET", f"{base(plan, router)}/readiness", "")]) == [200]


def test_a_stranger_reaches_the_router_and_ssh_and_nothing_else_of_ours(host, plan, router, instances):
    """From this machine, which is in no inventory: every TCP port that a process of ours listens on."""
    address = next(item["address"] for item in [*instances, router] if item)
    listening = host.check_output("ss -Hltn")
    ports = {int(line.split()[3].rpartition(":")[2]) for line in listening.splitlines() if "127.0.0." not in line}
    open_ports = {port for port in ports if reach(address, port)}
    wanted = {22} | ({router["ports"]["http"]} if router else set())
    assert open_ports == wanted
    assert len(ports) > len(wanted)
    for item in instances:
        assert reach(item["address"], item["ports"]["http"]) is False


def test_members_reach_each_other(host, plan):
    ports = [(item["address"], port) for item in plan["instances"] for port in item["ports"].values()]
    asked = [("GET", f"http://{address}:{port}/health", "") for address, port in ports]
    assert len(asked) == 3
    assert statuses(host, asked) == [200] * 3


def test_the_firewall_is_loaded_at_boot(host):
    """What boots load is what is loaded."""
    script = "systemctl is-enabled pd-firewall; systemctl is-active pd-firewall; nft list ruleset"
    enabled, active, *rules = host.check_output(script).splitlines()
    assert (enabled, active) == ("enabled", "active")
    assert "table inet pdstack {" in rules


def reach(address: str, port: int) -> bool:
    """Whether a connection is accepted; refused at once is the firewall's answer, silence would be a fault."""
    try:
        with socket.create_connection((address, port), timeout=3):
            return True
    except ConnectionRefusedError:
        return False


def test_the_controller_kept_no_key(host, plan, keys):
    """What Ansible has shown, and what it leaves behind, of the scenario whose log Molecule keeps."""
    shown = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"], "ansible.log").read_text(errors="replace")
    assert "Write the keys" in shown
    left = [path for path in (ROOT / ".ansible").rglob("*") if path.is_file() and "collections" not in path.parts]
    texts = {str(path): path.read_text(errors="replace") for path in left}
    for key in keys.values():
        assert key not in shown
        assert [path for path, text in texts.items() if key in text] == []
