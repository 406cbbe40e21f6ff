"""callback_plugins/pd_preload.py: the files of filters are loaded once a run, and not in each worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FILTER = """
import os
with open(os.environ["LOADED"], "a") as stream:
    stream.write(f"{os.getpid()}\\n")
class FilterModule:
    def filters(self):
        return {"twice": lambda value: value * 2}
"""


def test_filters_are_loaded_once_for_all_workers(project_root: Path, tmp_path: Path) -> None:
    (tmp_path / "filters").mkdir()
    (tmp_path / "filters/twice.py").write_text(FILTER)
    tasks = [{"ansible.builtin.assert": {"that": "'a' | twice == 'aa'"}}] * 2
    play = [{"hosts": "all", "gather_facts": False, "tasks": tasks}]
    (tmp_path / "play.yml").write_text(json.dumps(play))
    command = [Path(sys.executable).parent / "ansible-playbook", "-i", "a,b,c,", tmp_path / "play.yml"]
    more = {"ANSIBLE_FILTER_PLUGINS": f"{tmp_path}/filters", "LOADED": str(tmp_path / "loaded")}
    env = {**os.environ, "ANSIBLE_CONFIG": str(project_root / "ansible.cfg"), **more}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "loaded").read_text().splitlines()) == 1
