"""One connection, on which nobody can wait for ever: uvicorn's HTTP/1.1 protocol with two more limits.

`header_seconds`: the longest time from opening a connection, or from the first byte of a later request, to the
request's last header; then 408. `send_seconds`: the longest time for which a client may take nothing of a waiting
answer; then the connection is reset, which ends its generation. uvicorn itself closes a connection that is idle between
two requests; `body_limits.py` and `uploads.py` limit the time for bodies.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from fp8serve.server.settings import ServerLimits

TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def timed_protocol(limits: ServerLimits) -> type[H11Protocol]:
    """The protocol class for a server with these limits; uvicorn makes one for each connection."""

    class Timed(TimedProtocol):
        header_seconds, send_seconds = limits.header_seconds, limits.send_seconds

    return Timed


class TimedProtocol(H11Protocol):
    """See the module."""

    header_seconds = 10.0
    send_seconds = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(self.header_seconds, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_in()
        self._stall_is_over()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._between_requests or self.transport.is_closing():
            self._head_is_in()
        elif self._head is None and self.timeout_keep_alive_task is None:
            self._head = self.loop.call_later(self.header_seconds, self._head_is_late)

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _head_is_in(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _head_is_late(self) -> None:
        self._head = None
        if self._between_requests and not self.transport.is_closing():
            self.transport.write(TIMEOUT)
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self._stall or self.loop.call_later(self.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_is_over()

    def _stall_is_over(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
