"""A process that works for another one under limits of processor time and memory.

What a stranger wrote (a request, a chat template, a tokenizer) costs as much as its writer cares to make it cost, and
may end the process that runs it. So such work is a job: a frame on the socket that is the process's standard input, a
JSON head and some bytes, and the answer is another frame. Before each job the limits that its head names are set:
`cpu` seconds, after which the kernel ends the process (ITIMER_PROF), and `memory` bytes beyond what is in use
(RLIMIT_AS). Nothing is unpickled. Where the system does not say how much is in use, as on macOS, memory is not limited,
and the limit of time remains.

`serve` is that process's loop, and `is_limited` is true in it. `LimitedProcess` is the handle of one for a program that
waits for each answer. A process that is forked has its parent's handles, and starts processes of its own for them.
`server/parsing/parser_pool.py` has handles for an event loop.
"""

import contextlib
import logging
import os
import resource
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Literal

from fp8serve.errors import Fp8ServeError, MachineError, ModelError
from fp8serve.model.storage.memory import address_space
from fp8serve.processes import (
    Head,
    describe_error,
    describe_exit,
    error_of,
    module_command,
    pack,
    receive,
    without_interrupts,
)

log = logging.getLogger("fp8serve.limits")

WAIT_SECONDS = 60.0
"""Seconds beyond its processor time after which a process that does not answer counts as hung."""
STATUS_SECONDS = 10.0
"""Seconds in which the exit status of a process that has closed its socket is certain to come."""
Answer = tuple[Head, bytes]
Jobs = Mapping[str, Callable[[Head, bytes], Answer]]
Exhausted = Literal["processor time", "memory"]

_serving = threading.Event()
_handles: "weakref.WeakSet[LimitedProcess]" = weakref.WeakSet()


def exhausted_by(status: int | None) -> Exhausted | None:
    """What a process that ended with `status` had too little of; None if it ended for another reason."""
    if status == -signal.SIGPROF:
        return "processor time"
    return "memory" if status in (-signal.SIGABRT, -signal.SIGKILL) else None  # the allocator, or the kernel, gave up


# -- the process itself ------------------------------------------------------------------------------------------------


def serve(jobs: Jobs, prepare: Callable[[Head], None] = lambda _head: None) -> None:
    """Does jobs until the socket ends. `prepare` does what is not a part of a job, before its limits are set."""
    _serving.set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other process's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as connection:
        while (job := receive(connection)) is not None:
            connection.sendall(_perform(jobs, prepare, *job))


def is_limited() -> bool:
    """Whether this process works under limits, so that it may run what a stranger wrote."""
    return _serving.is_set()


def _perform(jobs: Jobs, prepare: Callable[[Head], None], head: Head, body: bytes) -> bytes:
    """The answer to one job, an error of ours as its class and sentence."""
    try:
        prepare(head)
        before = address_space()
        _limit(head)
        answer, content = jobs[head["op"]](head, body)
        grown = before is not None and (address_space() or 0) - before > head["memory"] // 4
        return pack(answer | ({"last": True} if grown else {}), content)
    except (Fp8ServeError, OSError) as error:
        return pack(describe_error(error))
    except MemoryError:
        return pack({"too_much": True, "last": True})
    except Exception as error:  # a mistake of ours: the log has it
        log.exception("a process with limits failed")
        return pack({"error": "RuntimeError", "message": f"A process with limits failed: {type(error).__name__}."})
    finally:
        allow(0)


def _limit(head: Head) -> None:
    """From now on the kernel ends this process after `cpu` seconds of work, and refuses it `memory` more bytes."""
    allow(head["cpu"])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if (used := address_space()) is not None:
        most = used + head["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def allow(seconds: float) -> None:
    """From now on the kernel ends this process after so many seconds of work; 0: no longer."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


# -- its handle --------------------------------------------------------------------------------------------------------


class LimitedProcess:
    """A process that runs `module`, started when it is needed and again after it ended; thread-safe."""

    def __init__(self, module: str, cpu: float, memory: int) -> None:
        self._command = module_command(module)
        self._limits = {"cpu": cpu, "memory": memory}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        _handles.add(self)

    def perform(self, what: str, head: Head, body: bytes = b"") -> Answer:
        """The answer to a job. ModelError, about `what`, if it needs more than it may use or ends the process; errors
        of ours are raised as such."""
        with self._lock:
            try:
                answer, content = self._exchange(pack(head | self._limits, body))
            except (EOFError, ConnectionError):  # it has ended, and its status is about to come
                raise _ended(what, self._close(STATUS_SECONDS)) from None
            except TimeoutError:
                raise _ended(what, self._close()) from None
            except BaseException:
                self._close()
                raise
            if answer.pop("last", False):
                self._close()
        if answer.pop("too_much", False):
            raise ModelError(f"{what} takes more memory than it may.")
        if "error" in answer:
            raise error_of(answer)
        return answer, content

    def close(self) -> None:
        """Ends the process, if it runs."""
        with self._lock:
            self._close()

    def _exchange(self, frame: bytes) -> Answer:
        if self._process is None or self._process.poll() is not None:
            self._close()
            self._start()
        self._socket.sendall(frame)
        answer = receive(self._socket)
        if answer is None:
            raise EOFError
        return answer

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(WAIT_SECONDS + 10 * self._limits["cpu"])
        with theirs:
            try:
                with without_interrupts():
                    self._process = subprocess.Popen(self._command, stdin=theirs.fileno())
            except OSError as error:
                self._socket.close()
                raise MachineError(f"No process can be started under limits: {error.strerror}.") from None

    def disown(self) -> None:
        """Leaves the process to the one that this one was forked from, whose threads may have held the lock."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # so that nothing waits for it
            self._socket.close()

    def _close(self, patience: float = 0.2) -> int | None:
        """The exit status, if the process has ended by itself, at most `patience` seconds from now."""
        process, self._process = self._process, None
        if process is None:
            return None
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(patience)
        process.kill()
        process.wait()
        return None


def _disown_all() -> None:
    for handle in list(_handles):
        handle.disown()


os.register_at_fork(after_in_child=_disown_all)


def _ended(what: str, status: int | None) -> ModelError:
    if status is None:
        return ModelError(f"{what} takes longer than it may.")
    if (resource_name := exhausted_by(status)) is not None:
        return ModelError(f"{what} takes more {resource_name} than it may.")
    return ModelError(f"{what} ended the process that it ran in ({describe_exit(status)}).")
