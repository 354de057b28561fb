"""benchmarks/failures.py: how it judges the end of a request."""

import http.server
import json
import random
import threading
from collections.abc import Iterator

import pytest

from benchmarks import failures
from benchmarks.failures import Balancer, Outcome, Request

WHOLE, STREAM = Request("Once", False), Request("Once", True)
REPLIES: dict[str, tuple[int, list[str]]] = {
    "whole": (200, [json.dumps({"choices": [{"text": "upon"}]})]),
    "error": (503, [json.dumps({"error": {"code": "engine_dead", "message": "It ended."}})]),
    "error without a code": (503, [json.dumps({"error": {"message": "It ended."}})]),
    "refused": (400, [json.dumps({"error": {"code": "invalid_parameter", "message": "No."}})]),
    "stream": (200, ['data: {"choices": [{"text": "up", "finish_reason": null}]}', "", ": a comment", "",
                     'data: {"choices": [{"text": "on", "finish_reason": "length"}]}', "", "data: [DONE]", ""]),
    "cut": (200, ['data: {"choices": [{"text": "up", "finish_reason": null}]}', ""]),
    "no reason": (200, ['data: {"choices": [{"text": "up", "finish_reason": null}]}', "", "data: [DONE]", ""]),
    "error in a stream": (200, ['data: {"choices": [{"text": "up", "finish_reason": null}]}', "",
                                'data: {"error": {"code": "engine_dead", "message": "It ended."}}', ""]),
}  # fmt: skip


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, lines = REPLIES[self.server.reply]  # type: ignore[attr-defined]
            self.send_response(status)
            self.end_headers()
            self.wfile.write("\n".join(lines).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.mark.parametrize(
    ("reply", "request_", "end", "text"),
    [
        ("whole", WHOLE, "right", "upon"),
        ("error", WHOLE, "error", ""),
        ("error without a code", WHOLE, "wrong", ""),
        ("refused", STREAM, "wrong", ""),
        ("stream", STREAM, "right", "upon"),
        ("cut", STREAM, "broken", "up"),
        ("no reason", STREAM, "wrong", "up"),
        ("error in a stream", STREAM, "error", "up"),
    ],
)
def test_ends_of_requests(server: http.server.HTTPServer, reply: str, request_: Request, end: str, text: str) -> None:
    server.reply = reply  # type: ignore[attr-defined]
    outcome = failures.ask(f"http://127.0.0.1:{server.server_address[1]}", request_)
    assert (outcome.end, outcome.text) == (end, text)


@pytest.mark.parametrize(
    ("outcomes", "hit", "ends", "number_of_wrong"),
    [
        ([("right", "upon")], None, {"right": 1}, 0),
        ([("right", "up")], None, {"wrong": 1}, 1),  # a part of the answer that is said to be all of it
        ([("error", "up")], (0, {"error"}), {"error": 1}, 0),
        ([("error", "other")], (0, {"error"}), {"wrong": 1}, 1),
        ([("error", "up")], (1, {"error"}), {"error": 1}, 1),  # on the server that did not fail
        ([("broken", "up")], (0, {"error"}), {"broken": 1}, 1),
        ([("refused", ""), ("right", "upon")], (0, {"broken"}), {"moved": 1, "right": 1}, 0),
        ([("error", ""), ("right", "upon")], (0, {"error"}), {"moved": 1, "right": 1}, 0),
        ([("refused", ""), ("refused", "")], (0, {"broken"}), {"moved": 2, "refused": 1}, 1),
    ],
)
def test_what_a_failure_permits(
    outcomes: list[tuple[str, str]],
    hit: tuple[int, set[str]] | None,
    ends: dict[str, int],
    number_of_wrong: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replies = iter(outcomes)
    monkeypatch.setattr(failures, "ask", lambda _url, _request: Outcome(*next(replies)))
    balancer = Balancer(["first", "second"], {WHOLE: "upon"}, hit=hit)
    rng = random.Random(next(seed for seed in range(9) if _first_server(seed) == 0))
    balancer.send(rng)
    assert (dict(balancer.ends), len(balancer.wrong)) == (ends, number_of_wrong)


def _first_server(seed: int) -> int:
    rng = random.Random(seed)
    rng.choice([WHOLE])
    return rng.randrange(2)
