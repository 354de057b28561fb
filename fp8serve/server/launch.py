"""`run(settings)`: host the application until it is told to stop.

The port is bound before anything else, so a port in use is one sentence and not a half-started server. Requests are
answered from the first moment (readiness false while the model loads); a model that cannot be loaded ends the server
with its own error.

SIGTERM or SIGINT begins the drain: readiness turns false, new work gets 503 with Retry-After, accepted requests
finish. When none is left, or `drain_seconds` have passed and the rest were ended with a typed error, the sockets
close and `run` returns, exit status 0, also while the model still loads. A second signal ends the wait. A running
fine-tune job stops at a checkpoint meanwhile, or is ended with the wait, and resumes with the next server. On SIGHUP
the file of keys is read again, if there is one.
"""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn

from fp8serve import logs
from fp8serve.errors import MachineError, RequestError
from fp8serve.server.app import create_app
from fp8serve.server.http.connections import BACKLOG, ThrottledWarning, connection_limit, timed_protocol
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.served import Launch
from fp8serve.server.settings import Settings

log = logging.getLogger("fp8serve.server")
CLOSING_SECONDS = 1
NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def run(settings: Settings, start_engine: Launch | None = None, listener: socket.socket | None = None) -> None:
    """Serves until a signal, on `listener` or, without one, on the host and port of the settings.

    Raises MachineError (port, data directory), or the error that kept the model from loading.
    """
    logs.configure(settings.log_format, "server")
    listener = listener or bind(settings.host, settings.port)
    with contextlib.closing(listener):
        app = create_app(settings, start_engine)
        state: ServerState = app.state.server
        limit = connection_limit(settings.limits)
        config = uvicorn.Config(
            app,
            http=timed_protocol(settings.limits, limit.connections),
            backlog=limit.batch,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=settings.limits.header_bytes,
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
        state.address = address(listener)
        DrainingServer(config, state).run([listener])
    if (problem := state.models.default.problem) is not None and state.failed.is_set():
        raise problem


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises MachineError with what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise MachineError(_why_not(host, port, error)) from None
    return listener


def adopt(fd: int) -> socket.socket:
    """The listening socket that the parent process opened and passed on as file descriptor `fd`.

    Raises RequestError when `fd` is not a listening socket.
    """
    try:
        listener = socket.socket(fileno=fd)
        listening = bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        listening = False
    if not listening or listener.family not in (socket.AF_INET, socket.AF_INET6):
        raise RequestError(f"File descriptor {fd} is not a listening TCP socket; open it before starting the server.")
    listener.setblocking(False)
    return listener


def address(listener: socket.socket) -> str:
    """The server's address for a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use by another program; stop it or choose another port with --port."
    if error.errno == errno.EACCES:
        return f"This user may not listen on port {port}; choose one above 1023 with --port."
    return f"Cannot listen on {host}:{port} ({error.strerror}); check --host and --port."


class DrainingServer(uvicorn.Server):
    """uvicorn, with a drain before its shutdown and a clean exit status after it."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self.state = state
        self._reload_keys = False
        self._no_descriptor = ThrottledWarning()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections."""
        asyncio.get_running_loop().set_exception_handler(self._loop_failed)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has set this to the size of a batch

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio would log a traceback for each connection that it cannot accept, thousands a second."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
            self._no_descriptor.warn("a connection waits, because it cannot be accepted: %s", error.strerror)
        else:
            loop.default_exception_handler(context)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does not raise the signal again when the server is done, as uvicorn does: the exit status would be 143."""
        self._loop = asyncio.get_running_loop()
        handlers: dict[signal.Signals, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGINT), self.handle_exit)
        if self.state.keys.path is not None:
            handlers[signal.SIGHUP] = self.handle_hangup
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins the drain before the loop learns anything else, such as the end of an engine that got the signal,
        too."""
        self._loop.call_soon_threadsafe(self._drain_or_hurry)

    def _drain_or_hurry(self) -> None:
        if self.state.draining.is_set():
            self.state.hurry()
        else:
            log.info("asked to stop: draining")
            self.state.begin_drain()

    def handle_hangup(self, sig: int, frame: FrameType | None) -> None:
        self._reload_keys = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._reload_keys:
            self._reload_keys = False
            self.state.keys.reload()
        if self.state.failed.is_set() or (self.state.draining.is_set() and self.state.drained):
            self.should_exit = True
        return await super().on_tick(counter)
