"""The outermost middleware: it adds a request id and security headers to each response, counts it and logs it.

The log line has the route's template, the status and the duration, but no query string, body or header. A JSON record
(`fp8serve/logs.py`) also has the tenant, the tokens and the error code. All records that are logged for a request have
its ids. An unexpected exception becomes a 500 without details.
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


_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


class TraceContext(NamedTuple):
    """The caller's span, from the `traceparent` header (W3C Trace Context, level 1).

        00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01    version, trace id, parent's span id, flags

    As the specification demands, an invalid or repeated header is ignored, and newer versions may have more fields.
    `trace_id` has 32 hexadecimal digits and `span_id` 16.
    """

    trace_id: str
    span_id: str


def trace_context(scope: Scope) -> TraceContext | None:
    """Returns the trace context of the request, or None if it has none."""
    values = [value for name, value in scope["headers"] if name == b"traceparent"]
    match = _TRACEPARENT.fullmatch(values[0].decode("latin-1").strip()) if len(values) == 1 else None
    if match is None:
        return None
    version, trace_id, span_id, _, extra_fields = match.groups()
    if version == "ff" or (version == "00" and extra_fields) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id)


class AccessLog:
    """The middleware. It stores the request id in `scope["request_id"]`; handlers count tokens in `scope["usage"]`."""

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
            if (span := self._begin_span(scope)) is not None:
                logs.bind(trace_id=span.trace_id, span_id=span.span_id)
            return await self._run_app(scope, receive, _ResponseSender(scope, send))

    def _begin_span(self, scope: Scope) -> TraceContext | RequestSpan | None:
        """Returns the request's new span if tracing is on, otherwise its caller's span, if any."""
        if self.tracing is not None and scope["path"] not in UNTRACED:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            scope["span"] = self.tracing.begin(_method(scope), headers)
        return scope.get("span") or trace_context(scope)

    async def _run_app(self, scope: Scope, receive: Receive, sender: "_ResponseSender") -> None:
        started = time.perf_counter()
        try:
            await self.app(scope, receive, sender)
        except Exception as error:
            log.error("unexpected %s in %s", type(error).__name__, _route(scope), exc_info=error)
            if sender.status == 0:
                await refuse(
                    Fault(Code.INTERNAL, "An internal error occurred; see the server's log for this request id."),
                    scope,
                    receive,
                    sender,
                )
        finally:
            self._log_response(scope, sender.status or 499, time.perf_counter() - started)

    def _log_response(self, scope: Scope, status: int, seconds: float) -> None:
        route = _route(scope)
        method = _method(scope)
        self.metrics.responses.labels(route, method, str(status)).inc()
        self.metrics.http_seconds.labels(route).observe(seconds)
        if (code := logs.bound().get("error")) is not None:
            self.metrics.errors.labels(code).inc()
        level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO  # probes poll these every few seconds
        usage: Usage = scope["usage"]
        self._end_span(scope, method, route, status)
        fields = logs.fields(
            method=method,
            route=route,
            status=status,
            duration_ms=round(seconds * 1e3, 1),
            prompt_tokens=usage.prompt_tokens or None,
            answer_tokens=usage.generated_tokens or None,
        )
        line = "%s %s %s %.1f ms %s"
        log.log(level, line, method, route, status, seconds * 1e3, scope["request_id"], extra=fields)

    def _end_span(self, scope: Scope, method: str, route: str, status: int) -> None:
        span: RequestSpan | None = scope.get("span")
        if span is None:
            return
        attributes = {"http.request.method": method, "http.route": route, "http.response.status_code": status}
        bound = logs.bound()
        names = {"fp8serve.request_id": "request_id", "fp8serve.tenant": "tenant", "error.type": "error"}
        attributes |= {name: bound[field] for name, field in names.items() if field in bound}
        span.end(attributes, scope["usage"])


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in METHODS else "other"


def _route(scope: Scope) -> str:
    """Returns the route's template, so that clients cannot create labels or log text with arbitrary paths."""
    route = scope.get("route")
    if scope["path"] == "/openapi.json":
        return "/openapi.json"
    return (
        getattr(route, "path_format", None)
        or getattr(route, "path", None)
        or ("unmatched" if route is None else "mounted")
    )


class _ResponseSender:
    """A `send` that adds headers and stores the status, which is 0 until the response starts."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.status = 0
        self._send = send
        self._headers = [*SECURITY_HEADERS, (b"x-request-id", scope["request_id"].encode("latin-1"))]

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), *self._headers]}
        await self._send(message)
