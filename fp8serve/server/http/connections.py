"""uvicorn's HTTP/1.1 protocol with time limits, and a limit of open connections.

A client gets 408 if its last header has not arrived `header_seconds` after it opened the connection, or after the first
byte of a later request. If a client accepts nothing of a pending response for `send_seconds`, its connection is reset,
which aborts the generation. uvicorn itself closes connections that are idle between two requests. `body_limits.py` and
`uploads.py` limit the time for bodies.

Event streams write their chunks through `write_chunk`, which frames them as h11 does, at a fraction of the time.
Handlers get to know of a disconnect through `on_disconnect`, without a task that waits for it.

Files and engine processes need file descriptors, too, so connections may use only some of them (`ConnectionLimit`).
A client without a key cannot lock out others by opening many connections: if the limit is reached, the connection that
has waited longest for a request is closed. The new connection is refused with 503 if all others have a request.
"""

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from fp8serve.server.http.streams import ON_DISCONNECT, WRITE_CHUNK
from fp8serve.server.settings import ServerLimits

log = logging.getLogger("fp8serve.server")

TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
BACKLOG = 2048  # connections that the kernel queues
BATCH = 128  # connections that asyncio accepts in one iteration of its loop
OTHER_FILES = 256  # descriptors for files, engines and their sockets
MAX_OPEN_FILES = 1 << 16  # a limit of a billion would be slow for programs that iterate over all descriptors
WARNING_INTERVAL_SECONDS = 60.0  # between two warnings of one kind


@dataclass(frozen=True)
class ConnectionLimit:
    """The largest number of open connections, and of connections that are accepted in one iteration of the loop.

    A batch is small, because a request that has arrived is read only a few iterations later. Until then its connection
    counts as waiting, and a large batch of new connections could close it.
    """

    connections: int
    batch: int

    @classmethod
    def within(cls, max_files: int, max_connections: int) -> "ConnectionLimit":
        """Returns a limit for a process that may open `max_files` files, some of which are left for files and
        engines."""
        available = max_files - min(OTHER_FILES, max_files // 4)
        connections = max(1, min(max_connections, available - min(BATCH, available // 8)))
        return cls(connections, max(1, min(BATCH, connections // 8)))


def raise_open_files() -> int:
    """Raises the soft limit of open files up to MAX_OPEN_FILES or the hard limit. Returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY:
        return MAX_OPEN_FILES
    if soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return max(soft, target)


def connection_limit(limits: ServerLimits) -> ConnectionLimit:
    """Raises this process's limit of open files and returns the connection limit. Logs a warning if it is too low."""
    files = raise_open_files()
    limit = ConnectionLimit.within(files, limits.connections)
    if limit.connections < limits.connections:
        log.warning(
            "only %d connections can be open at once instead of %d, because this process may open only %d files; "
            "raise its hard limit (ulimit -Hn, LimitNOFILE)", limit.connections, limits.connections, files,
        )  # fmt: skip
    return limit


class ThrottledWarning:
    """Logs a warning at most once in WARNING_INTERVAL_SECONDS."""

    def __init__(self) -> None:
        self._last = -WARNING_INTERVAL_SECONDS

    def warn(self, message: str, *values: Any) -> None:
        if (now := time.monotonic()) >= self._last + WARNING_INTERVAL_SECONDS:
            self._last = now
            log.warning(message, *values)


class WaitingConnections:
    """The connections of one server that wait for a request, in order of their waiting time, the longest first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: dict[TimedProtocol, None] = {}
        self._limit_warning = ThrottledWarning()

    def add_waiting(self, connection: "TimedProtocol") -> None:
        """Records that the connection waits for a request."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def remove_waiting(self, connection: "TimedProtocol") -> None:
        """Records that a request has arrived or the connection is closed."""
        self._waiting.pop(connection, None)

    def close_longest_waiting(self) -> None:
        """Closes the connection that has waited longest. It may be the newest one, if all others have a request."""
        message = "%d connections are open, which is this server's limit; idle connections are closed"
        self._limit_warning.warn(message, self.limit)
        if self._waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.close_for_another()


def timed_protocol(limits: ServerLimits, max_connections: int) -> type[H11Protocol]:
    """Returns the protocol class of a server, of which uvicorn creates an object for each connection."""

    class Timed(TimedProtocol):
        header_seconds, send_seconds = limits.header_seconds, limits.send_seconds
        waiting_connections = WaitingConnections(max_connections)

    return Timed


class TimedProtocol(H11Protocol):
    """One connection with time limits. Private attributes ending in `_timer` are None while no limit runs."""

    header_seconds = 10.0
    send_seconds = 60.0
    waiting_connections: WaitingConnections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._disconnect_callbacks: set[Callable[[], None]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.header_seconds, self._fail_late_header)
        self.waiting_connections.add_waiting(self)
        if len(self.connections) > self.waiting_connections.limit:
            self.waiting_connections.close_longest_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting_connections.remove_waiting(self)
        self._stop_header_timer()
        self._stop_send_timer()
        super().connection_lost(exc)
        for callback in list(self._disconnect_callbacks):
            callback()

    def close_for_another(self) -> None:
        """Closes the connection, which has no running request, because a new connection exceeds the limit."""
        if self.cycle is None:
            self.transport.write(UNAVAILABLE)
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the client does not read, so closing would wait for it
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_between_requests or self.transport.is_closing():
            self._stop_header_timer()
        elif self._header_timer is None and self.timeout_keep_alive_task is None:
            self._header_timer = self.loop.call_later(self.header_seconds, self._fail_late_header)

    def handle_events(self) -> None:
        super().handle_events()
        if not self._is_between_requests:
            self.waiting_connections.remove_waiting(self)
            self._close_if_ambiguous()
            extensions = {WRITE_CHUNK: self.write_chunk, ON_DISCONNECT: self.on_disconnect}
            self.scope["extensions"] = extensions  # type: ignore[typeddict-item]

    def on_disconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls `callback` when the client of the current request disconnects, or now if it has. Returns a function
        that revokes this."""
        self.flow.resume_reading()  # as the request's `receive` does, because a paused connection notices no disconnect
        if self.cycle.disconnected:
            callback()
        self._disconnect_callbacks.add(callback)
        return partial(self._disconnect_callbacks.discard, callback)

    def write_chunk(self, data: bytes) -> bool:
        """Writes a part of the response's body. Returns False if it must be passed to `send`: if the client is slow or
        gone, or if the body is not chunked."""
        cycle = self.cycle
        has_ended = cycle.response_complete or cycle.disconnected
        if has_ended or not cycle.response_started or self.flow.write_paused or not data:
            return False
        if self.conn.their_http_version != b"1.1":
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()  # this starts the next request if it has arrived
        if self._is_between_requests and not self.transport.is_closing():
            self.waiting_connections.add_waiting(self)

    def _close_if_ambiguous(self) -> None:
        """Closes the connection after a request with both `Content-Length` and `Transfer-Encoding`.

        A proxy may disagree about the end of such a body, and take the rest for another request (RFC 9112, 6.1).
        """
        names = {name for name, _ in self.headers}
        if {b"content-length", b"transfer-encoding"} <= names and CLOSE_HEADER not in self.headers:
            self.headers.append(CLOSE_HEADER)  # uvicorn then closes the connection as if the client had asked for it

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _fail_late_header(self) -> None:
        self._header_timer = None
        if self._is_between_requests and not self.transport.is_closing():
            self.transport.write(TIMEOUT)
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self._send_timer or self.loop.call_later(self.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
