"""Turns exceptions of handlers into error responses."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from fp8serve import logs
from fp8serve.errors import DataError, Fp8ServeError, MachineError
from fp8serve.options import describe_violation
from fp8serve.server.faults import STORAGE_ERRORS, Code, Fault, disk_fault, is_anthropic
from fp8serve.server.http.scope import METHODS
from fp8serve.server.http.streams import ClientGoneError

CLIENT_CLOSED_STATUS = 499
MAX_PATH_PARTS = 8  # how many of an unknown path's last components are compared with the routes


def add_error_handlers(app: FastAPI, paths: Iterable[str]) -> None:
    """Registers the handlers, which render each error in the format of its path. `paths` are those of all routes."""
    app.state.paths = frozenset(path for path in paths if "{" not in path and path != "/")
    handlers: dict[type[Exception], Callable[[Request, Any], Awaitable[Response]]] = {
        Fault: _on_fault,
        RequestValidationError: _on_invalid,
        HTTPException: _on_http,
        Fp8ServeError: _on_fp8serve_error,
        OSError: _on_os_error,
        ClientGoneError: _on_client_gone,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _render(request: Request, fault: Fault, path: str | None = None) -> Response:
    logs.bind(error=fault.code.value)
    return fault.response(path or request.scope["path"], request.scope.get("request_id", ""))


async def _on_fault(request: Request, fault: Fault) -> Response:
    return _render(request, fault)


async def _on_fp8serve_error(request: Request, error: Fp8ServeError) -> Response:
    """Handles errors of fp8serve that no handler caught. Except for MachineError, the client has caused them."""
    if isinstance(error, MachineError):
        return _render(request, Fault(Code.ENGINE_DOWN, str(error)))
    param = "data" if isinstance(error, DataError) else None
    return _render(request, Fault(Code.INVALID_PARAMETER, str(error), param=param))


async def _on_os_error(request: Request, error: OSError) -> Response:
    """Handles errors of a full or failing disk. Any other OSError is a bug and is raised again."""
    if error.errno in STORAGE_ERRORS:
        return _render(request, disk_fault(error.strerror or "the system gives no reason"))
    raise error


async def _on_client_gone(request: Request, error: ClientGoneError) -> Response:
    """Returns a response that no client receives, whose status is for the metrics."""
    return Response(status_code=CLIENT_CLOSED_STATUS)


async def _on_http(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        route = _nearest_route(request)
        fault = Fault(Code.ROUTE_NOT_FOUND, "There is no such route here.", hint=_route_hint(request, route))
        return _render(request, fault, route)  # clients of that route show only errors in its format
    if error.status_code == 405:
        fault = Fault(Code.METHOD_NOT_ALLOWED, "This route does not accept that method.", hint="GET /docs lists them.")
        response = _render(request, fault)
        scope = {"type": "http", "path": request.scope["path"], "headers": []}
        matches = {
            method for method in METHODS for route in request.app.routes
            if route.matches(scope | {"method": method})[0] is Match.FULL
        }  # fmt: skip
        response.headers["Allow"] = ", ".join(sorted(matches))
        return response
    return _render(request, Fault(Code.INVALID_JSON, "The request body cannot be parsed as JSON."))


def _nearest_route(request: Request) -> str | None:
    """Returns the route that the client probably meant, or None.

    Most often the client's base URL is wrong: /v1 is missing or repeated, or the path of a proxy precedes it.
    """
    parts = request.scope["path"].strip("/").split("/")[-MAX_PATH_PARTS:]
    endings = ["/" + "/".join(parts[start:]) for start in range(len(parts))]
    if request.scope["path"] in _OLLAMA_PATHS:
        return None
    paths = (f"{prefix}{ending}" for ending in endings for prefix in ("/v1", ""))
    return next((path for path in paths if path in request.app.state.paths), None)


_OLLAMA_PATHS = frozenset(
    f"/api/{name}" for name in ("chat", "generate", "tags", "show", "embed", "embeddings", "ps", "pull", "version")
)
"""Routes of Ollama, whose clients show only the field `error`."""


def _route_hint(request: Request, route: str | None) -> str:
    if request.scope["path"] in _OLLAMA_PATHS:
        return "Ollama's protocol is not supported; use an OpenAI client with a base URL that ends in /v1."
    if route is None:
        return "GET /docs lists them."
    if is_anthropic(route) and "/v1/v1/" in request.scope["path"]:
        return f"The route is {route}, and Anthropic's client adds /v1 itself: leave it out of the base URL."
    if route.startswith("/v1/"):
        return f"The route is {route}, and the base URL of its clients ends in /v1."
    return f"The route is {route}."


async def _on_invalid(request: Request, error: RequestValidationError) -> Response:
    model = getattr(request.scope.get("route"), "body_model", None)
    fields = [] if model is None else [name for name in model.model_fields if name not in model.COMPATIBILITY_FIELDS]
    return _render(request, fault_of(error.errors(), fields))


def fault_of(errors: Sequence[Any], fields: Sequence[str] = ()) -> Fault:
    """Returns the first of pydantic's errors as a fault, without values that the client sent.

    For an unknown field, the most similar one of `fields` is suggested.
    """
    error = _error_of_matching_branch(errors)
    kind, field = str(error["type"]), _field_path(error["loc"])
    if kind == "json_invalid":
        return Fault(Code.INVALID_JSON, "The request body is not valid JSON.")
    if not field and kind in ("missing", "model_attributes_type", "dict_type", "model_type"):
        message = "The request body must be a JSON object."
        return Fault(Code.INVALID_JSON, message, hint="Send it with Content-Type: application/json.")
    if kind == "extra_forbidden":
        matches = get_close_matches(field, fields, 1)
        hint = f"Did you mean {matches[0]}?" if matches else None
        return Fault(Code.UNKNOWN_PARAMETER, f"{field} is not a field of this request.", param=field, hint=hint)
    if kind == "unsupported_parameter":
        name = ".".join(filter(None, (field, error["ctx"]["name"])))
        hint = error["ctx"].get("instead") or None
        message = f"This server does not support {name}; omit it."
        return Fault(Code.UNSUPPORTED_PARAMETER, message, param=name, hint=hint)
    clause = _with_alternatives(describe_violation(field or "The request", error), error, errors)
    return Fault(Code.INVALID_PARAMETER, f"{clause}.", param=field or None)


def _with_alternatives(clause: str, error: Any, errors: Sequence[Any]) -> str:
    """Adds the types that other branches of a union accept to the clause about a value of a wrong type."""
    if not str(error["type"]).endswith("_type"):
        return clause
    field = _field_path(error["loc"])
    type_errors = [e for e in errors if str(e["type"]).endswith("_type") and _field_path(e["loc"]) == field]
    types = dict.fromkeys(describe_violation("", e).removeprefix(" must be ") for e in type_errors)
    return " or ".join([clause, *(name for name in types if not clause.endswith(f"must be {name}"))])


def _error_of_matching_branch(errors: Sequence[Any]) -> Any:
    """Returns the first error, or the error of the union branch whose type the value has.

    pydantic reports errors of all branches of a union. A type error about the whole value only says that the value was
    meant for another branch. So an error of another kind, or about a part of the value, is preferred.
    """
    field = _field_path(errors[0]["loc"])
    within = [error for error in errors if f"{_field_path(error['loc'])}.".startswith(f"{field}.")]
    matching = (e for e in within if not str(e["type"]).endswith("_type") or _field_path(e["loc"]) != field)
    return next(matching, errors[0]) if str(errors[0]["type"]).endswith("_type") else errors[0]


def _field_path(location: Sequence[Any]) -> str:
    """Returns a path such as `messages.0.role`, without pydantic's names for the branches of a union."""
    parts = [str(part) for part in location[1:]]
    parts = [part for previous, part in pairwise(["", *parts]) if previous not in _TAGGED_FIELDS]
    names = [part for part in parts if (part.isidentifier() or part.isdigit()) and part not in _TYPE_BRANCHES]
    before = zip(["", "", *names], ["", *names], names, strict=False)  # each name after the two before it
    fields = [part for field, index, part in before if not (index.isdigit() and part in _ITEM_TAGS.get(field, ()))]
    return ".".join(part[:40] for part in fields)[:120]


_TYPE_BRANCHES = frozenset({"str", "int", "float", "bool"})
_TAGGED_FIELDS = frozenset({"response_format", "tool_choice"})
"""Fields whose `type` chooses a branch of a union. pydantic adds the branch's name after the field's name."""
_ITEM_TAGS = {
    "messages": frozenset({"user", "assistant", "system"}),
    "input": frozenset({"message", "function_call", "function_call_output", "reasoning"}),
    "content": frozenset({"thinking", "tool_use", "tool_result"}),
}
"""Lists whose items are branches of a union. pydantic adds the branch's name after the index."""
