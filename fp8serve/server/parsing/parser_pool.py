"""The server's side of the parser processes (`parser_process.py`), which parse and tokenize what clients send.

The server itself parses short bodies: their length bounds the cost to a few milliseconds. Longer bodies, and everything
that needs a tokenizer or a chat template, go to a parser process with limits of processor time and memory. A process
that exceeds its limits ends, and another one is started for the next job. Long jobs run one at a time, so that one of
the two processes stays free for short jobs. The bytes of waiting jobs are bounded; a job beyond the bound gets a 429 at
once. If the caller of a job is cancelled, the process is killed.
"""

import asyncio
import contextlib
import json
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from fp8serve.errors import MachineError
from fp8serve.logs import LogFormat
from fp8serve.model.text.limited_process import EXIT_STATUS_SECONDS, WAIT_SECONDS, JobResult, exhausted_resource
from fp8serve.processes import FRAME, Head, describe_exit, module_command, pack, to_exception, without_interrupts
from fp8serve.server.faults import Code, Fault

SHORT_BYTES = 1 << 13
"""The longest body that the server itself parses."""
COMMAND = module_command("fp8serve.server.parsing.parser_process")


@dataclass(frozen=True)
class JobLimits:
    """The limits of one job: processor seconds, and bytes of memory in addition to those of the idle process."""

    cpu: float
    memory: int


class ParserProcess:
    """One parser process, which is started for its first job and runs one job at a time."""

    def __init__(self, log_format: LogFormat = "plain") -> None:
        self._process: Process | None = None
        self._command = (*COMMAND, log_format)

    async def perform(
        self, head: Head, body: bytes, allowance: JobLimits, *, repeats_killed_job: bool = True
    ) -> JobResult:
        """Runs a job and returns its answer. Raises Fault 400 if the job exceeds `allowance`, and the errors of
        fp8serve that the job raised. A job whose process is killed is run once more, since the kernel kills processes
        when others use too much memory, too."""
        frame = pack(head | {"cpu": allowance.cpu, "memory": allowance.memory}, body)
        try:
            async with asyncio.timeout(WAIT_SECONDS + 10 * allowance.cpu):
                answer, content = await self._exchange(frame)
        except (asyncio.IncompleteReadError, ConnectionError):  # the process has ended; wait for its exit status
            status = await self.close(EXIT_STATUS_SECONDS)
            if status == -signal.SIGKILL and repeats_killed_job:
                return await self.perform(head, body, allowance, repeats_killed_job=False)
            raise _process_error(head, status) from None
        except TimeoutError:
            raise _process_error(head, await self.close()) from None
        except (ValueError, MemoryError, OverflowError, RecursionError) as error:
            await self.close()
            message = f"The process that parses requests gave no valid answer ({type(error).__name__})."
            raise MachineError(message) from None
        except BaseException:
            await self.close()
            raise
        if answer.pop("retire", False):
            await self.close()
        if answer.pop("out_of_memory", False):
            raise _limit_fault(head, "memory")
        if "error" in answer:
            raise to_exception(answer)
        return answer, content

    async def _exchange(self, frame: bytes) -> JobResult:
        if not self._is_alive():
            await self.close()
            await self._start()
        self._writer.write(frame)
        await self._writer.drain()
        head, body = FRAME.unpack(await self._reader.readexactly(FRAME.size))
        return json.loads(await self._reader.readexactly(head)), await self._reader.readexactly(body)

    def _is_alive(self) -> bool:
        """Whether the process can run a job. The socket shows at once that a process has ended; asyncio would notice it
        only later, and the next job would be blamed for it."""
        if self._process is None:
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)  # blocks if the process lives and is idle
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def _start(self) -> None:
        """Starts the process. If that fails or the caller is cancelled, the socket is closed again."""
        parent, child = socket.socketpair()
        with child:
            reader, writer = await asyncio.open_unix_connection(sock=parent)
            try:
                with without_interrupts():
                    self._process = await asyncio.create_subprocess_exec(*self._command, stdin=child.fileno())
            except OSError as error:
                raise MachineError(f"The process that parses requests cannot start: {error.strerror}.") from None
            finally:
                if self._process is None:
                    writer.close()
        self._socket, self._reader, self._writer = parent, reader, writer

    async def close(self, timeout: float = 0.2) -> int | None:
        """Waits up to `timeout` seconds for the process to end and returns its exit status, or kills it and returns
        None."""
        process, self._process = self._process, None
        if process is None:
            return None
        self._writer.close()
        with contextlib.suppress(TimeoutError):  # an idle process ends when its socket is closed
            return await asyncio.wait_for(process.wait(), timeout)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return None


class ParserPool:
    """Two processes for requests and one for training data. `waiting_bytes` counts the bodies of unfinished jobs."""

    def __init__(self, max_waiting_bytes: int, log_format: LogFormat = "plain") -> None:
        self._processes = [ParserProcess(log_format) for _ in range(3)]
        self._idle: asyncio.LifoQueue[ParserProcess] = asyncio.LifoQueue()
        self._idle.put_nowait(self._processes[0])
        self._idle.put_nowait(self._processes[1])
        self._long_job_lock = asyncio.Lock()
        self._rows_lock = asyncio.Lock()
        self.waiting_bytes = 0
        self._max_waiting_bytes = max_waiting_bytes

    async def run(self, head: Head, body: bytes, allowance: JobLimits) -> JobResult:
        """Runs a job of a request. Raises Fault 429 if too many bytes are waiting."""
        lock = self._long_job_lock if len(body) > SHORT_BYTES else contextlib.nullcontext()
        with self._count_waiting(len(body)):
            async with lock, self._idle_process() as process:
                return await process.perform(head, body, allowance)

    async def inspect_rows(self, head: Head, body: bytes, allowance: JobLimits) -> JobResult:
        """Runs a job on training data, which may take minutes."""
        async with self._rows_lock:
            return await self._processes[2].perform(head, body, allowance)

    @contextlib.contextmanager
    def _count_waiting(self, size: int) -> Iterator[None]:
        if self.waiting_bytes and self.waiting_bytes + size > self._max_waiting_bytes:
            message = "Too many bytes of other requests are waiting to be parsed."
            raise Fault(Code.QUEUE_FULL, message, hint="Try again in a moment.", retry_after=1)
        self.waiting_bytes += size
        try:
            yield
        finally:
            self.waiting_bytes -= size

    @contextlib.asynccontextmanager
    async def _idle_process(self) -> AsyncIterator[ParserProcess]:
        process = await self._idle.get()
        try:
            yield process
        finally:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        await asyncio.gather(*(process.close() for process in self._processes))


def _process_error(head: Head, status: int | None) -> Exception:
    """Returns the error for a parser process that ended with `status` during a job, or did not answer (None)."""
    if (resource := exhausted_resource(status)) is not None:
        return _limit_fault(head, resource)
    if "directory" in head and status is not None:  # the model's tokenizer or template ended the process
        return Fault(Code.TOKENIZER_ERROR, "The model's tokenizer crashed on this text.")
    return MachineError(
        "The process that parses requests did not answer in time."
        if status is None
        else f"The process that parses requests ended ({describe_exit(status)})."
    )


def _limit_fault(head: Head, resource: str) -> Fault:
    code = Code.TEMPLATE_ERROR if head["op"] in ("chat", "count") else Code.INVALID_PARAMETER
    return Fault(
        code, f"Parsing this request needs more {resource} than this server allows.", hint="Send less at once."
    )
