"""Build backend (PEP 517) of this package: a pure wheel, the same bytes from the same sources, without any dependency.

pip uses it for `pip install ./kernels`; the role kernel_extension runs it as a script, which prints the wheel's path:

    python3 build_backend.py FOLDER
"""

from __future__ import annotations

import base64
import hashlib
import pathlib
import sys
import tomllib
import zipfile
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent


def contents() -> tuple[str, dict[str, bytes]]:
    """The wheel's file name and its files."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    distribution = f"{project['name'].replace('-', '_')}-{project['version']}"
    info = f"{distribution}.dist-info"
    groups = project["entry-points"].items()
    metadata = {
        "Metadata-Version": "2.1",
        "Name": project["name"],
        "Version": project["version"],
        "Summary": project["description"],
        "License": project["license"],
        "Requires-Python": project["requires-python"],
    }
    files = {
        path.relative_to(HERE / "src").as_posix(): path.read_bytes()
        for path in sorted((HERE / "src").rglob("*"))
        if path.suffix in (".py", ".typed")
    }
    entry_points = [
        line for name, points in groups for line in (f"[{name}]", *(f"{k} = {v}" for k, v in points.items()))
    ]
    files[f"{info}/METADATA"] = "".join(f"{key}: {value}\n" for key, value in metadata.items()).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: pdstack\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = ("\n".join(entry_points) + "\n").encode()
    files[f"{info}/RECORD"] = record(files, f"{info}/RECORD").encode()
    return f"{distribution}-py3-none-any.whl", files


def record(files: dict[str, bytes], own: str) -> str:
    """RECORD of the files: path, hash and size a line."""
    lines = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}\n")
    return "".join(lines) + f"{own},,\n"


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Write the wheel and return its file name (PEP 517)."""
    name, files = contents()
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return name


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    print(folder / build_wheel(str(folder)))
