"""The job table against a model of it: any order of calls, with restarts between them."""

import json
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from fp8serve.errors import MachineError
from fp8serve.server.faults import Fault
from fp8serve.server.finetuning.database import NewJob, new_job_id
from fp8serve.server.finetuning.job_runner import read_events
from fp8serve.server.finetuning.job_store import JobStore

LEADS_TO = {
    "queued": {"running", "paused", "failed", "cancelled"},
    "running": {"queued", "paused", "succeeded", "failed", "cancelled"},
    "paused": {"queued", "cancelled"},
    "failed": {"queued"},
    "succeeded": set(),
    "cancelled": set(),
}
"""What a job may become, as the documentation of the routes draws it."""
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
        self.store = JobStore(Path(self.folder.name) / "jobs.db")
        self.expected: dict[str, Expected] = {}

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
        self.store = JobStore(Path(self.folder.name) / "jobs.db")

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


def test_events_that_were_stored_meanwhile_are_not_stored_again(tmp_path: Path) -> None:
    path, store = tmp_path / "events.jsonl", JobStore(tmp_path / "jobs.sqlite3")
    job, _ = store.create(NewJob(base="base", source="source", config={}), "ftjob-1", WAITING)
    new = [{"id": i, "created_at": i, "type": "metrics", "level": "info", "message": "", "step": i} for i in (4, 5)]
    path.write_text("".join(json.dumps(event) + "\n" for event in new) + '{"id": 6, "cre')
    events, offset = read_events(path, job.events_offset)
    store.add_events(job, events, offset)
    store.add_events(job, events, offset)
    assert [event.data["step"] for event in store.events(job.id) if event.type == "metrics"] == [4, 5]
    assert (store.get(job.id).progress, store.get(job.id).events_offset) == ({"step": 5}, offset)
    store.close()


TestJobTable = JobTable.TestCase
TestJobTable.settings = settings(max_examples=60, stateful_step_count=30, suppress_health_check=list(HealthCheck))


def test_a_table_of_another_layout_is_named_and_left_alone(tmp_path: Path) -> None:
    table = tmp_path / "jobs.sqlite3"
    with closing(sqlite3.connect(table)) as newer:
        newer.execute("PRAGMA user_version=9")
    with pytest.raises(
        MachineError,
        match="has schema version 9, but this fp8serve reads version 4; start the fp8serve version that wrote it",
    ):
        JobStore(table)
    with closing(sqlite3.connect(table)) as kept:
        assert kept.execute("PRAGMA user_version").fetchone()[0] == 9
        assert not kept.execute("SELECT name FROM sqlite_master").fetchall()
