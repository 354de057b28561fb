"""The router knows the blocks that the engine holds, also after an engine or a report has failed."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fp8serve.errors import MachineError
from fp8serve.integrations.dynamo import cache_reports
from fp8serve.integrations.dynamo.cache_reports import CacheReports
from fp8serve.server.serving.served_model import ServedModel

Change = tuple[str, str | None, list[int], str]
A, B = "0100000000000000ff", "0200000000000000ff"


class Engine:
    """An engine whose prefix cache changes as a test says."""

    def __init__(self, *changes: Change) -> None:
        self.alive = True
        self.changes = list(changes)

    async def pop_block_changes(self) -> list[Change]:
        if not self.alive:
            raise MachineError("The engine process has ended.")
        changes, self.changes = self.changes, []
        return changes


class Router:
    """Knows the blocks that were published, and refuses to remove others."""

    def __init__(self) -> None:
        self.known: dict[int, int | None] = {}

    def publish_stored(self, tokens: Any, counts: Any, hashes: list[int], parent: int | None, cache_salt: Any) -> None:
        self.known |= dict.fromkeys(hashes, parent)

    def publish_removed(self, hashes: list[int]) -> None:
        for key in hashes:
            del self.known[key]


class Model:
    """A served model with one engine at a time."""

    def __init__(self, engine: Engine) -> None:
        self.stats: dict[str, Any] = {}
        self.serve(engine)

    def serve(self, engine: Engine) -> None:
        self.current = SimpleNamespace(engine=engine)


def reports_of(model: Model) -> tuple[CacheReports, Router]:
    reports = CacheReports(cast(ServedModel, model), dict)
    reports.blocks = router = Router()
    return reports, router


def stored(key: str, previous: str | None = None) -> Change:
    return key, previous, [5, 6], ""


def removed(key: str) -> Change:
    return key, None, [], ""


async def test_blocks_come_and_go() -> None:
    engine = Engine(stored(A), stored(B, A))
    reports, router = reports_of(Model(engine))
    await reports.report()
    assert router.known == {1: None, 2: 1}
    engine.changes = [removed(B), removed(B)]
    await reports.report()
    assert router.known == {1: None}
    engine.changes = [removed(""), stored(B)]  # all are removed
    await reports.report()
    assert router.known == {2: None}


async def test_the_blocks_of_a_dead_engine_are_removed_before_it_runs_again() -> None:
    engine = Engine(stored(A))
    model = Model(engine)
    reports, router = reports_of(model)
    await reports.report()
    engine.alive = False
    await reports.report()
    assert router.known == {}
    model.serve(Engine(stored(B)))
    await reports.report()
    assert router.known == {2: None}


async def test_a_report_that_fails_does_not_end_the_reports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_reports, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(cache_reports, "REPORT_SECONDS", 0.0)
    engine = Engine(stored("not a hash"))
    reports, router = reports_of(Model(engine))
    task = asyncio.create_task(reports.run())
    while engine.changes:
        await asyncio.sleep(0)
    engine.changes = [stored(A)]
    while not (router.known or task.done()):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert router.known == {1: None}
    assert "a report to the router failed" in caplog.text
