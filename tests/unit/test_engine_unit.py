"""The engines' unit as it is rendered for a GPU host: what its sandbox takes away is done before it."""

from __future__ import annotations

import pathlib
import shlex
import subprocess
from typing import Any

import jinja2
import plans
import pytest
import yaml
from pdstack import service


def rendered(root: pathlib.Path, profile: str) -> str:
    role = root / "roles/pd_service"
    surroundings = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, autoescape=False)
    surroundings.filters["pd_credential_names"] = service.credential_names
    variables: dict[str, Any] = yaml.safe_load((role / "defaults/main.yml").read_text())
    variables["pd_service_plan"] = {**plans.PLAN, "profile": profile, "kernel_extension": False}
    template = surroundings.from_string((role / "templates/pd-engine@.service.j2").read_text())
    return template.render(**variables, engine="decode")


def value(text: str, name: str) -> list[str]:
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{name}=")]


@pytest.mark.skipif(pathlib.Path("/dev/nvidia-uvm").exists(), reason="this machine has the file that is to be made")
def test_the_driver_makes_its_file_before_the_sandbox(project_root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """CUDA calls nvidia-modprobe for it, whose set-uid bit NoNewPrivileges makes void."""
    text = rendered(project_root, "gpu")
    assert value(text, "NoNewPrivileges") == ["yes"]
    (before,) = value(text, "ExecStartPre")
    assert before.startswith("-+"), "with root's rights, outside the sandbox; a driver that needs it not may lack it"
    stub = tmp_path / "nvidia-modprobe"
    stub.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n')
    stub.chmod(0o755)
    subprocess.run(shlex.split(before[2:]), check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (tmp_path / "called").read_text().split() == ["-c", "0", "-u"]


def test_no_driver_is_asked_where_there_are_no_gpus(project_root: pathlib.Path) -> None:
    assert value(rendered(project_root, "cpu"), "ExecStartPre") == []
