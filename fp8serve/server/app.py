"""The HTTP application: routes, error rendering and the three layers in front of them, around one `House`.

`create_app(settings)` is a clean ASGI application that anything can host; `fp8serve.server.launch.run` hosts it with
uvicorn and adds binding, signals and draining. This process never imports torch.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

import fp8serve
from fp8serve.errors import DataError, Fp8ServeError, MachineError
from fp8serve.server import files, finetune, native, openai, openai_jobs, status
from fp8serve.server.description import describe
from fp8serve.server.faults import STORAGE_ERRORS, Code, Fault, disk_fault
from fp8serve.server.guard import METHODS, Envelope, Gate, Intake
from fp8serve.server.house import House
from fp8serve.server.models import Launch
from fp8serve.server.settings import Settings
from fp8serve.server.streams import ClientGoneError
from fp8serve.server.training import WORKER

SUMMARY = "Serve a language model in FP8, fine-tune it in FP8, and serve the result, through one interface."
CLIENT_CLOSED = 499


def create_app(settings: Settings, start_engine: Launch | None = None, worker: Sequence[str] = WORKER) -> FastAPI:
    """The application. Loading starts when its lifespan does, and `/health/ready` says when it is done.

    `start_engine` and `worker` replace the engine's and the trainer's process, for tests. Raises MachineError when the
    data directory cannot be used.
    """
    house = House(settings, start_engine, worker)
    app = FastAPI(
        title="fp8serve",
        version=fp8serve.__version__,
        summary=SUMMARY,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.house = house
    for router in (native.router, openai.router, finetune.router, files.router, openai_jobs.router, status.router):
        app.include_router(router)
    describe(app)
    _add_error_handlers(app)
    limits = settings.limits
    app.add_middleware(Intake, max_bytes=limits.body_bytes, seconds=limits.body_seconds, held_bytes=limits.held_bytes)
    app.add_middleware(Gate, settings=settings)
    app.add_middleware(Envelope, metrics=house.metrics)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    house: House = app.state.house
    await house.open()
    try:
        yield
    finally:
        await house.close()


# -- errors ------------------------------------------------------------------------------------------------------------


def _add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(Fault, _on_fault)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Fp8ServeError, _on_ours)
    app.add_exception_handler(OSError, _on_os_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)


def _render(request: Request, fault: Fault) -> Response:
    return fault.response(request.scope["path"], request.scope.get("request_id", ""))


async def _on_fault(request: Request, error: Exception) -> Response:
    return _render(request, error) if isinstance(error, Fault) else Response(status_code=500)


async def _on_ours(request: Request, error: Exception) -> Response:
    """An error of another room that no handler expected: the user's fault by definition, except where the machine lacks
    something.
    """
    if isinstance(error, MachineError):
        return _render(request, Fault(Code.ENGINE_DOWN, str(error)))
    param = "data" if isinstance(error, DataError) else None
    return _render(request, Fault(Code.INVALID_PARAMETER, str(error), param=param))


async def _on_os_error(request: Request, error: Exception) -> Response:
    """A full or failing disk, wherever it is met; any other is our mistake."""
    if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
        return _render(request, disk_fault(error.strerror or "no reason is given"))
    raise error


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; the status is for the metrics."""
    return Response(status_code=CLIENT_CLOSED)


async def _on_http(request: Request, error: Exception) -> Response:
    status_code = error.status_code if isinstance(error, HTTPException) else 500
    if status_code == 404:
        return _render(
            request, Fault(Code.ROUTE_NOT_FOUND, "There is no such route here.", hint="GET /docs lists them.")
        )
    if status_code == 405:
        fault = Fault(Code.METHOD_NOT_ALLOWED, "This route does not take that method.", hint="GET /docs lists them.")
        answer = _render(request, fault)
        answer.headers["Allow"] = ", ".join(sorted(_methods(request)))
        return answer
    return _render(request, Fault(Code.INVALID_JSON, "The request body is not JSON that can be read."))


def _methods(request: Request) -> set[str]:
    """What the path of `request` takes, over all routes that it matches."""
    scope = {"type": "http", "path": request.scope["path"], "headers": []}

    def allowed(method: str) -> bool:
        found = (route.matches(scope | {"method": method})[0] for route in request.app.routes)
        return Match.FULL in found

    return {method for method in METHODS if allowed(method)}


async def _on_invalid(request: Request, error: Exception) -> Response:
    return _render(
        request,
        fault_of(error.errors())
        if isinstance(error, RequestValidationError)
        else Fault(Code.INTERNAL, "The request failed."),
    )


def fault_of(errors: Sequence[Any]) -> Fault:
    """The first of pydantic's complaints, in our words, without what was sent. A complaint about one branch of a union
    names the field.
    """
    first = errors[0]
    kind, place = str(first["type"]), _place(first["loc"])
    if kind == "json_invalid":
        return Fault(Code.INVALID_JSON, "The request body is not valid JSON.")
    if not place and kind in ("missing", "model_attributes_type", "dict_type", "model_type"):
        return Fault(
            Code.INVALID_JSON,
            "The request body must be a JSON object.",
            hint="Send it with Content-Type: application/json.",
        )
    if kind == "extra_forbidden":
        return Fault(Code.UNKNOWN_PARAMETER, f"{place} is not a field of this request.", param=place)
    if kind == "missing":
        return Fault(Code.INVALID_PARAMETER, f"{place} is missing.", param=place)
    if kind == "unsupported_parameter":
        name = ".".join(filter(None, (place, first["ctx"]["name"])))
        return Fault(Code.UNSUPPORTED_PARAMETER, f"This server does not implement {name}; leave it out.", param=name)
    message = str(first["msg"])
    return Fault(
        Code.INVALID_PARAMETER, f"{place or 'The request'}: {message[:1].lower()}{message[1:]}.", param=place or None
    )


def _place(location: Sequence[Any]) -> str:
    """`parameters.top_p`, `messages.0.role`: field names and indexes, without pydantic's names for the branches of a
    union.
    """
    parts = [str(part) for part in location[1:]]
    named = [part for part in parts if part.isidentifier() or part.isdigit()]
    return ".".join(part[:40] for part in named if part not in _BRANCHES)[:120]


_BRANCHES = frozenset({"str", "int", "float", "bool"})
