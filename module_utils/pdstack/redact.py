"""Take secrets out of text that leaves a host: known values, and whatever looks like a secret. Pure.

Both, since either alone misses some: a value that is known is found wherever it stands, also encoded, and
a value that nobody told us of is found by the name before it or by its own shape. Numbers of tokens, digests and
paths stay, for they are what a bug report is about.
"""

from __future__ import annotations

import base64
import json
import re
import urllib.parse
from typing import Any, Callable, Dict, Iterable, List, Match, Pattern, Tuple

SHORTEST = 6  # characters of a known value: a shorter one would blot out innocent words

_NAME = (
    r"(?:[A-Za-z0-9_.-]*[_.-])?"
    r"(?:api[_-]?keys?|admin[_-]?keys?|access[_-]?keys?(?:[_-]?id)?|private[_-]?keys?|secret[_-]?keys?|client[_-]?keys?|"
    r"auth[_-]?keys?|tokens?|secrets?|passwords?|passwd|passphrase|pass|pwd|credentials?|authorization|cookie|"
    r"set-cookie|x-api-key)"
)
# Names that end like a secret's and hold a count, or a word of a tokenizer. In lower case, with _ for - and for a dot.
_COUNT = re.compile(r"tokens?$|(?:^|_)pass$")
_WORD = re.compile(r"(?:^|_)(?:bos|eos|pad|unk|mask|cls|sep|stop|special|image|audio|video)_token$")


def _removed(what: str) -> str:
    return f"<removed:{what.replace(' ', '-')}>"


_SHAPES: List[Tuple[str, Pattern[str], str]] = [
    (
        "private key",
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        _removed("private key"),
    ),
    (
        "address",
        re.compile(r"(?P<keep>\b[A-Za-z][A-Za-z0-9+.-]*://)[^\s/@\"'<>]+@"),
        r"\g<keep>" + _removed("login") + "@",
    ),
    (
        "query",
        re.compile(
            r"(?P<keep>[?&;](?:[\w-]*(?:token|key|secret|password|signature|credential)|sig|auth|code)=)[^&\s\"'<>#;]+",
            re.IGNORECASE,
        ),
        r"\g<keep>" + _removed("query"),
    ),
    (
        "authorization",
        re.compile(
            r"(?P<keep>\b(?:Bearer|Basic|Digest|Negotiate)\s+)(?!<removed:)[A-Za-z0-9._~+/=:-]{6,}", re.IGNORECASE
        ),
        r"\g<keep>" + _removed("authorization"),
    ),
    (
        "token",
        re.compile(r"\b(?:hf_|hf_oauth_|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abp]-|nvapi-|npm_)[A-Za-z0-9_-]{8,}"),
        _removed("token"),
    ),
    ("token", re.compile(r"\bsk-[A-Za-z0-9_-]{12,}"), _removed("token")),
    ("token", re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), _removed("token")),
    ("token", re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"), _removed("token")),
    ("password hash", re.compile(r"\$(?:1|2[aby]|5|6|y|argon2id)\$[^\s:\"']{8,}"), _removed("password hash")),
    ("login", re.compile(r"(?P<keep>(?:^|\s)(?:-u|--user)[ =]+)[^\s:]+:\S+"), r"\g<keep>" + _removed("login")),
    (
        "cookie",
        re.compile(r"(?P<keep>\b(?:set-)?cookie[\"']?:)[ \t]*(?![ \t]*<removed:).*", re.IGNORECASE),
        r"\g<keep> " + _removed("cookie"),
    ),
    (
        "credential",
        re.compile(r"(?P<keep>\bSetCredential(?:Encrypted)?=[^:\s]+:).*"),
        r"\g<keep>" + _removed("credential"),
    ),
]
# "random" is how an inventory asks for a key that nobody has to know.
_NO_VALUE = ("", "none", "null", "true", "false", "auto", "off", "random")
_PLACEHOLDER = re.compile(r"<removed:[a-z-]+>")
# The same, as it is written in different places: each has its own end of the value.
_NAMED: List[Pattern[str]] = [
    re.compile(form.replace("NAME", "(?P<name>" + _NAME + ")"), re.IGNORECASE | re.MULTILINE)
    for form in (
        r"(?P<before>[\"'])NAME(?P<between>=)(?P<value>(?:(?!(?P=before)).)+)(?=(?P=before))",  # Environment="NAME=a b"
        # lists and blocks of YAML
        r"(?P<before>^[ \t]*(?:-[ \t]+)?)NAME(?P<between>:)(?P<value>[ \t]*\n(?:[ \t]*-[ \t]+.*(?:\n|\Z))+)",
        r"(?P<before>^[ \t]*(?:-[ \t]+)?)NAME(?P<between>:[ \t]*[|>][+-]?[ \t]*\n)(?P<value>(?:[ \t]+.*(?:\n|\Z))+)",
        # to the line's end, or the next assignment in it
        r"(?P<before>^[ \t]*(?:-[ \t]+|export[ \t]+)?)NAME(?P<between>=|:[ \t]+)"
        r"(?P<value>[^\s](?:(?!, ?[\w.-]+[=:]).)*)",
        r"(?P<before>\\?[\"'])NAME(?P<between>\\?[\"'][ \t]*:[ \t]*)(?P<value>\[[^\]]*\])",  # a list of JSON
        r"(?P<before>(?<![A-Za-z0-9_.-])--)NAME(?P<between>[\"']?[ \t]+)(?P<value>\"[^\"]*\"|'[^']*'|(?!-)\S+)",
        r"(?P<before>(?<![A-Za-z0-9_.]))(?:--)?NAME(?P<between>\\?[\"']?[ \t]*(?:=|:(?!//))[ \t]*)"
        r"(?P<value>\\?\"(?:[^\"\\]|\\[^\"])*\\?\"|'[^']*'|[^\s,;\"'}\])]+)",
    )
]


class Redactor:
    """Removes secrets from texts. ``secrets`` are values that are known, such as the contents of credential files."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self.counts: Dict[str, int] = {}
        forms = {form for secret in secrets for form in _forms(secret)}
        words = sorted(forms, key=len, reverse=True)  # the longest first: one may be part of another
        self._known = re.compile("|".join(map(re.escape, words))) if words else None

    def text(self, text: str) -> str:
        """Return the text without secrets."""
        if self._known is not None:
            text = self._known.sub(self._counting("known value", lambda match: _removed("known value")), text)
        for what, pattern, into in _SHAPES:
            text = pattern.sub(self._counting(what, lambda match, into=into: match.expand(into)), text)  # type: ignore[misc]
        for pattern in _NAMED:
            text = pattern.sub(self._named, text)
        return text

    def _counting(self, what: str, replace: Callable[[Match[str]], str]) -> Callable[[Match[str]], str]:
        def replacement(match: Match[str]) -> str:
            self.counts[what] = self.counts.get(what, 0) + 1
            return replace(match)

        return replacement

    def _named(self, match: Match[str]) -> str:
        name, value = match.group("name"), match.group("value")
        if _harmless(re.sub(r"[-.]", "_", name.lower()), value.strip("\\\"' \t\n")):
            return match.group(0)
        self.counts["named"] = self.counts.get("named", 0) + 1
        before = match.group(0)[: match.start("value") - match.start()]
        quote = value[: len(value) - len(value.lstrip("\\\"'"))]
        end = "\n" if value.endswith("\n") else quote
        return f"{before}{quote}{_removed('secret')}{end}"


def _harmless(name: str, value: str) -> bool:
    """Whether a value with a suspicious name holds no secret: a number of tokens, a path, nothing."""
    if _PLACEHOLDER.sub("", value).lower().strip("\"', ") in _NO_VALUE:
        return True
    if re.fullmatch(r"(?:%d)?/[\w./@%-]*|\$\{?\w+\}?|\{\{.*\}\}|<[\w/|]{1,20}>", value):
        return True  # where a secret lies is no secret
    if _COUNT.search(name) and re.fullmatch(r"-?[\d.eE+-]+,?", value):
        return True
    return _WORD.search(name) is not None and re.fullmatch(r"\S{0,24}", value) is not None


def _forms(secret: str) -> List[str]:
    """Return the forms in which a known value may stand in a text."""
    value = secret.strip()
    if len(value) < SHORTEST:
        return []
    encoded = [base64.b64encode(data).decode().rstrip("=") for data in (value.encode(), f"{value}\n".encode())]
    forms = [value, urllib.parse.quote(value, safe=""), json.dumps(value)[1:-1], *encoded]
    return [form for form in dict.fromkeys(forms) if len(form) >= SHORTEST] + [
        line.strip() for line in value.splitlines() if len(line.strip()) >= 16 and "-----" not in line
    ]


def secrets_in(document: Any, name: str = "") -> List[str]:
    """Return the values in a document whose key says that they are secrets: those of an inventory, for a Redactor."""
    if isinstance(document, dict):
        return [secret for key, item in document.items() for secret in secrets_in(item, str(key))]
    if isinstance(document, list):
        return [secret for item in document for secret in secrets_in(item, name)]
    suspicious = re.fullmatch(_NAME, name, re.IGNORECASE) is not None
    found = isinstance(document, str) and suspicious and not _harmless(re.sub(r"[-.]", "_", name.lower()), document)
    return [document] if found else []
