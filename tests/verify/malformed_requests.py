"""Send 200 requests that no server should serve, one connection each, and print what came back as JSON.

Runs on a host, standard library only: `python3 - ADDRESS PORT tls|plain KEY_FILE MODEL`. Per request the status, 0
where the server closed the connection without one, "hung" where nothing came within ten seconds, or "left" where we
went away in the middle of a request, as a client that crashes does.
"""

import json
import pathlib
import random
import socket
import ssl
import sys
import time

ADDRESS, PORT, TLS, KEY_FILE, MODEL = sys.argv[1:6]
KEY = pathlib.Path(KEY_FILE).read_text().strip()
LIMIT_S = 10
BODIES = [  # good JSON, bad requests
    {"prompt": {"a": 1}},
    {"prompt": 5},
    {"prompt": None},
    {"prompt": [[["x"]]]},
    {"prompt": "x", "max_tokens": "many"},
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "max_tokens": 10**7},
    {"prompt": "x", "max_tokens": 10**30},
    {"prompt": "x", "max_tokens": 1.5},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x", "temperature": -5},
    {"prompt": "x", "top_p": 7},
    {"prompt": "x", "top_p": []},
    {"prompt": "x", "n": -1},
    {"prompt": "x", "n": "two"},
    {"prompt": "x", "stop": {"a": 1}},
    {"prompt": "x", "stream": "perhaps"},
    {"prompt": "x", "logit_bias": "none"},
    {"prompt": "x" * 200_000, "max_tokens": 4},
    {},
]
TEXTS = [
    "",
    "{",
    "null",
    "[]",
    '"x"',
    "{'a': 1}",
    '{"model":',
    "[" * 5000,
    "\x00\x01",
    '{"prompt": "x"} trailing',
    "NaN",
]
METHODS = ["GET", "PUT", "DELETE", "PATCH", "TRACE", "BREW", "get", "HEAD"]
PATHS = ["/v1/completions/../../etc/passwd", "/%00", "/v1/complet1ons", "/" + "a" * 60_000, "//", "/v1/%zz", "*"]
KEYS = ["", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer " + "k" * 9000]


def http(method="POST", path="/v1/completions", body=b"", headers=(), key=f"Bearer {KEY}", length=None):
    lines = [f"{method} {path} HTTP/1.1", f"Host: {ADDRESS}", "Connection: close", "Content-Type: application/json"]
    lines += [f"Authorization: {key}"] if key is not None else []
    lines += [f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


LEFT = ("truncated body", "broken chunks", "half a greeting")


def requests():
    """Return 200 requests as (what is wrong, bytes)."""
    good = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    kinds = {
        "wrong types": [http(body=json.dumps({"model": MODEL, **item}).encode()) for item in BODIES],
        "no JSON": [http(body=text.encode()) for text in TEXTS],
        "wrong method": [http(method=method) for method in METHODS],
        "wrong path": [http(path=path, body=good) for path in PATHS],
        "wrong key": [http(body=good, key=key) for key in [*KEYS, None]],
        "huge headers": [http(body=good, headers=[f"X-{i}: {'a' * 2_000_000}"]) for i in range(3)]
        + [http(body=good, headers=[f"X-{i}: a" for i in range(2000)])],
        "broken headers": [http(body=good, headers=[line]) for line in ("no colon", ": empty", "X\x00: 1", "X y: 1")],
        "truncated body": [http(body=good, length=len(good) + more) for more in (1, 100, 10**6, 10**12)],
        "wrong length": [http(body=good, length=length) for length in ("-5", "x", "99999999999999999999999")]
        + [http(body=good, headers=["Content-Length: 7"])],
        "broken chunks": [
            http(headers=["Transfer-Encoding: chunked"], length=None, body=body)
            for body in (b"zz\r\nxx\r\n", b"ffffffffffffffffff\r\n", b"5\r\nab")
        ],
        "half a greeting": [b"\x16\x03\x01\x02\x00", b"POST", b"\r\n" * 500],
        "no HTTP": [b"\x00" * 4096, b"HELLO\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"],
    }
    pool = [(kind, item) for kind, items in kinds.items() for item in items]
    rest = random.Random(7)
    while len(pool) < 200:  # good requests with noise in their first line
        spoilt = bytearray(http(body=good))
        for _ in range(rest.randint(1, 8)):
            spoilt[rest.randrange(29)] = rest.choice(b"\x00\xff\x80 \t:{}")
        pool.append(("noise", bytes(spoilt)))
    return pool[:200]


def ask(kind, data):
    raw = socket.create_connection((ADDRESS, int(PORT)), timeout=LIMIT_S)
    raw.settimeout(LIMIT_S)
    connection = raw
    answer = b""
    if TLS == "tls":
        context = ssl.create_default_context(cafile="/etc/pdstack/credentials/tls_pin")
        context.check_hostname = False
        connection = context.wrap_socket(raw)
    try:
        connection.sendall(data)
        if kind in LEFT:
            return "left"
        while b"\r\n" not in answer:
            more = connection.recv(4096)
            if not more:
                break
            answer += more
    except TimeoutError:
        return "hung"
    except OSError:
        pass
    finally:
        connection.close()
    words = answer.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else 0


begin = time.monotonic()
found = {}
for kind, data in requests():
    status = str(ask(kind, data))
    found.setdefault(kind, {}).setdefault(status, 0)
    found[kind][status] += 1
print(json.dumps({"found": found, "seconds": time.monotonic() - begin}))
