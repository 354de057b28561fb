"""The middleware that reads a request's body before its handler runs, with a size limit (413) and a time limit (408).

So handlers never wait for a slow client. Uploads are streamed and timed by their own handler. The bytes of all long
bodies together are bounded, too (429); short bodies are always accepted. Compressed bodies are refused (415).

The rest of a refused body is read and discarded, up to a bound. Otherwise the kernel would reset the connection, and
the client would lose the response (RFC 9112, 9.6). Nothing is read from a client that waits for "100 Continue", because
it has not sent the body.
"""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fp8serve.server.faults import Code, Fault
from fp8serve.server.http.scope import header, refuse, replay

STREAMED_UPLOADS = frozenset({"/v1/files"})
SHORT_BODY_BYTES = 64 << 10
DISCARD_FACTOR = 8  # of a refused body, at most this many times `max_bytes` are read and discarded
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})


class BodyLimits:
    """The middleware. `max_held_bytes` limits the bytes of all long bodies together."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float, max_held_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.max_held_bytes = max_held_bytes
        self.total_held = 0
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoding = header(scope, b"content-encoding") or b"identity" if scope["type"] == "http" else b"identity"
        if scope.get("method") in BODY_METHODS and encoding.strip().lower() != b"identity":
            message = "Content-Encoding is not supported: a request body must not be compressed."
            hint = "Send the body uncompressed, without that header."
            await self._discard_rest(scope, _BodyReceiver(receive))
            fault = Fault(Code.UNSUPPORTED_MEDIA_TYPE, message, hint=hint)
            await refuse(fault, scope, receive, send, close=True)
            return
        if scope["type"] != "http" or (scope["path"] in STREAMED_UPLOADS and scope["method"] == "POST"):
            await self.app(scope, receive, send)
            return
        held_body = _HeldBody(self)
        try:
            await self._read_and_run(scope, receive, send, held_body)
        finally:
            held_body.release()

    async def _read_and_run(self, scope: Scope, receive: Receive, send: Send, held_body: "_HeldBody") -> None:
        body_receiver = _BodyReceiver(receive)
        try:
            async with asyncio.timeout(self.seconds):
                body = await self._read(scope, body_receiver, held_body)
        except TimeoutError:
            fault = Fault(Code.REQUEST_TIMEOUT, f"The request body did not arrive within {self.seconds:g} seconds.")
            await refuse(fault, scope, receive, send, close=True)
            return
        except Fault as fault:
            await self._discard_rest(scope, body_receiver)
            await refuse(fault, scope, receive, send, close=True)
            return
        if body is not None:  # None if the client has disconnected
            await self.app(scope, replay(body, receive), send)

    async def _discard_rest(self, scope: Scope, body_receiver: "_BodyReceiver") -> None:
        """Reads and discards the rest of a refused body, within the time limit for bodies."""
        remaining = 0 if header(scope, b"expect") else DISCARD_FACTOR * self.max_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(self.seconds):
                while remaining > 0 and body_receiver.has_more:
                    remaining -= len((await body_receiver()).get("body", b""))

    async def _read(self, scope: Scope, receive: "_BodyReceiver", held_body: "_HeldBody") -> bytes | None:
        """Returns the body, or None if the client has disconnected. Raises Fault if it is too large."""
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
            held_body.grow(len(body))
            if not message.get("more_body", False):
                return bytes(body)


class _BodyReceiver:
    """A `receive` with an attribute that says whether the body continues."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.has_more = receive, True

    async def __call__(self) -> Message:
        message = await self._receive()
        self.has_more = bool(message.get("more_body", False))
        return message


class _HeldBody:
    """Counts the bytes of one request's body in `BodyLimits.total_held`. Its first SHORT_BODY_BYTES do not count."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits, self._bytes = limits, 0

    def grow(self, size: int) -> None:
        """Counts a body of `size` bytes so far. Raises Fault 429 if all bodies together have too many bytes."""
        added = max(0, size - SHORT_BODY_BYTES) - self._bytes
        if added and self._limits.total_held + added > self._limits.max_held_bytes:
            message = "The bodies of all requests together exceed this server's limit."
            raise Fault(Code.QUEUE_FULL, message, hint="Try again in a moment.", retry_after=1)
        self._limits.total_held += added
        self._bytes += added

    def release(self) -> None:
        self._limits.total_held -= self._bytes
        self._bytes = 0


def _too_large(scope: Scope, limit: int) -> Fault:
    is_finetune = scope["path"].startswith("/finetune")
    hint = "Upload data through POST /v1/files." if is_finetune else "Send less in one request."
    return Fault(
        Code.BODY_TOO_LARGE, f"The request body is larger than this server's limit of {limit} bytes.", hint=hint
    )
