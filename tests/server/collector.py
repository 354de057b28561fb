"""A small OpenTelemetry collector: it accepts spans by OTLP over HTTP, refuses them, or does not answer."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.spans: list[Any] = []  # protobuf messages
        self.resource: dict[str, str] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []  # path, headers
        self.status = 200  # of all answers; spans are stored only if it is 200
        self.silent = False  # whether requests wait until `released` is set
        self.released = threading.Event()

    def take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = {item.key: item.value.string_value for item in group.resource.attributes}
            self.spans += [span for scope in group.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append((self.path, dict(self.headers)))
        if self.server.silent:
            self.server.released.wait()
        if self.server.status == 200:
            self.server.take(body)
        with contextlib.suppress(OSError):
            self.send_response(self.server.status)
            self.send_header("content-length", "0")
            self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    """Returns the attributes of a protobuf span."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}
