"""Turns an exception in a handler into an answer: faults as they are, others translated first."""

from collections.abc import Iterable, Sequence
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
from fp8serve.options import rule
from fp8serve.server.faults import STORAGE_ERRORS, Code, Fault, disk_fault, is_anthropic
from fp8serve.server.http.scope import METHODS
from fp8serve.server.http.streams import ClientGoneError

CLIENT_CLOSED = 499
MAX_DEPTH = 8  # components of a path that is compared with the routes


def add_error_handlers(app: FastAPI, paths: Iterable[str]) -> None:
    """Every failure of a handler becomes an answer in the shape of its path. paths: those of the routes."""
    app.state.paths = frozenset(path for path in paths if "{" not in path and path != "/")
    app.add_exception_handler(Fault, _on_fault)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Fp8ServeError, _on_ours)
    app.add_exception_handler(OSError, _on_os_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)


def _render(request: Request, fault: Fault, path: str | None = None) -> Response:
    """path: whose shape the answer has, if not that of the request's own path."""
    logs.bind(error=fault.code.value)
    return fault.response(path or request.scope["path"], request.scope.get("request_id", ""))


async def _on_fault(request: Request, error: Exception) -> Response:
    return _render(request, error) if isinstance(error, Fault) else Response(status_code=500)


async def _on_ours(request: Request, error: Exception) -> Response:
    """An fp8serve error that no handler expected: the user's fault by definition, except if the machine lacks
    something.
    """
    if isinstance(error, MachineError):
        return _render(request, Fault(Code.ENGINE_DOWN, str(error)))
    param = "data" if isinstance(error, DataError) else None
    return _render(request, Fault(Code.INVALID_PARAMETER, str(error), param=param))


async def _on_os_error(request: Request, error: Exception) -> Response:
    """A full or failing disk, wherever it occurs; any other OSError is a bug."""
    if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
        return _render(request, disk_fault(error.strerror or "no reason is given"))
    raise error


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """No client receives this; the status is for the metrics."""
    return Response(status_code=CLIENT_CLOSED)


async def _on_http(request: Request, error: Exception) -> Response:
    status_code = error.status_code if isinstance(error, HTTPException) else 500
    if status_code == 404:
        route = _nearest_route(request)
        fault = Fault(Code.ROUTE_NOT_FOUND, "There is no such route here.", hint=_route_hint(request, route))
        return _render(request, fault, route)  # in another shape the client of that route shows no message
    if status_code == 405:
        fault = Fault(Code.METHOD_NOT_ALLOWED, "This route does not take that method.", hint="GET /docs lists them.")
        answer = _render(request, fault)
        answer.headers["Allow"] = ", ".join(sorted(_methods(request)))
        return answer
    return _render(request, Fault(Code.INVALID_JSON, "The request body is not JSON that can be read."))


def _nearest_route(request: Request) -> str | None:
    """The route that a path which is none was for: most often a client has another base URL than it needs, /v1 is
    missing or stands there twice, or it has the path of a proxy."""
    parts = request.scope["path"].strip("/").split("/")[-MAX_DEPTH:]
    endings = ["/" + "/".join(parts[start:]) for start in range(len(parts))]
    if request.scope["path"] in _OLLAMA:
        return None
    paths = (f"{prefix}{ending}" for ending in endings for prefix in ("/v1", ""))
    return next((path for path in paths if path in request.app.state.paths), None)


_OLLAMA = frozenset(
    f"/api/{name}" for name in ("chat", "generate", "tags", "show", "embed", "embeddings", "ps", "pull", "version")
)
"""Routes of Ollama, whose clients show nothing but `error`."""


def _route_hint(request: Request, route: str | None) -> str:
    if request.scope["path"] in _OLLAMA:
        return "Ollama's protocol is not spoken; use a client of OpenAI, with a base URL that ends in /v1."
    if route is None:
        return "GET /docs lists them."
    if is_anthropic(route) and "/v1/v1/" in request.scope["path"]:
        return f"The route is {route}, and Anthropic's client adds /v1 itself: leave it out of the base URL."
    if route.startswith("/v1/"):
        return f"The route is {route}, and the base URL of its clients ends in /v1."
    return f"The route is {route}."


def _methods(request: Request) -> set[str]:
    """The methods of the path of `request`, over all routes that it matches."""
    scope = {"type": "http", "path": request.scope["path"], "headers": []}

    def allowed(method: str) -> bool:
        matches = (route.matches(scope | {"method": method})[0] for route in request.app.routes)
        return Match.FULL in matches

    return {method for method in METHODS if allowed(method)}


async def _on_invalid(request: Request, error: Exception) -> Response:
    return _render(
        request,
        fault_of(error.errors(), _fields(request))
        if isinstance(error, RequestValidationError)
        else Fault(Code.INTERNAL, "The request failed."),
    )


def _fields(request: Request) -> list[str]:
    """The fields that the body of the route may have."""
    model = getattr(request.scope.get("route"), "body_model", None)
    return [] if model is None else [name for name in model.model_fields if name not in model.FOREIGN]


def fault_of(errors: Sequence[Any], fields: Sequence[str] = ()) -> Fault:
    """The first of pydantic's errors, in our words, without the values that were sent. An error about one branch of a
    union names the field. An unknown field is compared with `fields`.
    """
    first = _error_of_matching_branch(errors)
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
        near = get_close_matches(place, fields, 1)
        hint = f"Did you mean {near[0]}?" if near else None
        return Fault(Code.UNKNOWN_PARAMETER, f"{place} is not a field of this request.", param=place, hint=hint)
    if kind == "missing":
        return Fault(Code.INVALID_PARAMETER, f"{place} is missing.", param=place)
    if kind == "unsupported_parameter":
        name = ".".join(filter(None, (place, first["ctx"]["name"])))
        instead = first["ctx"].get("instead") or None
        message = f"This server does not implement {name}; leave it out."
        return Fault(Code.UNSUPPORTED_PARAMETER, message, param=name, hint=instead)
    clause = _with_alternatives(rule(place or "The request", first), first, errors)
    return Fault(Code.INVALID_PARAMETER, f"{clause}.", param=place or None)


def _with_alternatives(clause: str, first: Any, errors: Sequence[Any]) -> str:
    """The clause about a value of a wrong type, with the types that the other branches of a union want."""
    if not str(first["type"]).endswith("_type"):
        return clause
    place = _place(first["loc"])
    same = [e for e in errors if str(e["type"]).endswith("_type") and _place(e["loc"]) == place]
    others = dict.fromkeys(rule("", e).removeprefix(" must be ") for e in same)
    return " or ".join([clause, *(other for other in others if not clause.endswith(f"must be {other}"))])


def _error_of_matching_branch(errors: Sequence[Any]) -> Any:
    """The first error; if it only says that a value has the type of another branch of a union, that branch's error: one
    of another kind, or one about a part of the value."""
    place = _place(errors[0]["loc"])
    within = [error for error in errors if f"{_place(error['loc'])}.".startswith(f"{place}.")]
    matching = (e for e in within if not str(e["type"]).endswith("_type") or _place(e["loc"]) != place)
    return next(matching, errors[0]) if str(errors[0]["type"]).endswith("_type") else errors[0]


def _place(location: Sequence[Any]) -> str:
    """`parameters.top_p`, `messages.0.role`: field names and indexes, without pydantic's names for the branches of a
    union.
    """
    parts = [str(part) for part in location[1:]]
    own = [part for before, part in pairwise(["", *parts]) if before not in _TAGGED]
    named = [part for part in own if (part.isidentifier() or part.isdigit()) and part not in _BRANCHES]
    fields = [part for i, part in enumerate(named) if not _is_tag_of_item(named[:i], part)]
    return ".".join(part[:40] for part in fields)[:120]


def _is_tag_of_item(before: Sequence[str], part: str) -> bool:
    return len(before) > 1 and before[-1].isdigit() and part in _TAGS_OF_ITEMS.get(before[-2], ())


_BRANCHES = frozenset({"str", "int", "float", "bool"})
_TAGGED = frozenset({"response_format", "grammar", "tool_choice"})
"""Fields whose `type` chooses a branch of a union: the branch's name stands behind the field's."""
_TAGS_OF_ITEMS = {
    "messages": frozenset({"user", "assistant", "system"}),
    "input": frozenset({"message", "function_call", "function_call_output", "reasoning"}),
    "content": frozenset({"thinking", "tool_use", "tool_result"}),
}
"""Lists whose items are branches of a union: the branch's name stands behind the index."""
