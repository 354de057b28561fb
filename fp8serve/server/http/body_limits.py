"""The middleware that reads a request's body before its handler runs, within a size (413) and a time (408).

So no handler ever holds a half-sent request. Uploads are streamed by their own handler and only timed there. All long
bodies together are bounded as well (429); a short one is always accepted. A compressed one is refused (415).

The rest of a refused body is read and forgotten, up to a bound: the kernel resets a connection that is closed with
bytes unread, and the client would lose the refusal (RFC 9112, 9.6). A client that waits for "100 Continue" has not
sent it.
"""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.scope import header, refuse, replay

STREAMED_UPLOADS = frozenset({"/v1/files"})
SHORT_BODY = 64 << 10
DRAINED = 8  # bodies of the largest size that are read and forgotten, at most
TAKE_BODY = frozenset({"POST", "PUT", "PATCH"})


class BodyLimits:
    """See the module."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float, held_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.held_bytes = held_bytes
        self._held = 0
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _encoded(scope):
            await self._drain(scope, _Remaining(receive))
            await refuse(_compressed(), scope, receive, send, close=True)
            return
        if scope["type"] != "http" or (scope["path"] in STREAMED_UPLOADS and scope["method"] == "POST"):
            await self.app(scope, receive, send)
            return
        holding = _Holding(self)
        try:
            await self._take(scope, receive, send, holding)
        finally:
            holding.give_back()

    def holds(self, more: int) -> int:
        """Bytes of all requests together, and `more`."""
        return self._held + more

    def take(self, more: int) -> None:
        self._held += more

    async def _take(self, scope: Scope, receive: Receive, send: Send, holding: "_Holding") -> None:
        remaining = _Remaining(receive)
        try:
            async with asyncio.timeout(self.seconds):
                body = await self._read(scope, remaining, holding)
        except TimeoutError:
            fault = Fault(Code.REQUEST_TIMEOUT, f"The request body did not arrive within {self.seconds:g} seconds.")
            await refuse(fault, scope, receive, send, close=True)
            return
        except Fault as fault:
            await self._drain(scope, remaining)
            await refuse(fault, scope, receive, send, close=True)
            return
        if body is not None:  # else the client has gone
            await self.app(scope, replay(body, receive), send)

    async def _drain(self, scope: Scope, remaining: "_Remaining") -> None:
        """Reads what is left of a refused body, as long as a body may take."""
        left = 0 if header(scope, b"expect") else DRAINED * self.max_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(self.seconds):
                while left > 0 and remaining.more:
                    left -= len((await remaining()).get("body", b""))

    async def _read(self, scope: Scope, receive: "_Remaining", holding: "_Holding") -> bytes | None:
        limit = self.max_bytes
        declared = header(scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared[:20]) > limit:
            raise _too_large(scope, limit)
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > limit:
                raise _too_large(scope, limit)
            holding.hold(len(body))
            if not message.get("more_body", False):
                return bytes(body)


class _Remaining:
    """A `receive` that knows whether there is more of the body."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.more = receive, True

    async def __call__(self) -> Message:
        message = await self._receive()
        self.more = bool(message.get("more_body", False))
        return message


class _Holding:
    """The bytes that one request holds of those that all may hold; its first SHORT_BODY do not count."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits, self._bytes = limits, 0

    def hold(self, size: int) -> None:
        """Records `size` bytes so far. Fault 429 when they are too many together with those of others."""
        more = max(0, size - SHORT_BODY) - self._bytes
        if more and self._limits.holds(more) > self._limits.held_bytes:
            hint = "Try again in a moment."
            raise Fault(Code.QUEUE_FULL, "The server holds as many long requests as it can.", hint=hint, retry_after=1)
        self._limits.take(more)
        self._bytes += more

    def give_back(self) -> None:
        self._limits.take(-self._bytes)
        self._bytes = 0


def _encoded(scope: Scope) -> bool:
    """Whether a body is compressed, or says so."""
    encoding = header(scope, b"content-encoding") or b"identity"
    return scope["method"] in TAKE_BODY and encoding.strip().lower() != b"identity"


def _compressed() -> Fault:
    return Fault(
        Code.UNSUPPORTED_MEDIA_TYPE,
        "Content-Encoding is not supported: a request body must not be compressed.",
        hint="Send it as it is, without that header.",
    )


def _too_large(scope: Scope, limit: int) -> Fault:
    training = scope["path"].startswith("/finetune")
    hint = "Upload data through POST /v1/files." if training else "Send less in one request."
    return Fault(
        Code.BODY_TOO_LARGE, f"The request body is larger than this server's limit of {limit} bytes.", hint=hint
    )
