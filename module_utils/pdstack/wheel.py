"""Write a pure-Python wheel with the standard library: no network, no build back end, the same bytes everywhere.

The project's own small packages travel in the wheelhouse and are pinned by hash like any other wheel. That works only
if building them again, on another machine and another Python, gives the identical file: entries are sorted, carry
one fixed time and mode, and are stored without compression (zlib's output differs between its versions).
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import zipfile
from typing import Dict, Tuple

#: The earliest time a zip archive can hold.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def build(project: str) -> Tuple[str, bytes]:
    """Return the file name and the bytes of the wheel of a project folder with ``pyproject.toml`` and ``src/``.

    Everything below ``src/`` is installed into site-packages as it lies there. Of the metadata, name, version, summary
    and requires-python are carried. Raises ValueError where the name or the version is missing.
    """
    with open(os.path.join(project, "pyproject.toml"), encoding="utf-8") as stream:
        text = stream.read()
    name, version = _field(text, "name"), _field(text, "version")
    if not name or not version:
        raise ValueError(f"{project}/pyproject.toml: no name or no version in [project]")
    files = {}
    source = os.path.join(project, "src")
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(item for item in folders if item != "__pycache__" and not item.endswith(".egg-info"))
        for item in names:
            path = os.path.join(folder, item)
            with open(path, "rb") as content:
                files[os.path.relpath(path, source)] = content.read()
    metadata = {
        "Name": name,
        "Version": version,
        "Summary": _field(text, "description"),
        "Requires-Python": _field(text, "requires-python"),
    }
    return build_from(metadata, files)


def build_from(metadata: Dict[str, str], files: Dict[str, bytes]) -> Tuple[str, bytes]:
    """Return the file name and the bytes of a ``py3-none-any`` wheel of these files (path -> content)."""
    stem = f"{re.sub(r'[-_.]+', '_', metadata['Name'])}-{metadata['Version']}"
    info = f"{stem}.dist-info"
    head = "Metadata-Version: 2.1\n" + "".join(f"{key}: {value}\n" for key, value in metadata.items() if value)
    content = dict(files)
    content[f"{info}/METADATA"] = head.encode()
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: pdstack\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{path},sha256={_digest(content[path])},{len(content[path])}\n" for path in sorted(content))
    content[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(content):
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.create_system = 3  # Unix, on whatever system this runs: the mode below is read as one
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, content[path])
    return f"{stem}-py3-none-any.whl", buffer.getvalue()


def _field(text: str, key: str) -> str:
    """A plain string of [project]; tomllib would need Python 3.11, and our own files hold nothing harder."""
    section = re.search(r"^\[project\]$(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    match = re.search(rf'^{key} = "([^"]*)"$', section.group(1), re.MULTILINE) if section else None
    return match.group(1) if match else ""


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
