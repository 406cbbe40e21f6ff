"""Fingerprints of the keys in an OpenPGP file (RFC 4880 and 9580), so that a host needs no gpg to check one.

Only reads packet headers and hashes key packets. Whether a subkey belongs to its key, apt and rpm check when they use
the file; what matters here is that no primary key but the pinned one is in it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Iterator, List, Tuple

PUBLIC_KEY, SECRET_KEY = 6, 5
_ARMOR = re.compile(
    rb"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(?:[^\r\n]+\r?\n)*\r?\n(.*?)-----END PGP PUBLIC KEY BLOCK-----", re.S
)


class KeyFileError(ValueError):
    """The file is not an OpenPGP public key."""


def fingerprints(data: bytes) -> List[str]:
    """Return the fingerprints (upper-case hex) of all primary keys of a key file, armored or not.

    Raises KeyFileError for anything that is not a sequence of OpenPGP packets with at least one public key.
    """
    found = [_fingerprint(body) for tag, body in _packets(_binary(data)) if tag == PUBLIC_KEY]
    if not found:
        raise KeyFileError("no public key in it")
    return found


def armored(data: bytes) -> bytes:
    """Return the key in armor, as apt wants a file that ends in .asc; one that has armor stays as it is."""
    if _ARMOR.search(data):
        return data
    lines = base64.encodebytes(data)
    return b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n" + lines + b"-----END PGP PUBLIC KEY BLOCK-----\n"


def _binary(data: bytes) -> bytes:
    blocks = _ARMOR.findall(data)
    if not blocks:
        if data.lstrip().startswith(b"-----BEGIN"):
            raise KeyFileError("armor, but not of a public key")
        return data
    result = b""
    for block in blocks:
        text = b"".join(line for line in block.split() if not line.startswith(b"="))  # "=" starts the checksum
        try:
            result += base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise KeyFileError(f"damaged armor: {error}") from None
    return result


def _packets(data: bytes) -> Iterator[Tuple[int, bytes]]:
    at = 0
    while at < len(data):
        header = data[at]
        if not header & 0x80:
            raise KeyFileError(f"byte {at} starts no packet")
        try:
            if header & 0x40:
                tag, (size, start) = header & 0x3F, _new_length(data, at + 1)
            else:
                tag, width = (header >> 2) & 0x0F, 1 << (header & 0x03)
                if width == 8:
                    raise KeyFileError("a packet of indeterminate length")
                size, start = int.from_bytes(data[at + 1 : at + 1 + width], "big"), at + 1 + width
        except IndexError:
            raise KeyFileError("cut off in a packet's header") from None
        if start + size > len(data):
            raise KeyFileError("cut off in a packet")
        if tag == SECRET_KEY:
            raise KeyFileError("a secret key; needed is the public one")
        yield tag, data[start : start + size]
        at = start + size


def _new_length(data: bytes, at: int) -> Tuple[int, int]:
    first = data[at]
    if first < 192:
        return first, at + 1
    if first < 224:
        return ((first - 192) << 8) + data[at + 1] + 192, at + 2
    if first == 255:
        return int.from_bytes(data[at + 1 : at + 5], "big"), at + 5
    raise KeyFileError("a packet in parts")


def _fingerprint(body: bytes) -> str:
    version = body[0] if body else 0
    if version == 4:
        return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()
    if version == 6:
        return hashlib.sha256(b"\x9b" + len(body).to_bytes(4, "big") + body).hexdigest().upper()
    raise KeyFileError(f"a key of version {version}; 4 and 6 are known")
