"""The load client tells whole answers from cut ones, and right ones from others: against a server that lies."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import load
import pytest


class Server(http.server.BaseHTTPRequestHandler):
    """Answers with the words that the test put in its script, the last of them again and again."""

    script: list[tuple[str, bool]]  # words of an answer, whether it comes to its end

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words, whole = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        document = {"choices": [{"text": words}], "usage": {"completion_tokens": body["max_tokens"]}}
        events = [f"data: {json.dumps({'choices': [{'text': word}]})}\n\n" for word in words.split(" ")]
        text = "".join(events) + ("data: [DONE]\n\n" if whole else "") if body["stream"] else json.dumps(document)
        if not words:
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(text) + (0 if whole else 10)))
        self.end_headers()
        self.wfile.write((text if whole or body["stream"] else text[:20]).encode())

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def client() -> Iterator[load.Load]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    yield load.Load("127.0.0.1", server.server_port, timeout_s=5)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_is_cut_is_no_answer_and_its_begin_is_right(client: load.Load, streamed: bool) -> None:
    Server.script = [("a b c", True), ("a b c", True), ("a b", False)]
    whole, again, cut = (client.one("x", streamed) for _ in range(3))
    assert (whole.ok, again.ok, cut.ok, cut.wrong) == (True, True, False, False)
    assert load.summary([whole, again, cut]).statuses == {"cut stream" if streamed else "cut answer": 1}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_without_a_word_is_no_answer(client: load.Load, streamed: bool) -> None:
    Server.script = [("a b c", True), ("", True)]
    assert client.one("x", streamed).ok
    refused = client.one("x", streamed)
    assert (refused.ok, refused.status, refused.wrong) == (False, 401, False)


@pytest.mark.parametrize("streamed", [False, True])
def test_other_words_than_before_are_a_wrong_answer(client: load.Load, streamed: bool) -> None:
    Server.script = [("a b c", True), ("a b d", True)]
    assert client.one("x", streamed).ok
    other = client.one("x", streamed)
    assert (other.ok, other.wrong) == (False, True)
    assert load.summary([other]).wrong == 1


def test_so_is_a_stream_that_began_otherwise_before_it_was_cut(client: load.Load) -> None:
    Server.script = [("a b c", True), ("a x", False)]
    assert client.one("x", streamed=True).ok
    assert client.one("x", streamed=True).wrong
