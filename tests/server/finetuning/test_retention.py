"""Jobs that are deleted, by their owner or because they are old, and what must stay."""

import csv
import io
import shutil
from pathlib import Path
from typing import Any

import pytest

from fp8serve.server.finetuning.job_runner import TRAINING_COMMAND
from fp8serve.train.events import FIRST_COLUMNS
from tests.patience import eventually
from tests.server import fakes
from tests.server.conftest import Server, Start
from tests.server.finetuning.test_finetune import (
    submit,
    trained,
    unblock_job,
    wait_for,
    wait_for_step,
    write_trainable_model,
)


def is_gone(server: Server, job: str) -> bool:
    return not server.state.runner.job_dir(job).exists()


async def remove(server: Server, job: str) -> tuple[int, str]:
    answer = await server.client.delete(f"/finetune/{job}")
    return answer.status_code, answer.text


async def servable(server: Server) -> str:
    """Returns a job that has succeeded, with a result from which another job can start."""
    job = await trained(server)
    shutil.copytree(server.state.settings.model, server.state.runner.job_dir(job) / "out/model", dirs_exist_ok=True)
    return job


async def test_a_job_that_has_ended_is_deleted_with_its_files(start: Start) -> None:
    async with start() as server:
        job, other = await trained(server), await trained(server)
        path = f"/finetune/{job}"
        assert (await server.client.delete(path)).json() == {"id": job, "deleted": True}
        assert is_gone(server, job)
        for place in ("", "/events", "/metrics", "/checkpoints"):
            assert (await server.client.get(path + place)).status_code == 404
        assert (await remove(server, job))[0] == 404
        listed = (await server.client.get("/finetune")).json()["jobs"]
        assert [row["id"] for row in listed] == [other]
        assert await trained(server)
        events = (await server.client.get(f"/finetune/{other}/events")).json()["events"]
        assert len([e for e in events if e["type"] == "metrics"]) == 6


async def test_a_job_that_has_not_ended_cannot_be_deleted(start: Start) -> None:
    async with start() as server:
        running, waiting = await submit(server, "held"), await submit(server)
        await wait_for_step(server, running["id"])
        for job, state in ((running["id"], "running"), (waiting["id"], "queued")):
            status, text = await remove(server, job)
            assert (status, f"is {state}; cancel it first" in text) == (409, True)
        await server.client.post(f"/finetune/{running['id']}/pause")
        await wait_for(server, running["id"], "paused")
        assert (await remove(server, running["id"]))[0] == 409
        await server.client.post(f"/finetune/{running['id']}/cancel")
        assert (await remove(server, running["id"]))[0] == 200
        assert is_gone(server, running["id"])


async def test_a_job_that_is_served_cannot_be_deleted(start: Start) -> None:
    async with start() as server:
        job = await trained(server)
        await server.client.post(f"/finetune/{job}/activate")
        status, text = await remove(server, job)
        assert (status, "is being served" in text) == (409, True)
        await server.client.post("/models/tiny/activate", json={"source": "base"})
        assert (await remove(server, job))[0] == 200


async def test_a_job_from_which_a_running_job_started_cannot_be_deleted(start: Start) -> None:
    async with start() as server:
        first = await servable(server)
        second = await submit(server, "held", model=first)
        await wait_for_step(server, second["id"])
        status, text = await remove(server, first)
        assert (status, "started from this job's result" in text) == (409, True)
        unblock_job(server, second["id"])
        await wait_for(server, second["id"], "succeeded")
        assert (await remove(server, first))[0] == 200
        assert not is_gone(server, second["id"])


async def test_the_server_keeps_the_newest_jobs_and_the_served_one(start: Start) -> None:
    async with start(keep_jobs=2) as server:
        jobs = [await servable(server), await trained(server)]
        await server.client.post(f"/finetune/{jobs[0]}/activate")  # which stays, however old it is
        jobs += [await trained(server) for _ in range(3)]

        async def only_newest_remain() -> bool:
            listed = (await server.client.get("/finetune")).json()["jobs"]
            present = [not is_gone(server, job) for job in jobs]
            return [job["id"] for job in listed] == [jobs[4], jobs[3], jobs[0]] and present == [
                True,
                False,
                False,
                True,
                True,
            ]

        await eventually(only_newest_remain, "the older jobs are gone")


async def test_files_that_a_crash_left_of_a_deleted_job_go_at_the_next_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as server:
        job = await trained(server)
        monkeypatch.setattr(server.state.runner.artifacts, "discard", lambda path: None)
        assert (await remove(server, job))[0] == 200
        assert not is_gone(server, job)
    async with start() as server:
        assert is_gone(server, job)


async def test_metrics_of_a_job_without_a_step(start: Start) -> None:
    async with start() as server:
        running, waiting = await submit(server, "held"), await submit(server)
        path = f"/finetune/{waiting['id']}/metrics"
        assert (await server.client.get(path)).json() == {"metrics": []}
        for options in ({"params": {"format": "csv"}}, {"headers": {"accept": "text/csv"}}):
            table = await server.client.get(path, **options)  # type: ignore[arg-type]
            assert (table.status_code, table.text) == (200, ",".join(FIRST_COLUMNS) + "\n")
            assert table.headers["content-disposition"] == f'attachment; filename="{waiting["id"]}.csv"'
        assert (await server.client.get(path, params={"format": "xml"})).status_code == 422
        assert (await server.client.get("/finetune/nothing/metrics", params={"format": "csv"})).status_code == 404
        await wait_for_step(server, running["id"])
        table = await server.client.get(f"/finetune/{running['id']}/metrics", params={"format": "csv"})
        assert next(row["step"] for row in csv.DictReader(io.StringIO(table.text))) == "1"


@pytest.mark.slow
async def test_every_checkpoint_is_served_by_name_and_trained_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job runs the real training process; the fake engine must know all ids of its tokenizer."""
    monkeypatch.setattr(fakes, "VOCABULARY", 320)
    model = write_trainable_model(tmp_path / "random")
    async with start(worker=TRAINING_COMMAND, model=model) as server:
        options: dict[str, Any] = {"max_steps": 3, "batch_size": 1, "save_every": 1, "keep_last": 3}
        job = await submit(server, "a text to learn", **options)
        await wait_for(server, job["id"], "succeeded")
        listed = (await server.client.get(f"/finetune/{job['id']}/checkpoints")).json()["checkpoints"]
        assert [point["step"] for point in listed] == [3, 2, 1]
        name = listed[1]["model"]
        served = (await server.client.post(f"/finetune/{job['id']}/activate", json={"step": 2})).json()["served"]
        assert (served["source"], served["model"]) == (f"{job['id']}:ckpt-step-2", name)
        directory = server.state.runner.job_dir(job["id"]) / "served" / "step-2"
        assert (directory / "scales.safetensors").is_file()
        assert "is being served" in (await remove(server, job["id"]))[1]
        further = await submit(server, "a text to learn", model=listed[2]["model"], **options)
        finished_job = await wait_for(server, further["id"], "succeeded", "failed")
        assert (finished_job["status"], finished_job["base_model"]) == ("succeeded", listed[2]["model"])
        assert finished_job["fine_tuned_model"].startswith("ft:random:org-local:")
        loaded = await server.client.post("/models/early/load", json={"source": listed[2]["model"]})
        assert loaded.json()["served"]["model"] == listed[2]["model"]
    async with start(worker=TRAINING_COMMAND, model=model) as server:
        assert (await server.client.get("/models")).json()["served"]["model"] == name
