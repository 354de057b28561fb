"""A full disk at any write of a request gives a 507 and leaves no incomplete files; the same request works later."""

import errno
import json
import os
import pathlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import MachineError
from fp8serve.server.data_directory import DataDirectory
from fp8serve.server.faults import Fault
from fp8serve.server.finetuning.database import NewJob
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.settings import Settings
from tests.patience import eventually
from tests.server.conftest import Server, Start
from tests.server.finetuning.test_finetune import submit, wait_for

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Disk:
    """Counts writes; the write with the number `full_at` fails, and all later ones do, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes, self.full_at = 0, 0
        for owner, name in ((Path, "mkdir"), (Path, "rename"), (os, "fsync"), (os, "link"), (shutil, "copyfile")):
            self._watch(monkeypatch, owner, name, lambda *_: True)
        self._watch(monkeypatch, pathlib.Path, "open", lambda *args: set(str(args[1:])) & set("wax"))

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, counts: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if counts(*args, *kwargs.values()):
                self.writes += 1
                if self.full_at and self.writes >= self.full_at:
                    raise FULL
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


ROW = {"text": "a row"}


async def upload(server: Server) -> Any:
    form = {"file": ("rows.jsonl", json.dumps(ROW).encode())}
    return await server.client.post("/v1/files", files=form, data={"purpose": "fine-tune"})


REQUESTS: dict[str, Callable[[Server, str], Any]] = {
    "inline": lambda server, _: server.client.post("/finetune", json={"data": [ROW], "validation_data": [ROW]}),
    "uploaded": lambda server, file: server.client.post("/finetune", json={"file_id": file}),
    "openai": lambda server, file: server.client.post(
        "/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": file}
    ),
    "dry run": lambda server, _: server.client.post("/finetune/validate", json={"data": [ROW]}),
    "dry run of a file": lambda server, file: server.client.post("/finetune/validate", json={"file_id": file}),
    "upload": lambda server, _: upload(server),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_every_write_of_a_request_may_meet_a_full_disk(start: Start, disk: Disk, name: str) -> None:
    async with start() as server:
        server.state.runner.is_closing = True  # no job runs: its writes are not the request's
        server.state.runner.wake()
        file = (await upload(server)).json()["id"]
        send = REQUESTS[name]

        def remaining_files() -> set[str]:
            return {p.name for folder in ("jobs", "files") for p in (server.state.data_dir / folder).iterdir()}

        before, write = remaining_files(), 0
        while True:
            write += 1
            disk.writes, disk.full_at = 0, write
            answer = await send(server, file)
            if disk.writes < write:
                break
            body = answer.json()
            assert answer.status_code == 507, (write, answer.text)
            assert (body["error"]["code"] if answer.url.path.startswith("/v1") else body["code"]) == "disk_full"
            disk.full_at = 0
            assert remaining_files() == before, write
        assert write > 2
        assert answer.status_code in (200, 202)


async def test_an_activation_that_cannot_be_recorded_is_undone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise FULL

    async with start() as server:
        finished_job = await wait_for(server, (await submit(server, "fine"))["id"], "succeeded")
        served = server.state.models.default.current
        monkeypatch.setattr(server.state.jobs, "set_activated", full)
        answer = await server.client.post(f"/finetune/{finished_job['id']}/activate")
        assert (answer.status_code, answer.json()["code"]) == (507, "disk_full")
        assert server.state.models.default.current is served
        assert server.launcher.engine.closed
        assert (await server.client.post("/generate", json={"inputs": "a"})).status_code == 200
        monkeypatch.undo()
        assert (await server.client.post(f"/finetune/{finished_job['id']}/activate")).status_code == 200


async def test_an_activation_that_cannot_be_loaded_is_not_recorded(start: Start) -> None:
    async with start() as server:
        finished_job = await wait_for(server, (await submit(server, "fine"))["id"], "succeeded")
        server.launcher.problem = "The scales are gone."
        assert (await server.client.post(f"/finetune/{finished_job['id']}/activate")).status_code == 409
        assert server.state.jobs.activated(str(server.state.settings.model.resolve())) is None
        server.launcher.problem = None


async def test_a_job_that_met_a_full_disk_is_resumed(start: Start) -> None:
    async with start() as server:
        job = await submit(server, "full-disk")
        failed = await wait_for(server, job["id"], "failed")
        assert "No space left" in failed["error"]["message"]
        (server.state.runner.job_dir(job["id"]) / "room").touch()
        answer = await server.client.post(f"/finetune/{job['id']}/resume")
        assert (answer.status_code, answer.json()["error"], answer.json()["finished_at"]) == (200, None, None)
        finished_job = await wait_for(server, job["id"], "succeeded", "failed")
        assert finished_job["status"] == "succeeded", finished_job["error"]
        events = (await server.client.get(f"/finetune/{job['id']}/events")).json()["events"]
        assert [e["data"]["step"] for e in events if e["type"] == "metrics"] == [1, 2, 3, 4, 5, 6]
        again = await server.client.post(f"/v1/fine_tuning/jobs/{job['id']}/resume")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "job_state")
        assert (await server.client.post("/finetune/ftjob-0/resume")).status_code == 404


async def test_jobs_run_again_after_the_table_could_not_be_read(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8serve.server.finetuning.job_runner.RETRY_SECONDS", 0.05)
    async with start() as server:
        failures = 0

        def unreadable() -> list[Any]:
            nonlocal failures
            failures += 1
            raise FULL

        with monkeypatch.context() as broken:
            broken.setattr(server.state.jobs, "unfinished_jobs", unreadable)
            job = await submit(server, "fine")
            await eventually(lambda: failures)
        assert (await wait_for(server, job["id"], "succeeded"))["status"] == "succeeded"


def test_a_full_table_is_a_fault_and_does_not_block_later_writes(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs.sqlite3")
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count={pages}")
    large = NewJob(base="b", source="base", config={"x": "y" * 100_000})
    with pytest.raises(Fault) as caught:
        store.create(large, "ftjob-1", 5)
    assert caught.value.code.value == "disk_full"
    assert store.jobs() == []
    store._db.execute(f"PRAGMA max_page_count={pages * 100}")
    assert store.create(large, "ftjob-1", 5)[1]
    store.close()


def test_a_commit_that_fails_has_not_happened(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "jobs.sqlite3")

    class Failing:
        """A connection whose next COMMIT meets a full disk."""

        def __init__(self, db: sqlite3.Connection) -> None:
            self._db = db

        def __getattr__(self, name: str) -> Any:
            return getattr(self._db, name)

        def execute(self, query: str, *values: Any) -> Any:
            if query == "COMMIT":
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error
            return self._db.execute(query, *values)

    real = store._db
    store._db = Failing(real)  # type: ignore[assignment]
    with pytest.raises(Fault, match="database or disk is full"):
        store.set_activated("model", "base")
    store._db = real
    assert store.activated("model") is None
    store.set_activated("model", "base")
    assert store.activated("model") == "base"
    store.close()


def test_a_server_on_a_full_disk_does_not_start_with_a_traceback(settings: Settings, disk: Disk) -> None:
    disk.full_at = 1
    with pytest.raises(MachineError, match="No space left"):
        DataDirectory(settings)


@pytest.mark.parametrize("value", [5e-324, 1e-300, 1e-7, 1e6, 0.0, -1.0])
async def test_a_learning_rate_that_no_trainer_takes_is_refused(start: Start, value: float) -> None:
    async with start() as server:
        file = (await upload(server)).json()["id"]
        hyper = {"learning_rate_multiplier": value}
        for body in (
            {"hyperparameters": hyper},
            {"method": {"type": "supervised", "supervised": {"hyperparameters": hyper}}},
        ):
            answer = await server.client.post(
                "/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": file, **body}
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].endswith("learning_rate_multiplier")
        if value < 1e-12:
            answer = await server.client.post("/finetune", json={"data": [ROW], "learning_rate": value})
            assert (answer.status_code, answer.json()["param"]) == (422, "learning_rate")
