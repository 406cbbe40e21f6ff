"""The far end of a xet download. It runs in a Python that has hf_xet, such as the engine release's.

What to fetch comes as JSON on standard input, the access token too; the bytes go to standard output. Retries, time-outs
and digests are the business of whoever reads them.
"""

from __future__ import annotations

import json
import os
import sys

REFUSED, UNKNOWN = 3, 4  # exit status: the token is not taken; no such file
BUFFER = 64_000_000  # bytes; hf_xet would take up to 6 GB


def main() -> int:
    try:
        import hf_xet  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1

    asked = json.load(sys.stdin)
    config = hf_xet.XetConfig().with_config(
        {
            "telemetry.enabled": False,
            "client.retry_max_attempts": 1,
            "client.retry_base_delay": "1s",
            "client.connect_timeout": f"{asked['timeout']}s",
            "client.read_timeout": f"{asked['timeout']}s",
            "reconstruction.min_reconstruction_fetch_size": BUFFER,
            "reconstruction.max_reconstruction_fetch_size": 4 * BUFFER,
            "reconstruction.min_prefetch_buffer": BUFFER,
            "reconstruction.download_buffer_size": BUFFER,
            "reconstruction.download_buffer_perfile_size": BUFFER,
            "reconstruction.download_buffer_limit": BUFFER,
        }
    )
    try:
        group = hf_xet.XetSession(config).new_download_stream_group(
            endpoint=asked["endpoint"], token=asked["token"], token_expiry_unix_secs=asked["expires"]
        )
        info = hf_xet.XetFileInfo(asked["hash"], asked["size"])
        for chunk in group.download_stream(info, start=asked["start"], end=asked["size"]):
            view = memoryview(chunk)
            while len(view):
                view = view[os.write(1, view) :]
    except hf_xet.XetAuthenticationError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except hf_xet.XetObjectNotFoundError as error:
        print(error, file=sys.stderr)
        return UNKNOWN
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
