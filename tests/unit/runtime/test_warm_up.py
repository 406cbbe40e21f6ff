"""Compiling JIT modules ahead: what is asked, when it is asked again, and the script under a real Python."""

import json
import pathlib
import sys
import types

import pytest
import yaml
from pdstack import runner, warm_up

ROOT = pathlib.Path(__file__).resolve().parents[3]
SCRIPT = (ROOT / "roles/sglang_runtime/files/warm_up.py").read_text()
MODULES = {"12.0": ["flashinfer.jit.mla:gen_sparse", "flashinfer.jit.sampling:gen_sampling"], "9.0": ["a:b"]}


def request(tmp_path, **changes):
    values = {
        "python": "/opt/pdstack/releases/x/venv/bin/python",
        "script": SCRIPT,
        "modules": MODULES,
        "architectures": ["12.0", "12.0"],
        "environment": {"SGLANG_CACHE_DIR": str(tmp_path), "CUDA_HOME": "/opt/pdstack/cuda"},
        "user": "pdstack",
    }
    return warm_up.Request(**{**values, **changes})


def compiler(tmp_path, rc=0, err=""):
    """A runner that stands for the release's Python and leaves libraries; what it was asked is kept."""

    def run(argv):
        run.asked.append(argv)
        answer = []
        for generator in json.loads(argv[-1]):
            library = tmp_path / generator.replace(":", ".")
            answer.append({"name": generator, "library": str(library), "seconds": 0.0 if library.exists() else 1.5})
            library.write_text("")
        return runner.Completed(rc, f"noise\n{json.dumps(answer)}\n", err)

    run.asked = []
    return run


def test_modules_are_compiled_once_as_the_services_user_and_without_a_gpu(tmp_path):
    wanted, run = request(tmp_path), compiler(tmp_path)
    assert not warm_up.done(wanted)
    found = warm_up.apply(wanted, run)
    assert [(item.name, item.architecture) for item in found.modules] == [(name, "12.0") for name in MODULES["12.0"]]
    (argv,) = run.asked  # two GPUs of one architecture are one run
    words = " ".join(argv[:-3])
    assert words.startswith("setpriv --reuid=pdstack --regid=pdstack --init-groups nice -n 19 env -i ")
    for setting in ("CUDA_HOME=/opt/pdstack/cuda", "FLASHINFER_CUDA_ARCH_LIST=12.0", f"SGLANG_CACHE_DIR={tmp_path}"):
        assert f" {setting}" in words
    assert " CUDA_VISIBLE_DEVICES= " in words
    assert warm_up.done(wanted)


@pytest.mark.parametrize(
    "changes", [{"python": "/other/bin/python"}, {"modules": {"12.0": ["c:d"]}}, {"architectures": ["9.0"]}]
)
def test_another_release_list_or_gpu_asks_again(tmp_path, changes):
    warm_up.apply(request(tmp_path), compiler(tmp_path))
    assert not warm_up.done(request(tmp_path, **changes))


def test_a_library_that_is_gone_asks_again(tmp_path):
    warm_up.apply(request(tmp_path), compiler(tmp_path))
    (tmp_path / "flashinfer.jit.mla.gen_sparse").unlink()
    assert not warm_up.done(request(tmp_path))


def test_a_module_that_does_not_compile_fails_with_the_compilers_words_and_leaves_no_record(tmp_path):
    with pytest.raises(warm_up.WarmUpFailed, match=r"compiling for 12\.0 ended with status 1: nvcc fatal"):
        warm_up.apply(request(tmp_path), compiler(tmp_path, rc=1, err="nvcc fatal"))
    assert not warm_up.done(request(tmp_path))


@pytest.mark.parametrize(
    ("architectures", "words"),
    [([], "no GPU that will serve"), (["10.0"], "no modules for 10.0 (it does for 12.0, 9.0)"), (["12.0"], "")],
)
def test_it_says_why_there_is_nothing_to_compile(tmp_path, architectures, words):
    said = warm_up.reason(request(tmp_path, architectures=architectures))
    assert words in said
    assert bool(said) is bool(words)


def test_the_script_compiles_what_is_missing_and_says_what_was_there(tmp_path, monkeypatch, capsys):
    class Spec:
        def __init__(self, name):
            self.name, self.path = name, tmp_path / f"{name}.so"

        @property
        def is_compiled(self):
            return self.path.exists()

        def get_library_path(self):
            return self.path

        def build(self, verbose):
            self.path.write_text("")

    (tmp_path / "there.so").write_text("")
    jit = types.SimpleNamespace(gen_there=lambda: Spec("there"), gen_new=lambda: Spec("new"))
    monkeypatch.setitem(sys.modules, "fake_jit", jit)
    monkeypatch.setattr(sys, "argv", ["-c", json.dumps(["fake_jit:gen_there", "fake_jit:gen_new"])])
    exec(compile(SCRIPT, "warm_up.py", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr()
    answer = json.loads(said.out.splitlines()[-1])
    assert [item["library"] for item in answer] == [str(tmp_path / "there.so"), str(tmp_path / "new.so")]
    assert answer[0]["seconds"] == 0.0
    assert said.err == "compiling new\n"
    assert (tmp_path / "new.so").exists()


def test_architectures_are_those_of_the_gpus_that_serve():
    gpus = [types.SimpleNamespace(compute_capability=name) for name in ("12.0", "12.0", "9.0", None)]
    instances = [{"host": "a", "gpus": [{"position": 0}, {"position": 1}]}, {"host": "b", "gpus": [{"position": 2}]}]
    plan, found = {"profile": "gpu", "instances": instances}, types.SimpleNamespace(gpus=gpus)
    assert warm_up.architectures(plan, "a", found) == ["12.0"]
    assert warm_up.architectures(plan, "b", found) == ["9.0"]
    assert warm_up.architectures(plan, "router-only", found) == []
    assert warm_up.architectures({**plan, "profile": "cpu"}, "a", found) == []


@pytest.mark.parametrize("release", sorted(path.parent.name for path in ROOT.glob("releases/*/release.yml")))
def test_releases_list_generators_of_flashinfer_alone(release):
    spec = yaml.safe_load((ROOT / "releases" / release / "release.yml").read_text())
    listed = [name for names in spec.get("warm_up", {}).values() for name in names]
    assert all(name.startswith("flashinfer.jit.") and name.count(":") == 1 for name in listed)
    assert bool(listed) is (release == "sglang-0.5.23")
