"""A fake HTTP server with prepared answers."""

import json
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EVENTS = "text/event-stream"


@dataclass
class Answer:
    """A prepared answer, whose parts are sent one by one.

    `cut` closes the connection before the end of the body. If `until` is given, the server waits for that event before
    it sends the last part.
    """

    parts: Iterable[bytes]
    status: int = 200
    kind: str = "application/json"
    cut: bool = False
    until: threading.Event | None = None
    headers: dict[str, str] = field(default_factory=dict)


def json_answer(value: Any, status: int = 200) -> Answer:
    """Returns an answer with a JSON body."""
    return Answer([json.dumps(value).encode()], status)


def stream_answer(*events: Any, **options: Any) -> Answer:
    """Returns an answer with server-sent events: strings as they are, other values as JSON."""
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return Answer([f"data: {text}\n\n".encode() for text in texts], kind=EVENTS, **options)


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """Returns an event of a chat completion stream."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


CHAT = (delta(role="assistant", content=""), delta(content="Good "), delta(content="day."), delta("stop"), "[DONE]")
MODELS = json_answer({"object": "list", "data": [{"id": "fake", "object": "model"}, {"id": "other"}]})


class Quiet(ThreadingHTTPServer):
    """Prints nothing if a client disconnects, because tests compare standard error."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class FakeServer:
    """`routes` has the answers by method and path; a list has one answer for each request. `requests` has all of them,
    each as its route and its body.
    """

    def __init__(self, **routes: Any) -> None:
        self.routes: dict[str, Answer | list[Answer]] = {"GET /v1/models": MODELS}
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []

        class Handler(_Handler):
            owner = self

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def bodies(self, route: str) -> list[Any]:
        return [body for request, body in self.requests if request == route]

    @contextmanager
    def running(self) -> "Iterator[FakeServer]":
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: FakeServer
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        route = f"{self.command} {self.path}"
        raw = self._body()
        body = json.loads(raw) if self.headers.get("Content-Type") == "application/json" else raw
        self.owner.requests.append((route, body))
        self.owner.headers.append(dict(self.headers))
        answer = self.owner.routes.get(route, json_answer({"error": {"message": "No such route."}}, 404))
        with suppress(ConnectionError):  # the client may disconnect at any time
            self._send(answer.pop(0) if isinstance(answer, list) else answer)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815 - http.server names them so

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in {"Content-Type": answer.kind, "Transfer-Encoding": "chunked", **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        parts = list(answer.parts)
        for index, part in enumerate(parts):
            if answer.until is not None and index == len(parts) - 1:
                answer.until.wait()
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
        if answer.cut:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args: Any) -> None:
        """Logs nothing."""
