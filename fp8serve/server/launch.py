"""Hosts the application with uvicorn until a signal stops it: `run(settings)`.

The port is bound first, so a port in use is reported before anything else starts. The server responds while the model
loads, but is not ready. If the default model cannot be loaded, `run` raises the model's error.

SIGTERM or SIGINT starts the drain: the server is no longer ready, new requests get 503 with Retry-After, and admitted
requests finish. After `drain_seconds`, or after a second signal, the remaining requests are aborted with an error. Then
`run` returns, with exit status 0. A running fine-tune job stops at a checkpoint within the same time and resumes when a
server starts again. On SIGHUP the file of keys is read again.
"""

import asyncio
import contextlib
import errno
import gc
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
from fp8serve.server.serving.served_weights import Launch
from fp8serve.server.settings import Settings

log = logging.getLogger("fp8serve.server")
SHUTDOWN_SECONDS = 1
ACCEPT_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def run(settings: Settings, start_engine: Launch | None = None, listener: socket.socket | None = None) -> None:
    """Serves on `listener`, or on the host and port of the settings, until a signal stops the server.

    Raises MachineError if the port or the data directory cannot be used, or the error of the default model.
    """
    logs.configure(settings.log_format, "server")
    listener = listener or bind(settings.host, settings.port)
    with contextlib.closing(listener):
        app = create_app(settings, start_engine)
        state: ServerState = app.state.server
        limit = connection_limit(settings.limits)
        config = uvicorn.Config(
            app,
            loop="asyncio",  # and not uvloop where that happens to be installed
            http=timed_protocol(settings.limits, limit.connections),
            backlog=limit.batch,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=settings.limits.header_bytes,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        state.address = address(listener)
        DrainingServer(config, state).run([listener])
    if (problem := state.models.default.problem) is not None and state.failed.is_set():
        raise problem


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises MachineError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise MachineError(_bind_error_message(host, port, error)) from None
    return listener


def adopt(fd: int) -> socket.socket:
    """Returns the listening socket that the parent process passed as the file descriptor `fd`.

    Raises RequestError if `fd` is not a listening socket.
    """
    try:
        listener = socket.socket(fileno=fd)
        is_listening = bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        is_listening = False
    if not is_listening or listener.family not in (socket.AF_INET, socket.AF_INET6):
        raise RequestError(f"File descriptor {fd} is not a listening TCP socket; open it before starting the server.")
    listener.setblocking(False)
    return listener


def address(listener: socket.socket) -> str:
    """Returns the server's address for a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind_error_message(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use by another program; stop it or choose another port with --port."
    if error.errno == errno.EACCES:
        return f"This user may not listen on port {port}; choose one above 1023 with --port."
    return f"Cannot listen on {host}:{port} ({error.strerror}); check --host and --port."


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains before its shutdown and exits with status 0."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self.state = state
        self._reload_keys = False
        self._accept_warning = ThrottledWarning()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections."""
        asyncio.get_running_loop().set_exception_handler(self._handle_loop_error)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has set the backlog to the batch size
        gc.collect()
        gc.freeze()  # the modules' objects, 100,000 of them: each full collection would hold up all streams for 30 ms

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        gc.unfreeze()  # the caller's process may go on

    def _handle_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs one warning for connections that cannot be accepted, instead of asyncio's traceback for each of them."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in ACCEPT_ERRORS:
            self._accept_warning.warn("new connections wait, because they cannot be accepted: %s", error.strerror)
        else:
            loop.default_exception_handler(context)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals. Unlike uvicorn's method, it does not raise them again at the end, which would give exit
        status 143."""
        self._loop = asyncio.get_running_loop()
        handlers: dict[signal.Signals, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGINT), self.handle_exit)
        if self.state.keys.path is not None:
            handlers[signal.SIGHUP] = self.handle_hangup
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Starts the drain. Engine processes may get the same signal and end, so the drain starts before the event loop
        notices their end."""
        self._loop.call_soon_threadsafe(self._drain_or_end)

    def _drain_or_end(self) -> None:
        if self.state.draining.is_set():
            self.state.end_drain()
        else:
            log.info("asked to stop: draining")
            self.state.begin_drain()

    def handle_hangup(self, sig: int, frame: FrameType | None) -> None:
        self._reload_keys = True

    async def on_tick(self, counter: int) -> bool:
        """Ends the server when it is drained or failed. uvicorn calls this ten times a second."""
        if self._reload_keys:
            self._reload_keys = False
            self.state.keys.reload()
        if self.state.failed.is_set() or (self.state.draining.is_set() and self.state.finish_drain()):
            self.should_exit = True
        return await super().on_tick(counter)
