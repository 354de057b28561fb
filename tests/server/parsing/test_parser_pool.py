"""ParserProcess alone: what an end of its process means."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from fp8serve.server.parsing.parser_pool import Allowance, ParserProcess
from tests.patience import until

ALLOWED = Allowance(cpu=60.0, memory=2**34)


def state_of(pid: int) -> str:
    """ "Z" for a process that has ended and has not been asked for, "" for one that has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_an_idle_process_is_not_the_next_jobs_fault(number: int, tmp_path: Path) -> None:
    """The process ends while the event loop stands still, so that asyncio cannot have heard of it."""
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "one"}\n')

    async def killed_between_two_jobs() -> None:
        process, body = ParserProcess(), json.dumps([str(data)]).encode()
        for _ in range(3):
            assert await process.perform({"op": "rows"}, body, ALLOWED) == ({}, b"")
            assert process._process is not None
            pid = process._process.pid
            os.kill(pid, number)
            until(lambda pid=pid: state_of(pid) in ("Z", ""))  # type: ignore[misc]
        await process.close()

    asyncio.run(killed_between_two_jobs())
