"""What every middleware needs from an ASGI request: its headers, its body again, and a way to refuse it."""

from starlette.types import Message, Receive, Scope, Send

from fp8serve import logs
from fp8serve.server.faults import Fault

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
"""Paths that are answered without a key, whatever name the request asks for."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that lower-case name."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def refuse(fault: Fault, scope: Scope, receive: Receive, send: Send, close: bool = False) -> None:
    """Answers with `fault`. `close`: the body was not read, so the connection cannot be used again."""
    logs.bind(error=fault.code.value)
    response = fault.response(scope["path"], scope.get("request_id", ""))
    if close:
        response.headers["connection"] = "close"
    await response(scope, receive, send)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then whatever the connection says, which is a disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return pending.pop() if pending else await receive()

    return received
