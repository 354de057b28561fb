"""Runs untrusted work in a child process with limits of CPU time and memory.

An untrusted request, chat template or tokenizer can use any amount of time and memory, or crash the process that runs
it. Such work is therefore sent as a job to a child process. A job is a frame, a JSON head followed by bytes, which the
process reads from the socket that is its standard input. It writes the result as another frame. No frame is unpickled.
The child process sets the job's limits before it runs the job: `cpu` seconds, after which the kernel ends the process
(ITIMER_PROF), and `memory` bytes beyond those in use (RLIMIT_AS). macOS does not report the bytes in use, so memory is
not limited there.

`serve` is the loop of the child process, where `is_limited()` is true. `LimitedProcess` starts a child process for a
caller that waits for each result; `server/parsing/parser_pool.py` does so for an event loop. A process that was forked
starts new child processes and leaves those of its parent alone.
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
    module_command,
    pack,
    receive,
    to_exception,
    without_interrupts,
)

log = logging.getLogger("fp8serve.limits")

WAIT_SECONDS = 60.0
"""Seconds beyond its CPU time after which a child process that sends no result counts as hung."""
EXIT_STATUS_SECONDS = 10.0
"""Seconds to wait for the exit status of a child process that has closed its socket."""
JobResult = tuple[Head, bytes]
Jobs = Mapping[str, Callable[[Head, bytes], JobResult]]
ExhaustedResource = Literal["processor time", "memory"]

_is_child = threading.Event()
_processes: "weakref.WeakSet[LimitedProcess]" = weakref.WeakSet()


def exhausted_resource(status: int | None) -> ExhaustedResource | None:
    """Returns the limit that a process with this exit status exceeded, or None if it ended for another reason."""
    if status == -signal.SIGPROF:
        return "processor time"
    return "memory" if status in (-signal.SIGABRT, -signal.SIGKILL) else None  # from the allocator or the kernel


# -- child process -----------------------------------------------------------------------------------------------------


def serve(jobs: Jobs, prepare: Callable[[Head], None] = lambda _head: None) -> None:
    """Runs jobs until the parent process closes the socket. `prepare` runs before the limits of each job are set."""
    _is_child.set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as connection:
        while (job := receive(connection)) is not None:
            connection.sendall(_run_job(jobs, prepare, *job))


def is_limited() -> bool:
    """Whether this process is a child process with limits, which may run untrusted work."""
    return _is_child.is_set()


def _run_job(jobs: Jobs, prepare: Callable[[Head], None], head: Head, body: bytes) -> bytes:
    """Runs one job and returns the frame of its result, or of the class and the message of its error. `retire` tells
    the parent process to start a new child process for the next job."""
    try:
        prepare(head)
        used_bytes = address_space()
        _set_limits(head)
        result, content = jobs[head["op"]](head, body)
        has_grown = used_bytes is not None and (address_space() or 0) - used_bytes > head["memory"] // 4
        return pack(result | ({"retire": True} if has_grown else {}), content)
    except (Fp8ServeError, OSError) as error:
        return pack(describe_error(error))
    except MemoryError:
        return pack({"out_of_memory": True, "retire": True})
    except Exception as error:  # a bug, whose traceback is logged
        log.exception("a process with limits failed")
        return pack({"error": "RuntimeError", "message": f"A process with limits failed: {type(error).__name__}."})
    finally:
        set_cpu_limit(0)


def _set_limits(head: Head) -> None:
    """Limits this process to `cpu` seconds of CPU time and `memory` further bytes."""
    set_cpu_limit(head["cpu"])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if (used_bytes := address_space()) is not None:
        soft = used_bytes + head["memory"]
        resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def set_cpu_limit(seconds: float) -> None:
    """Makes the kernel end this process after so many further seconds of CPU time; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


# -- parent process ----------------------------------------------------------------------------------------------------


class LimitedProcess:
    """Runs `module` in a child process, which is started for the first job and again after it ended. Thread-safe."""

    def __init__(self, module: str, cpu: float, memory: int) -> None:
        self._command = module_command(module)
        self._limits = {"cpu": cpu, "memory": memory}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        _processes.add(self)

    def run_job(self, subject: str, head: Head, body: bytes = b"") -> JobResult:
        """Runs a job and returns its result, or raises its error. Raises ModelError if the job exceeds a limit or
        ends the process; `subject` begins the error's message. A job whose process is killed is run once more, since
        the kernel kills processes when others use too much memory, too."""
        frame = pack(head | self._limits, body)
        with self._lock:
            try:
                try:
                    result, content = self._send(frame)
                except (EOFError, ConnectionError):
                    if (status := self._close(EXIT_STATUS_SECONDS)) != -signal.SIGKILL:
                        raise _exit_error(subject, status) from None
                    result, content = self._send(frame)
            except (EOFError, ConnectionError):  # the process has ended, but may not have an exit status yet
                raise _exit_error(subject, self._close(EXIT_STATUS_SECONDS)) from None
            except TimeoutError:
                raise _exit_error(subject, self._close()) from None
            except BaseException:
                self._close()
                raise
            if result.pop("retire", False):
                self._close()
        if result.pop("out_of_memory", False):
            raise ModelError(f"{subject} exceeds its memory limit.")
        if "error" in result:
            raise to_exception(result)
        return result, content

    def close(self) -> None:
        """Ends the child process, if it runs."""
        with self._lock:
            self._close()

    def _send(self, frame: bytes) -> JobResult:
        if self._process is None or self._process.poll() is not None:
            self._close()
            self._start()
        self._socket.sendall(frame)
        result = receive(self._socket)
        if result is None:
            raise EOFError
        return result

    def _start(self) -> None:
        self._socket, child_socket = socket.socketpair()
        self._socket.settimeout(WAIT_SECONDS + 10 * self._limits["cpu"])
        with child_socket:
            try:
                with without_interrupts():
                    self._process = subprocess.Popen(self._command, stdin=child_socket.fileno())
            except OSError as error:
                self._socket.close()
                raise MachineError(f"A process with limits cannot be started: {error.strerror}.") from None

    def detach(self) -> None:
        """Forgets the child process without ending it. Called in a forked process, whose parent uses the child."""
        self._lock = threading.Lock()  # a thread of the parent process may have held the old one
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # so that Popen does not wait for it
            self._socket.close()

    def _close(self, timeout_seconds: float = 0.2) -> int | None:
        """Ends the child process. Returns its exit status if it ended by itself within the timeout, else None."""
        process, self._process = self._process, None
        if process is None:
            return None
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout_seconds)
        process.kill()
        process.wait()
        return None


def _detach_all() -> None:
    for process in list(_processes):
        process.detach()


os.register_at_fork(after_in_child=_detach_all)


def _exit_error(subject: str, status: int | None) -> ModelError:
    if status is None:
        return ModelError(f"{subject} exceeds its time limit.")
    if (resource_name := exhausted_resource(status)) is not None:
        return ModelError(f"{subject} exceeds its {resource_name} limit.")
    return ModelError(f"{subject} ended the process that it ran in ({describe_exit(status)}).")
