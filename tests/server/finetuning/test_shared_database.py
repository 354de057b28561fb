"""Several servers on one PostgreSQL database: each job runs once, and all servers serve the active weights."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8serve.errors import MachineError
from fp8serve.server.data_directory import DataDirectory
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning import fronts, job_runner, replication
from fp8serve.server.finetuning.database import Database, NewJob, new_job_id
from fp8serve.server.finetuning.fronts import Fronts
from fp8serve.server.finetuning.job_store import JobStore, activate
from fp8serve.server.settings import Settings
from tests.patience import eventually, until
from tests.server.conftest import Server, Start
from tests.server.fakes import Launcher, model_dir
from tests.server.finetuning.test_finetune import submit, unblock_job, wait_for, wait_for_step
from tests.server.process import Process, serving

NEW = NewJob(base="tiny", source="base", config={})


@pytest.fixture(autouse=True)
def endless_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases in this process end only where a test ends them, however slow the machine is."""
    monkeypatch.setattr(fronts, "LEASE_SECONDS", 1e6)


@contextlib.contextmanager
def stores(url: str, count: int) -> Iterator[list[JobStore]]:
    """Opens connections as so many servers do, each with a lease."""
    opened = [JobStore(url) for _ in range(count)]
    try:
        for store in opened:
            Fronts(store).renew(["tiny"])
        yield opened
    finally:
        for store in opened:
            store.close()


def end_lease(store: Database, front: str) -> None:
    with store.write() as db:
        db.execute("UPDATE fronts SET expires_at = 0 WHERE id = ?", (front,))


# -- leases ------------------------------------------------------------------------------------------------------------


async def test_each_job_has_one_owner(database: str) -> None:
    with stores(database, 4) as servers:
        ids = [new_job_id() for _ in range(12)]
        for job_id in ids:
            servers[0].create(NEW, job_id, 100)

        def claim_all(store: JobStore) -> list[str]:
            return [job.id for job in store.unfinished_jobs() if store.claim(job.id) is not None]

        claimed = await asyncio.gather(*(asyncio.to_thread(claim_all, store) for store in servers))
        assert sorted(job_id for own in claimed for job_id in own) == sorted(ids)
        for store, own in zip(servers, claimed, strict=True):
            assert {job.id for job in store.unfinished_jobs()} == set(own)


def test_a_lost_lease_gives_the_job_to_another_server_and_silences_the_first(database: str) -> None:
    with stores(database, 2) as (first, second):
        first.create(NEW, "ftjob-1", 100)
        assert first.claim("ftjob-1") is not None
        assert first.set_status("ftjob-1", "running", "running")
        assert second.claim("ftjob-1") is None
        job = first.get("ftjob-1")
        assert Fronts(first).renew([])
        end_lease(second, first.front)
        assert not Fronts(first).renew([])  # it was silent, but no other server has claimed the job
        assert second.claim("ftjob-1") is None
        end_lease(second, first.front)
        assert second.claim("ftjob-1") == job
        Fronts(first).renew([])
        assert first.claim("ftjob-1") is None
        event = {"created_at": 1, "type": "metrics", "level": "info", "message": "", "step": 1, "id": 1}
        first.add_events(job, [event], 10)
        assert not first.set_status("ftjob-1", "succeeded", "done")
        assert second.get("ftjob-1").events_offset == 0
        second.add_events(job, [event], 10)
        assert second.set_status("ftjob-1", "succeeded", "done")
        assert (second.get("ftjob-1").progress, second.get("ftjob-1").owner) == ({"step": 1}, None)


def test_a_lease_ends_by_the_clock_of_the_database(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with stores(database, 2) as (first, second):
        first.create(NEW, "ftjob-1", 100)
        assert first.claim("ftjob-1") is not None
        Fronts(first).renew([])
        assert second.claim("ftjob-1") is None
        monkeypatch.setattr(fronts, "LEASE_SECONDS", 0.0)
        Fronts(first).renew([])
        assert first.claim("ftjob-1") is None
        assert second.claim("ftjob-1") is not None


def test_a_server_without_a_lease_claims_nothing(database: str) -> None:
    with closing(JobStore(database)) as store:
        store.create(NEW, "ftjob-1", 100)
        assert store.unfinished_jobs() == []
        assert store.claim("ftjob-1") is None
        Fronts(store).renew([])
        assert store.claim("ftjob-1") is not None
        Fronts(store).leave()
        assert store.claim("ftjob-1") is None


# -- swaps -------------------------------------------------------------------------------------------------------------


def test_a_swap_needs_every_server_that_has_a_lease(database: str) -> None:
    with stores(database, 3) as (first, second, third):
        a, b, c = map(Fronts, (first, second, third))
        c.renew(["other"])  # serves another model
        swap = a.propose("tiny", "ftjob-1", 2.0, 1000)
        assert not swap.is_alone
        assert c.invitations() == []
        assert b.invitations() == [swap]
        assert b.invitations() == []  # it has joined
        a.set_loaded(swap)
        assert a.decide(swap).state == "loading"
        with pytest.raises(Fault) as busy:
            b.propose("tiny", "base", 2.0, 1000)
        assert busy.value.code is Code.ALIAS_BUSY
        assert first.activated("tiny") is None
        b.set_loaded(swap)
        assert b.decide(swap).state == "switched"
        assert third.activated("tiny") == "ftjob-1"
        b.abort(swap, "too late")
        assert a.decide(swap).state == "switched"
        assert not a.is_complete(swap)
        a.set_swapped(swap)
        end_lease(first, second.front)
        assert a.is_complete(swap)


@pytest.mark.parametrize("source", ["ftjob-1", "ftjob-1:ckpt-step-5"])
def test_a_result_that_the_servers_activate_is_not_deleted(database: str, source: str) -> None:
    with stores(database, 1) as (store,):
        for job_id in ("ftjob-1", "ftjob-2"):
            store.create(NEW, job_id, 100)
            assert store.set_status(job_id, "cancelled", "The job was cancelled.")
        swap = Fronts(store).propose("tiny", source, 2.0, 1000)
        with pytest.raises(Fault, match="The job's result is being activated"):
            store.delete_job("ftjob-1")
        store.delete_job("ftjob-2")
        Fronts(store).abort(swap, "No memory.")
        Fronts(store).propose("tiny", source, 2.0, -1)  # by servers that have ended
        store.delete_job("ftjob-1")


def test_one_server_that_cannot_load_the_weights_aborts_the_swap(database: str) -> None:
    with stores(database, 2) as (first, second):
        a, b = map(Fronts, (first, second))
        swap = a.propose("tiny", "ftjob-1", 2.0, 1000)
        a.set_loaded(swap)
        b.abort(swap, "No memory.")
        assert a.decide(swap) == fronts.Decision("aborted", "No memory.")
        assert first.activated("tiny") is None
        assert a.propose("tiny", "ftjob-2", 2.0, 1000).source == "ftjob-2"


def test_a_rollback_changes_no_later_activation(database: str) -> None:
    with stores(database, 1) as (store,):
        a = Fronts(store)
        swap = a.propose("tiny", "ftjob-1", 2.0, 1000)
        a.set_loaded(swap)
        assert a.decide(swap).state == "switched"
        a.roll_back(swap, "base")
        assert store.activated("tiny") == "base"
        store.set_activated("tiny", "ftjob-2")
        a.roll_back(swap, "base")
        assert store.activated("tiny") == "ftjob-2"


def test_a_server_that_ends_does_not_hold_up_a_swap(database: str) -> None:
    with stores(database, 2) as (first, second):
        a, b = map(Fronts, (first, second))
        swap = a.propose("tiny", "ftjob-1", 2.0, 1000)
        a.set_loaded(swap)
        assert a.decide(swap).state == "loading"
        b.leave()
        assert a.decide(swap).state == "switched"
        b.renew(["tiny"])
        drained = a.propose("tiny", "base", 2.0, 1000)
        a.set_loaded(drained)
        b.withdraw(drained)
        assert a.decide(drained).state == "switched"
        b.leave()
        left = b.propose("tiny", "ftjob-2", 2.0, 1000)  # by a server that ends before it has loaded them
        b.renew(["tiny"])
        end_lease(first, second.front)
        end_lease(first, first.front)
        assert a.decide(left).state == "aborted"
        a.renew(["tiny"])
        late = a.propose("tiny", "ftjob-3", 2.0, -1)
        assert a.decide(late) == fronts.Decision("aborted", "They were not loaded in time.")


# -- servers -----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def two_servers(start: Start, url: str, folder: Path, **changes: Any) -> AsyncIterator[list[Server]]:
    """Two servers that share the database and the data directory."""
    shared = {"database": url, "data_dir": folder / "shared"} | changes
    async with start(Launcher(), **shared) as first, start(Launcher(), **shared) as second:
        await eventually(lambda: all("tiny" in models_of(server) for server in (first, second)), "both leases")
        yield [first, second]


def models_of(server: Server) -> list[str]:
    query = "SELECT models FROM fronts WHERE id = ?"
    rows = server.state.jobs.rows(query, server.state.jobs.front)
    return json.loads(rows[0]["models"]) if rows else []


async def test_two_servers_run_each_job_once(start: Start, database: str, tmp_path: Path) -> None:
    async with two_servers(start, database, tmp_path) as servers:
        jobs = [(await submit(servers[n % 2], "slow"))["id"] for n in range(4)]
        for job_id in jobs:
            assert (await wait_for(servers[0], job_id, "succeeded", "failed"))["status"] == "succeeded"
            assert (servers[0].state.runner.job_dir(job_id) / "tries.txt").read_text() == "x"
            events = (await servers[1].client.get(f"/finetune/{job_id}/events")).json()["events"]
            assert [e["data"]["step"] for e in events if e["type"] == "metrics"] == [1, 2, 3, 4, 5, 6]
            codes = [e["data"].get("code") for e in events if e["type"] == "message"]
            assert codes == ["queued", "running", "data", "succeeded"]


async def test_a_job_is_cancelled_and_paused_through_another_server(
    start: Start, database: str, tmp_path: Path
) -> None:
    async with two_servers(start, database, tmp_path) as servers:
        job = await submit(servers[0], "held")
        await wait_for_step(servers[0], job["id"])
        owner = next(server for server in servers if server.state.jobs.get(job["id"]).owner == server.state.jobs.front)
        (other,) = [server for server in servers if server is not owner]
        await other.client.post(f"/finetune/{job['id']}/pause")
        await wait_for(other, job["id"], "paused")
        await other.client.post(f"/finetune/{job['id']}/resume")
        unblock_job(other, job["id"])
        await wait_for(other, job["id"], "succeeded")


async def test_a_stopped_server_leaves_its_job_to_the_other(start: Start, database: str, tmp_path: Path) -> None:
    shared = {"database": database, "data_dir": tmp_path / "shared"}
    async with start(Launcher(), **shared) as second:
        second.state.runner.is_closing = True  # it runs no job until the other has stopped
        second.state.runner.wake()
        async with start(Launcher(), **shared) as first:
            job = await submit(first, "held")
            await wait_for_step(first, job["id"])
        assert (await wait_for(second, job["id"], "queued"))["progress"]["step"] >= 1
        second.state.runner.is_closing = False
        second.state.runner.start()
        unblock_job(second, job["id"])
        await wait_for(second, job["id"], "succeeded")
        assert (second.state.runner.job_dir(job["id"]) / "tries.txt").read_text() == "xx"


async def test_an_activation_reaches_all_servers_without_a_failed_request(
    start: Start, database: str, tmp_path: Path
) -> None:
    async with two_servers(start, database, tmp_path) as servers:
        job = (await wait_for(servers[0], (await submit(servers[0]))["id"], "succeeded"))["id"]
        stop = asyncio.Event()

        async def ask(server: Server) -> set[str]:
            versions = set()
            while not stop.is_set():
                answer = await server.client.post("/generate", json={"inputs": "abc"})
                assert answer.status_code == 200, answer.text
                versions.add(answer.json()["weight_version"].partition("-")[0])
            return versions

        clients = [asyncio.create_task(ask(server)) for server in servers]
        answers = [await servers[n % 2].client.post("/models/tiny/activate", json={"source": s})
                   for n, s in enumerate([job, "base", job])]  # fmt: skip
        for server in servers:  # when the response has arrived, all servers have swapped
            assert (await server.client.get("/models")).json()["served"]["source"] == job
        stop.set()
        assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
        assert [await client for client in clients] == [{"base", "ftjob"}] * 2


async def test_a_server_that_cannot_load_the_weights_keeps_all_from_serving_them(
    start: Start, database: str, tmp_path: Path
) -> None:
    async with two_servers(start, database, tmp_path) as servers:
        job = (await wait_for(servers[0], (await submit(servers[0]))["id"], "succeeded"))["id"]
        servers[1].launcher.problem = "The scales are gone."
        answer = await servers[0].client.post("/models/tiny/activate", json={"source": job})
        assert (answer.status_code, answer.json()["code"]) == (409, "activation_failed")
        assert "Not every server can serve the new weights" in answer.text
        assert "The scales are gone." in answer.text
        servers[1].launcher.problem = None
        for server in servers:
            assert (await server.client.get("/models")).json()["served"]["source"] == "base"
            assert (await server.client.post("/generate", json={"inputs": "a"})).status_code == 200
            assert server.state.jobs.activated("tiny") is None
        assert servers[0].launcher.engine.closed
        assert (await servers[0].client.post("/models/tiny/activate", json={"source": job})).status_code == 200


async def test_a_server_that_is_stopped_while_it_loads_does_not_end_the_activation(
    start: Start, database: str, tmp_path: Path
) -> None:
    shared = {"database": database, "data_dir": tmp_path / "shared"}
    async with start(Launcher(), **shared) as first:
        job = (await wait_for(first, (await submit(first))["id"], "succeeded"))["id"]
        async with start(Launcher(), **shared) as second:
            await eventually(lambda: "tiny" in models_of(second), "the lease")
            second.launcher.paused = True
            activation = asyncio.create_task(first.client.post("/models/tiny/activate", json={"source": job}))
            await eventually(lambda: second.state.models.default.is_swapping(), "the second server's load")
            second.state.begin_drain()
            answer = await activation
        assert answer.status_code == 200, answer.text
        assert served(first) == job


async def test_a_server_that_starts_or_returns_serves_the_active_weights(
    start: Start, database: str, tmp_path: Path
) -> None:
    shared = {"database": database, "data_dir": tmp_path / "shared"}
    async with start(Launcher(), **shared) as first:
        job = (await wait_for(first, (await submit(first))["id"], "succeeded"))["id"]
        assert (await first.client.post("/models/tiny/activate", json={"source": job})).status_code == 200
        async with start(Launcher(), **shared) as second:
            assert second.state.models.default.current is not None
            assert second.state.models.default.current.source.key == job
            first.state.jobs.set_activated("tiny", "base")  # as by a server of a group that this one had left
            for server in (first, second):
                await eventually(lambda server=server: served(server) == "base", "the active weights")
                await eventually(lambda server=server: server.state.ready, "readiness")


async def test_a_server_that_cannot_roll_back_is_not_ready(
    start: Start, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "RETRY_SECONDS", 0.0)
    async with start(Launcher(), database=database) as server:
        job = (await wait_for(server, (await submit(server))["id"], "succeeded"))["id"]
        assert (await server.client.post("/models/tiny/activate", json={"source": job})).status_code == 200
        await eventually(lambda: server.state.ready, "readiness")
        server.launcher.problem = "The scales are gone."
        server.state.jobs.set_activated("tiny", "base")  # as by another server
        await eventually(lambda: not server.state.ready, "the second attempt")
        assert served(server) == job
        server.launcher.problem = None
        await eventually(lambda: served(server) == "base" and server.state.ready, "the previous weights")


async def test_an_adapter_is_loaded_and_unloaded_on_all_servers(start: Start, database: str, tmp_path: Path) -> None:
    async with two_servers(start, database, tmp_path) as servers:
        job = (await wait_for(servers[0], (await submit(servers[0], lora_rank=4))["id"], "succeeded"))["id"]
        answer = await servers[0].client.post(f"/finetune/{job}/activate")
        assert answer.status_code == 200, answer.text
        name = answer.json()["model"]

        async def status() -> int:
            return (await servers[1].client.post("/v1/completions", json={"model": name, "prompt": "a"})).status_code

        async def has_loaded() -> bool:
            return await status() == 200

        async def has_unloaded() -> bool:
            return await status() == 404

        await eventually(has_loaded, "the adapter")
        answer = await servers[0].client.post("/v1/unload_lora_adapter", json={"lora_name": name})
        assert answer.status_code == 200, answer.text
        await eventually(has_unloaded, "the adapter's end")
        assert all(not server.state.models.default.adapters for server in servers)


async def test_a_server_that_missed_the_unloading_of_an_adapter_serves_the_active_weights(
    start: Start, database: str, tmp_path: Path
) -> None:
    async with start(Launcher(), database=database) as server:
        model = server.state.models.default
        merged = (await wait_for(server, (await submit(server))["id"], "succeeded"))["id"]
        adapter = (await wait_for(server, (await submit(server, lora_rank=4))["id"], "succeeded"))["id"]
        server.state.jobs.add_activated_adapter("tiny", adapter)  # as by another server
        await eventually(lambda: model.adapters, "the adapter")
        with server.state.jobs.write() as db:  # as by servers from which this one was cut off
            db.execute("DELETE FROM activated_adapters")
            activate(db, "tiny", merged)
        await eventually(lambda: served(server) == merged, "the active weights")
        assert not model.adapters
        await eventually(lambda: server.state.ready, "readiness")


@pytest.mark.parametrize("lease_ended", [False, True])
async def test_servers_answer_while_they_roll_back_weights_that_failed_on_another(
    start: Start, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease_ended: bool
) -> None:
    """A server whose lease had ended may have missed other activations, so it does not answer."""
    renewals, renew = [], Fronts.renew

    def renew_and_report(self: Fronts, models: Iterable[str]) -> bool:
        renewals.append(renew(self, models))
        return not lease_ended

    async with start(Launcher(), database=database) as server:
        model = server.state.models.default
        job = (await wait_for(server, (await submit(server))["id"], "succeeded"))["id"]
        assert (await server.client.post("/models/tiny/activate", json={"source": job})).status_code == 200
        await eventually(lambda: server.state.ready, "readiness")
        server.launcher.paused = True
        monkeypatch.setattr(Fronts, "renew", renew_and_report)
        await eventually(lambda: renewals, "a renewal")
        server.state.jobs.set_activated("tiny", "base")  # as by another server
        await eventually(lambda: model.is_swapping(), "the load of the previous weights")
        assert server.state.ready is not lease_ended
        server.launcher.paused = False
        await eventually(lambda: served(server) == "base", "the previous weights")
        await eventually(lambda: server.state.ready, "readiness")


def served(server: Server) -> str:
    current = server.state.models.default.current
    assert current is not None
    return current.source.key


async def test_a_server_starts_with_the_active_weights_or_not_at_all(
    start: Start, database: str, tmp_path: Path
) -> None:
    with closing(JobStore(database)) as store:
        store.set_activated("tiny", "ftjob-gone")
    async with start(Launcher(), wait=False, database=database) as server:
        await eventually(server.state.failed.is_set)
        assert "The active weights cannot be served" in str(server.state.models.default.problem)


async def test_a_server_whose_database_fails_before_it_loads_ends(
    start: Start, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[str]:
        raise Fault(Code.STORAGE_UNAVAILABLE, "The job database cannot be used.")

    monkeypatch.setattr(JobStore, "activated_adapters", fail)
    async with start(wait=False, database=database) as server:
        await eventually(server.state.failed.is_set, "the failure")
        assert str(server.state.models.default.problem).endswith("The job database cannot be used.")
        assert server.state.status == "failed"


# -- files -------------------------------------------------------------------------------------------------------------


def write_old_folder(data_dir: Path) -> Path:
    folder = data_dir / "jobs" / "ftjob-old"
    folder.mkdir(parents=True)
    os.utime(folder, (1, 1))
    return folder


async def test_files_that_another_database_may_list_are_kept(
    start: Start, postgres: Any, settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_sqlite, of_postgres = tmp_path / "a", tmp_path / "b"
    urls = [postgres.url(), postgres.url()]
    async with start(data_dir=of_sqlite) as server:
        job = (await submit(server))["id"]
        await wait_for(server, job, "succeeded")
    os.utime(of_sqlite / "jobs" / job, (1, 1))
    async with start(data_dir=of_sqlite, database=urls[0]):
        pass
    assert f"1 files and directories of jobs and uploads, such as {of_sqlite / 'jobs' / job}," in caplog.text
    write_old_folder(of_sqlite)
    async with start(data_dir=of_sqlite) as server:  # both have been used
        assert {path.name for path in server.state.runner.root.iterdir()} == {job, "ftjob-old"}
    assert f"such as {of_sqlite / 'jobs' / 'ftjob-old'}," in caplog.text

    folder = write_old_folder(of_postgres)
    for url in (urls[0], urls[0].replace("fp8serve@", "fp8serve:secret@")):  # one database
        async with start(data_dir=of_postgres, database=url):
            assert not folder.exists()
        folder = write_old_folder(of_postgres)
    async with start(data_dir=of_postgres, database=urls[1]):
        assert folder.exists()
    with pytest.raises(MachineError, match="has the files of a PostgreSQL database; give --database, or another"):
        DataDirectory(replace(settings, data_dir=of_postgres))
    folder.rmdir()
    DataDirectory(replace(settings, data_dir=of_postgres)).close()  # nothing is lost


# -- faults ------------------------------------------------------------------------------------------------------------


async def test_a_database_that_is_restarted_is_used_again(
    start: Start, postgres: Any, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_runner, "RETRY_SECONDS", 0.1)
    async with start(Launcher(), database=database) as server:
        postgres.stop()
        try:
            answer = await server.client.get("/finetune")
            assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
            assert "psycopg" not in answer.text
            assert (await server.client.post("/generate", json={"inputs": "a"})).status_code == 200
            assert (await server.client.get("/metrics")).status_code == 200
        finally:
            postgres.start()

        async def can_submit() -> bool:
            body = {"data": [{"text": "a"}]}
            return (await server.client.post("/finetune", json=body)).status_code == 202

        await eventually(can_submit, "the connection")
        (job,) = (await server.client.get("/finetune")).json()["jobs"]
        await wait_for(server, job["id"], "succeeded")


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("has_bucket", [False, True])
def test_another_server_takes_the_job_of_a_killed_one(database: str, tmp_path: Path, has_bucket: bool) -> None:
    """With a shared data directory, the other server follows the training process, which goes on. With a bucket, it
    starts another one."""
    model_dir(tmp_path / "tiny")
    options = {"model": str(tmp_path / "tiny"), "train_on": "share", "fake": True, "database": database}
    options |= {"stub": True, "lease_seconds": 1e6}
    if has_bucket:
        options["artifacts"] = f"file://{tmp_path / 'bucket'}"
    folders = [tmp_path / name for name in ("a", "b" if has_bucket else "a")]
    with serving(tmp_path / "a.log", **options, data_dir=str(folders[0])) as first:
        body = {"data": [{"text": "held"}]}
        job = first.client.post("/finetune", json=body).raise_for_status().json()["id"]
        until(lambda: first.client.get(f"/finetune/{job}").json()["progress"], "the first step")
        with serving(tmp_path / "b.log", **options, data_dir=str(folders[1])) as second:
            assert first.stop(signal.SIGKILL) == -signal.SIGKILL
            end_lease_of_owner(database, job)
            until(lambda: "taken_over" in codes_of(second, job), "the end of the lease")
            (folders[1] / "jobs" / job / "go").touch()
            until(lambda: second.client.get(f"/finetune/{job}").json()["status"] == "succeeded", "the end of the job")
            assert (folders[1] / "jobs" / job / "tries.txt").read_text() == "x"
            events = second.client.get(f"/finetune/{job}/events").json()["events"]
            assert [e["data"]["step"] for e in events if e["type"] == "metrics"] == [1, 2, 3, 4, 5, 6]
            assert second.stop() == 0
        if has_bucket:  # nobody follows the first process any more
            os.kill(int((folders[0] / "jobs" / job / "worker.lock").read_text().split()[0]), signal.SIGKILL)


@pytest.mark.slow
def test_a_suspended_server_that_returns_leaves_its_job_to_the_other(database: str, tmp_path: Path) -> None:
    model_dir(tmp_path / "tiny")
    options = {"model": str(tmp_path / "tiny"), "train_on": "share", "fake": True, "database": database}
    options |= {"stub": True, "lease_seconds": 1e6, "data_dir": str(tmp_path / "data")}
    with serving(tmp_path / "a.log", **options) as first:
        body = {"data": [{"text": "held"}]}
        job = first.client.post("/finetune", json=body).raise_for_status().json()["id"]
        until(lambda: first.client.get(f"/finetune/{job}").json()["progress"], "the first step")
        with serving(tmp_path / "b.log", **options) as second:
            first.popen.send_signal(signal.SIGSTOP)
            end_lease_of_owner(database, job)
            until(lambda: "taken_over" in codes_of(second, job), "the end of the lease")
            first.popen.send_signal(signal.SIGCONT)
            until(lambda: "runs on another server" in first.log.read_text(), "the first server's return")
            (tmp_path / "data" / "jobs" / job / "go").touch()
            until(lambda: second.client.get(f"/finetune/{job}").json()["status"] == "succeeded", "the end of the job")
            assert (tmp_path / "data" / "jobs" / job / "tries.txt").read_text() == "x"
            assert [code for code in codes_of(first, job) if code] == [
                "queued", "running", "data", "taken_over", "succeeded",
            ]  # fmt: skip
            assert (second.stop(), first.stop()) == (0, 0)


def end_lease_of_owner(url: str, job: str) -> None:
    """Ends the lease of a server that can no longer renew it."""
    with closing(JobStore(url)) as store:
        owner = store.get(job).owner
        assert owner is not None
        end_lease(store, owner)


def codes_of(server: Process, job: str) -> list[str]:
    events = server.client.get(f"/finetune/{job}/events").json()["events"]
    return [event["data"].get("code") for event in events]
