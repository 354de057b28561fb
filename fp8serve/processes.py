"""Child processes of this project: the command that starts one, its messages and errors, and how its end is described.

A child is always a module of this package. Its command is made here and nowhere else, because of `-P`: without it,
Python puts the current directory first on `sys.path`, and a server that was started inside a downloaded model's
directory would run that directory's `json.py`. `tests/test_processes.py` finds every other start in the tree.

`python -m fp8serve` itself has that fault, and no code of ours can mend it, because Python imports modules from the
current directory before it imports ours. `__main__.py` removes the directory from `sys.path` for everything later. The
command `fp8serve` and `python -P -m fp8serve` never look there.

Processes of ours end at once (`end_process`): workers, because their owner waits for it, and a server that has not
begun. The interpreter needs one to three seconds to shut down a process with torch, and frees nothing that the
operating system does not free anyway.

Messages are JSON and nothing is ever unpickled: a frame (`pack`, `receive`) is a JSON object and some bytes, each with
its length; the engine's messages are lines (engine/worker.py). An error is sent as its class and sentence
(`describe_error`, `error_of`).
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from fp8serve import errors
from fp8serve.errors import Fp8ServeError

FRAME = struct.Struct("!QQ")  # bytes of the JSON head, bytes of the body behind it
Head = dict[str, Any]


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs `module` of this package in a Python process like this one."""
    return (sys.executable, "-P", "-m", module, *arguments)


def module_path() -> str:
    """PYTHONPATH of a child that must find the modules that this process finds. The current directory is left out where
    Python added it, as `python -m` and an interactive Python do."""
    with contextlib.suppress(FileNotFoundError):  # there is no current directory
        if not sys.flags.safe_path and sys.path[0] == os.getcwd():
            return os.pathsep.join(filter(None, sys.path[1:]))
    return os.pathsep.join(filter(None, sys.path))


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes started in the block never get SIGINT: Ctrl-C reaches the whole group, and is their owner's to handle,
    also while they still import what would ignore it. Their owner's own is delayed at most.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def describe_exit(status: int | None) -> str:
    """How a process ended, in words. status: as `subprocess` gives it, below 0 for a signal; None: unknown."""
    if status is None:
        return "its exit status is unknown"
    return f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL. Realtime signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_process(status: int) -> NoReturn:
    """Ends the process with `status`, after what was printed; neither finalizers nor `atexit` run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def ends_at_signals() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGINT end the process at once with status 0, unless it handles them itself.

    For what has nothing to finish yet. Python's own handling would show a KeyboardInterrupt, or lose it in an import;
    and the first process of a container ignores a SIGTERM that it does not handle. Before the block, while Python
    imports the command line, a signal does what it does to any program: a shell then sees 143.
    """

    def end(*_: Any) -> NoReturn:
        os._exit(0)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pack(head: Head, body: bytes = b"") -> bytes:
    """One frame: a JSON object and some bytes."""
    text = json.dumps(head, separators=(",", ":")).encode()
    return FRAME.pack(len(text), len(body)) + text + body


def receive(connection: socket.socket) -> tuple[Head, bytes] | None:
    """The next frame; None if the other end is closed before it is whole."""
    if (sizes := _read(connection, FRAME.size)) is None:
        return None
    head, body = (_read(connection, size) for size in FRAME.unpack(sizes))
    return None if head is None or body is None else (json.loads(head), body)


def _read(connection: socket.socket, size: int) -> bytes | None:
    content, received = bytearray(size), 0
    while received < size:
        if not (count := connection.recv_into(memoryview(content)[received:])):
            return None
        received += count
    return bytes(content)


def describe_error(error: Exception) -> Head:
    """The error as JSON, for `error_of` in the process that waits."""
    if isinstance(error, OSError):
        return {"error": "OSError", "errno": error.errno or 0, "message": error.strerror or str(error)}
    return {"error": type(error).__name__, "message": str(error)}


def error_of(answer: Head, unknown: type[Exception] = RuntimeError) -> Exception:
    """The error of another process, as the class it was raised as; `unknown` for a class that is not fp8serve's."""
    if answer["error"] == "OSError":
        return OSError(answer["errno"], answer["message"])
    kind = getattr(errors, answer["error"], None)
    if isinstance(kind, type) and issubclass(kind, Fp8ServeError):
        return kind(answer["message"])
    return unknown(answer["message"])
