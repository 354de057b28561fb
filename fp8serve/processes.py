"""Child processes of fp8serve: their commands, their messages, and their exit.

A child process runs a module of this package. Only `module_command` builds the command for this, because the command
needs `-P`. Without `-P`, Python puts the current directory first on `sys.path`, and a server that was started in the
directory of a downloaded model would run that directory's `json.py`. `tests/test_processes.py` checks that no other
code starts one.

`python -m fp8serve` imports modules from the current directory before any code of fp8serve runs. `__main__.py` removes
the directory from `sys.path` for all later imports. `fp8serve` and `python -P -m fp8serve` never import from the
current directory.

Workers exit with `end_process`, and a server that is still starting exits at once on a signal (`ends_at_signals`). The
regular shutdown of a process with torch takes one to three seconds and frees nothing that the operating system does not
free anyway.

Messages are JSON; nothing is unpickled. A frame (`pack`, `receive`) is a JSON object and bytes, each with its length.
The messages of the engine process have a format of their own (engine/messages.py). An error is sent as its class and
message (`describe_error`, `to_exception`).
"""

import contextlib
import json
import os
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from fp8serve import errors
from fp8serve.errors import Fp8ServeError

FRAME = struct.Struct("!QQ")  # the length of the JSON head and the length of the body, in bytes
Head = dict[str, Any]
_PLACE_IN_GROUP = re.compile(r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*)")


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Returns the command that runs a module of this package with the Python interpreter of this process."""
    return (sys.executable, "-P", "-m", module, *arguments)


def module_path() -> str:
    """Returns the PYTHONPATH for a child process that needs the import path of this process. The current directory is
    omitted if Python added it, as `python -m` and interactive Python do."""
    with contextlib.suppress(FileNotFoundError):  # the current directory was deleted
        if not sys.flags.safe_path and sys.path[0] == os.getcwd():
            return os.pathsep.join(filter(None, sys.path[1:]))
    return os.pathsep.join(filter(None, sys.path))


def environment_without_group() -> dict[str, str]:
    """Returns the environment of this process without the variables with which torchrun tells it its place in a group,
    for a child process that does not belong to the group."""
    return {name: value for name, value in os.environ.items() if not _PLACE_IN_GROUP.fullmatch(name)}


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Blocks SIGINT in processes that are started in the block. Ctrl-C reaches the whole process group, but only the
    parent handles it, even while a child still imports its modules. In the parent, SIGINT is delayed to the end of the
    block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def describe_exit(status: int | None) -> str:
    """Returns a phrase for the exit status of a process. As in `subprocess`, a negative status is a signal. None is an
    unknown status."""
    if status is None:
        return "its exit status is unknown"
    return f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as SIGKILL, or its number for a realtime signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Phases:
    """The seconds of consecutive phases, by name, since this object was created."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, name: str) -> None:
        """Ends the running phase, which gets this name, and begins the next. Phases of the same name are added up."""
        now = time.monotonic()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._last, 3)
        self._last = now


def phases_text(seconds: Mapping[str, float]) -> str:
    """Returns phases and their seconds for a log line, such as "imports 2.3, weights 1.1"."""
    return ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())


def pid_namespace() -> str:
    """Returns a name for the processes among which this process's id is unique: those of a container, or of a machine
    since its last boot. It is the host's name if the system does not report them."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def process_seconds() -> float:
    """Returns the seconds since the system started this process, 0 if it does not report them."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        start = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd field; the first two end with the parenthesis
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def end_process(status: int) -> NoReturn:
    """Flushes the output and ends the process with `status`, without finalizers and `atexit` functions."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def ends_at_signals() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGINT end the process at once with status 0, unless the block installs
    handlers.

    A server that is still starting has nothing to finish. Python's default handler would print a KeyboardInterrupt or
    lose it in an import. The first process of a container ignores a SIGTERM without a handler. Before the block, while
    Python imports the command line, signals have their default effect, and a shell sees status 143.
    """

    def end(*_: Any) -> NoReturn:
        os._exit(0)

    previous_handlers = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def end_first_process_at_sigterm() -> None:
    """Gives SIGTERM its default effect in the first process of a container, where the kernel ignores a signal that has
    no handler: the process ends at once, and a shell sees status 143. Commands may install other handlers."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


def pack(head: Head, body: bytes = b"") -> bytes:
    """Returns a frame with a JSON object and bytes."""
    text = json.dumps(head, separators=(",", ":")).encode()
    return FRAME.pack(len(text), len(body)) + text + body


def receive(connection: socket.socket) -> tuple[Head, bytes] | None:
    """Receives a frame. Returns None if the peer closes the connection before the frame is complete."""
    if (lengths := _receive_bytes(connection, FRAME.size)) is None:
        return None
    head, body = (_receive_bytes(connection, length) for length in FRAME.unpack(lengths))
    return None if head is None or body is None else (json.loads(head), body)


def _receive_bytes(connection: socket.socket, length: int) -> bytes | None:
    content, received = bytearray(length), 0
    while received < length:
        if not (count := connection.recv_into(memoryview(content)[received:])):
            return None
        received += count
    return bytes(content)


def describe_error(error: Exception) -> Head:
    """Returns an exception as JSON, for `to_exception` in another process."""
    if isinstance(error, OSError):
        return {"error": "OSError", "errno": error.errno or 0, "message": error.strerror or str(error)}
    return {"error": type(error).__name__, "message": str(error)}


def to_exception(description: Head, unknown: type[Exception] = RuntimeError) -> Exception:
    """Returns the exception that another process has described, as an `unknown` unless its class is OSError or one of
    fp8serve's."""
    if description["error"] == "OSError":
        return OSError(description["errno"], description["message"])
    cls = getattr(errors, description["error"], None)
    if isinstance(cls, type) and issubclass(cls, Fp8ServeError):
        return cls(description["message"])
    return unknown(description["message"])
