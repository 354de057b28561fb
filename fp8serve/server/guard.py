"""What stands between the socket and the handlers: three plain ASGI layers, outermost first.

* `Envelope`: a request id, the metrics and the log line of every response (route template, status, milliseconds;
  never a query string, a body or a header), security headers, and the last resort: an exception nobody expected
  becomes a small 500 without a word about where it happened.
* `Gate`: decides on `scope["path"]` and nothing else, denies by default. Only the health routes are open when a key
  is set. The key arrives as `Authorization: Bearer KEY` or, so that a browser can open the console, as the password
  of HTTP Basic. Keys are compared as bytes in constant time. A request by a name that is not this server's is refused
  (hosts.py), and a browser that acts for another site (`Sec-Fetch-Site`, `Origin`) may not change anything, key or
  no key.
* `Intake`: reads the body before the handler runs, within a size (413) and a time (408), so that no handler ever
  holds a half-sent request; uploads are streamed by their own handler and only timed there. All long bodies together
  are bounded as well (429); a short one is always taken.
"""

import asyncio
import base64
import binascii
import hmac
import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fp8serve.server.faults import Code, Fault
from fp8serve.server.hosts import Hosts
from fp8serve.server.metrics import Metrics
from fp8serve.server.settings import Settings
from fp8serve.server.tenants import tenant_of

log = logging.getLogger("fp8serve.server.access")

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
STREAMED_UPLOADS = frozenset({"/v1/files"})
SHORT_BODY = 64 << 10
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
]
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that lower-case name."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def refuse(fault: Fault, scope: Scope, receive: Receive, send: Send, close: bool = False) -> None:
    """Answers with `fault`. `close`: the body was not read, so the connection cannot be used again."""
    response = fault.response(scope["path"], scope.get("request_id", ""))
    if close:
        response.headers["connection"] = "close"
    await response(scope, receive, send)


class Envelope:
    """See the module. Handlers find the request id in `scope["request_id"]`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = (header(scope, b"x-request-id") or b"").decode("latin-1")
        scope["request_id"] = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        answer = _Answer(scope, send)
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
            self._account(scope, answer.status, time.perf_counter() - started)

    def _account(self, scope: Scope, status: int, seconds: float) -> None:
        route = _route(scope)
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.metrics.responses.labels(route, method, str(status or 499)).inc()
        self.metrics.http_seconds.labels(route).observe(seconds)
        level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO  # probes come every few seconds
        log.log(level, "%s %s %s %.1f ms %s", method, route, status or 499, seconds * 1e3, scope["request_id"])


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def _route(scope: Scope) -> str:
    """The route's template; a client cannot make labels or log text by asking for odd paths."""
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


class Gate:
    """See the module."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self._key = settings.api_key.encode() if settings.api_key is not None else None
        self._hosts = Hosts(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # there is no websocket here
            return await send({"type": "websocket.close", "code": 1008})
        if (fault := self._verdict(scope)) is not None:
            return await refuse(fault, scope, receive, send, close=True)
        scope["tenant"] = tenant_of(scope, self._key)
        return await self.app(scope, receive, send)

    def _verdict(self, scope: Scope) -> Fault | None:
        if scope["path"] not in OPEN_PATHS and not self._hosts.knows(scope):
            hint = "Ask for localhost, or start the server with --allowed-host NAME."
            return Fault(Code.FORBIDDEN, "This server does not answer to the name in the Host header.", hint=hint)
        if scope["path"] not in OPEN_PATHS and not self._authorised(scope):
            return Fault(
                Code.INVALID_API_KEY,
                "This server needs an API key, and the one given is missing or wrong.",
                hint="Send it as: Authorization: Bearer KEY.",
            )
        foreign = header(scope, b"sec-fetch-site") in (b"cross-site", b"same-site") or not self._hosts.is_own_page(
            scope
        )
        if scope["method"] not in SAFE_METHODS and foreign:
            return Fault(Code.FORBIDDEN, "A page of another site may not use this server.")
        return None

    def _authorised(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        given = presented_key(header(scope, b"authorization") or b"")
        return hmac.compare_digest(given, self._key)


def presented_key(authorization: bytes) -> bytes:
    """The key inside an Authorization header, empty when there is none."""
    scheme, _, value = authorization.strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


class Intake:
    """See the module."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float, held_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.held_bytes = held_bytes
        self._held = 0
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["path"] in STREAMED_UPLOADS and scope["method"] == "POST"):
            await self.app(scope, receive, send)
            return
        holding = _Holding(self)
        try:
            await self._take(scope, receive, send, holding)
        finally:
            holding.give_back()

    def holds(self, more: int) -> int:
        """Bytes of all requests together, were there `more`."""
        return self._held + more

    def take(self, more: int) -> None:
        self._held += more

    async def _take(self, scope: Scope, receive: Receive, send: Send, holding: "_Holding") -> None:
        try:
            async with asyncio.timeout(self.seconds):
                body = await self._read(scope, receive, holding)
        except TimeoutError:
            fault = Fault(Code.REQUEST_TIMEOUT, f"The request body did not arrive within {self.seconds:g} seconds.")
            await refuse(fault, scope, receive, send, close=True)
            return
        except Fault as fault:
            await refuse(fault, scope, receive, send, close=True)
            return
        if body is not None:  # else the client has gone
            await self.app(scope, replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive, holding: "_Holding") -> bytes | None:
        limit = self.max_bytes
        declared = header(scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared[:20]) > limit:
            raise _too_large(limit)
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > limit:
                raise _too_large(limit)
            holding.hold(len(body))
            if not message.get("more_body", False):
                return bytes(body)


class _Holding:
    """What one request holds of the bytes that all may hold; its first SHORT_BODY are free."""

    def __init__(self, intake: Intake) -> None:
        self._intake, self._bytes = intake, 0

    def hold(self, size: int) -> None:
        """`size` bytes so far. Fault 429 when they are too many beside those of others."""
        more = max(0, size - SHORT_BODY) - self._bytes
        if more and self._intake.holds(more) > self._intake.held_bytes:
            hint = "Try again in a moment."
            raise Fault(Code.QUEUE_FULL, "The server holds as many long requests as it can.", hint=hint, retry_after=1)
        self._intake.take(more)
        self._bytes += more

    def give_back(self) -> None:
        self._intake.take(-self._bytes)
        self._bytes = 0


def _too_large(limit: int) -> Fault:
    return Fault(
        Code.BODY_TOO_LARGE,
        f"The request body is larger than this server's limit of {limit} bytes.",
        hint="Upload data through POST /v1/files.",
    )


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then whatever the connection says, which is a disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return pending.pop() if pending else await receive()

    return received
