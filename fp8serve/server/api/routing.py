"""What all routes have in common: arguments of handlers other than bodies, the base of the models of their answers, and
the check of long bodies.

Long bodies are checked in a parser process before FastAPI sees them. FastAPI gets the same request, valid and without
rows of training data, which the process has written to a file.
"""

import secrets
import shutil
from collections.abc import Callable, Coroutine
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

from fastapi import Depends, Header, Query, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, with_config
from starlette.responses import Response

from fp8serve.server.http.scope import replay
from fp8serve.server.http.streams import until_disconnect
from fp8serve.server.parsing.parser_pool import SHORT
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
                    "description": "Of each event of the stream.",
                    "required": ["data"],
                    "properties": {name: {"type": "string"} for name in ("data", "event", "id")},
                }
            }
        }
    }
}
"""The description of a stream of events, for `responses` of a route that can answer with one."""


def state_of(request: Request) -> ServerState:
    """The state that `create_app` made."""
    state: ServerState = request.app.state.server
    return state


StateDep = Annotated[ServerState, Depends(state_of)]
PageSize = Annotated[int, Query(ge=1, le=1000)]
IdempotencyKey = Annotated[str | None, Header(max_length=255)]


class Answer(BaseModel):
    """The base of every object in an answer. Objects are closed: a field that its class lacks is an error."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), json_schema_serialization_defaults_required=True)


closed = with_config(extra="forbid")
"""Closes a TypedDict, the form of objects of which an answer has thousands: checking one makes no instance."""


class CachedTokens(Answer):
    cached_tokens: int


def absent() -> Any:
    """The default of a field that is left out of the answer while it is None."""
    return Field(None, exclude_if=lambda value: value is None)


def finite(logprob: float) -> float:
    """A finite number for one that may be minus infinity, which JSON does not have."""
    return max(logprob, LOWEST_LOGPROB)


def _context(state: ServerState) -> int:
    """The longest context of all models; before one is loaded, more than a body can hold."""
    served = [model.current for model in state.models.models.values() if model.current is not None]
    return max((s.engine.limits.max_model_len for s in served), default=state.settings.limits.body_bytes)


def _model(hint: Any) -> type[Any] | None:
    """The class of a route's body, from `Body` or `Body | None`; None for a route without a body."""
    classes = (kind for kind in get_args(hint) or (hint,) if isinstance(kind, type) and kind is not NoneType)
    return next(classes, None)


class BoundedRoute(APIRoute):
    """Checks long bodies in a parser process; if they held rows, `scope["rows"]` names their folder. `body_model`: the
    class of its bodies."""

    body_model: type[Any] | None = None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        self.body_model = model = _model(get_type_hints(self.endpoint).get("body"))
        if model is None:
            return handle
        has_rows = not model.model_fields.keys().isdisjoint(ROWS)

        async def bounded(request: Request) -> Response:
            raw = await request.body()
            if len(raw) <= SHORT:
                if has_rows:
                    check_keys(raw)
                return await handle(request)
            state = state_of(request)
            folder = state.runner.root / f"rows-{secrets.token_hex(8)}"
            try:
                checked = await until_disconnect(request, state.parser.body(model, raw, folder, _context(state)))
                scope = {**request.scope, "rows": folder if folder.is_dir() else None}
                return await handle(Request(scope, replay(checked, request.receive)))
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        return bounded
