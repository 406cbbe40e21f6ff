"""Keep a benchmark's result on the controller, compare it, write the report (see library/pd_benchmark_report.py)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from typing import Any

from ansible.module_utils.pdstack import codec, inventory
from ansible.module_utils.pdstack.bench import archive, compare, page, peer, results
from ansible.plugins.action import ActionBase

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PICTURE_TIMEOUT_S = 90


class ActionModule(ActionBase):
    """One run for all hosts, on the controller, without a connection."""

    BYPASS_HOST_LOOP = True
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            {
                "parts": {"type": "list", "elements": "dict", "required": True},
                "host": {"type": "str", "required": True},
                "folder": {"type": "path", "required": True},
                "label": {"type": "str", "default": ""},
                "plan": {"type": "dict", "default": {}},
                "facts": {"type": "dict", "default": {}},
                "manifest": {"type": "dict", "default": {}},
                "quality": {"type": "dict", "default": {}},
                "baseline": {"type": "str", "default": ""},
                "beside": {"type": "list", "elements": "path", "default": []},
                "noise_floor": {"type": "float", "default": 0.05},
                "png": {"type": "bool", "default": True},
            }
        )
        args = inventory.builtin(args)
        if self._task.check_mode:
            return {**result, "changed": False, "msg": "a rehearsal measured nothing"}
        try:
            return {**result, **report(args)}
        except (codec.CodecError, OSError) as error:
            return {**result, "failed": True, "msg": f"the result cannot be kept or compared: {error}"}


def report(args: dict[str, Any]) -> dict[str, Any]:
    """Write JSON, HTML and, where a browser is at hand, PNG; say what is worse and what is wrong."""
    ours = [part for part in args["parts"] if part["client"] == results.OURS]
    theirs = [part for part in args["parts"] if part["client"] != results.OURS]
    plan, facts = args["plan"], args["facts"]
    simulated = plan.get("profile") == "cpu" or any(document.get("simulated") for document in facts.values())
    drivers = [document.get("driver", {}).get("loaded_version") for document in facts.values()]
    driver = next((version for version in drivers if version), None)
    quality = {**args["quality"], "same": archive.same_answers(args["quality"])} if args["quality"] else {}
    known = {
        "label": args["label"] or f"{args['host']} {plan.get('topology', {}).get('mode', '')}".strip(),
        "kind": "simulated" if simulated else "GPU",
        "machine": archive.machine_line(facts),
        "topology": archive.topology_line(plan) if plan else "",
        "release": str(args["manifest"].get("id") or plan.get("release", "")),
        "versions": archive.versions(args["manifest"], driver),
        "plan": plan,
        "facts": facts,
        "quality": quality,
    }
    main = archive.joined(ours or theirs, **known)
    beside = [archive.read(path) for path in args["beside"]]
    agreed = []
    if ours and theirs:
        other = archive.joined(theirs, **known)
        agreed = peer.agreement(main.runs, other.runs)
        beside.insert(0, other)
    name, before, why = baseline_of(args, main)
    changes = compare.changes(before.runs, main.runs, args["noise_floor"]) if before and not why else []
    path = archive.path_of(args["folder"], args["host"], main)
    files = {
        path: json.dumps(codec.dump(main), indent=1) + "\n",
        path.replace(".json", ".html"): page.page(
            [main, *beside, *([before] if before and not why else [])], changes, name, why, agreed
        ),
    }
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for target, content in files.items():
        with open(target, "w", encoding="utf-8") as stream:
            stream.write(content)
    drawn = picture(path.replace(".json", ".html")) if args["png"] else ""
    problems = problems_of(main, changes)
    lines = [archive.text(main), *(compare.line(change) for change in changes)]
    lines += [f"peer {item.step} {item.metric}: {item.difference:+.1%}" for item in agreed]
    lines += [f"not compared with {name}: {why}"] if why else []
    lines.append("written: " + ", ".join([*files, *([drawn] if drawn else [])]))
    return {
        "changed": True,
        "failed": bool(problems),
        "msg": "\n".join([*problems, *lines]),
        "summary": lines,
        "result": path,
        "page": path.replace(".json", ".html"),
        "png": drawn,
        "changes": codec.dump(changes),
        "peer": [dict(codec.dump(item), difference=item.difference) for item in agreed],
    }


def baseline_of(args: dict[str, Any], now: results.Result) -> tuple[str, results.Result | None, str]:
    """Return the name of the result to compare with, the result, and why they must not be compared."""
    if not args["baseline"]:
        return "", None, ""
    if args["baseline"] == "previous":
        path, before = archive.previous(args["folder"], args["host"], now)
        return path or "an earlier run", before, "" if before else "there is none of this host with the same load"
    before = archive.read(args["baseline"])
    return args["baseline"], before, compare.incomparable(before, now) or ""


def problems_of(main: results.Result, changes: list[compare.Change]) -> list[str]:
    """Return what makes the run a failure: figures that are no measurement, wrong answers, regressions."""
    found = [
        f"{run.failed} of {run.requests} requests failed: {next(iter(run.errors))}" for run in main.runs if run.errors
    ]
    wrong = [check for check in main.quality.get("after") or [] if not check["ok"]]
    found += [
        f"after the load, {check['subject']}: found {check['found']}, wanted {check['wanted']}" for check in wrong
    ]
    if main.quality.get("same") is False:
        found.append("the answers after the load are not those before it")
    return found + [f"regression: {compare.line(change)}" for change in compare.regressions(changes)]


def picture(html: str) -> str:
    """Draw the page as PNG where a browser is installed; return the file, "" where there is none."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        return ""
    png = html.replace(".html", ".png")
    with tempfile.TemporaryDirectory(prefix="pdstack-browser-") as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        # The page asks nobody; neither shall the browser, which has services of its own to call.
        command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--no-proxy-server", "--disable-background-networking"]
        command += [f"--user-data-dir={profile}", "--window-size=1280,3200", f"--screenshot={png}"]
        try:
            subprocess.run(
                [*command, f"file://{os.path.abspath(html)}"],
                capture_output=True,
                timeout=PICTURE_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return ""
    return png if os.path.exists(png) else ""
