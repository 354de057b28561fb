"""One connection, on which nobody waits for ever, and how many there may be: uvicorn's HTTP/1.1 protocol with limits.

`header_seconds`: the longest time from opening a connection, or from the first byte of a later request, to the
request's last header; then 408. `send_seconds`: the longest time for which a client may take nothing of a waiting
answer; then the connection is reset, which ends its generation. uvicorn itself closes a connection that is idle between
two requests; `body_limits.py` and `uploads.py` limit the time for bodies.

Files, engines and new connections need descriptors, so connections may use only some of them (`ConnectionLimit`).
Whoever opens more, without a key or a request, keeps nobody else out: a new connection takes the place of the one that
has been waiting for a request for the longest time. It is refused with 503 if all others are in the middle of one.
"""

import asyncio
import logging
import resource
import time
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from fp8serve.server.settings import ServerLimits

log = logging.getLogger("fp8serve.server")

TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
BACKLOG = 2048  # connections that the kernel may hold
BATCH = 128  # connections that asyncio accepts in one turn of its loop
OTHER_FILES = 256  # descriptors for files, engines and their sockets
OPEN_FILES = 1 << 16  # descriptors that are enough: some systems allow a billion, for which programs scan all
LOG_SECONDS = 60.0  # between two warnings of one kind


@dataclass(frozen=True)
class ConnectionLimit:
    """How many connections may be open, and how many are accepted in one turn of the loop, before they are counted.

    It takes a few turns until a request that has arrived is read, in which its connection must not be closed for those
    that were accepted after it. So a batch is small.
    """

    connections: int
    batch: int

    @classmethod
    def within(cls, files: int, most: int) -> "ConnectionLimit":
        """With room for everything else that needs a descriptor. files: the process may open so many. most: open
        connections."""
        room = files - min(OTHER_FILES, files // 4)
        connections = max(1, min(most, room - min(BATCH, room // 8)))
        return cls(connections, max(1, min(BATCH, connections // 8)))


def raise_open_files() -> int:
    """Raises the soft limit of open files towards the hard one; returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft == resource.RLIM_INFINITY:
        return OPEN_FILES
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def connection_limit(limits: ServerLimits) -> ConnectionLimit:
    """The limit of this process, whose open files are raised for it; a warning if they are too few."""
    files = raise_open_files()
    limit = ConnectionLimit.within(files, limits.connections)
    if limit.connections < limits.connections:
        log.warning(
            "%d connections can be open at once, and not %d, because this process may open only %d files; "
            "raise its hard limit (ulimit -Hn, LimitNOFILE)", limit.connections, limits.connections, files,
        )  # fmt: skip
    return limit


class ThrottledWarning:
    """A warning that is logged at most once in LOG_SECONDS, however often its cause occurs."""

    def __init__(self) -> None:
        self._last = -LOG_SECONDS

    def warn(self, message: str, *values: Any) -> None:
        if (now := time.monotonic()) >= self._last + LOG_SECONDS:
            self._last = now
            log.warning(message, *values)


class OpenConnections:
    """The connections of one server that wait for a request, the one that has waited longest first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._waiting: dict[TimedProtocol, None] = {}
        self._full = ThrottledWarning()

    def wait(self, connection: "TimedProtocol") -> None:
        """The connection begins to wait for a request."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def leave(self, connection: "TimedProtocol") -> None:
        """The connection no longer waits: a request has arrived, or it is closed."""
        self._waiting.pop(connection, None)

    def make_room(self) -> None:
        """Closes the connection that has waited longest; it may be the newest one."""
        self._full.warn("%d connections are open, this server's limit; those without a request are closed", self.most)
        if self._waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.give_way()


def timed_protocol(limits: ServerLimits, most: int) -> type[H11Protocol]:
    """The protocol class for a server with these limits and at most so many connections; uvicorn makes an object of it
    for each connection."""

    class Timed(TimedProtocol):
        header_seconds, send_seconds = limits.header_seconds, limits.send_seconds
        open_connections = OpenConnections(most)

    return Timed


class TimedProtocol(H11Protocol):
    """See the module."""

    header_seconds = 10.0
    send_seconds = 60.0
    open_connections: OpenConnections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(self.header_seconds, self._head_is_late)
        self.open_connections.wait(self)
        if len(self.connections) > self.open_connections.most:
            self.open_connections.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_connections.leave(self)
        self._head_is_in()
        self._stall_is_over()
        super().connection_lost(exc)

    def give_way(self) -> None:
        """Closes the connection, which has no request under way, because another needs its place."""
        if self.cycle is None:
            self.transport.write(UNAVAILABLE)
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # its client takes nothing, so that the descriptor would stay
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._between_requests or self.transport.is_closing():
            self._head_is_in()
        elif self._head is None and self.timeout_keep_alive_task is None:
            self._head = self.loop.call_later(self.header_seconds, self._head_is_late)

    def handle_events(self) -> None:
        super().handle_events()
        if not self._between_requests:
            self.open_connections.leave(self)
            self._close_if_ambiguous()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins the next request if it has arrived
        if self._between_requests and not self.transport.is_closing():
            self.open_connections.wait(self)

    def _close_if_ambiguous(self) -> None:
        """Lets the connection end with a request that has both `Content-Length` and `Transfer-Encoding`: a proxy may
        have seen the end of its body elsewhere, and take what follows for another's request (RFC 9112, 6.1)."""
        names = {name for name, _ in self.headers}
        if {b"content-length", b"transfer-encoding"} <= names and CLOSE_HEADER not in self.headers:
            self.headers.append(CLOSE_HEADER)  # as if the client had asked for it

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
