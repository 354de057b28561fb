"""Jobs over HTTP: their life, their events, what outlives a crash, and the swap to their result."""

import asyncio
import contextlib
import csv
import io
import json
import operator
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st

from fp8serve.errors import MachineError
from fp8serve.model.storage.files import acquire_lock
from fp8serve.processes import pid_namespace
from fp8serve.server.finetuning.job_runner import (
    TRAINING_COMMAND,
    JobRunner,
    TrainingProcess,
    is_lock_held,
    lock_holder,
)
from fp8serve.server.http.uploads import RowBounds
from fp8serve.server.schemas.finetune_bodies import JobBody
from fp8serve.server.settings import ServerLimits
from fp8serve.train.events import EventLog, message, read_events
from fp8serve.train.scratch import write_random_model
from tests.patience import PATIENCE, eventually
from tests.server.conftest import STUB, Server, Start
from tests.server.fakes import FakeEngine, Launcher, model_dir
from tests.server.finetuning import killed_servers


async def submit(server: Server, text: str = "hello", **more: Any) -> dict[str, Any]:
    answer = await server.client.post("/finetune", json={"data": [{"text": text}], **more})
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/finetune/{answer.json()['id']}"
    job: dict[str, Any] = answer.json()
    return job


async def wait_for(server: Server, job_id: str, *states: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE):
        while True:
            job: dict[str, Any] = (await server.client.get(f"/finetune/{job_id}")).json()
            if job["status"] in states:
                return job
            await asyncio.sleep(0.02)


async def wait_for_step(server: Server, job_id: str) -> None:
    async def has_progress() -> bool:
        return bool((await server.client.get(f"/finetune/{job_id}")).json()["progress"])

    await eventually(has_progress, "the first step")


def unblock_job(server: Server, job_id: str) -> None:
    """Lets a "held" job continue."""
    (server.state.runner.job_dir(job_id) / "go").touch()


def lock_owner(server: Server, job_id: str) -> int:
    return int((server.state.runner.job_dir(job_id) / "worker.lock").read_text().split()[0])


async def test_an_adapters_job_keeps_its_fields(start: Start) -> None:
    async with start() as server:
        job = await submit(server, lora_rank=8, lora_targets=["q_proj"], dora=True)
        finished_job = await wait_for(server, job["id"], "succeeded", "failed")
        config = finished_job["config"]
        assert (config["lora_rank"], config["lora_targets"], config["dora"]) == (8, ["q_proj"], True)
        refused = await server.client.post("/finetune", json={"data": [{"text": "a"}], "dora": True})
        assert refused.status_code == 422
        assert "give lora_rank, too" in refused.text


async def test_unknown_lora_targets_are_refused_with_the_possible_ones(start: Start) -> None:
    async with start() as server:
        adapter = {"lora_rank": 8, "lora_targets": ["q_proj", "nonsense"]}
        upload = await server.client.post(
            "/v1/files", files={"file": ("a.jsonl", b'{"text": "x"}\n')}, data={"purpose": "fine-tune"}
        )
        openai_body = {"model": "tiny", "training_file": upload.json()["id"], **adapter}
        for route, body in (
            ("/finetune", {"data": [{"text": "a"}], **adapter}),
            ("/finetune/validate", {"data": [{"text": "a"}], **adapter}),
            ("/v1/fine_tuning/jobs", openai_body),
        ):
            answer = await server.client.post(route, json=body)
            assert answer.status_code in (400, 422), answer.text
            error = answer.json()["error"] if route.startswith("/v1") else answer.json()
            assert error["param"] == "lora_targets"
            for name in ("'nonsense'", "q_proj, k_proj, v_proj, o_proj", "down_proj"):
                assert name in answer.text
        assert list(server.state.runner.root.iterdir()) == []


async def test_states_of_8_bits_are_refused_where_the_package_is_missing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start() as server:
        body = {"data": [{"text": "a"}], "optimizer_states": "8bit"}
        monkeypatch.setattr("fp8serve.train.events.find_spec", lambda name: None)
        refused = await server.client.post("/finetune", json=body)
        assert (refused.status_code, "pip install 'fp8serve[torchao]'" in refused.text) == (422, True), refused.text
        monkeypatch.setattr("fp8serve.train.events.find_spec", lambda name: object())
        assert (await server.client.post("/finetune", json=body)).status_code == 202
        assert (await server.client.post("/finetune", json=body | {"optimizer_states": "4bit"})).status_code == 422


def test_an_openai_job_takes_the_fields_of_an_adapter() -> None:
    body = JobBody(model="tiny", training_file="file-1", seed=3, lora_rank=8, lora_targets=["q_proj"])  # type: ignore[call-arg]
    parameters = body.to_native().hyper_parameters()
    assert parameters["seed"] == 3
    assert (parameters["lora_rank"], parameters["lora_targets"], parameters["dora"]) == (8, ["q_proj"], False)


async def test_a_job_runs_reports_and_succeeds(start: Start) -> None:
    async with start() as server:
        job = await submit(server, suffix="mine", metadata={"team": "a"})
        finished_job = await wait_for(server, job["id"], "succeeded", "failed")
        assert finished_job["status"] == "succeeded"
        assert finished_job["fine_tuned_model"] == f"ft:tiny:org-local:mine:{job['id'][-8:]}"
        assert finished_job["progress"]["step"] == 6
        assert finished_job["metadata"] == {"team": "a"}
        events = (await server.client.get(f"/finetune/{job['id']}/events")).json()["events"]
        assert [e["data"]["code"] for e in events if e["type"] == "message"] == [
            "queued",
            "running",
            "data",
            "succeeded",
        ]
        assert [e["data"]["step"] for e in events if e["type"] == "metrics"] == [1, 2, 3, 4, 5, 6]
        assert [e["id"] for e in events] == sorted(e["id"] for e in events)
        checkpoints = (await server.client.get(f"/finetune/{job['id']}/checkpoints")).json()["checkpoints"]
        assert [c["step"] for c in checkpoints] == [6, 5, 4, 3, 2, 1]
        series = (await server.client.get(f"/finetune/{job['id']}/metrics")).json()["metrics"]
        assert [m["train_loss"] for m in series] == [1.0 / s for s in range(1, 7)]
        table = await server.client.get(f"/finetune/{job['id']}/metrics", params={"format": "csv"})
        assert table.headers["content-type"].startswith("text/csv")
        assert [row["train_loss"] for row in csv.DictReader(io.StringIO(table.text))] == [
            str(1.0 / s) for s in range(1, 7)
        ]
        everything = json.dumps([finished_job, events, checkpoints, series])
        assert "secret" not in everything
        assert str(server.state.data_dir) not in everything


async def test_the_series_of_a_run_that_went_back_has_each_step_once(start: Start) -> None:
    async with start() as server:
        job = (await submit(server))["id"]
        await wait_for(server, job, "succeeded")
        again = [{"step": step, "train_loss": 7.0, "returns": 1} for step in (3, 4)]
        event = {"created_at": 1, "level": "info", "type": "metrics", "message": "Step"}
        server.state.jobs.add_events(server.state.jobs.get(job), [event | one for one in again], 100_000)
        series = (await server.client.get(f"/finetune/{job}/metrics")).json()["metrics"]
        assert [(one["step"], one["train_loss"]) for one in series] == [(1, 1.0), (2, 0.5), (3, 7.0), (4, 7.0)]
        table = await server.client.get(f"/finetune/{job}/metrics", params={"format": "csv"})
        assert [row["step"] for row in csv.DictReader(io.StringIO(table.text))] == ["1", "2", "3", "4"]


async def test_a_checkpoint_that_is_gone_is_not_listed(start: Start) -> None:
    async with start() as server:
        job = await submit(server)
        await wait_for(server, job["id"], "succeeded")
        (server.state.runner.job_dir(job["id"]) / "out" / "checkpoints" / "step-4").rmdir()
        checkpoints = (await server.client.get(f"/finetune/{job['id']}/checkpoints")).json()["checkpoints"]
        assert [c["step"] for c in checkpoints] == [6, 5, 3, 2, 1]


async def test_events_stream_to_the_end_and_replay_from_the_last_seen(start: Start) -> None:
    async with start() as server:
        job = await submit(server, "slow")
        accept = {"accept": "text/event-stream"}
        path = f"/finetune/{job['id']}/events"
        text = (await server.client.get(path, headers=accept)).text
        ids = [int(line[4:]) for line in text.splitlines() if line.startswith("id: ")]
        assert text.rstrip().endswith('data: {"status":"succeeded"}')
        assert ids[:-1] == sorted(set(ids[:-1]))
        replay = (await server.client.get(path, headers=accept | {"last-event-id": str(ids[3])})).text
        assert [int(line[4:]) for line in replay.splitlines() if line.startswith("id: ")] == ids[4:]
        page = (await server.client.get(path, params={"after": ids[3], "limit": 2})).json()
        assert [e["id"] for e in page["events"]] == ids[4:6]
        assert page["has_more"]


async def test_a_failed_job_has_the_reason_as_its_error(start: Start) -> None:
    async with start() as server:
        finished_job = await wait_for(server, (await submit(server, "fail"))["id"], "failed")
        assert finished_job["error"]["message"] == "The loss is not finite."
        answer = await server.client.post(f"/finetune/{finished_job['id']}/activate")
        assert (answer.status_code, answer.json()["code"]) == (409, "job_state")


async def test_a_worker_that_dies_goes_on_from_its_checkpoint(start: Start) -> None:
    async with start() as server:
        finished_job = await wait_for(server, (await submit(server, "die-once"))["id"], "succeeded", "failed")
        assert finished_job["status"] == "succeeded"
        events = (await server.client.get(f"/finetune/{finished_job['id']}/events")).json()["events"]
        assert any(e["data"].get("code") == "restarted" and "SIGKILL" in e["message"] for e in events)
        assert [e["data"]["step"] for e in events if e["type"] == "metrics"] == [1, 2, 3, 4, 5, 6]


async def test_a_worker_that_always_dies_fails_its_job(start: Start) -> None:
    async with start() as server:
        finished_job = await wait_for(server, (await submit(server, "die"))["id"], "failed")
        assert "3 times" in finished_job["error"]["message"]


@pytest.mark.parametrize("mood", ["held", "stubborn"])
async def test_cancel(start: Start, mood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8serve.server.finetuning.job_runner.CANCEL_SECONDS", 0.4)

    async with start() as server:
        running, waiting = await submit(server, mood), await submit(server)
        await wait_for_step(server, running["id"])
        assert (await server.client.post(f"/finetune/{waiting['id']}/cancel")).json()["status"] == "cancelled"
        assert (await server.client.post(f"/finetune/{running['id']}/cancel")).json()["cancel_requested"]
        await wait_for(server, running["id"], "cancelled")
        again = await server.client.post(f"/finetune/{running['id']}/cancel")
        assert (again.status_code, again.headers["x-should-retry"]) == (409, "false")
        with pytest.raises(ProcessLookupError):
            os.kill(lock_owner(server, running["id"]), 0)


async def test_a_paused_job_frees_its_process_and_goes_on_where_it_was(start: Start) -> None:
    """A job stays paused when the server restarts. Meanwhile the next job runs. A queued job is paused immediately."""
    async with start() as server:
        job, other = await submit(server, "held"), await submit(server)
        await wait_for_step(server, job["id"])
        path = f"/finetune/{job['id']}"
        assert (await server.client.post(f"/finetune/{other['id']}/pause")).json()["status"] == "paused"
        assert (await server.client.post(f"/finetune/{other['id']}/resume")).json()["status"] == "queued"
        assert (await server.client.post(f"{path}/pause")).json()["status"] in ("running", "paused")
        await wait_for(server, job["id"], "paused")
        assert (await server.client.post(f"{path}/pause")).json()["status"] == "paused"
        with pytest.raises(ProcessLookupError):
            os.kill(lock_owner(server, job["id"]), 0)
        await wait_for(server, other["id"], "succeeded")
        assert (await server.client.post(f"/finetune/{other['id']}/pause")).status_code == 409
    async with start() as server:
        assert (await server.client.get(path)).json()["status"] == "paused"
        unblock_job(server, job["id"])
        resumed = await server.client.post(f"/v1/fine_tuning/jobs/{job['id']}/resume")
        assert resumed.json()["status"] in ("queued", "running", "succeeded")
        await wait_for(server, job["id"], "succeeded")
        events = (await server.client.get(f"{path}/events")).json()["events"]
        codes = [e["data"]["code"] for e in events if e["type"] == "message"]
        assert codes == ["queued", "running", "data", "paused", "resumed", "running", "data", "succeeded"]
        assert [e["data"]["step"] for e in events if e["type"] == "metrics"] == [1, 2, 3, 4, 5, 6]


def write_trainable_model(directory: Path) -> Path:
    """Writes a model that the real training process trains in seconds."""
    sizes = {"vocab_size": 320, "hidden_size": 64, "layers": 1, "heads": 1, "kv_heads": 1, "context": 128}
    return write_random_model(directory, ["a text to learn"], **sizes)


@pytest.mark.slow
async def test_a_paused_job_ends_with_the_bytes_of_one_that_was_not(start: Start, tmp_path: Path) -> None:
    """The job runs the real training process, which is paused after its first step."""
    model = write_trainable_model(tmp_path / "random")
    async with start(worker=TRAINING_COMMAND, model=model) as server:
        options = {"max_steps": 120, "batch_size": 1, "recipe": "delayed", "save_every": 60}
        whole = (await submit(server, "a text to learn", **options))["id"]
        await wait_for(server, whole, "succeeded")
        parted = (await submit(server, "a text to learn", **options))["id"]
        await wait_for_step(server, parted)
        await server.client.post(f"/finetune/{parted}/pause")
        stopped = await wait_for(server, parted, "paused", "succeeded")
        assert (stopped["status"], stopped["progress"]["step"] < 120) == ("paused", True)
        await server.client.post(f"/finetune/{parted}/resume")
        await wait_for(server, parted, "succeeded")
        files = [
            sorted((server.state.runner.job_dir(job) / "out/model").glob("*.safetensors")) for job in (whole, parted)
        ]
        assert [path.name for path in files[0]] == ["model.safetensors", "scales.safetensors"]
        assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


async def test_a_job_that_starts_while_it_is_cancelled_stops(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request reads that the job is queued, and the runner starts the job before the request cancels it."""
    async with start() as server:
        job_id = (await submit(server, "held"))["id"]
        await wait_for_step(server, job_id)
        queued = replace(server.state.jobs.get(job_id), status="queued", started_at=None)
        monkeypatch.setattr(server.state.jobs, "_get_unended", lambda job_id: queued)
        answer = await server.client.post(f"/finetune/{job_id}/cancel")
        assert (answer.json()["status"], answer.json()["cancel_requested"]) == ("running", True)
        await wait_for(server, job_id, "cancelled")
        assert not is_lock_held(server.state.runner.job_dir(job_id) / "worker.lock")


async def test_the_process_of_a_job_that_no_longer_runs_is_stopped(start: Start) -> None:
    async with start() as server:
        job_id = (await submit(server, "held"))["id"]
        await wait_for_step(server, job_id)
        assert server.state.jobs.set_status(job_id, "cancelled", "The job was cancelled.")
        lock = server.state.runner.job_dir(job_id) / "worker.lock"
        await eventually(lambda: not is_lock_held(lock), "the end of the process")
        await wait_for(server, (await submit(server))["id"], "succeeded")
        assert server.state.jobs.get(job_id).status == "cancelled"


async def test_a_job_that_is_about_to_pause_can_be_resumed_or_cancelled(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job continues if it is resumed before it has paused, and ends if it is cancelled while it is paused."""
    monkeypatch.setattr("fp8serve.server.finetuning.job_runner.CANCEL_SECONDS", 0.4)
    async with start() as server:
        job = await submit(server, "stubborn")
        await wait_for_step(server, job["id"])
        path = f"/v1/fine_tuning/jobs/{job['id']}"
        for action in ("pause", "resume"):
            assert (await server.client.post(f"{path}/{action}")).status_code == 200
        assert (await server.client.post(f"{path}/pause")).status_code == 200
        await wait_for(server, job["id"], "paused")
        assert (await server.client.post(f"{path}/cancel")).json()["status"] == "cancelled"
        assert (await server.client.post(f"{path}/resume")).status_code == 409


async def test_a_job_outlives_its_server(start: Start) -> None:
    """A job stops at a checkpoint with its server, and the next server continues it."""

    async with start() as server:
        job = await submit(server, "held")
        await wait_for_step(server, job["id"])
    async with start() as server:
        unblock_job(server, job["id"])
        finished_job = await wait_for(server, job["id"], "succeeded", "failed")
        assert finished_job["status"] == "succeeded"
        events = (await server.client.get(f"/finetune/{job['id']}/events")).json()["events"]
        codes = [e["data"]["code"] for e in events if e["type"] == "message"]
        assert codes == ["queued", "running", "data", "stopped", "running", "data", "succeeded"]
        assert [e["data"]["step"] for e in events if e["type"] == "metrics"] == [1, 2, 3, 4, 5, 6]


async def test_a_stop_gives_up_an_activation_that_still_loads(start: Start) -> None:
    launcher = Launcher()
    async with start(launcher) as server:
        job = await submit(server)
        await wait_for(server, job["id"], "succeeded")
        launcher.paused = True
        pending = asyncio.create_task(server.client.post(f"/finetune/{job['id']}/activate"))
        await eventually(lambda: server.state.models.default.activating is not None, "the load")
        server.state.begin_drain()
        answer = await pending
        assert (answer.status_code, answer.json()["code"]) == (503, "draining")
        await eventually(server.state.finish_drain, "the end of the drain")
    launcher.paused = False
    async with start(launcher) as server:
        assert launcher.sources[-1].key == "base"


async def test_a_second_signal_does_not_wait_for_a_checkpoint(start: Start) -> None:
    """After a second signal the job's process is killed; the job still continues from its last checkpoint."""
    async with start(drain_seconds=10 * PATIENCE) as server:
        job = await submit(server, "stubborn")
        await wait_for_step(server, job["id"])
        server.state.begin_drain()
        assert not server.state.finish_drain()
        server.state.end_drain()
        assert server.state.finish_drain()
    async with start() as server:
        unblock_job(server, job["id"])
        await wait_for(server, job["id"], "succeeded")
        events = (await server.client.get(f"/finetune/{job['id']}/events")).json()["events"]
        assert "stopped" in [e["data"]["code"] for e in events if e["type"] == "message"]


async def test_a_process_on_another_machine_gets_no_signal(tmp_path: Path) -> None:
    """Its id belongs to an unrelated process here."""
    lock = tmp_path / "worker.lock"
    with subprocess.Popen(["sleep", "1000"]) as unrelated, acquire_lock(lock, "held") as held:
        held.write(f"{unrelated.pid} {pid_namespace()}\n")
        held.flush()
        assert lock_holder(lock) == unrelated.pid
        held.truncate(0)
        held.write(f"{unrelated.pid} another-boot/pid:[1]\n")
        held.flush()
        assert lock_holder(lock) is None
        stop = asyncio.create_task(TrainingProcess("ftjob-1", tmp_path, None).stop(PATIENCE))
        await eventually((tmp_path / "stop").exists, "the stop file")
        held.close()
        await stop
        assert unrelated.poll() is None
        unrelated.kill()


async def test_a_worker_that_outlives_its_server_is_followed_not_doubled(start: Start) -> None:
    async with start() as server:
        job = await submit(server, "held")
        await wait_for_step(server, job["id"])
        server.state.runner._process = None  # as if this front had been killed: the worker is not stopped
        task = server.state.runner._task
        assert task is not None
        task.cancel()
    async with start() as server:
        await eventually(lambda: server.state.runner._process is not None, "the worker that still runs is followed")
        unblock_job(server, job["id"])
        finished_job = await wait_for(server, job["id"], "succeeded", "failed")
        assert finished_job["status"] == "succeeded"
        assert (server.state.runner.job_dir(job["id"]) / "tries.txt").read_text() == "x"


async def test_an_idempotency_key_makes_one_job(start: Start) -> None:
    async with start() as server:
        body = {"data": [{"text": "x"}]}

        async def send(key: str, rows: Any) -> httpx.Response:
            return await server.client.post("/finetune", json=rows, headers={"idempotency-key": key})

        answers = await asyncio.gather(*(send("k", body) for _ in range(8)))
        assert {a.status_code for a in answers} == {202}, [a.text for a in answers]
        assert len({a.json()["id"] for a in answers}) == 1
        assert len(list(server.state.runner.root.iterdir())) == 1
        other = await send("k", {"data": [{"text": "y"}]})
        assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")
        assert (await send("j", body)).json()["id"] != answers[0].json()["id"]


async def test_bad_rows_of_a_file_fail_the_request_here_and_the_job_at_openais(start: Start) -> None:
    async with start() as server:
        form: Any = {
            "files": {"file": ("a.jsonl", b'{"text": "x"}\n{"text": 7}\n')},
            "data": {"purpose": "fine-tune"},
        }
        file_id = (await server.client.post("/v1/files", **form)).json()["id"]
        answer = await server.client.post("/finetune", json={"file_id": file_id})
        assert (answer.status_code, answer.json()["param"]) == (422, "data")
        assert answer.json()["error"].startswith("a.jsonl:2: `text`")
        report = (await server.client.post("/finetune/validate", json={"file_id": file_id})).json()
        assert [bad["message"].partition(": ")[0] for bad in report["bad_lines"]] == ["a.jsonl:2"]
        response = await server.client.post("/finetune", json={"data": [{"text": "x"}], "validation_file_id": file_id})
        assert (response.status_code, response.json()["param"]) == (422, "validation_data")
        assert response.json()["error"].startswith("a.jsonl:2: `text`")
        response = await server.client.post("/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": file_id})
        assert response.status_code == 200


async def test_refused_jobs_leave_nothing(start: Start) -> None:
    async with start() as server:
        bad: list[tuple[dict[str, Any], str]] = [
            ({"data": [{"text": "x"}, {"text": ""}]}, "2"),
            ({"data": [{"text": "x", "prompt": "y"}]}, "both"),
            ({"data": [{"messages": [{"role": "user", "content": "hi"}]}]}, "assistant"),
            ({"data": [{"text": "x"}], "recipe": "bf16", "amax_history_len": 4}, "amax_history_len"),
            ({"data": [{"text": "x"}], "recipe_options": {"margins": 1}}, "margins"),
            ({"data": [{"text": "x"}], "recipe_options": {"margin": 1e9}}, "recipe_options"),
            ({"data": [{"text": "x"}], "recipe": "block", "recipe_options": {"fp8_dpa": True}}, "fp8_dpa"),
            ({"data": [{"text": "x"}], "eval_every": 3}, "eval_every"),
            ({"data": [{"text": "x"}], "seq_len": 4096}, "512"),
            ({"data": [{"prompt": "p" * 600, "completion": "x"}]}, "learn"),
            ({"file_id": "file-none"}, "file"),
            ({"data": [{"text": "x"}], "model": "gpt"}, "model"),
        ]
        for body, word in bad:
            answer = await server.client.post("/finetune", json=body)
            assert answer.status_code in (404, 422), answer.text
            assert word in answer.json()["error"]
        assert list(server.state.runner.root.iterdir()) == []
        assert (await server.client.get("/finetune")).json()["jobs"] == []


async def test_training_on_the_serving_device_needs_an_option(start: Start) -> None:
    async with start(train_on="refuse") as server:
        for path, body in (
            ("/finetune", {"data": [{"text": "x"}]}),
            ("/v1/fine_tuning/jobs", {"model": "base", "training_file": "f"}),
        ):
            answer = await server.client.post(path, json=body)
            assert answer.status_code == 409
            assert "--train-on" in answer.text
    async with start(train_on="refuse", train_device="cuda:1") as server:
        job = await submit(server)
        assert job["config"]["device"] == "cuda:1"


async def test_pause_finishes_running_requests_and_refuses_new_ones(start: Start) -> None:
    async with start(Launcher(lambda: FakeEngine(delay=0.01)), train_on="pause") as server:
        body = {"inputs": "x", "parameters": {"max_new_tokens": 40}}
        before = asyncio.create_task(server.client.post("/generate", json=body))
        await eventually(lambda: server.launcher.engine.running)
        job = await submit(server, "held")
        await eventually(lambda: server.state.paused)
        refused = await server.client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "paused_for_training")
        assert "retry-after" in refused.headers
        assert (await server.client.get("/health/ready")).json() == {"ok": False, "state": "paused"}
        assert (await server.client.get("/health/live")).status_code == 200
        assert (await before).status_code == 200
        unblock_job(server, job["id"])
        await wait_for(server, job["id"], "succeeded")
        await eventually(lambda: not server.state.paused)
        assert (await server.client.post("/generate", json=body)).status_code == 200


async def trained(server: Server) -> str:
    job = await submit(server)
    await wait_for(server, job["id"], "succeeded")
    return str(job["id"])


async def test_activation_fails_no_request_and_each_answer_names_its_weights(start: Start) -> None:
    async with start(Launcher(lambda: FakeEngine(delay=0.002), load_seconds=0.05)) as server:
        sources = [await trained(server), "base"]
        versions: set[str] = set()
        stop = asyncio.Event()
        answered = [0] * 8

        async def load(user: int) -> None:
            while not stop.is_set():
                count = answered[user]
                body = {"inputs": "abc", "parameters": {"max_new_tokens": 20}, "stream": count % 2 == 1}
                answer = await server.client.post("/generate", json=body)
                assert answer.status_code == 200, answer.text
                response = answer.json() if count % 2 == 0 else json.loads(answer.text.strip().split("\n\n")[-1][5:])
                assert response["generated_text"] == ("abc" * 7)[:20]
                versions.add(response["weight_version"])
                answered[user] += 1

        users = [asyncio.create_task(load(user)) for user in range(len(answered))]
        for turn in range(6):
            response = (await server.client.post("/models/tiny/activate", json={"source": sources[turn % 2]})).json()
            assert response["served"]["source"] == sources[turn % 2]
            before = list(answered)
            await eventually(lambda before=before: all(map(operator.gt, answered, before)), "an answer to everyone")
        stop.set()
        await asyncio.gather(*users)
        assert len(versions) == 2
        await eventually(lambda: all(engine.closed for engine in server.launcher.engines[:-1]))
        assert not server.launcher.engine.closed


async def test_a_failed_activation_leaves_the_old_weights_serving(start: Start) -> None:
    async with start() as server:
        job = await trained(server)
        server.launcher.problem = "The weights in /data/jobs/x are damaged."
        answer = await server.client.post(f"/finetune/{job}/activate")
        assert (answer.status_code, answer.json()["code"]) == (409, "activation_failed")
        assert "/data" not in answer.text
        assert (
            (await server.client.post("/generate", json={"inputs": "x"})).json()["weight_version"].startswith("base-")
        )
        server.launcher.problem = None
        engine = FakeEngine()
        engine.alive = False
        server.launcher.make = lambda: engine
        assert (await server.client.post(f"/finetune/{job}/activate")).status_code == 409
        assert engine.closed
        assert (await server.client.get("/health/ready")).status_code == 200


async def test_the_step_of_an_activation_is_served_or_refused(start: Start) -> None:
    async with start() as server:
        job = await trained(server)  # of six steps, with a checkpoint of each, of which no model can be made
        path = f"/finetune/{job}/activate"
        for step, why in (
            (1, "step-1 is not a usable training checkpoint"),
            (7, "no checkpoint at step 7; its checkpoints are: 6, 5"),
        ):
            answer = await server.client.post(path, json={"step": step})
            assert (answer.status_code, answer.json()["code"]) == (409, "job_state")
            assert why in answer.text
        for invalid in ({"step": 0}, {"step": "6"}, {"stepp": 6}, {"step": 6.0}):
            assert (await server.client.post(path, json=invalid)).status_code == 422
        assert (await server.client.get("/models")).json()["served"]["source"] == "base"
        assert (await server.client.post(path, json={"step": 6})).json()["served"]["source"] == job
        assert (await server.client.post(path, json={})).status_code == 200


async def test_an_engine_on_a_gpu_leaves_room_for_jobs_and_their_results(start: Start) -> None:
    """The engine of a result uses the memory that the first one left. When it restarts alone, it gets the first one's
    share."""
    async with start(device="cuda") as server:
        await server.client.post(f"/finetune/{await trained(server)}/activate")
        server.launcher.engine.alive = False
        await eventually(lambda: len(server.launcher.sources) == 3, "the restart")
        assert [source.options.gpu_memory for source in server.launcher.sources] == [0.6, None, 0.6]
    for settings, gpu_memory in (({"gpu_memory": 0.3}, 0.3), ({"train_on": "refuse"}, None)):
        async with start(device="cuda", **settings) as server:
            assert server.launcher.sources[0].options.gpu_memory == gpu_memory


async def test_one_activation_at_a_time(start: Start) -> None:
    async with start(Launcher(load_seconds=0.1)) as server:
        job = await trained(server)
        answers = await asyncio.gather(*(server.client.post(f"/finetune/{job}/activate") for _ in range(3)))
        assert sorted(a.status_code for a in answers) == [200, 409, 409]


async def test_the_activated_weights_are_served_after_a_restart_while_they_load(start: Start) -> None:
    async with start() as server:
        job = await trained(server)
        await server.client.post(f"/finetune/{job}/activate")
        assert (await server.client.get(f"/finetune/{job}")).json()["active"]
    async with start() as server:
        assert (await server.client.get("/models")).json()["served"]["source"] == job
        model = server.state.runner.result_dir(server.state.jobs.get(job))
    shutil.rmtree(model)
    async with start() as server:
        assert (await server.client.get("/models")).json()["served"]["source"] == "base"


async def test_an_openai_job_trains_on_the_rows_of_its_file(start: Start) -> None:
    async with start() as server:
        rows = b'{"prompt": "a", "completion": "b"}\n' * 3
        form = {"files": {"file": ("../../evil.jsonl", rows)}, "data": {"purpose": "fine-tune"}}
        upload = (await server.client.post("/v1/files", **form)).json()  # type: ignore[arg-type]
        assert (upload["bytes"], upload["filename"], upload["status"]) == (
            len(rows),
            "../../evil.jsonl",
            "processed",
        )
        assert [p.name for p in (server.state.data_dir / "files").iterdir()] == [upload["id"] + ".jsonl"]
        assert (await server.client.get(f"/v1/files/{upload['id']}/content")).content == rows
        method = {
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": 2.0}},
        }
        body = {"model": "tiny", "training_file": upload["id"], "suffix": "s", "seed": 5, "method": method}
        job = (await server.client.post("/v1/fine_tuning/jobs", json=body)).json()
        assert job["object"] == "fine_tuning.job"
        assert job["hyperparameters"] == {"n_epochs": 2, "batch_size": 8, "learning_rate_multiplier": 2.0}
        assert (await server.client.get(f"/finetune/{job['id']}")).json()["config"]["learning_rate"] == 4e-5
        await wait_for(server, job["id"], "succeeded")
        deleted = (await server.client.delete(f"/v1/files/{upload['id']}")).json()
        assert deleted == {"id": upload["id"], "object": "file", "deleted": True}
        assert (await server.client.get(f"/v1/files/{upload['id']}")).status_code == 404
        assert (server.state.runner.job_dir(job["id"]) / "data.jsonl").read_bytes() == rows
        events = (await server.client.get(f"/v1/fine_tuning/jobs/{job['id']}/events", params={"limit": 3})).json()
        assert events["has_more"]
        more = (
            await server.client.get(f"/v1/fine_tuning/jobs/{job['id']}/events", params={"after": events["last_id"]})
        ).json()
        numbers = [int(e["id"].removeprefix("ftevent-")) for e in events["data"] + more["data"]]
        assert numbers == sorted(numbers, reverse=True)
        points = (await server.client.get(f"/v1/fine_tuning/jobs/{job['id']}/checkpoints")).json()["data"]
        assert points[0]["step_number"] == 6
        assert points[0]["fine_tuned_model_checkpoint"].endswith(":ckpt-step-6")


async def test_preferences_in_openais_and_in_the_native_format(start: Start) -> None:
    prompt, answers = {"messages": [{"role": "user", "content": "a"}]}, {}
    for name, text in (("preferred_output", "b"), ("non_preferred_output", "c")):
        answers[name] = [{"role": "assistant", "content": text}]
    async with start() as server:
        content = json.dumps({"input": prompt, **answers}).encode()
        upload = (
            await server.client.post("/v1/files", files={"file": ("p.jsonl", content)}, data={"purpose": "fine-tune"})
        ).json()
        body: dict[str, Any] = {"model": "tiny", "training_file": upload["id"], "label_smoothing": 0.1}
        method = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3, "n_epochs": 2}}}
        job = (await server.client.post("/v1/fine_tuning/jobs", json={**body, "method": method})).json()
        assert job["method"]["type"] == "dpo"
        assert job["method"]["dpo"]["hyperparameters"] == {
            "n_epochs": 2, "batch_size": 8, "learning_rate_multiplier": 1.0, "beta": 0.3,
        }  # fmt: skip
        config = (await server.client.get(f"/finetune/{job['id']}")).json()["config"]
        assert (config["method"], config["beta"], config["label_smoothing"]) == ("dpo", 0.3, 0.1)
        await wait_for(server, job["id"], "succeeded")
        refused = await server.client.post(
            "/v1/fine_tuning/jobs", json={**body, "method": {**method, "supervised": {"hyperparameters": {}}}}
        )
        assert refused.status_code == 400
        assert "has settings of supervised beside the type dpo" in refused.text
        plain = await server.client.post("/v1/fine_tuning/jobs", json={**body, "method": {"type": "supervised"}})
        assert (plain.status_code, "label_smoothing is an option of the method dpo" in plain.text) == (400, True)

        pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
        for rows, message in (([pair, {"prompt": "a", "completion": "b"}], ":2 has only"), ([pair], "")):
            answer = await server.client.post("/finetune", json={"data": rows, "method": "dpo", "loss_type": "simpo"})
            assert (answer.status_code, message in answer.text) == (422 if message else 202, True)
        mismatched = {"file_id": upload["id"], "method": "sft"}
        answer = await server.client.post("/finetune", json=mismatched)
        assert (answer.status_code, "has only ['input'" in answer.text) == (422, True)
        await wait_for(server, (await server.client.get("/finetune")).json()["jobs"][0]["id"], "succeeded")


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"files": {"file": ("a.jsonl", b"")}, "data": {"purpose": "fine-tune"}}, 400),
        ({"files": {"file": ("a.jsonl", b"x")}, "data": {"purpose": "batch"}}, 400),
        ({"files": {"file": ("a.jsonl", b"x")}}, 400),
        ({"files": {"other": ("a.jsonl", b"x" * 10_000)}, "data": {"purpose": "fine-tune"}}, 400),
        ({"files": {"file": ("a.jsonl", b"x")}, "data": {"purpose": "fine-tune", "expires_after": "1"}}, 400),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400),
        ({"content": b"--b\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400),
        ({"content": b"{}", "headers": {"content-type": "application/json"}}, 415),
        ({"files": {"file": ("a.jsonl", b"x" * 3_000_000)}, "data": {"purpose": "fine-tune"}}, 413),
    ],
)
async def test_uploads_that_are_refused_leave_nothing(start: Start, form: dict[str, Any], status: int) -> None:
    async with start(limits=ServerLimits(upload_bytes=2_000_000)) as server:
        answer = await server.client.post("/v1/files", **form)
        assert answer.status_code == status, answer.text
        assert list((server.state.data_dir / "files").iterdir()) == []
        assert (await server.client.get("/v1/files")).json()["data"] == []


async def test_incomplete_files_of_a_crash_are_removed_at_the_next_start(start: Start) -> None:
    async with start() as server:
        job = await trained(server)
        root, files = server.state.runner.root, server.state.data_dir / "files"
    (root / "ftjob-half").mkdir()
    (root / "ftjob-half" / "data.jsonl").write_text("x")
    files.mkdir()
    (files / ".file-half.part").write_text("x")
    async with start():
        assert [path.name for path in root.iterdir()] == [job]
        assert list(files.iterdir()) == []


async def test_two_servers_do_not_share_a_data_directory(start: Start) -> None:
    async with start():
        with pytest.raises(MachineError, match="--data-dir"):
            async with start():
                pass


async def test_a_killed_worker_of_a_killed_server_is_resumed(start: Start, tmp_path: Path) -> None:
    async with start() as server:
        job = await submit(server, "held")
        await wait_for_step(server, job["id"])
        owner = lock_owner(server, job["id"])
        server.state.runner._process = None
        task = server.state.runner._task
        assert task is not None
        task.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner, signal.SIGKILL)
    async with start() as server:
        unblock_job(server, job["id"])
        assert (await wait_for(server, job["id"], "succeeded", "failed"))["status"] == "succeeded"
        assert (server.state.runner.job_dir(job["id"]) / "tries.txt").read_text() == "xx"


ROW = b'{"text": "x"}\n'


@pytest.mark.parametrize(
    ("name", "content", "status"),
    [
        ("a.jsonl", ROW * 5, 200),
        ("a.jsonl", ROW * 5 + b"\n \n", 200),
        ("a.jsonl", ROW * 6, 400),
        ("a.jsonl", ROW + b'{"text": "' + b"x" * 100 + b'"}\n', 400),
        ("a.jsonl", b"x" * 101, 400),
        ("a.txt", b"line\n" * 15 + b"\n" + b"more\r\n\r\n" * 3, 200),
        ("a.txt", b"word\n\n" * 6, 400),
        ("a.md", b"line\n" * 30, 400),
    ],
)
async def test_the_bounds_of_rows_hold_for_uploads(start: Start, name: str, content: bytes, status: int) -> None:
    async with start(limits=ServerLimits(rows=5, row_bytes=100)) as server:
        form = {"data": {"purpose": "fine-tune"}, "files": {"file": (name, content)}}
        answer = await server.client.post("/v1/files", **form)
        assert answer.status_code == status, answer.text
        assert status == 200 or answer.json()["error"]["param"] == "file"
        assert len(list((server.state.data_dir / "files").iterdir())) == (status == 200)


@hypothesis.settings(max_examples=100)
@hypothesis.given(st.binary(max_size=60).map(lambda data: data.replace(b"\x00", b"\n")), st.integers(1, 7))
def test_rows_are_counted_alike_however_they_arrive(data: bytes, piece: int) -> None:
    for text in (False, True):
        whole, parts = RowBounds(ServerLimits(), text), RowBounds(ServerLimits(), text)
        whole.update(data)
        for i in range(0, len(data), piece):
            parts.update(data[i : i + piece])
        assert parts.rows == whole.rows
        if not text:
            assert whole.rows == sum(bool(line.strip()) for line in data.split(b"\n"))


def test_a_damaged_event_is_left_out_and_the_job_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = [{"id": i, "created_at": 1, "level": "info", "type": "message", "message": str(i)} for i in (1, 2)]
    damaged = ['{"id": 3', "[]", "7", '{"id": 3}', "\xff", "[" * 100_000]
    lines = [json.dumps(whole[0]), *damaged, json.dumps(whole[1]), '{"id": 4, "cre']
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(lines))
    events, offset = read_events(path, 0)
    assert (events, offset) == (whole, path.read_bytes().rfind(b"\n") + 1)
    assert read_events(path, offset) == ([], offset)
    assert len(caplog.records) == len(damaged)


def test_a_line_that_a_killed_job_cut_is_read_when_the_next_start_wrote_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with contextlib.closing(EventLog(path)) as log:
        log(message("data", "One row."))
    with path.open("a") as file:
        file.write('{"id": 2, "created_at": 1, "type": "mess')
    events, offset = read_events(path, 0)
    assert [event["code"] for event in events] == ["data"]
    with contextlib.closing(EventLog(path)) as log:
        log(message("resumed", "From step 1."))
    events, end = read_events(path, offset)
    assert ([event["code"] for event in events], end) == (["resumed"], path.stat().st_size)


def test_a_server_that_is_killed_at_any_seam_loses_and_repeats_no_event(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.server.finetuning.killed_servers", str(tmp_path)]
    process = subprocess.run(program, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) >= 6  # two starts, a move before the first and one at the end, a crash, and events


async def test_events_of_a_process_that_ends_between_two_looks_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of an earlier server starts late, when this server's has died and its last events are stored."""
    killed_servers.make_job(tmp_path, model_dir(tmp_path / "tiny"))
    store_events, late = JobRunner._store_events, list[subprocess.CompletedProcess[bytes]]()

    def store_events_then_run(runner: JobRunner, process: TrainingProcess) -> Any:
        stored = store_events(runner, process)
        if process.exit_code == -signal.SIGKILL and not late:
            late.append(subprocess.run([*STUB, str(process.directory)], check=True))
        return stored

    monkeypatch.setattr(JobRunner, "_store_events", store_events_then_run)
    await killed_servers.serve(tmp_path)
    assert late
    killed_servers.expect_whole(tmp_path, "")


async def test_a_job_of_a_server_that_torchrun_started_is_in_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**variables, "TORCHELASTIC_RUN_ID": "none", "MASTER_KEY": "kept"}.items():
        monkeypatch.setenv(name, value)
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    process = await TrainingProcess.start("ft-1", tmp_path, [sys.executable, "-c", code])
    await eventually(process.has_ended)
    environment = json.loads((tmp_path / "worker.log").read_text())
    assert environment["MASTER_KEY"] == "kept"
    assert environment.keys().isdisjoint({*variables, "TORCHELASTIC_RUN_ID"})
