"""A server with a fake engine, driven in process through httpx, lifespan included."""

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from fp8serve.server.app import create_app
from fp8serve.server.server_state import ServerState
from fp8serve.server.settings import Settings
from tests.patience import eventually
from tests.server.fakes import Launcher, model_dir

STUB = (sys.executable, str(Path(__file__).with_name("stub_worker.py")))


class Server:
    """A server in this process: its application, a client for it, its state, and the launcher of its engines."""

    def __init__(self, app: Any, client: httpx.AsyncClient, launcher: Launcher) -> None:
        self.app, self.client, self.launcher = app, client, launcher
        self.state: ServerState = app.state.server

    async def ready(self) -> None:
        await eventually(lambda: self.state.models.default.ready, "readiness")


Start = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(model=model_dir(tmp_path / "tiny"), data_dir=tmp_path / "data", train_on="share", drain_seconds=5)


@pytest.fixture
def start(settings: Settings) -> Start:
    """`async with start() as server`; keyword arguments change the settings, `launcher` the engines."""

    @contextlib.asynccontextmanager
    async def started(
        launcher: Launcher | None = None, wait: bool = True, worker: Sequence[str] = STUB, **changes: Any
    ) -> AsyncIterator[Server]:
        launcher = launcher or Launcher()
        app = create_app(replace(settings, **changes), launcher, worker)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            server = Server(app, client, launcher)
            if wait:
                await server.ready()
            yield server

    return started
