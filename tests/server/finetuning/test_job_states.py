"""The job table against a model of it: any order of calls, with restarts between them."""

import json
import shutil
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from fp8serve.errors import MachineError
from fp8serve.server.faults import Fault
from fp8serve.server.finetuning import fronts
from fp8serve.server.finetuning.database import NewJob, new_job_id
from fp8serve.server.finetuning.fronts import Fronts
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.settings import Settings
from fp8serve.train.events import read_events
from tests.server.conftest import Start

LEADS_TO = {
    "queued": {"running", "paused", "failed", "cancelled"},
    "running": {"queued", "paused", "succeeded", "failed", "cancelled"},
    "paused": {"queued", "cancelled"},
    "failed": {"queued"},
    "succeeded": set(),
    "cancelled": set(),
}
"""The statuses that may follow each status, as in the documentation of the routes."""
FINAL = {"succeeded", "failed", "cancelled"}
WAITING = 3
STATES = st.sampled_from(sorted(LEADS_TO))


@dataclass
class Expected:
    status: str = "queued"
    cancel_requested: bool = False
    pause_requested: bool = False


class JobTable(RuleBasedStateMachine):
    jobs = Bundle("jobs")

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = self.connect()
        self.expected: dict[str, Expected] = {}

    def connect(self) -> JobStore:
        return JobStore(Path(self.folder.name) / "jobs.db")

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    @rule(target=jobs)
    def create(self) -> str:
        job_id = new_job_id()
        waiting = sum(job.status == "queued" for job in self.expected.values())
        new = NewJob(base="base", source="source", config={})
        if waiting >= WAITING:
            with pytest.raises(Fault):
                self.store.create(new, job_id, WAITING)
        else:
            self.store.create(new, job_id, WAITING)
            self.expected[job_id] = Expected()
        return job_id

    @rule(job_id=jobs, to=STATES)
    def move(self, job_id: str, to: str) -> None:
        job = self.expected.get(job_id)
        allowed = job is not None and to in LEADS_TO[job.status]
        assert self.store.set_status(job_id, to, "moved", error="why" if to == "failed" else None) is allowed  # type: ignore[arg-type]
        if job is not None and allowed:
            job.status, job.cancel_requested = to, job.cancel_requested and to != "failed"
            job.pause_requested = job.pause_requested and to == "running"

    @rule(job_id=jobs)
    def cancel(self, job_id: str) -> None:
        job = self.expected.get(job_id)
        if job is None or job.status in FINAL:
            with pytest.raises(Fault):
                self.store.request_cancel(job_id)
            return
        self.store.request_cancel(job_id)
        job.cancel_requested = True
        if job.status != "running":
            job.status, job.pause_requested = "cancelled", False

    @rule(job_id=jobs)
    def pause(self, job_id: str) -> None:
        job = self.expected.get(job_id)
        if job is None or job.status in FINAL or job.cancel_requested:
            with pytest.raises(Fault):
                self.store.request_pause(job_id)
            return
        self.store.request_pause(job_id)
        job.pause_requested = job.status == "running"
        job.status = "paused" if job.status == "queued" else job.status

    @rule(job_id=jobs)
    def resume(self, job_id: str) -> None:
        job = self.expected.get(job_id)
        if job is not None and job.status == "running" and job.pause_requested:
            self.store.resume(job_id)
            job.pause_requested = False
            return
        if job is None or job.status not in ("failed", "paused"):
            with pytest.raises(Fault):
                self.store.resume(job_id)
            return
        self.store.resume(job_id)
        job.status = "queued"

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.connect()
        for job in self.store.unfinished_jobs():  # as a server does before it follows a training process
            assert job.status != "running" or self.store.claim(job.id)

    @invariant()
    def the_table_is_as_expected(self) -> None:
        if not hasattr(self, "store"):
            return
        counts = dict.fromkeys(LEADS_TO, 0)
        for job_id, expected in self.expected.items():
            job = self.store.get(job_id)
            counts[expected.status] += 1
            assert job.status == expected.status
            assert job.cancel_requested == expected.cancel_requested
            assert job.pause_requested == expected.pause_requested
            assert (job.finished_at is not None) == (job.status in FINAL)
            assert (job.error is not None) == (job.status == "failed")
        assert self.store.counts() == counts
        unfinished = [name for name, job in self.expected.items() if job.status in ("queued", "running")]
        assert sorted(job.id for job in self.store.unfinished_jobs()) == sorted(unfinished)


LAYOUTS = Path(__file__).with_name("layout3")
"""A data directory as the version with layout 3 wrote it: its table as SQL, and the events of its jobs."""


def write_table(path: Path, *changes: str) -> None:
    """Writes a table of layout 3, which SQL statements may change into one of an older layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as db:
        db.executescript((LAYOUTS / "jobs.sql").read_text() + ";".join(changes))


def test_a_table_of_the_first_layout_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    first = "ALTER TABLE jobs DROP COLUMN pause_requested; DROP TABLE activated_adapters; PRAGMA user_version=1"
    write_table(path, first)
    store = JobStore(path)
    store.create(NewJob(base="base", source="source", config={}), "new", WAITING)
    assert [store.request_pause(job_id).status for job_id in ("ftjob-queued", "new")] == ["paused", "paused"]
    store.close()


SECOND_LAYOUT = """
INSERT INTO activated VALUES ('/models/a', 'ftjob-1', 1), ('small=/models/b', 'base', 1);
INSERT INTO activated VALUES ('adapters of /models/a', 'ftjob-2,ftjob-3:ckpt-step-5', 1);
INSERT INTO activated VALUES ('adapters of small=/models/b', 'ftjob-2', 1), ('adapters of /models/c', '', 1);
DROP TABLE activated_adapters; PRAGMA user_version=2;
"""


def test_a_table_of_the_second_layout_keeps_its_activated_adapters(tmp_path: Path) -> None:
    """The second layout stored them as a list in one column of the table `activated`."""
    path = tmp_path / "jobs.db"
    write_table(path, SECOND_LAYOUT)
    store = JobStore(path)
    models = ("/models/a", "small=/models/b", "/models/c")
    adapters = [["ftjob-2", "ftjob-3:ckpt-step-5"], ["ftjob-2"], []]
    assert [store.activated_adapters(model) for model in models] == adapters
    assert [store.activated(model) for model in models] == ["ftjob-1", "base", None]
    store.add_activated_adapter("/models/c", "ftjob-2")
    store.remove_activated_adapter("/models/a", "ftjob-2")
    store.close()
    store = JobStore(path)
    assert [store.activated_adapters(model) for model in models] == [["ftjob-3:ckpt-step-5"], ["ftjob-2"], ["ftjob-2"]]
    store.close()


def test_a_data_directory_of_the_third_layout_keeps_its_jobs_and_events(tmp_path: Path) -> None:
    """Its server was killed after the running job's process had written two events that the table does not hold, and a
    part of a third."""
    shutil.copytree(LAYOUTS / "jobs", tmp_path / "jobs")
    path, running = tmp_path / "jobs.sqlite3", tmp_path / "jobs" / "ftjob-running" / "events.jsonl"
    write_table(path)
    with closing(sqlite3.connect(path)) as db:
        before = db.execute("SELECT seq, job, created_at, level, type, message, data FROM events").fetchall()
        jobs = db.execute("SELECT * FROM jobs ORDER BY number").fetchall()
        db.execute("UPDATE sqlite_sequence SET seq = 1000 WHERE name = 'events'")  # of a job that was deleted
        db.commit()
    size_when_running = running.stat().st_size
    new = [{"id": i, "created_at": i, "type": "metrics", "level": "info", "message": "", "step": i} for i in (4, 5)]
    with running.open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in new) + '{"id": 6, "cre')

    JobStore(path).close()
    store = JobStore(path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT * FROM events").fetchall() == before
        assert [row[:-2] for row in db.execute("SELECT * FROM jobs ORDER BY number")] == jobs
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        assert layout(path) == layout_of_new_table(tmp_path / "new.sqlite3")
    assert store.activated("MODEL_DIRECTORY") == "ftjob-succeeded"
    assert store.activated_adapters("MODEL_DIRECTORY") == ["ftjob-adapter"]
    for job in store.jobs():
        events = tmp_path / "jobs" / job.id / "events.jsonl"
        size = size_when_running if job.id == "ftjob-running" else events.stat().st_size if events.exists() else 0
        assert job.events_offset == size, job.id

    job = store.get("ftjob-running")
    events, offset = read_events(running, job.events_offset)
    store.add_events(job, events, offset)
    store.add_events(job, events, offset)  # the same events again, which must not be stored twice
    after = store.events(job.id, before[-1][0])
    assert [(event.seq, event.data["step"]) for event in after] == [(1001, 4), (1002, 5)]
    assert store.get(job.id).progress == {"step": 5}
    store.close()


def test_a_table_of_the_fourth_layout_keeps_every_row(tmp_path: Path) -> None:
    """Its server wrote it before several servers could share a database."""
    path = tmp_path / "jobs.sqlite3"
    tables = ("jobs", "events", "files", "idempotency", "activated", "activated_adapters")
    with closing(sqlite3.connect(path)) as db:
        db.executescript((LAYOUTS.with_name("layout4") / "jobs.sql").read_text())
        before = {table: db.execute(f"SELECT * FROM {table}").fetchall() for table in tables}
    assert all(before.values())
    with closing(JobStore(path)) as store:
        assert layout(path) == layout_of_new_table(tmp_path / "new.sqlite3")
        with closing(sqlite3.connect(path)) as db:
            after = {table: db.execute(f"SELECT * FROM {table}").fetchall() for table in tables}
        after["jobs"] = [row[:-1] for row in after["jobs"]]
        assert after == before
        jobs = store.unfinished_jobs()
        assert [(job.id, job.owner) for job in jobs] == [("ftjob-running", None), ("ftjob-queued", None)]
        assert store.claim("ftjob-running") == jobs[0]
        assert store.set_status("ftjob-running", "succeeded", "The job succeeded.")


async def test_jobs_of_older_versions_are_listed_in_both_formats(start: Start, settings: Settings) -> None:
    """The oldest jobs were stored before there was a choice of methods."""
    active = "UPDATE jobs SET status = 'cancelled', finished_at = 1 WHERE status IN ('queued', 'running')"
    write_table(
        settings.data_dir / "jobs.sqlite3",
        active,
        "UPDATE jobs SET config = json_remove(config, '$.method') WHERE id = 'ftjob-succeeded'",
    )
    async with start() as server:
        native = (await server.client.get("/finetune")).json()["jobs"]
        (oldest,) = [job for job in native if "method" not in job["config"]]
        assert oldest["id"] == "ftjob-succeeded"
        response = await server.client.get("/v1/fine_tuning/jobs")
        assert response.status_code == 200, response.text
        methods = {job["id"]: job["method"]["type"] for job in response.json()["data"]}
        assert methods == dict.fromkeys((job["id"] for job in native), "supervised")


def layout(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Returns the columns of each table, and the indices."""
    with closing(sqlite3.connect(path)) as db:
        names = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")]
        columns = {name: db.execute(f"PRAGMA table_info({name})").fetchall() for name in names}
        indices = {f"indices of {name}": db.execute(f"PRAGMA index_list({name})").fetchall() for name in names}
        return columns | indices


def layout_of_new_table(path: Path) -> dict[str, list[tuple[object, ...]]]:
    JobStore(path).close()
    return layout(path)


TestJobTable = JobTable.TestCase
TestJobTable.settings = settings(max_examples=60, stateful_step_count=30, suppress_health_check=list(HealthCheck))


def test_the_job_table_in_postgresql(postgres: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts, "LEASE_SECONDS", 1e6)  # no lease ends on a slow machine

    class PostgresJobTable(JobTable):
        @initialize()
        def open(self) -> None:
            self.url = postgres.url()
            super().open()

        def connect(self) -> JobStore:
            store = JobStore(self.url)
            Fronts(store).renew([])
            return store

        @rule()
        def restart(self) -> None:
            Fronts(self.store).leave()
            super().restart()

    few = settings(max_examples=8, stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None)
    run_state_machine_as_test(PostgresJobTable, settings=few)


def test_a_table_of_another_layout_is_refused_and_not_changed(tmp_path: Path) -> None:
    table = tmp_path / "jobs.sqlite3"
    with closing(sqlite3.connect(table)) as newer:
        newer.execute("PRAGMA user_version=9")
    with pytest.raises(
        MachineError,
        match="has schema version 9, but this fp8serve reads version 6; start the fp8serve version that wrote it",
    ):
        JobStore(table)
    with closing(sqlite3.connect(table)) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == 9
        assert not db.execute("SELECT name FROM sqlite_master").fetchall()
