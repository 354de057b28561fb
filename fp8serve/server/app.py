"""The HTTP application: routes, error handlers and middleware around one `ServerState`.

`create_app(settings)` returns an ASGI application that any ASGI server can host. `fp8serve.server.launch.run` hosts it
with uvicorn and adds binding, signals and draining. This process never imports torch.

The console and the documentation page are files of this package with a strict content security policy. They work
offline and need no build: the console consists of ES modules, which are served as they are. Browsers revalidate each
file by its ETag, which is a hash of its content.
"""

import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.resources import files

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import RedirectResponse, Response

import fp8serve
from fp8serve.server.api import anthropic_messages, model_list_routes, responses
from fp8serve.server.api.native import finetune_routes, generation_routes, model_routes, status_routes, trainer_routes
from fp8serve.server.api.openai import chat_routes, completion_routes, embedding_routes, finetuning_routes
from fp8serve.server.api.openapi_description import describe
from fp8serve.server.data_directory import DataDirectory
from fp8serve.server.finetuning.job_runner import training_command
from fp8serve.server.http.access_control import AccessControl, RateLimits
from fp8serve.server.http.access_log import AccessLog
from fp8serve.server.http.body_limits import BodyLimits
from fp8serve.server.http.error_handlers import add_error_handlers
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.served_weights import Launch
from fp8serve.server.settings import Settings

SUMMARY = "Serve a language model in FP8, fine-tune it in FP8, and serve the result, through one interface."
ROUTES = (
    generation_routes, completion_routes, chat_routes, responses, anthropic_messages, embedding_routes,
    model_list_routes, finetune_routes, model_routes, trainer_routes, finetuning_routes, status_routes,
)  # fmt: skip
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
CONSOLE_DIR = files("fp8serve.server").joinpath("console")
MEDIA_TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
HTML = "text/html; charset=utf-8"
CONSOLE_FILES = sorted(item.name for item in CONSOLE_DIR.iterdir() if item.name.rpartition(".")[2] in MEDIA_TYPES)
PAGES = {
    "/": ("index.html", HTML),
    "/docs": ("docs.html", HTML),
    **{f"/console/{name}": (name, MEDIA_TYPES[name.rpartition(".")[2]]) for name in CONSOLE_FILES},
}


def create_app(settings: Settings, start_engine: Launch | None = None, worker: Sequence[str] = ()) -> FastAPI:
    """Returns the application. Models load after its startup, and `/health/ready` reports when they are loaded.

    Tests replace the engine process by `start_engine` and the training process by the command `worker`. Raises
    MachineError if the data directory cannot be used, and RequestError if an option does not suit the device.
    """
    data = DataDirectory(settings)
    try:
        settings = settings.on_device()
        state = ServerState(settings, data, start_engine, worker or training_command(settings.train_procs))
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
    routers = (*(routes.router for routes in ROUTES), pages())
    for router in routers:
        app.router.routes.extend(router.routes)  # include_router would build them all again at the first request: 50 ms
    describe(app)
    add_error_handlers(app, (route.path for router in routers for route in router.routes))
    limits = settings.limits
    app.add_middleware(
        BodyLimits, max_bytes=limits.body_bytes, seconds=limits.body_seconds, max_held_bytes=limits.held_bytes
    )
    app.add_middleware(RateLimits, tenants=state.tenants)
    app.add_middleware(AccessControl, settings=settings, keys=state.keys)
    app.add_middleware(AccessLog, metrics=state.metrics, tracing=state.tracing)
    return app


def pages() -> APIRouter:
    """Returns a router with one route for each file of `PAGES`, so that no request's path becomes a file name."""
    router = APIRouter(tags=["server"])
    for path, (name, media_type) in PAGES.items():
        content = CONSOLE_DIR.joinpath(name).read_bytes()
        router.add_api_route(path, _page(content, media_type), methods=["GET", "HEAD"], include_in_schema=False)

    @router.get("/console", include_in_schema=False)
    def console() -> Response:
        return RedirectResponse("./")  # relative, because a proxy may serve this below another path

    return router


def _page(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"Content-Security-Policy": CSP, "Cache-Control": "no-cache", "ETag": etag}

    async def page(request: Request) -> Response:
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return page


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: ServerState = app.state.server
    await state.open()
    try:
        yield
    finally:
        await state.close()
