"""The storage behind a hub that keeps files in xet, as far as a download needs it. hf_xet speaks to it.

One file is one xorb of uncompressed chunks: https://huggingface.co/docs/xet/xorb, .../xet/api
"""

from __future__ import annotations

import hashlib
import os
import pathlib

CHUNK = 1 << 16
HEADER = 8  # bytes before each chunk: version, length in the xorb, scheme, length


def name(sha256: str) -> str:
    """Return what the tree gives as xetHash; the real one is a Merkle hash, and no client checks it."""
    return hashlib.sha256(f"xet {sha256}".encode()).hexdigest()


def xorb(path: pathlib.Path) -> int:
    """Return a descriptor of the file's xorb."""
    fd = os.memfd_create("xorb")
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            length = len(chunk).to_bytes(3, "little")
            os.write(fd, b"\0" + length + b"\0" + length + chunk)
    return fd


def reconstruction(sha256: str, size: int, asked: str | None, url: str) -> dict[str, object]:
    """Return which chunks of the xorb make the bytes ``asked`` (a Range header's value), and where they lie."""
    first, last = 0, size - 1
    if asked:
        first, last = (int(text) for text in asked.removeprefix("bytes=").split("-"))
    start, end = first // CHUNK, min(last, size - 1) // CHUNK + 1
    chunks = {"start": start, "end": end}
    stop = min(end * CHUNK, size)
    place = {"start": start * (CHUNK + HEADER), "end": stop + end * HEADER - 1}
    term = {"hash": name(sha256), "unpacked_length": stop - start * CHUNK, "range": chunks}
    return {
        "offset_into_first_range": first - start * CHUNK,
        "terms": [term],
        "fetch_info": {name(sha256): [{"range": chunks, "url": url, "url_range": place}]},
    }
