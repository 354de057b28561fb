"""Backups of the job database: complete, restored into SQLite and PostgreSQL, and refused where they do not fit."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fp8serve.cli import main
from fp8serve.errors import RequestError
from fp8serve.server.data_directory import DataDirectory
from fp8serve.server.faults import disk_fault
from fp8serve.server.finetuning import backup
from fp8serve.server.finetuning.backup import KEY_TABLES, TABLES, back_up, restore
from fp8serve.server.finetuning.database import Database, NewJob
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.settings import Settings
from tests.server.finetuning.test_job_states import LAYOUTS, write_table


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """A database with jobs in all states, events, a file and activations."""
    shutil.copytree(LAYOUTS / "jobs", tmp_path / "old" / "jobs")
    write_table(tmp_path / "old" / "jobs.sqlite3")
    with closing(JobStore(tmp_path / "old" / "jobs.sqlite3")) as opened:
        opened.add_file("file-1", "rows.jsonl", 5, "0" * 64, "fine-tune")
        opened.create(NewJob(base="base", source="base", config={"é": 1}), "ftjob-new", 10, "a key", "request")
        opened.set_activated("small=/models/b", "base")
        with opened.write() as db:
            db.execute("UPDATE activated SET base = '/models/MODEL_DIRECTORY' WHERE base = 'MODEL_DIRECTORY'")
            db.execute("UPDATE activated_adapters SET model = '/models/MODEL_DIRECTORY'")
        assert opened.claim("ftjob-new") is not None
        yield opened


def rows(database: Database) -> dict[str, list[dict[str, Any]]]:
    """Returns all rows, without the owners of jobs, and without keys, which a server with an SQLite file has not."""
    names = [table for table in TABLES if table not in KEY_TABLES]
    tables = {table: [dict(row) for row in database.rows(f"SELECT * FROM {table}")] for table in names}
    return {
        table: sorted(({k: v for k, v in row.items() if k not in ("owner", "rowid")} for row in all_rows), key=str)
        for table, all_rows in tables.items()
    }


def test_a_restored_database_has_every_row(store: JobStore, tmp_path: Path) -> None:
    number = back_up(store, tmp_path / "backup.jsonl")
    assert number == len(store.ids("jobs"))
    assert (tmp_path / "backup.jsonl").stat().st_mode & 0o077 == 0
    with closing(JobStore(tmp_path / "new.sqlite3")) as new:
        assert restore(new, tmp_path / "backup.jsonl") == number
        assert all(rows(store).values())
        assert rows(new) == rows(store)
        assert new.get("ftjob-new").owner is None
        assert new.claim("ftjob-new") is not None
        last = max(event.seq for job in new.jobs() for event in new.events(job.id))
        new.add_message("ftjob-new", "The next event.", "next")
        assert new.newest_events("ftjob-new", 1)[0].seq > last


def test_a_server_moves_to_postgresql_and_back(store: JobStore, database: str, tmp_path: Path) -> None:
    back_up(store, tmp_path / "backup.jsonl")
    with closing(JobStore(database)) as moved:
        restore(moved, tmp_path / "backup.jsonl")
        before, after = rows(store), rows(moved)
        assert {row["base"] for row in after["activated"]} == {"MODEL_DIRECTORY", "small"}
        assert {row["model"] for row in after["activated_adapters"]} == {"MODEL_DIRECTORY"}
        for table in ("jobs", "events", "files", "idempotency"):
            assert after[table] == before[table], table
        last = max(row["seq"] for row in after["events"])
        moved.add_message("ftjob-new", "The next event.", "next")
        assert moved.newest_events("ftjob-new", 1)[0].seq == last + 1
        back_up(moved, tmp_path / "back.jsonl")
    with closing(JobStore(tmp_path / "back.sqlite3")) as back:
        restore(back, tmp_path / "back.jsonl")
        assert rows(back)["jobs"] == before["jobs"]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_server_writes_during_a_backup(database: str, is_shared: bool, tmp_path: Path) -> None:
    location = database if is_shared else tmp_path / "jobs.sqlite3"
    with closing(JobStore(location)) as server, closing(Database(location)) as command:
        server.create(NewJob(base="base", source="base", config={}), "ftjob-1", 10)
        with server.write() as db:
            db.execute("DELETE FROM events")
            db.execute("DELETE FROM jobs")
            assert back_up(command, tmp_path / "backup.jsonl") == 1
        with command.read() as db:
            assert db.execute("SELECT id FROM jobs").fetchall() == []
            server.create(NewJob(base="base", source="base", config={}), "ftjob-2", 10)
        assert back_up(command, tmp_path / "backup.jsonl") == 1
        assert '"ftjob-2"' in (tmp_path / "backup.jsonl").read_text()


def test_a_backup_does_not_migrate_the_database_of_a_running_server(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, path = DataDirectory(settings), settings.data_dir / "jobs.sqlite3"
    write_table(path)
    with closing(sqlite3.connect(path)) as db:
        before = db.execute("PRAGMA user_version").fetchone()[0]
    arguments = ["state", "backup", str(settings.data_dir / "b.jsonl"), "--data-dir", str(settings.data_dir)]
    assert main(arguments) == 1
    assert "A server uses the data directory" in capsys.readouterr().err
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == before
    directory.close()
    assert main(arguments) == 0


def test_a_database_that_fails_is_reported_in_one_sentence(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(database: Database, path: Path) -> int:
        raise disk_fault("disk I/O error")

    monkeypatch.setattr(backup, "back_up", fail)
    assert main(["state", "backup", str(tmp_path / "b.jsonl"), "--data-dir", str(tmp_path / "old")]) == 1
    assert "internal error" not in (message := capsys.readouterr().err)
    assert "disk I/O error" in message


def test_activations_move_to_postgresql_by_the_name_of_their_model(
    store: JobStore, database: str, tmp_path: Path
) -> None:
    store.set_activated("meta-llama/Llama-3=/models/llama", "ftjob-1")
    store.add_activated_adapter("/runs/lr=1e-4/model", "ftjob-2")
    back_up(store, tmp_path / "backup.jsonl")
    with closing(JobStore(database)) as moved:
        restore(moved, tmp_path / "backup.jsonl")
        assert moved.activated("meta-llama/Llama-3") == "ftjob-1"
        assert moved.activated_adapters("model") == ["ftjob-2"]
        before = rows(moved)
        back_up(moved, tmp_path / "moved.jsonl")
    with closing(JobStore(tmp_path / "back.sqlite3")) as back:
        restore(back, tmp_path / "moved.jsonl")
        assert rows(back) == before | {"activated": [], "activated_adapters": []}
    with closing(JobStore(database)) as again:
        with again.write() as db:
            db.execute(f"TRUNCATE {', '.join(TABLES)} CASCADE")
        restore(again, tmp_path / "moved.jsonl")
        assert rows(again) == before


def test_a_backup_is_restored_into_an_empty_database_only(store: JobStore, tmp_path: Path) -> None:
    back_up(store, tmp_path / "backup.jsonl")
    before = rows(store)
    with pytest.raises(RequestError, match="has jobs already; restore a backup into an empty database"):
        restore(store, tmp_path / "backup.jsonl")
    assert rows(store) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:-1], lines[-1][:-5]], "is no backup of a job database, or is damaged"),
        (lambda lines: ["{}", *lines[1:]], "has schema version None, but this fp8serve reads version 6"),
        (lambda lines: [*lines, json.dumps({"table": "fronts", "row": {}})], "is no backup"),
        (lambda lines: [*lines, json.dumps({"table": "files", "row": {"id": "x; DROP TABLE jobs"}})], "other columns"),
        (lambda lines: ["[]"], "is no backup"),
    ],
)
def test_a_damaged_backup_changes_nothing(store: JobStore, tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "backup.jsonl"
    back_up(store, path)
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    with closing(JobStore(tmp_path / "new.sqlite3")) as new:
        with pytest.raises(RequestError, match=message):
            restore(new, path)
        assert not any(rows(new).values())


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(
    "change",
    [{}, {"id": "file-2"}, {"id": "file-2", "number": 2, "bytes": {}},
     {"id": "file-2", "number": 2, "bytes": None}, {"id": "file-2", "number": 10**30}],
    ids=["same id", "same number", "object", "null", "too large"],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_refused(
    store: JobStore, database: str, tmp_path: Path, is_shared: bool, change: dict[str, Any]
) -> None:
    path = tmp_path / "backup.jsonl"
    back_up(store, path)
    lines = path.read_text().splitlines()
    entry = json.loads(next(line for line in lines if '"table": "files"' in line))
    path.write_text("\n".join([*lines, json.dumps(entry | {"row": entry["row"] | change})]))
    with closing(JobStore(database if is_shared else tmp_path / "new.sqlite3")) as new:
        with pytest.raises(RequestError, match="has a row of files that does not fit"):
            restore(new, path)
        assert not any(rows(new).values())


def test_the_commands(store: JobStore, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backup, count = str(tmp_path / "b.jsonl"), len(store.ids("jobs"))
    assert main(["state", "backup", backup, "--data-dir", str(tmp_path / "old")]) == 0
    assert f"{count} jobs were written" in capsys.readouterr().err
    assert main(["state", "restore", backup, "--data-dir", str(settings.data_dir)]) == 0
    assert f"{count} jobs were restored" in capsys.readouterr().err
    directory = DataDirectory(settings)
    for arguments, message in (
        (["restore", backup, "--data-dir", str(settings.data_dir)], "A server uses the data directory"),
        (["backup", backup, "--data-dir", str(tmp_path / "nothing")], "has no job database"),
        (["backup", backup], "Give --data-dir or --database"),
        (["backup", backup, "--database", "sqlite:///x"], "must be the URL of a PostgreSQL database"),
        (["restore", str(tmp_path / "none"), "--data-dir", str(tmp_path / "fresh")], "cannot be read"),
    ):
        assert main(["state", *arguments]) == 1, arguments
        assert message in capsys.readouterr().err
    directory.close()
