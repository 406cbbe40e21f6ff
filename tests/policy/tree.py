"""Find and parse what the policy tests judge: YAML files, the tasks in them, Python sources."""

import functools
import pathlib
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from ansible.playbook.block import Block
from ansible.playbook.handler import Handler
from ansible.playbook.task import Task as AnsibleTask

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TASK_KEYWORDS = {"with_items", "local_action", *AnsibleTask.fattributes, *Block.fattributes, *Handler.fattributes}
BLOCK_PARTS = ("block", "rescue", "always")
PLAY_PARTS = ("pre_tasks", "tasks", "post_tasks", "handlers")


class Loader(yaml.SafeLoader):
    """Safe, and lets ansible's own tags (!vault, !unsafe) pass as their text."""


def _tagged(loader: yaml.Loader, suffix: str, node: yaml.Node) -> Any:
    return loader.construct_scalar(node) if isinstance(node, yaml.ScalarNode) else None


Loader.add_multi_constructor("!", _tagged)


@dataclass(frozen=True)
class Task:
    """One task or handler, and where it stands."""

    where: str
    body: dict[str, Any]
    tags: tuple[str, ...] = ()  # its own and those of the blocks and the play around it

    @property
    def name(self) -> str:
        return str(self.body.get("name", ""))

    @property
    def title(self) -> str:
        """The name without the prefix that tells the file: 'install | Bring it' is 'Bring it'."""
        return re.sub(r"^([a-z0-9_-]+ \| )+", "", self.name)

    @property
    def modules(self) -> list[str]:
        """The module's name; more than one, or none, is a mistake that ansible reports itself."""
        return [key for key in self.body if key not in TASK_KEYWORDS and not key.startswith("with_")]

    @property
    def module(self) -> str:
        return self.modules[0] if self.modules else ""

    def __str__(self) -> str:
        return f"{self.where}: '{self.name or self.module}'"


def parse(text: str) -> Any:
    return yaml.load(text, Loader)


def load(path: pathlib.Path) -> Any:
    return parse(path.read_text())


def relative(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def files() -> list[pathlib.Path]:
    """What is tracked, and what would be with the next `git add`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def matching(*patterns: str) -> list[pathlib.Path]:
    """Files of the project that one of the patterns finds; ** spans folders."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return [path for path in files() if path in found]


def tasks_in(document: Any, where: str, outer: tuple[str, ...] = ()) -> Iterator[Task]:
    """Every task of a playbook or a task file, blocks opened. A block counts as a task when it is named."""
    for entry in document or []:
        if not isinstance(entry, dict):
            continue
        tags = (*outer, *listed(entry.get("tags")))
        if "hosts" in entry:
            for part in PLAY_PARTS:
                yield from tasks_in(entry.get(part), where, tags)
        elif "block" in entry:
            for part in BLOCK_PARTS:
                yield from tasks_in(entry.get(part), where, tags)
        elif "ansible.builtin.import_playbook" not in entry:
            yield Task(where, entry, tags)


def task_files() -> list[pathlib.Path]:
    return matching("playbooks/**/*.yml", "roles/*/tasks/**/*.yml", "roles/*/handlers/**/*.yml", "molecule/**/*.yml")


def tasks() -> list[Task]:
    return [task for path in task_files() for task in tasks_in(as_list(load(path)), relative(path))]


def as_list(document: Any) -> list[Any]:
    """Playbooks and task files are lists; molecule.yml and variable files are not, and hold no tasks."""
    return document if isinstance(document, list) else []


def listed(value: Any) -> list[Any]:
    """Ansible takes one word where it takes a list."""
    return value if isinstance(value, list) else [value] if value else []


def plays(path: pathlib.Path) -> list[dict[str, Any]]:
    return [entry for entry in as_list(load(path)) if isinstance(entry, dict)]


def roles() -> list[pathlib.Path]:
    return sorted({ROOT / "roles" / path.relative_to(ROOT).parts[1] for path in matching("roles/*/**/*")})


def own_modules() -> set[str]:
    """Names that are ours, and so are written bare."""
    return {path.stem for path in matching("library/*.py", "action_plugins/*.py")}
