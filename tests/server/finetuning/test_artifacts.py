"""Files of jobs in a bucket: other servers run the jobs and serve the results, and bad buckets are refused."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fp8serve.errors import MachineError, RequestError
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning import fronts, job_runner
from fp8serve.server.finetuning.artifacts import COMPLETE, Artifacts, Bucket
from fp8serve.server.finetuning.fronts import Fronts
from fp8serve.server.finetuning.job_runner import TRAINING_COMMAND, TrainingProcess, is_lock_held
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.settings import Settings
from tests.patience import eventually, until
from tests.server.conftest import Server, Start
from tests.server.fakes import Launcher
from tests.server.finetuning.test_finetune import submit, unblock_job, wait_for, wait_for_step, write_trainable_model


@pytest.fixture
def bucket() -> Iterator[str]:
    """A bucket in this process's memory."""
    yield "memory://bucket/some/prefix"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_what_is_published_is_fetched_whole(bucket: str, tmp_path: Path) -> None:
    one, other = (Artifacts(make(tmp_path / name), Bucket(bucket)) for name in ("one", "other"))
    job = one.job_dir("ftjob-1")
    write(job / "data.jsonl", "rows")
    earlier = one.job_dir("ftjob-0") / "out" / "model"
    write(earlier / "config.json", "{}")
    one.publish(earlier)
    config = {"model": str(earlier), "data": [str(job / "data.jsonl")], "out": str(job / "out"), "x": "/else/where"}
    write(job / "job.json", json.dumps(config))
    assert not other.has_job("ftjob-1")
    one.publish_job("ftjob-1")
    assert other.has_job("ftjob-1")
    fetched = other.fetch_job("ftjob-1")
    assert (fetched / "data.jsonl").read_text() == "rows"
    moved = json.dumps(config).replace(str(one.root), str(other.root))
    assert (fetched / "job.json").read_text() == moved
    assert (other.job_dir("ftjob-0") / "out" / "model" / "config.json").read_text() == "{}"

    for step in (1, 2):
        write(one.checkpoints_dir("ftjob-1") / f"step-{step}" / "state" / "a.bin", f"{step}")
    one.publish_checkpoints("ftjob-1")
    (one.checkpoints_dir("ftjob-1") / "step-1" / "state" / "a.bin").unlink()
    (one.checkpoints_dir("ftjob-1") / "step-1" / "state").rmdir()
    (one.checkpoints_dir("ftjob-1") / "step-1").rmdir()
    one.publish_checkpoints("ftjob-1")
    assert other.checkpoints("ftjob-1") == {"step-2"}
    other.fetch_checkpoints("ftjob-1")
    assert [path.name for path in other.checkpoints_dir("ftjob-1").iterdir()] == ["step-2"]
    assert (other.checkpoints_dir("ftjob-1") / "step-2" / "state" / "a.bin").read_text() == "2"

    other.discard(other.job_dir("ftjob-1"))
    assert not other.job_dir("ftjob-1").exists()
    assert not Artifacts(make(tmp_path / "third"), Bucket(bucket)).has_job("ftjob-1")
    assert other.has_job("ftjob-0") is False
    assert other.bucket is not None
    assert other.bucket.exists("jobs/ftjob-0/out/model")


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_directory_that_is_not_complete_does_not_exist(bucket: str, tmp_path: Path) -> None:
    artifacts = Artifacts(make(tmp_path / "one"), Bucket(bucket))
    assert artifacts.bucket is not None
    artifacts.bucket.write("jobs/ftjob-1/out/model/config.json", b"{}")  # its server died while it copied the rest
    assert not artifacts.bucket.exists("jobs/ftjob-1/out/model")
    assert not artifacts.fetch(artifacts.job_dir("ftjob-1") / "out" / "model").exists()


# -- servers -----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def two_servers(
    start: Start, database: str, bucket: str, tmp_path: Path, **more: Any
) -> AsyncIterator[list[Server]]:
    """Two servers, each with a data directory of its own. The second runs no job at first."""
    shared = {"database": database, "artifacts": bucket, **more}
    async with (
        start(Launcher(), data_dir=tmp_path / "b", **shared) as second,
        start(Launcher(), data_dir=tmp_path / "a", **shared) as first,
    ):
        second.state.runner.is_closing = True
        second.state.runner.wake()
        await eventually(lambda: all(server.state.ready for server in (first, second)), "readiness")
        yield [first, second]


def run_jobs(server: Server) -> None:
    server.state.runner.is_closing = False
    server.state.runner.start()


async def test_a_job_continues_on_another_server_from_its_checkpoint(
    start: Start, database: str, bucket: str, tmp_path: Path
) -> None:
    async with two_servers(start, database, bucket, tmp_path) as (first, second):
        job = (await submit(first, "held"))["id"]
        await wait_for_step(first, job)
        await first.state.runner.close(600)
        assert (await wait_for(second, job, "queued"))["progress"]["step"] >= 1
        (second.state.runner.job_dir(job)).mkdir(exist_ok=True)
        unblock_job(second, job)
        run_jobs(second)
        await wait_for(first, job, "succeeded")
        events = (await first.client.get(f"/finetune/{job}/events")).json()["events"]
        assert [e["data"]["step"] for e in events if e["type"] == "metrics"] == [1, 2, 3, 4, 5, 6]
        assert [e["id"] for e in events] == sorted({e["id"] for e in events})
        # the first server serves the result, which the second one made
        assert not first.state.runner.result_dir(first.state.jobs.get(job)).exists()
        answer = await first.client.post("/models/tiny/activate", json={"source": job})
        assert answer.status_code == 200, answer.text
        assert first.state.runner.result_dir(first.state.jobs.get(job)).exists()


async def test_a_server_that_stops_copies_the_last_checkpoint_and_queues_the_job(
    start: Start, database: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_runner, "STATUS_SECONDS", 0.0)
    async with start(Launcher(), database=database, artifacts=bucket) as server:
        job = (await submit(server, "held"))["id"]
        await wait_for_step(server, job)
        artifacts = server.state.runner.artifacts
        assert artifacts.bucket is not None
        put, is_released = artifacts.bucket.put, threading.Event()

        def put_slowly(path: Path, name: str) -> None:
            if path.name == "step-2":
                asyncio.run_coroutine_threadsafe(release(), loop)
                is_released.wait()
            put(path, name)

        async def release() -> None:
            await asyncio.sleep(0.5)  # the runner waits meanwhile
            is_released.set()

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(artifacts.bucket, "put", put_slowly)
        await server.state.runner.close(600)
        assert server.state.jobs.get(job).status == "queued"
        assert "step-2" in artifacts.bucket.names(f"jobs/{job}/out/checkpoints", COMPLETE)


async def test_a_takeover_that_fails_is_repeated(
    start: Start, database: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_runner, "RETRY_SECONDS", 0.01)
    async with two_servers(start, database, bucket, tmp_path) as (first, second):
        job = (await submit(first, "held"))["id"]
        await wait_for_step(first, job)
        await first.state.runner.close(600)
        await wait_for(second, job, "queued")
        artifacts = second.state.runner.artifacts
        fetch_checkpoints, failures = artifacts.fetch_checkpoints, [True, True]

        def fail_twice(job_id: str) -> None:
            if failures:
                failures.pop()
                raise Fault(Code.STORAGE_UNAVAILABLE, "The bucket cannot be used.")
            fetch_checkpoints(job_id)

        monkeypatch.setattr(artifacts, "fetch_checkpoints", fail_twice)
        second.state.runner.job_dir(job).mkdir(exist_ok=True)
        unblock_job(second, job)
        run_jobs(second)
        await wait_for(second, job, "succeeded")
        assert not failures
        assert {f"step-{step}" for step in (1, 2)} <= {p.name for p in artifacts.checkpoints_dir(job).iterdir()}
        events = [event for event in second.state.jobs.events(job) if event.type == "metrics"]
        assert [event.data["step"] for event in events] == [1, 2, 3, 4, 5, 6]


async def test_a_server_that_has_lost_its_job_stops_its_process_and_publishes_nothing(
    start: Start, database: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut off from the database while another server claimed the job."""
    monkeypatch.setattr(job_runner, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(fronts, "LEASE_SECONDS", 1e6)
    async with start(Launcher(), database=database, artifacts=bucket) as server:
        job = (await submit(server, "held"))["id"]
        await wait_for_step(server, job)
        runner = server.state.runner
        assert runner.artifacts.bucket is not None
        checkpoints = f"jobs/{job}/out/checkpoints"
        await eventually(lambda: runner.artifacts.bucket.names(checkpoints, COMPLETE) == {"step-1"}, "a checkpoint")
        with closing(JobStore(database)) as other:
            Fronts(other).renew([])

            def lose_the_job(process: TrainingProcess) -> NoReturn:
                with other.write() as db:
                    db.execute("UPDATE jobs SET owner = ? WHERE id = ?", (other.front, job))
                raise Fault(Code.STORAGE_UNAVAILABLE, "The database cannot be reached.")

            with monkeypatch.context() as patch:
                patch.setattr(runner, "_store_events", lose_the_job)
                await eventually(lambda: not is_lock_held(runner.job_dir(job) / "worker.lock"), "the process's end")
            offset = other.get(job).events_offset
            assert (runner.artifacts.checkpoints_dir(job) / "step-2").exists()
            assert runner._store_events(TrainingProcess(job, runner.job_dir(job), None))[1]
            assert other.get(job).events_offset == offset
            assert runner.artifacts.bucket.names(checkpoints, COMPLETE) == {"step-1"}


@pytest.mark.slow
async def test_a_job_that_continues_on_another_server_ends_with_the_same_bytes(
    start: Start, database: str, bucket: str, tmp_path: Path
) -> None:
    model = write_trainable_model(tmp_path / "random")
    real = {"worker": TRAINING_COMMAND, "model": model}
    async with two_servers(start, database, bucket, tmp_path, **real) as (first, second):
        options = {"max_steps": 120, "batch_size": 1, "recipe": "delayed", "save_every": 60}
        whole = (await submit(first, "a text to learn", **options))["id"]
        await wait_for(first, whole, "succeeded")
        parted = (await submit(first, "a text to learn", **options))["id"]
        await wait_for_step(first, parted)
        await first.client.post(f"/finetune/{parted}/pause")
        stopped = await wait_for(first, parted, "paused", "succeeded")
        assert (stopped["status"], stopped["progress"]["step"] < 120) == ("paused", True)
        first.state.runner.is_closing = True
        first.state.runner.wake()
        run_jobs(second)
        await second.client.post(f"/finetune/{parted}/resume")
        await wait_for(second, parted, "succeeded", "failed")
        events = second.state.jobs.events(parted)
        assert "resumed" in [event.data.get("code") for event in events]
        files = [
            sorted((server.state.runner.job_dir(job) / "out/model").glob("*.safetensors"))
            for server, job in ((first, whole), (second, parted))
        ]
        assert [path.name for path in files[0]] == ["model.safetensors", "scales.safetensors"]
        assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


async def test_uploads_are_read_through_another_server(
    start: Start, database: str, bucket: str, tmp_path: Path
) -> None:
    async with two_servers(start, database, bucket, tmp_path) as (first, second):
        row = b'{"text": "a"}\n'
        form: dict[str, Any] = {"files": {"file": ("a.jsonl", row)}, "data": {"purpose": "fine-tune"}}
        file = (await first.client.post("/v1/files", **form)).json()["id"]
        assert (await second.client.get(f"/v1/files/{file}/content")).content == row
        answer = await second.client.post("/finetune", json={"file_id": file})
        assert answer.status_code == 202, answer.text
        await wait_for(second, answer.json()["id"], "succeeded")  # the first server runs it
        assert (await second.client.delete(f"/v1/files/{file}")).status_code == 200
        assert (await first.client.get(f"/v1/files/{file}/content")).status_code == 404
        assert (await second.client.delete(f"/finetune/{answer.json()['id']}")).status_code == 200
        remaining = [path for path in MemoryFileSystem.store if "/jobs/" in path or "/files/" in path]
        assert remaining == []


# -- refusals ----------------------------------------------------------------------------------------------------------


class ReadOnly(MemoryFileSystem):  # type: ignore[misc]
    """A bucket that may be read only."""

    protocol = "readonly"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def pipe_file(self, path: str, value: bytes, **more: Any) -> None:
        raise PermissionError("Access Denied")


def test_a_bucket_without_permission_is_refused_in_one_sentence() -> None:
    fsspec.register_implementation("readonly", ReadOnly, clobber=True)
    with pytest.raises(MachineError, match=r"cannot be read and written \(PermissionError: Access Denied\); check"):
        Bucket("readonly://bucket")


def test_a_bucket_whose_package_is_missing_is_refused() -> None:
    with pytest.raises(MachineError, match="--artifacts needs a package that is not installed"):
        Bucket("adl://bucket")


def test_a_bucket_needs_a_database(settings: Settings) -> None:
    with pytest.raises(RequestError, match="give --database, too"):
        Settings(model=settings.model, artifacts="s3://bucket")


def test_a_bucket_that_fails_later_is_a_fault(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Bucket(bucket)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("The token has expired.")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    with pytest.raises(Fault) as caught:
        opened.read("jobs/ftjob-1/job.json")
    assert caught.value.code is Code.STORAGE_UNAVAILABLE
    assert "token" not in str(caught.value)


# -- S3 ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def s3_server(**environment: str) -> Iterator[str]:
    """Runs moto's S3 on a free port and yields its address."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: accepts(port), "the S3 server")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}
    for name, value in values.items():
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.mark.slow
@pytest.mark.usefixtures("s3_credentials")
def test_files_in_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        with pytest.raises(MachineError, match="The bucket of --artifacts cannot be read and written"):
            Bucket("s3://missing/prefix")
        import boto3

        boto3.client("s3").create_bucket(Bucket="bucket")
        test_what_is_published_is_fetched_whole("s3://bucket/prefix", tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("s3_credentials")
def test_s3_without_permission_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(INITIAL_NO_AUTH_ACTION_COUNT="1") as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        import boto3

        boto3.client("s3").create_bucket(Bucket="bucket")
        with pytest.raises(MachineError, match="cannot be read and written") as caught:
            Bucket("s3://bucket/prefix")
        assert "\n" not in str(caught.value)
