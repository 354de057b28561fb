"""The outermost middleware: each response gets a request id and security headers, and is counted and logged.

The log line holds the route's template, status and milliseconds; never a query string, a body or a header. In JSON
(`fp8serve/logs.py`) it has these as fields, and also the tenant, tokens and the failure's code; every record made for a
request has its ids. An unexpected exception becomes a small 500 that does not say where it happened.
"""

import logging
import re
import secrets
import time
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fp8serve import logs
from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.scope import METHODS, OPEN_PATHS, header, refuse
from fp8serve.server.metrics import Metrics
from fp8serve.server.tracing import RequestSpan, Tracing
from fp8serve.server.usage import Usage

log = logging.getLogger("fp8serve.server.access")

SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
]
UNTRACED = OPEN_PATHS | {"/metrics"}
"""Routes that are polled every few seconds."""
_REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


class TraceContext(NamedTuple):
    """The caller's span, as the `traceparent` header says (W3C Trace Context, level 1). A header that is not valid, or
    comes twice, is ignored, as the specification demands; one of a newer version may have more fields.

        00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01    version, trace id, parent's span id, flags

    `trace_id` has 32 hexadecimal digits and `span_id` 16."""

    trace_id: str
    span_id: str


def trace_context(scope: Scope) -> TraceContext | None:
    """The trace context of the request; None if it has none."""
    values = [value for name, value in scope["headers"] if name == b"traceparent"]
    match = _HEADER.fullmatch(values[0].decode("latin-1").strip()) if len(values) == 1 else None
    if match is None:
        return None
    version, trace_id, span_id, _, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id)


class AccessLog:
    """See the module. Handlers find the request id in `scope["request_id"]`, and count tokens in `scope["usage"]`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing | None) -> None:
        self.app = app
        self.metrics = metrics
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        client_id = (header(scope, b"x-request-id") or b"").decode("latin-1")
        scope["request_id"] = client_id if _REQUEST_ID.fullmatch(client_id) else f"req-{secrets.token_hex(12)}"
        scope["usage"] = Usage(scope["request_id"])
        with logs.request_fields(request_id=scope["request_id"]):
            if (span := self._begin(scope)) is not None:
                logs.bind(trace_id=span.trace_id, span_id=span.span_id)
            return await self._answer(scope, receive, _Answer(scope, send))

    def _begin(self, scope: Scope) -> TraceContext | RequestSpan | None:
        """The request's span: its own with tracing, otherwise its caller's."""
        if self.tracing is not None and scope["path"] not in UNTRACED:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            scope["span"] = self.tracing.begin(_method(scope), headers)
        return scope.get("span") or trace_context(scope)

    async def _answer(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        started = time.perf_counter()
        try:
            await self.app(scope, receive, answer)
        except Exception as error:
            log.error("unexpected %s in %s", type(error).__name__, _route(scope), exc_info=error)
            if answer.status == 0:
                await refuse(
                    Fault(Code.INTERNAL, "The server made a mistake; its log has the details under this request id."),
                    scope,
                    receive,
                    answer,
                )
        finally:
            self._account(scope, answer.status or 499, time.perf_counter() - started)

    def _account(self, scope: Scope, status: int, seconds: float) -> None:
        route = _route(scope)
        method = _method(scope)
        self.metrics.responses.labels(route, method, str(status)).inc()
        self.metrics.http_seconds.labels(route).observe(seconds)
        if (code := logs.bound().get("error")) is not None:
            self.metrics.errors.labels(code).inc()
        level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO  # probes come every few seconds
        usage: Usage = scope["usage"]
        self._end(scope, method, route, status)
        seen = logs.fields(
            method=method,
            route=route,
            status=status,
            duration_ms=round(seconds * 1e3, 1),
            prompt_tokens=usage.prompt or None,
            answer_tokens=usage.generated or None,
        )
        line = "%s %s %s %.1f ms %s"
        log.log(level, line, method, route, status, seconds * 1e3, scope["request_id"], extra=seen)

    def _end(self, scope: Scope, method: str, route: str, status: int) -> None:
        span: RequestSpan | None = scope.get("span")
        if span is None:
            return
        seen = {"http.request.method": method, "http.route": route, "http.response.status_code": status}
        known = logs.bound()
        named = {"fp8serve.request_id": "request_id", "fp8serve.tenant": "tenant", "error.type": "error"}
        span.end(seen | {name: known[field] for name, field in named.items() if field in known}, scope["usage"])


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in METHODS else "other"


def _route(scope: Scope) -> str:
    """The route's template, so that a client cannot create labels or log text by asking for odd paths."""
    route = scope.get("route")
    if scope["path"] == "/openapi.json":
        return "/openapi.json"
    return (
        getattr(route, "path_format", None)
        or getattr(route, "path", None)
        or ("unmatched" if route is None else "mounted")
    )


class _Answer:
    """`send` that adds headers and remembers the status (0: nothing sent yet)."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.status = 0
        self._send = send
        self._headers = [*SECURITY_HEADERS, (b"x-request-id", scope["request_id"].encode("latin-1"))]

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), *self._headers]}
        await self._send(message)
