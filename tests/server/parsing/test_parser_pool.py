"""ParserProcess alone: which errors the end of its process causes, and the clean-up after a cancelled start."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import MachineError
from fp8serve.model.text.limited_process import JobResult
from fp8serve.server.faults import Fault
from fp8serve.server.parsing.parser_pool import JobLimits, ParserProcess
from fp8serve.train.config import TrainConfig
from tests.patience import until
from tests.server.fakes import model_dir

ALLOWED = JobLimits(cpu=60.0, memory=2**34)


def state_of(pid: int) -> str:
    """The state in /proc: "Z" for a process that has ended but was not waited for; "" if there is no process."""
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
        config = TrainConfig(model="m", data=(str(data),), out="o").to_json()
        process, body = ParserProcess(), json.dumps({"config": config, "files": [str(data)]}).encode()
        for _ in range(3):
            assert await process.perform({"op": "check_rows"}, body, ALLOWED) == ({}, b"")
            assert process._process is not None
            pid = process._process.pid
            os.kill(pid, number)
            until(lambda pid=pid: state_of(pid) in ("Z", ""))  # type: ignore[misc]
        await process.close()

    asyncio.run(killed_between_two_jobs())


def test_a_process_that_is_given_up_at_any_moment_of_its_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Process] = []
    create = asyncio.create_subprocess_exec

    async def recording(*args: Any, **kwargs: Any) -> Process:
        started.append(await create(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recording)

    async def given_up_after(turns: int) -> None:
        process = ParserProcess()
        job = asyncio.create_task(process.perform({"op": "check_rows"}, b"[]", ALLOWED))
        for _ in range(turns):
            await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert process._process is None
        assert all(other.returncode is not None for other in started)

    for turns in range(12):
        asyncio.run(given_up_after(turns))
    assert started


@pytest.mark.parametrize(
    "frame", ["pack({})[:-2] + b'{]'", "FRAME.pack(5, 0) + b'\\xff' * 5", "FRAME.pack(2**63, 2**63)"]
)
async def test_an_answer_that_cannot_be_read_is_an_error_with_a_sentence(
    frame: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import socket; from fp8serve.processes import FRAME, pack\n"
        f"peer = socket.socket(fileno=0); peer.recv(99); peer.sendall({frame})"
    )
    process = ParserProcess()
    process._command = (sys.executable, "-c", program)
    with pytest.raises(MachineError, match=r"gave no valid answer|ended \(exit status 0\)"):
        await process.perform({"op": "check_rows"}, b"", ALLOWED)
    assert process._process is None


@pytest.mark.parametrize("kills", [1, 2])
def test_a_job_whose_process_is_killed_runs_once_more(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, start = str(model_dir(tmp_path)), ParserProcess._start
    head = {"op": "encode", "directory": directory, "lengths": [1], "special": True, "max_tokens": None, "context": 10}
    victims = iter(range(kills))

    async def start_and_kill(process: ParserProcess) -> None:
        await start(process)
        if next(victims, None) is not None:
            assert process._process is not None
            process._process.kill()

    async def perform() -> JobResult:
        process = ParserProcess()
        try:
            return await process.perform(head, b"a", ALLOWED)
        finally:
            await process.close()

    monkeypatch.setattr(ParserProcess, "_start", start_and_kill)
    if kills == 1:
        assert asyncio.run(perform())[0]["prompts"][0]["count"] == 1
    else:
        with pytest.raises(Fault, match="more memory"):
            asyncio.run(perform())


@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGSEGV, "tokenizer crashed"), (signal.SIGABRT, "more memory")]
)
def test_a_process_that_dies_of_a_tokenizer_is_the_requests_fault(number: int, message: str, tmp_path: Path) -> None:
    """Whatever signal ends the process. The next job succeeds."""
    directory = str(model_dir(tmp_path))
    head = {"op": "encode", "directory": directory, "lengths": [1], "special": True, "max_tokens": None, "context": 10}

    async def killed_within_a_job() -> None:
        process = ParserProcess()
        assert (await process.perform(head, b"a", ALLOWED))[0]["prompts"][0]["count"] == 1
        assert process._process is not None
        pid = process._process.pid
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state_of(pid) == "T")
        job = asyncio.create_task(process.perform(head, b"a", ALLOWED))
        await asyncio.sleep(0)
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(Fault, match=message) as caught:
            await job
        assert caught.value.code.kind.v1_status == 400
        assert (await process.perform(head, b"a", ALLOWED))[0]["prompts"][0]["count"] == 1
        await process.close()

    asyncio.run(killed_within_a_job())
