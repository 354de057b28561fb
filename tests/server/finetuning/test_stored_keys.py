"""API keys in the database of several servers: accepted by all, revoked and limited while they run, backed up."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fp8serve.cli import main
from fp8serve.server.access.keys import TenantLimits
from fp8serve.server.finetuning.backup import back_up, restore
from fp8serve.server.finetuning.database import Database
from fp8serve.server.finetuning.schema import SCHEMA_VERSION
from fp8serve.server.finetuning.stored_keys import create_key, load_keys, revoke_key, set_limits
from tests.patience import eventually
from tests.server.access.files import bearer
from tests.server.conftest import Server, Start

ASK = {"inputs": "abc"}


def new_key(url: str, name: str, capsys: pytest.CaptureFixture[str], tenant: str = "lab") -> str:
    """Creates a key with the scope `generate` by the command; returns it."""
    options = ["--name", name, "--tenant", tenant, "--scope", "generate", "--database", url]
    assert main(["key", "new", *options]) == 0
    return capsys.readouterr().out.strip()


async def status(server: Server, key: str | None) -> int:
    answer = await server.client.post("/generate", json=ASK, headers={} if key is None else bearer(key))
    return answer.status_code


async def test_all_servers_accept_the_keys_of_the_database(
    start: Start, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared: dict[str, Any] = {"database": database, "data_dir": tmp_path / "shared"}
    async with start(**shared) as first, start(**shared, api_key="admin") as second:
        servers = first, second
        assert [await status(server, None) for server in servers] == [200, 401]
        key, other = (new_key(database, name, capsys) for name in ("ci", "nightly"))
        for server in servers:
            await eventually(lambda server=server: answers(server, {None: 401, key: 200, other: 200}), "the keys")
            assert await status(server, "wrong") == 401
            assert (await server.client.get("/info", headers=bearer(key))).status_code == 403
        assert await status(second, "admin") == 200

        assert main(["key", "limit", "lab", "--requests-per-minute", "1000", "--database", database]) == 0
        for server in servers:

            async def has_limit(server: Server = server) -> bool:
                answer = await server.client.post("/generate", json=ASK, headers=bearer(key))
                return answer.headers.get("x-ratelimit-limit-requests") == "1000"

            await eventually(has_limit, "the limit")
        assert main(["key", "list", "--database", database]) == 0
        table = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
        assert sorted(table) == [[name, "lab", "generate", "1000", "-", "-"] for name in ("ci", "nightly")]

        for name in ("ci", "nightly"):
            assert main(["key", "revoke", name, "--database", database]) == 0
        ended = {key: 401, other: 401, None: 401}  # None: though no key is left
        for server in servers:
            await eventually(lambda server=server: answers(server, ended), "the end of the keys")
    async with start(**shared) as third:
        assert [await status(third, key) for key in (key, None)] == [401, 401]


async def answers(server: Server, statuses: Mapping[str | None, int]) -> bool:
    """Whether requests with these keys have these statuses."""
    return [await status(server, key) for key in statuses] == list(statuses.values())


async def test_a_server_on_the_network_refuses_all_requests_until_there_is_a_key(
    start: Start, database: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start(database=database, host="0.0.0.0") as server:
        assert await status(server, None) == 401
        await eventually(lambda: "until there is an API key" in caplog.text, "the warning")
        key = new_key(database, "ci", capsys)
        await eventually(lambda: answers(server, {key: 200}), "the key")
    caplog.clear()
    async with start(database=database, host="0.0.0.0", allow_unauthenticated=True) as server:
        await eventually(lambda: server.state.started, "the end of the start")
        assert [await status(server, key) for key in (key, None)] == [200, 401]
        assert "API key" not in caplog.text


async def test_a_revoked_key_is_refused_also_while_the_database_refuses_to_write(
    start: Start, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start(database=database) as server:
        key, other = (new_key(database, name, capsys) for name in ("ci", "nightly"))
        await eventually(lambda: answers(server, {key: 200, other: 200}), "the keys")
        with server.state.jobs.read() as db:
            db.execute("SET default_transaction_read_only = on")  # for this server's connection
        assert main(["key", "revoke", "ci", "--database", database]) == 0
        await eventually(lambda: answers(server, {key: 401, other: 200}), "the end of the key")


INVALID_ROWS = {
    "later": ("lab", "generate train", "a" * 64),  # a scope of a later version
    "short": ("lab", "generate", "a"),
    "limited": ("blocked", "generate", "b" * 64),  # see the test
}


async def test_an_invalid_row_refuses_its_key_only(
    start: Start, database: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start(database=database) as server:
        key, other = (new_key(database, name, capsys) for name in ("ci", "nightly"))
        await eventually(lambda: answers(server, {key: 200, other: 200}), "the keys")
        with closing(Database(database)) as store, store.write() as db:
            for name, values in INVALID_ROWS.items():
                db.execute("INSERT INTO api_keys VALUES (?, ?, ?, ?, 1, NULL)", (name, *values))
            db.execute("INSERT INTO tenants VALUES ('blocked', 0, NULL, NULL)")  # a limit must be at least 1
        assert main(["key", "revoke", "ci", "--database", database]) == 0
        await eventually(lambda: answers(server, {key: 401, other: 200}), "the end of the key")
    async with start(database=database) as server:
        assert [await status(server, name) for name in (key, other, None)] == [401, 200, 401]
    assert [caplog.text.count(f"the key '{name}' of the database") for name in INVALID_ROWS] == [1, 1, 1]
    assert main(["key", "list", "--database", database]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["name", "nightly"]


def test_a_backup_has_the_keys_as_hashes(database: str, postgres: Any, tmp_path: Path) -> None:
    path = tmp_path / "backup.jsonl"
    with closing(Database(database)) as db:
        assert load_keys(db) is None
        for name in ("ci", "old"):
            create_key(db, name, "lab", ["generate", "read"], f"secret-{name}")
        revoke_key(db, "old")
        set_limits(db, "lab", TenantLimits(tokens_per_minute=7))
        before = load_keys(db)
        back_up(db, path)
    assert "secret" not in path.read_text()
    with closing(Database(postgres.url())) as db:
        restore(db, path)
        keys = load_keys(db)
        assert keys is not None
        assert before is not None
        assert keys.digests == before.digests
        caller = keys.caller(b"secret-ci")
        assert caller is not None
        assert (caller.name, caller.scopes, caller.limits.tokens_per_minute) == ("ci", ("generate", "read"), 7)
        assert keys.caller(b"secret-old") is None
    with closing(Database(tmp_path / "jobs.sqlite3")) as db:  # whose server reads a file of keys
        restore(db, path)
        assert load_keys(db) is None


def test_the_tables_of_keys_are_added_to_a_database_of_the_fifth_layout(database: str) -> None:
    with closing(Database(database)) as db, db.write() as transaction:
        transaction.execute("DROP TABLE api_keys")
        transaction.execute("DROP TABLE tenants")
        transaction.execute("UPDATE schema_version SET version = 5")
    with closing(Database(database)) as db:
        create_key(db, "ci", "lab", ["read"], "secret")
        set_limits(db, "lab", TenantLimits(concurrent_requests=2**40))
        keys = load_keys(db)
        assert keys is not None
        assert [caller.limits.concurrent_requests for caller in keys.digests.values()] == [2**40]
        assert db.rows("SELECT version FROM schema_version") == [{"version": SCHEMA_VERSION}]


def test_wrong_commands_change_nothing(database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_key(database, "ci", capsys)
    new = ["new", "--tenant", "lab", "--scope", "read", "--name"]
    url = ["--database", database]
    for arguments, message in (
        ([*new, "ci", *url], "has or had a key named ci"),
        ([*new, "a.b", *url], "unlike 'a.b'"),
        ([*new, "cd", *url, "--scope", "all"], "scopes[1] must be"),
        ([*new, "cd", *url, "--file", str(tmp_path / "keys.toml")], "Give --file or --database, not both."),
        (["list"], "Give FILE or --database, one of them."),
        (["list", str(tmp_path / "keys.toml"), *url], "Give FILE or --database, one of them."),
        (["list", "--database", "sqlite:///x"], "must be the URL of a PostgreSQL database"),
        (["list", "--database", "postgresql://fp8serve:secret@/x?host=/nowhere"], "The job database cannot be used"),
        (["revoke", "cd", *url], "has no valid key named 'cd'"),
        (["limit", "a b", *url], "unlike 'a b'"),
        (["limit", "lab", "--tokens-per-minute", "0", *url], "tokens_per_minute must be"),
        (["limit", "lab", "--tokens-per-minute", str(10**30), *url], "The limits cannot be stored"),
    ):
        assert main(["key", *arguments]) == 1, arguments
        captured = capsys.readouterr()
        assert (captured.out, message in captured.err) == ("", True), captured.err
        assert "secret" not in captured.err
    assert not (tmp_path / "keys.toml").exists()
    with closing(Database(database)) as db:
        keys = load_keys(db)
        assert keys is not None
        assert [(caller.name, caller.limits) for caller in keys.digests.values()] == [("ci", TenantLimits())]
        revoke_key(db, "ci")
    for arguments, message in (
        (["revoke", "ci", *url], "has no valid key named 'ci'"),
        ([*new, "ci", *url], "has or had a key named ci"),
    ):
        assert main(["key", *arguments]) == 1
        assert message in capsys.readouterr().err
