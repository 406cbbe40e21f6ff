"""The client against a stub worker with known manners: what it measures is what the stub did."""

import asyncio
import json
import ssl
import subprocess

import pytest
from pdstack import bench_cli, codec
from pdstack.bench import ceiling, load, results, session, stats, stream, stub, workload
from pdstack.bench.stub import Manners
from pdstack.bench.workload import Prompt
from pdstack.http import Access


def against(manners, use, tls=None):
    """Run ``use(port)`` while a stub listens."""

    async def both():
        server, port = await stub.start(manners, tls=tls)
        try:
            return await use(port)
        finally:
            server.close()

    stub.Stub.served = 0
    return asyncio.run(both())


def closed(manners, count=8, concurrency=4, tokens=10, chat=True, timeout_s=5.0, max_s=30.0):
    async def use(port):
        target = stream.server(f"http://127.0.0.1:{port}")
        endpoint = load.Endpoint(target, stub.MODEL, chat, timeout_s=timeout_s)
        return await load.closed_loop(endpoint, [Prompt("a b c", tokens)] * count, concurrency, max_s)

    return against(manners, use)


@pytest.mark.parametrize("chat", [True, False])
def test_times_are_those_of_the_stub(chat):
    measured = closed(Manners(first_s=0.05, token_s=0.01), count=4, concurrency=4, chat=chat)
    run = stats.run(measured, 4, None)
    assert (run.completed, run.failed, run.output_tokens, run.input_tokens) == (4, 0, 40, 16)
    role = 10 if chat else 0  # the stub spends a token's time on the opening event without a token
    # never less than the stub took; more only by what a busy machine adds
    assert 50 + role <= run.ttft_ms.p50 < 2 * (50 + role)
    assert 10 <= run.tpot_ms.p50 < 25
    assert 10 <= run.itl_ms.p50 < 25
    assert len(measured.samples[0].gaps) == 9
    assert run.output_tok_s == pytest.approx(40 / measured.duration_s)


def test_closed_loop_keeps_so_many_under_way_on_kept_connections():
    measured = closed(Manners(token_s=0.002), count=12, concurrency=3)
    events = sorted([(s.sent, 1) for s in measured.samples] + [(s.end, -1) for s in measured.samples])
    under_way = most = 0
    for _, change in events:
        under_way += change
        most = max(most, under_way)
    assert most == 3
    assert len(measured.samples) == 12


def test_a_first_event_without_text_is_still_the_first_token():
    measured = closed(Manners(first_s=0.02, token_s=0.01, fault="empty-first"), count=1, chat=False)
    sample = measured.samples[0]
    assert sample.first - sample.sent >= 0.02
    assert len(sample.gaps) == 9


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cut", "closed before the answer was whole"),
        ("no-usage", "no usage"),
        ("status", "status 503"),
        ("error-event", "decode went away"),
    ],
)
def test_a_faulty_answer_fails_and_counts_in_nothing_else(fault, words):
    run = stats.run(closed(Manners(fault=fault, fault_every=4), count=8, concurrency=2), 2, None)
    assert (run.completed, run.failed, run.output_tokens) == (6, 2, 60)
    assert [count for error, count in run.errors.items() if words in error] == [2]


def test_a_connection_that_the_server_closes_is_opened_again():
    run = stats.run(closed(Manners(fault="close", fault_every=2), count=8, concurrency=1), 1, None)
    assert (run.completed, run.failed) == (8, 0)


def test_no_answer_ends_at_the_timeout_and_a_dead_port_at_once():
    run = stats.run(closed(Manners(first_s=60), count=2, concurrency=2, timeout_s=0.2), 2, None)
    assert list(run.errors) == ["no end within 0 s"]
    endpoint = load.Endpoint(stream.server("http://127.0.0.1:9"), "m")
    dead = asyncio.run(load.closed_loop(endpoint, [Prompt("a", 1)], 1, 5.0))
    assert "Connect call failed" in dead.samples[0].error


def test_after_the_time_no_request_leaves():
    measured = closed(Manners(token_s=0.02), count=50, concurrency=2, max_s=0.3)
    assert 2 <= len(measured.samples) < 50
    assert measured.unsent == 50 - len(measured.samples)


def test_open_loop_sends_at_its_times_however_slow_the_answers():
    times = workload.arrivals(20, 100.0, seed=1)

    async def use(port):
        endpoint = load.Endpoint(stream.server(f"http://127.0.0.1:{port}"), stub.MODEL)
        return await load.open_loop(endpoint, [Prompt("a", 3)] * 20, times, 30.0)

    measured = against(Manners(first_s=0.2), use)
    left = sorted(sample.sent for sample in measured.samples)
    assert [b - left[0] for b in left] == pytest.approx([t - times[0] for t in times], abs=0.03)
    assert max(sample.sent for sample in measured.samples) < min(sample.end for sample in measured.samples) + 0.05
    assert measured.late_s < 0.03


def test_key_and_certificate_are_used(tmp_path):
    key, certificate, secret = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "api_key"
    secret.write_text("secret\n")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate),
            *("-days", "1", "-subj", "/CN=stub", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)

    async def use(port):
        url = f"https://127.0.0.1:{port}"
        good = stream.server(url, Access(str(secret), str(certificate)))
        no_key = stream.server(url, Access("", str(certificate)))
        no_trust = stream.server(url, Access(str(secret)))
        model = await load.first_model(good)
        failures = []
        for target in (no_key, no_trust):
            with pytest.raises(workload.WorkloadError) as failed:
                await load.first_model(target)
            failures.append(str(failed.value))
        return model, failures

    model, (no_key, no_trust) = against(Manners(key="secret"), use, tls)
    assert model == stub.MODEL
    assert "401" in no_key
    assert "CERTIFICATE_VERIFY_FAILED" in no_trust
    assert "secret" not in no_key + no_trust


@pytest.fixture
def served():
    """The port of a stub in a process of its own."""
    process = subprocess.Popen(
        ["python3", "-m", "pdstack.bench.stub", "--first-s", "0.002"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=session.__file__.rpartition("/pdstack/")[0],
    )
    yield int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_command_writes_a_result_that_can_be_read_again(served, tmp_path, capsys):
    path = tmp_path / "out.json"
    url = f"http://127.0.0.1:{served}"
    code = bench_cli.main(
        f"--url {url} --concurrency 1,4 --requests 8 --repeat 2 --input-len 50 --output-len 5 --json {path}".split()
    )
    found = results.load(json.loads(path.read_text()))
    assert code == 0
    assert [(run.concurrency, run.repeat) for run in found.runs] == [(1, 1), (4, 1), (1, 2), (4, 2)]
    assert {(run.completed, run.input_tokens, run.output_tokens) for run in found.runs} == {(8, 400, 40)}
    assert "C=4: " in capsys.readouterr().out
    assert codec.dump(found) == json.loads(path.read_text())


def test_the_command_writes_a_page_with_other_results_beside(served, tmp_path):
    first, page = tmp_path / "first.json", tmp_path / "page.html"
    load = f"--url http://127.0.0.1:{served} --concurrency 2 --requests 4 --input-len 20 --output-len 5".split()
    assert bench_cli.main([*load, "--label", "before", "--json", str(first)]) == 0
    assert bench_cli.main([*load, "--label", "after", "--html", str(page), "--beside", str(first)]) == 0
    text = page.read_text()
    assert "Benchmark of after" in text
    assert "before" in text
    assert bench_cli.main([*load, "--html", str(page), "--beside", str(page)]) == 2


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert bench_cli.main([]) == 2
    assert "--url is missing" in capsys.readouterr().err
    assert bench_cli.main(["--url", "http://127.0.0.1:9"]) == 2
    assert "nothing was measured: 127.0.0.1:9/v1/models" in capsys.readouterr().err
    assert bench_cli.main(["--url", "ftp://x"]) == 2
    assert bench_cli.main(["--url", "http://127.0.0.1:9", "--requests", "0"]) == 2
    assert "requests is 0" in capsys.readouterr().err
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    with pytest.raises(SystemExit):
        bench_cli.main(["--url", "http://127.0.0.1:9", "--concurrency", "0"])


def test_the_client_is_far_from_its_ceiling():
    """A service that gives 20 tok/s to each of 64 streams needs 1280 tokens/s of the client."""
    (found,) = ceiling.measure([64], output_len=64, requests=128, say=lambda words: None)
    assert found.tokens_s > 5000
    assert found.cpu_us_per_token < 100
