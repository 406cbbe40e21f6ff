#!/usr/bin/python3
"""Write scrub, certificate and drift figures for Prometheus's textfile collector: pd_metrics.py OUTPUT [ROOT].

Standard library only; reads files, opens no connection. What is not there has no figure.
"""

import glob
import json
import os
import ssl
import sys
import time

SCRUB = "var/lib/pdstack/models/.pdstack/scrub/*.json"
CERTIFICATE = "etc/pdstack/credentials/tls_cert"
DRIFT = "var/lib/pdstack/drift.json"


def scrub(root, now):
    """Yield the age of the oldest proof and the number of damaged files, for each checkpoint."""
    for path in sorted(glob.glob(os.path.join(root, SCRUB))):
        with open(path, encoding="utf-8") as stream:
            files = json.load(stream)["files"].values()
        proofs = [item["verified"] for item in files if not item["corrupt"]]
        label = '{checkpoint="' + os.path.basename(path)[: -len(".json")] + '"}'
        if proofs:
            yield "pdstack_scrub_oldest_proof_age_seconds" + label, max(0.0, now - min(proofs))
        yield "pdstack_scrub_corrupt_files" + label, sum(1 for item in files if item["corrupt"])


def certificate(root, _now):
    """Yield the end of the router's certificate."""
    path = os.path.join(root, CERTIFICATE)
    if os.path.exists(path):
        found = ssl._ssl._test_decode_cert(path)  # the only reader of a certificate file in the standard library
        yield "pdstack_certificate_expiry_timestamp_seconds", ssl.cert_time_to_seconds(found["notAfter"])


def drift(root, _now):
    """Yield the number of findings of the last drift report that was copied here, and when it was written."""
    path = os.path.join(root, DRIFT)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as stream:
            report = json.load(stream)
        yield "pdstack_drift_findings", len(report["items"])
        yield "pdstack_drift_timestamp_seconds", os.stat(path).st_mtime


def render(root, now):
    """Return the text; a source that cannot be read is a figure too."""
    lines = []
    for source in (scrub, certificate, drift):
        broken = 0
        try:
            lines += [f"{name} {value!r}" for name, value in source(root, now)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{source.__name__}: {error}", file=sys.stderr)
            broken = 1
        lines.append(f'pdstack_metrics_source_failed{{source="{source.__name__}"}} {broken}')
    return "\n".join(lines) + "\n"


def main(output, root="/"):
    """Write the figures by rename, so that no half file is read."""
    with open(output + ".part", "w", encoding="utf-8") as stream:
        stream.write(render(root, time.time()))
    os.chmod(output + ".part", 0o644)
    os.replace(output + ".part", output)


if __name__ == "__main__":
    main(*sys.argv[1:])
