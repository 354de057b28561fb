"""The front's handle on the processes that read what clients send (`parser_process.py`).

Short requests are read where they arrive, in a thread: their cost is bounded by their length, to a few milliseconds.
Longer ones, and everything that runs a model's template, are read by a parser process, under limits of processor time
and memory. A process that exceeds them ends, and another is started for the next job. One of the two processes never
takes long jobs, so that a short job does not wait for a long one. The bytes that may wait are bounded: a job beyond
that is refused with 429 at once. A job whose caller goes away is given up, with its process.
"""

import asyncio
import contextlib
import json
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from fp8serve.errors import MachineError
from fp8serve.logs import LogFormat
from fp8serve.model.text.limited_process import STATUS_SECONDS, WAIT_SECONDS, Answer, exhausted_by
from fp8serve.processes import FRAME, Head, describe_exit, error_of, module_command, pack, without_interrupts
from fp8serve.server.faults import Code, Fault

SHORT = 1 << 13
"""Characters or bytes that are read where they arrive."""
COMMAND = module_command("fp8serve.server.parsing.parser_process")


@dataclass(frozen=True)
class Allowance:
    """What one job may use: processor seconds, and bytes of memory beyond what its process has before."""

    cpu: float
    memory: int


class ParserProcess:
    """One process, started when it is needed, for one job at a time."""

    def __init__(self, log_format: LogFormat = "plain") -> None:
        self._process: Process | None = None
        self._command = (*COMMAND, log_format)

    async def perform(self, head: Head, body: bytes, allowance: Allowance) -> Answer:
        """The answer to a job. Fault 400 when it needs more than it may use; fp8serve's own errors are raised as
        such."""
        frame = pack(head | {"cpu": allowance.cpu, "memory": allowance.memory}, body)
        try:
            async with asyncio.timeout(WAIT_SECONDS + 10 * allowance.cpu):
                answer, content = await self._exchange(frame)
        except (asyncio.IncompleteReadError, ConnectionError):  # it has ended, and its status is about to come
            raise _gone(head, await self.close(STATUS_SECONDS)) from None
        except TimeoutError:
            raise _gone(head, await self.close()) from None
        except (ValueError, MemoryError, OverflowError, RecursionError) as error:
            await self.close()
            raise MachineError(
                f"The process that reads requests gave no valid answer ({type(error).__name__})."
            ) from None
        except BaseException:
            await self.close()
            raise
        if answer.pop("last", False):
            await self.close()
        if answer.pop("too_much", False):
            raise _too_much(head, "memory")
        if "error" in answer:
            raise error_of(answer)
        return answer, content

    async def _exchange(self, frame: bytes) -> Answer:
        if not self._is_alive():
            await self.close()
            await self._start()
        self._writer.write(frame)
        await self._writer.drain()
        head, body = FRAME.unpack(await self._reader.readexactly(FRAME.size))
        return json.loads(await self._reader.readexactly(head)), await self._reader.readexactly(body)

    def _is_alive(self) -> bool:
        """Whether the process can take a job. The socket tells at once; asyncio learns of the end of a process only
        later, and until then the next job would be blamed for it."""
        if self._process is None:
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)  # between two jobs there is nothing to read
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def _start(self) -> None:
        """Starts the process, all or nothing, even if the waiting caller goes away meanwhile."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                with without_interrupts():
                    self._process = await asyncio.create_subprocess_exec(*self._command, stdin=theirs.fileno())
            except OSError as error:
                raise MachineError(f"No process can be started to read the request: {error.strerror}.") from None
            finally:
                if self._process is None:
                    writer.close()
        self._socket, self._reader, self._writer = ours, reader, writer

    async def close(self, patience: float = 0.2) -> int | None:
        """Ends the process; its exit status if it has ended by itself, at most `patience` seconds from now."""
        process, self._process = self._process, None
        if process is None:
            return None
        self._writer.close()
        with contextlib.suppress(TimeoutError):  # it ends by itself if it is not busy
            return await asyncio.wait_for(process.wait(), patience)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return None


class ParserPool:
    """Two processes for requests and one for training data. Call `close` at the end."""

    def __init__(self, waiting_bytes: int, log_format: LogFormat = "plain") -> None:
        self._all = [ParserProcess(log_format) for _ in range(3)]
        self._free: asyncio.LifoQueue[ParserProcess] = asyncio.LifoQueue()
        self._free.put_nowait(self._all[0])
        self._free.put_nowait(self._all[1])
        self._long = asyncio.Lock()
        self._rows = asyncio.Lock()
        self.bytes = 0
        self._most = waiting_bytes

    async def read(self, head: Head, body: bytes, allowance: Allowance) -> Answer:
        """A job of a request. Fault 429 when too much waits to be read."""
        with self._waiting(len(body)):
            async with self._long if len(body) > SHORT else contextlib.nullcontext(), self._free_process() as process:
                return await process.perform(head, body, allowance)

    async def look_at_rows(self, head: Head, body: bytes, allowance: Allowance) -> Answer:
        """A job about training data, which may take minutes."""
        async with self._rows:
            return await self._all[2].perform(head, body, allowance)

    @contextlib.contextmanager
    def _waiting(self, size: int) -> Iterator[None]:
        if self.bytes and self.bytes + size > self._most:
            raise Fault(
                Code.QUEUE_FULL,
                "As much text as this server holds is waiting to be read.",
                hint="Try again in a moment.",
                retry_after=1,
            )
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size

    @contextlib.asynccontextmanager
    async def _free_process(self) -> AsyncIterator[ParserProcess]:
        process = await self._free.get()
        try:
            yield process
        finally:
            self._free.put_nowait(process)

    async def close(self) -> None:
        await asyncio.gather(*(process.close() for process in self._all))


def _gone(head: Head, status: int | None) -> Exception:
    """The fault for a parser process that ended in the middle of a job, by its exit status; None: it did not answer."""
    if (name := exhausted_by(status)) is not None:
        return _too_much(head, name)
    if "directory" in head and status is not None:  # a tokenizer, or a template, that no limit has stopped
        return Fault(Code.TOKENIZER_ERROR, "The model's tokenizer ended the process that read this text.")
    return MachineError(
        "The process that reads requests did not answer."
        if status is None
        else f"The process that reads requests ended ({describe_exit(status)})."
    )


def _too_much(head: Head, what: str) -> Fault:
    code = Code.TEMPLATE_ERROR if head["op"] in ("chat", "count") else Code.INVALID_PARAMETER
    return Fault(code, f"Reading this request takes more {what} than this server allows.", hint="Send less at once.")
