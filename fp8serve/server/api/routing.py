"""Shared parts of the routes: dependencies and parameters of handlers, the base class of response models, and the route
class that validates long bodies.

A parser process validates a long body before FastAPI receives it. FastAPI then gets the valid body without rows of
training data, which the process has written to a file.
"""

import asyncio
import secrets
import shutil
from collections.abc import Callable, Coroutine
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

from fastapi import Depends, Header, Query, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, with_config
from starlette.responses import Response

from fp8serve.server.finetuning.database import Job
from fp8serve.server.http.scope import replay
from fp8serve.server.http.streams import until_disconnect
from fp8serve.server.parsing.parser_pool import SHORT_BYTES
from fp8serve.server.parsing.sizes import ROWS, check_keys
from fp8serve.server.server_state import ServerState

JsonObject = dict[str, Any]
LOWEST_LOGPROB = -9999.0
EVENTS = "text/event-stream"
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            EVENTS: {
                "schema": {
                    "type": "object",
                    "description": "The fields of each event of the stream.",
                    "required": ["data"],
                    "properties": {name: {"type": "string"} for name in ("data", "event", "id")},
                }
            }
        }
    }
}
"""The OpenAPI description of a stream of server-sent events, for the argument `responses` of a route."""


async def _state(request: Request) -> ServerState:
    """Returns the state that `create_app` created. FastAPI would run a synchronous function in another thread."""
    state: ServerState = request.app.state.server
    return state


StateDep = Annotated[ServerState, Depends(_state)]


async def _job(job_id: str, state: StateDep) -> Job:
    """Returns the job that the path names. Raises Fault 404 if there is none."""
    return await asyncio.to_thread(state.jobs.get, job_id)


JobDep = Annotated[Job, Depends(_job)]
PageSize = Annotated[int, Query(ge=1, le=1000)]
IdempotencyKey = Annotated[str | None, Header(max_length=255)]


class ResponseModel(BaseModel):
    """The base class of response models. A field that the class does not declare is an error."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), json_schema_serialization_defaults_required=True)


forbid_extra = with_config(extra="forbid")
"""A decorator for a TypedDict whose undeclared fields are errors. TypedDicts are for objects of which a response has
thousands, because validating one creates no instance."""


class CachedTokens(ResponseModel):
    cached_tokens: int


def omit_if_none() -> Any:
    """Returns the default of a field that is omitted from the response if it is None."""
    return Field(None, exclude_if=lambda value: value is None)


def finite(logprob: float) -> float:
    """Returns a log-probability, with LOWEST_LOGPROB instead of minus infinity, which JSON cannot represent."""
    return max(logprob, LOWEST_LOGPROB)


class BoundedRoute(APIRoute):
    """A route whose long bodies are validated in a parser process. `scope["rows"]` is the directory of the training
    rows of such a body, or None. `body_model` is the class of the body."""

    body_model: type[Any] | None = None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        hint = get_type_hints(self.endpoint).get("body")  # Body or Body | None, if the route has a body
        hints = (item for item in get_args(hint) or (hint,) if item is not NoneType)
        self.body_model = model = next(hints, None)
        if model is None:
            return handle
        has_rows = not model.model_fields.keys().isdisjoint(ROWS)

        async def handle_bounded(request: Request) -> Response:
            raw = await request.body()
            if len(raw) <= SHORT_BYTES:
                if has_rows:
                    check_keys(raw)
                return await handle(request)
            state = await _state(request)
            folder = state.runner.root / f"rows-{secrets.token_hex(8)}"
            served = [model.current for model in state.models.models.values() if model.current is not None]
            contexts = [weights.engine.limits.max_model_len for weights in served] or [len(raw)]
            try:
                parsing = state.parser.check_body(model, raw, folder, max(contexts))
                valid_body = await until_disconnect(request, parsing)
                scope = {**request.scope, "rows": folder if folder.is_dir() else None}
                return await handle(Request(scope, replay(valid_body, request.receive)))
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        return handle_bounded
