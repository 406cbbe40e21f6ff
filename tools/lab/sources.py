"""apt sources, both formats, and which of this machine's mirrors a base tree is built from. Pure.

Formats: sources.list(5). Only binary (``deb``) entries count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterable
from urllib.parse import urlsplit

DEBIAN = ("buster", "bullseye", "bookworm", "trixie", "forky", "sid", "stable", "oldstable", "testing", "unstable")
_ONE_LINE = re.compile(r"^deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)(?P<components>.*)$")


@dataclass(frozen=True)
class Source:
    """One archive: where, which suite, which components."""

    uri: str
    suite: str
    components: tuple[str, ...]


def parse_one_line(text: str) -> list[Source]:
    """Return the archives of a ``sources.list`` file."""
    found = []
    for line in text.splitlines():
        match = _ONE_LINE.match(line.split("#", 1)[0].strip())
        if match:
            found.append(Source(match["uri"], match["suite"], tuple(match["components"].split())))
    return found


def parse_deb822(text: str) -> list[Source]:
    """Return the archives of a ``.sources`` file: one for each URI and suite of each stanza."""
    found = []
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for stanza in re.split(r"\n\s*\n", "\n".join(lines)):
        fields: dict[str, list[str]] = {}
        key = ""
        for line in stanza.splitlines():
            if line[:1].isspace():
                fields.setdefault(key, []).extend(line.split())
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.split()
        if "deb" not in fields.get("types", []) or fields.get("enabled", ["yes"])[0].lower() in ("no", "false", "0"):
            continue
        components = tuple(fields.get("components", []))
        found += [Source(u, s, components) for u in fields.get("uris", []) for s in fields.get("suites", [])]
    return found


def _http(source: Source) -> bool:
    return urlsplit(source.uri).scheme in ("http", "https")


def debian_lines(machine: Iterable[Source], suite: str) -> list[str]:
    """Return one-line sources for ``suite`` from the machine's own Debian archives.

    Empty when the machine has none (Ubuntu): mmdebstrap then takes its own default for the suite.
    """
    archives: dict[str, str] = {}
    for source in machine:
        suite_of, _, pocket = source.suite.replace("/updates", "-security").partition("-")
        if suite_of in DEBIAN and "main" in source.components and _http(source):
            archives.setdefault(pocket, source.uri)
    if "" not in archives:
        return []
    return [
        f"deb {archives[pocket]} {suite}{'-' + pocket if pocket else ''} main"
        for pocket in ("", "updates", "security")
        if pocket in archives
    ]


def endpoints(sources: Iterable[Source]) -> dict[str, tuple[int, ...]]:
    """Return host -> TCP ports of every http(s) archive, sorted by host."""
    ports: dict[str, set[int]] = {}
    for source in sources:
        url = urlsplit(source.uri)
        if url.hostname and url.scheme in ("http", "https"):
            ports.setdefault(url.hostname, set()).add(url.port or (443 if url.scheme == "https" else 80))
    return {host: tuple(sorted(ports[host])) for host in sorted(ports)}


def proxy_endpoint(apt_config: str) -> tuple[str, int] | None:
    """Return host and port of ``Acquire::http::Proxy`` in the output of ``apt-config dump``, if one is set."""
    match = re.search(r'^Acquire::http::Proxy "([^"]+)";$', apt_config, re.MULTILINE | re.IGNORECASE)
    if not match or match[1].upper() == "DIRECT":
        return None
    url = urlsplit(match[1] if "//" in match[1] else f"http://{match[1]}")
    return (url.hostname, url.port or 80) if url.hostname else None
