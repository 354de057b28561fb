"""Helpers for ASGI middleware: reading a header, refusing a request, and replaying a body that was read."""

from starlette.types import Message, Receive, Scope, Send

from fp8serve import logs
from fp8serve.server.faults import Fault

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
"""Paths that are open without a key and with any `Host` header."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def header(scope: Scope, name: bytes) -> bytes | None:
    """Returns the first header with this lower-case name, or None."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def refuse(fault: Fault, scope: Scope, receive: Receive, send: Send, close: bool = False) -> None:
    """Sends `fault` as the response. With `close`, the connection is closed, because the body was not read."""
    logs.bind(error=fault.code.value)
    response = fault.response(scope["path"], scope.get("request_id", ""))
    if close:
        response.headers["connection"] = "close"
    await response(scope, receive, send)


def replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that yields the body once, and then what the connection yields: a disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return pending.pop() if pending else await receive()

    return receive_again
