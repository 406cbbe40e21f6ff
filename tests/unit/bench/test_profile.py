"""An engine is asked for a trace once load runs, and each rank's file is waited for to its last byte."""

import gzip
import json
import pathlib

import pytest
from pdstack.bench import profile
from pdstack.verify import Reply

METRICS = 'sglang:num_running_reqs{engine_type="decode",tp_rank="0"} %s\nsglang:num_running_reqs_offline 3\n'


class Engine:
    """Runs load from a given look on, and writes a part of a trace at each look after it was asked."""

    def __init__(self, folder, load_at=2, ranks=2, status=200, writes=True):
        self.folder, self.load_at, self.ranks, self.status, self.writes = folder, load_at, ranks, status, writes
        self.now, self.asked, self.stopped, self.looks = 0.0, None, False, 0

    def http(self, method, url, body):
        if url.endswith("/metrics"):
            self.looks += 1
            return Reply(200, METRICS % (4.0 if self.looks >= self.load_at else 0.0))
        if url.endswith("/start_profile"):
            self.asked = body
            return Reply(self.status, "Start profiling.")
        self.stopped = url.endswith("/stop_profile")
        return Reply(200, "")

    def sleep(self, seconds):
        self.now += seconds
        if self.asked and self.writes:
            for rank in range(self.ranks):
                data = gzip.compress(json.dumps({"traceEvents": [], "rank": rank}).encode())
                known = self.folder / f"x-TP-{rank}.trace.json.gz"
                done = known.stat().st_size if known.exists() else 0
                known.write_bytes(data[: done + 20 * (rank + 1)])  # rank 0 is the slower one


def run(engine, folder, **more):
    job = profile.Job("http://h:30100", str(folder), steps=7, ranks=2, timeout_s=20, **more)
    return profile.record(job, engine.http, lambda: engine.now, engine.sleep)


def test_traces_of_all_ranks_once_they_are_whole(tmp_path):
    engine = Engine(tmp_path)
    files = run(engine, tmp_path)
    assert engine.looks == 2
    assert engine.asked["num_steps"] == 7
    assert engine.asked["output_dir"] == str(tmp_path)
    assert [json.loads(gzip.decompress(pathlib.Path(path).read_bytes()))["rank"] for path in files] == [0, 1]
    assert engine.stopped is False


def test_without_load_nothing_is_recorded(tmp_path):
    engine = Engine(tmp_path, load_at=10**6)
    with pytest.raises(profile.ProfileError, match="no request under way within 20 s"):
        run(engine, tmp_path)
    assert engine.asked is None


def test_a_refused_profile_is_said_with_the_engines_words(tmp_path):
    with pytest.raises(profile.ProfileError, match="answered 401: Start"):
        run(Engine(tmp_path, status=401), tmp_path)


def test_a_profile_that_never_ends_is_stopped(tmp_path):
    engine = Engine(tmp_path, writes=False)
    with pytest.raises(profile.ProfileError, match="0 of 2 traces after 20 s"):
        run(engine, tmp_path)
    assert engine.stopped


def test_only_the_metric_itself_counts():
    assert profile.running_requests(METRICS % 2.0) == 2.0
    assert profile.running_requests("") == 0.0
