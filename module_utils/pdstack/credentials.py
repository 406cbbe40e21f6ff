"""Keys and the router's certificate on a host: what should lie in the folder that systemd hands to units.

Values are in memory and in these files (0600, root), nowhere else: callers show paths and actions only.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import tempfile
from typing import Dict, List, Mapping, Sequence

from .files import Entry
from .runner import Runner, need

# A random key and both halves of an own certificate are made only when they are missing or unfit.
CERTIFICATE, PRIVATE_KEY, PIN = "tls_cert", "tls_key", "tls_pin"
_VALID_DAYS = 730
_RENEW_DAYS = 60
_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)


def entries(
    folder: str,
    given: Mapping[str, str],
    random: Sequence[str],
    certificate: Sequence[str],
    runner: Runner,
    make: bool = True,
) -> List[Entry]:
    """Return the folder and its files.

    ``given`` has values by name. Of the names in ``random`` what lies there is kept, else a key is made.
    ``certificate`` are the names and addresses of a self-signed certificate, () for none. With
    ``make`` false nothing is made and a placeholder stands for what would be. Raises CommandFailed.
    """
    texts = {name: value if value.endswith("\n") else value + "\n" for name, value in given.items()}
    for name in random:
        kept = _read(os.path.join(folder, name))
        texts[name] = kept if _KEY.fullmatch(kept.strip()) else secrets.token_urlsafe(32) + "\n"
    if certificate:
        if own_certificate_fits(folder, certificate, runner):
            texts.update({name: _read(os.path.join(folder, name)) for name in (CERTIFICATE, PRIVATE_KEY)})
        else:
            texts.update(make_certificate(certificate, runner) if make else {CERTIFICATE: "-", PRIVATE_KEY: "-"})
    if CERTIFICATE in texts:
        # What our own modules trust: the router's certificate itself and not whoever issued it.
        found = _PEM.search(texts[CERTIFICATE])
        texts[PIN] = found.group(0) if found else texts[CERTIFICATE]
    return [Entry(folder, None, 0o700)] + [
        Entry(os.path.join(folder, name), text, 0o600) for name, text in sorted(texts.items())
    ]


def own_certificate_fits(folder: str, names: Sequence[str], runner: Runner) -> bool:
    """Whether the certificate in ``folder`` has these names, belongs to its key and is good for two more months."""
    cert, key = os.path.join(folder, CERTIFICATE), os.path.join(folder, PRIVATE_KEY)
    if not (os.path.isfile(cert) and os.path.isfile(key)):
        return False
    shown = runner(["openssl", "x509", "-in", cert, "-noout", "-pubkey", "-ext", "subjectAltName"])
    public = runner(["openssl", "pkey", "-in", key, "-pubout"])
    lasting = runner(["openssl", "x509", "-in", cert, "-noout", "-checkend", str(_RENEW_DAYS * 86400)])
    if shown.rc or public.rc or lasting.rc:
        return False
    found = set(re.findall(r"(?:DNS|IP Address):([^,\s]+)", shown.out))
    wanted = {name.partition(":")[2] for name in alternative_names(names)}
    return public.out.strip() in shown.out and {_plain(name) for name in found} == {_plain(name) for name in wanted}


def make_certificate(names: Sequence[str], runner: Runner) -> Dict[str, str]:
    """Return a new self-signed server certificate and its key. Raises CommandFailed."""
    with tempfile.TemporaryDirectory(prefix="pdstack-tls-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as d:
        config, cert, key = (os.path.join(d, name) for name in ("config", "cert", "key"))
        with open(config, "w", encoding="utf-8") as handle:
            handle.write(
                "[req]\ndistinguished_name = name\nx509_extensions = server\nprompt = no\n"
                f"[name]\nCN = {names[0][:64]}\n"
                # Not an authority: whoever trusts it trusts this router and nobody else.
                "[server]\nbasicConstraints = critical, CA:FALSE\nkeyUsage = critical, digitalSignature\n"
                f"extendedKeyUsage = serverAuth\nsubjectAltName = {','.join(alternative_names(names))}\n"
            )
        argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        need(runner, [*argv, "-config", config, "-days", str(_VALID_DAYS), "-keyout", key, "-out", cert])
        return {CERTIFICATE: _read(cert), PRIVATE_KEY: _read(key)}


def alternative_names(names: Sequence[str]) -> List[str]:
    """Return names and addresses as openssl takes them."""
    return [
        f"{'IP' if re.fullmatch(r'[0-9.]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*', name) else 'DNS'}:{name}" for name in names
    ]


def _plain(name: str) -> str:
    """Return one spelling of an address: openssl shows IPv6 in capitals and without its zeros."""
    if ":" not in name:
        return name.lower()
    return ipaddress.ip_address(name).compressed


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as handle:
            return handle.read()
    except (OSError, UnicodeDecodeError):
        return ""
