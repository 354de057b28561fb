"""The HTTP application: routes, error rendering and the three layers in front of them, around one `ServerState`.

`create_app(settings)` is a clean ASGI application that anything can host; `fp8serve.server.launch.run` hosts it with
uvicorn and adds binding, signals and draining. This process never imports torch.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI

import fp8serve
from fp8serve.server.api import anthropic_messages, model_list_routes, page_routes, responses
from fp8serve.server.api.native import finetune_routes, generation_routes, model_routes, status_routes
from fp8serve.server.api.openai import (
    chat_routes,
    completion_routes,
    embedding_routes,
    finetuning_routes,
)
from fp8serve.server.api.openapi_description import describe
from fp8serve.server.data_directory import DataDirectory
from fp8serve.server.finetuning.job_runner import worker_command
from fp8serve.server.http.access_control import AccessControl, RateLimits
from fp8serve.server.http.access_log import AccessLog
from fp8serve.server.http.body_limits import BodyLimits
from fp8serve.server.http.error_handlers import add_error_handlers
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.served import Launch
from fp8serve.server.settings import Settings

SUMMARY = "Serve a language model in FP8, fine-tune it in FP8, and serve the result, through one interface."
ROUTES = (
    generation_routes, completion_routes, chat_routes, responses, anthropic_messages, embedding_routes,
    model_list_routes, finetune_routes, model_routes, finetuning_routes, status_routes, page_routes,
)  # fmt: skip


def create_app(settings: Settings, start_engine: Launch | None = None, worker: Sequence[str] = ()) -> FastAPI:
    """The application. Loading starts when its lifespan does, and `/health/ready` says when it is done.

    `start_engine` and `worker` replace the engine's and the trainer's process, for tests. Raises MachineError when the
    data directory cannot be used.
    """
    data = DataDirectory(settings)
    try:
        state = ServerState(settings, data, start_engine, worker or worker_command(settings.train_procs))
    except BaseException:
        data.discard()
        raise
    app = FastAPI(
        title="fp8serve",
        version=fp8serve.__version__,
        summary=SUMMARY,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    for routes in ROUTES:
        app.include_router(routes.router)
    describe(app)
    add_error_handlers(app, (route.path for routes in ROUTES for route in routes.router.routes))
    limits = settings.limits
    app.add_middleware(
        BodyLimits, max_bytes=limits.body_bytes, seconds=limits.body_seconds, held_bytes=limits.held_bytes
    )
    app.add_middleware(RateLimits, tenants=state.tenants)
    app.add_middleware(AccessControl, settings=settings, keys=state.keys)
    app.add_middleware(AccessLog, metrics=state.metrics, tracing=state.tracing)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: ServerState = app.state.server
    await state.open()
    try:
        yield
    finally:
        await state.close()
