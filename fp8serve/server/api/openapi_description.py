"""The OpenAPI description: what FastAPI knows of the requests, and one table of what each route answers.

`ROUTES` names, for each operation, the shape of a success and the ways to fail that are its own; those that every route
shares (no key, a foreign page, a body that is late, too large or wrong) are added here. The statuses follow from
`faults.KINDS`, so the description cannot differ from what a Fault becomes. An answer that names a job or a file links
to the operations that take its id.
"""

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from fp8serve.server.faults import KINDS, Code, is_anthropic, is_openai
from fp8serve.server.http.scope import OPEN_PATHS
from fp8serve.server.metrics import CONTENT_TYPE
from fp8serve.server.schemas import anthropic_answers as m
from fp8serve.server.schemas import finetune_responses as f
from fp8serve.server.schemas import item_answers as i
from fp8serve.server.schemas import request_views as r
from fp8serve.server.schemas import responses as a

JsonObject = dict[str, Any]
REFERENCE = "#/components/schemas/{model}"
EVENTS = "text/event-stream"


@dataclass(frozen=True)
class Route:
    """What one operation answers. `media`: further media types of a success; `many`: a list of one `model`;
    `names`: the path parameter that the answer's `id` fills.
    """

    model: type[BaseModel] | None
    fails: tuple[Code, ...] = ()
    status: int = 200
    media: tuple[str, ...] = ()
    many: bool = False
    names: str | None = None


DOWN = (Code.STARTING, Code.ENGINE_DOWN, Code.MODEL_NOT_FOUND)
READING = (*DOWN, Code.TOKENIZER_ERROR)
GENERATION = (*READING, Code.QUEUE_FULL, Code.RATE_LIMITED, Code.REQUEST_CANCELLED, Code.GENERATION_FAILED)
EMBEDDING = (*READING, Code.RATE_LIMITED, Code.CONTEXT_LENGTH_EXCEEDED)
JOB = (Code.JOB_NOT_FOUND,)
SUBMISSION = (
    Code.MODEL_NOT_FOUND, Code.FILE_NOT_FOUND, Code.TRAINING_REFUSED, Code.QUEUE_FULL, Code.DRAINING, Code.DISK_FULL,
)  # fmt: skip
SWAP = (
    Code.JOB_NOT_FOUND, Code.JOB_STATE, Code.ALIAS_BUSY, Code.ACTIVATION_FAILED, Code.LOAD_FAILED, Code.NAME_TAKEN,
    Code.STARTING, Code.ENGINE_DOWN, Code.DISK_FULL,
)  # fmt: skip
SAVING = (*DOWN, Code.NOT_ROLLING, Code.NAME_TAKEN, Code.ALIAS_BUSY, Code.DISK_FULL)
LOAD = (Code.MODEL_NOT_FOUND, Code.NAME_TAKEN, Code.LOAD_FAILED, Code.JOB_STATE)
BESIDE = (*LOAD, Code.ALIAS_BUSY, Code.STARTING, Code.ENGINE_DOWN, Code.DRAINING)
RESUMPTION = (Code.JOB_NOT_FOUND, Code.JOB_STATE, Code.TRAINING_REFUSED, Code.DRAINING, Code.DISK_FULL)
JOBS = "/v1/fine_tuning/jobs"

TAKES_BODY = (
    Code.INVALID_JSON, Code.INVALID_PARAMETER, Code.UNKNOWN_PARAMETER, Code.UNSUPPORTED_PARAMETER, Code.QUEUE_FULL,
    Code.UNSUPPORTED_MEDIA_TYPE,
)  # fmt: skip

ROUTES: dict[tuple[str, str], Route] = {
    ("get", "/"): Route(None, media=("text/html",)),
    ("get", "/health"): Route(a.Health),
    ("get", "/health/live"): Route(a.Health),
    ("get", "/health/ready"): Route(a.Health),
    ("get", "/info"): Route(a.Info, DOWN),
    ("get", "/version"): Route(a.Version),
    ("get", "/scales"): Route(a.Scales, DOWN),
    ("post", "/scales/save"): Route(a.SavedScales, SAVING),
    ("get", "/scales/history"): Route(a.ScaleHistory, (*DOWN, Code.INVALID_PARAMETER)),
    ("get", "/requests"): Route(r.RequestList),
    ("post", "/requests/{request_id}/cancel"): Route(r.RequestView, (Code.REQUEST_NOT_FOUND,)),
    ("get", "/metrics"): Route(None, media=(CONTENT_TYPE.partition(";")[0],)),
    ("post", "/generate"): Route(a.Generated, GENERATION, media=(EVENTS,)),
    ("post", "/generate_stream"): Route(None, GENERATION, media=(EVENTS,)),
    ("post", "/"): Route(a.Generated, GENERATION, media=(EVENTS,), many=True),
    ("post", "/tokenize"): Route(a.Tokenized, (*READING, Code.RATE_LIMITED, Code.TEMPLATE_ERROR)),
    ("post", "/detokenize"): Route(a.Detokenized, (*READING, Code.RATE_LIMITED)),
    ("post", "/v1/completions"): Route(a.Completion, GENERATION, media=(EVENTS,)),
    ("post", "/v1/chat/completions"): Route(a.ChatCompletion, (*GENERATION, Code.TEMPLATE_ERROR), media=(EVENTS,)),
    ("post", "/v1/responses"): Route(i.ItemResponse, (*GENERATION, Code.TEMPLATE_ERROR), media=(EVENTS,)),
    ("post", "/v1/messages"): Route(m.AnthropicMessage, (*GENERATION, Code.TEMPLATE_ERROR), media=(EVENTS,)),
    ("post", "/v1/messages/count_tokens"): Route(m.TokenCount, (*READING, Code.TEMPLATE_ERROR)),
    ("post", "/v1/embeddings"): Route(a.Vectors, EMBEDDING),
    ("post", "/v1/rerank"): Route(a.Ranking, EMBEDDING),
    ("post", "/v1/score"): Route(a.Scores, EMBEDDING),
    ("post", "/classify"): Route(a.Classifications, EMBEDDING),
    ("get", "/v1/models"): Route(a.ModelList),
    ("get", "/v1/models/{model}"): Route(a.Model, (Code.MODEL_NOT_FOUND,)),
    ("post", "/finetune"): Route(f.JobView, (*SUBMISSION, Code.IDEMPOTENCY_MISMATCH), 202, names="job_id"),
    ("post", "/finetune/validate"): Route(f.DryRun, SUBMISSION),
    ("get", "/finetune"): Route(f.JobPage, JOB),
    ("get", "/finetune/{job_id}"): Route(f.JobView, JOB),
    ("delete", "/finetune/{job_id}"): Route(f.DeletedJob, (*JOB, Code.JOB_STATE, Code.DISK_FULL)),
    ("get", "/finetune/{job_id}/events"): Route(f.EventPage, (*JOB, Code.QUEUE_FULL), media=(EVENTS,)),
    ("get", "/finetune/{job_id}/checkpoints"): Route(f.Checkpoints, JOB),
    ("get", "/finetune/{job_id}/metrics"): Route(f.Series, JOB, media=("text/csv",)),
    ("post", "/finetune/{job_id}/cancel"): Route(f.JobView, (*JOB, Code.JOB_STATE)),
    ("post", "/finetune/{job_id}/pause"): Route(f.JobView, (*JOB, Code.JOB_STATE)),
    ("post", "/finetune/{job_id}/resume"): Route(f.JobView, RESUMPTION),
    ("post", "/finetune/{job_id}/activate"): Route(f.Swapped, SWAP),
    ("get", "/models"): Route(f.Models),
    ("post", "/models/{name}/activate"): Route(f.Swapped, SWAP),
    ("post", "/models/{name}/load"): Route(f.ModelView, LOAD),
    ("post", "/models/{name}/unload"): Route(f.Unloaded, (Code.MODEL_NOT_FOUND, Code.NAME_TAKEN, Code.ALIAS_BUSY)),
    ("post", "/models/{name}/alias"): Route(f.ModelView, (Code.MODEL_NOT_FOUND, Code.NAME_TAKEN)),
    ("post", "/weights"): Route(f.Replaced, (*BESIDE, Code.ACTIVATION_FAILED)),
    ("post", "/v1/load_lora_adapter"): Route(None, BESIDE, media=("text/plain",)),
    ("post", "/v1/unload_lora_adapter"): Route(None, (Code.MODEL_NOT_FOUND, Code.DISK_FULL), media=("text/plain",)),
    ("post", "/v1/files"): Route(
        f.FileObject, (Code.INVALID_PARAMETER, Code.UNSUPPORTED_MEDIA_TYPE, Code.DISK_FULL), names="file_id"
    ),
    ("get", "/v1/files"): Route(f.FilePage, (Code.FILE_NOT_FOUND,)),
    ("get", "/v1/files/{file_id}"): Route(f.FileObject, (Code.FILE_NOT_FOUND,)),
    ("delete", "/v1/files/{file_id}"): Route(f.DeletedFile, (Code.FILE_NOT_FOUND, Code.JOB_STATE)),
    ("get", "/v1/files/{file_id}/content"): Route(None, (Code.FILE_NOT_FOUND,), media=("application/octet-stream",)),
    ("post", JOBS): Route(f.OpenAIJob, (*SUBMISSION, Code.IDEMPOTENCY_MISMATCH), names="job_id"),
    ("get", JOBS): Route(f.OpenAIJobPage, JOB),
    ("get", JOBS + "/{job_id}"): Route(f.OpenAIJob, JOB),
    ("get", JOBS + "/{job_id}/events"): Route(f.OpenAIEventPage, JOB),
    ("get", JOBS + "/{job_id}/checkpoints"): Route(f.OpenAICheckpointPage, JOB),
    ("post", JOBS + "/{job_id}/cancel"): Route(f.OpenAIJob, (*JOB, Code.JOB_STATE)),
    ("post", JOBS + "/{job_id}/pause"): Route(f.OpenAIJob, (*JOB, Code.JOB_STATE)),
    ("post", JOBS + "/{job_id}/resume"): Route(f.OpenAIJob, RESUMPTION),
}
"""A route that is not here fails a test."""

ROWS = [{"prompt": "The capital of France is", "completion": " Paris."}]
CHAT = [{"role": "user", "content": "Name a colour."}]
EXAMPLES: dict[str, JsonObject] = {
    "/": {"inputs": "Once upon a time"},
    "/generate": {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 16}},
    "/generate_stream": {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 16}},
    "/tokenize": {"prompt": "Once upon a time"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 16},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 16},
    "/v1/responses": {"input": "Name a colour.", "max_output_tokens": 16},
    "/v1/messages": {"messages": CHAT, "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/embeddings": {"input": "Once upon a time"},
    "/v1/rerank": {"query": "Once", "documents": ["upon", "a time"]},
    "/v1/score": {"text_1": "Once", "text_2": ["upon", "a time"]},
    "/classify": {"input": ["Once upon", "a time"]},
    "/finetune": {"data": ROWS, "max_steps": 1},
    "/finetune/validate": {"data": ROWS},
    "/scales/save": {"name": "my-model-as-of-today"},
    "/models/{name}/activate": {"source": "base"},
    "/models/{name}/load": {"source": None},
    "/models/{name}/alias": {"alias": "gpt-4o-mini"},
    "/weights": {"path": "policy/step-12"},
    "/v1/load_lora_adapter": {"lora_name": "clerk", "lora_path": "clerk-2026-01"},
    "/v1/unload_lora_adapter": {"lora_name": "tutor"},
}
"""A body that each of these routes takes as it is."""
EVENT = {
    "type": "object",
    "description": "Of each event of the stream.",
    "required": ["data"],
    "properties": {name: {"type": "string"} for name in ("data", "event", "id")},
}


def describe(app: FastAPI) -> None:
    """Makes `app.openapi()` tell answers, too. Made once, when it is first asked for."""
    of_requests = app.openapi

    def openapi() -> JsonObject:
        if app.openapi_schema is None:
            app.openapi_schema = _described(of_requests())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _described(document: JsonObject) -> JsonObject:
    models = [route.model for route in ROUTES.values() if route.model is not None]
    wanted: dict[type[BaseModel], None] = dict.fromkeys([*models, a.NativeError, a.OpenAIError, a.AnthropicError])
    _, definitions = models_json_schema([(model, "serialization") for model in wanted], ref_template=REFERENCE)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= definitions["$defs"]
    document["paths"]["/"]["get"] = {"tags": ["server"], "summary": "The console", "operationId": "console"}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            route = ROUTES[method, path.replace(":path", "")]
            operation["responses"] = _responses(path, operation, route)
            if method == "post" and path in EXAMPLES:
                operation["requestBody"]["content"]["application/json"]["example"] = EXAMPLES[path]
            if route.names is not None:
                operation["responses"][str(route.status)]["links"] = _links(document, path, route.names)
    return document


def _responses(path: str, operation: JsonObject, route: Route) -> JsonObject:
    found = {str(route.status): {"description": "Success", "content": _content(route)}}
    if path in OPEN_PATHS:
        return found | {"503": {"description": "No", "content": _content(route)}}
    error = _error(path)
    failed: dict[str, list[str]] = {}
    for code in (*_common(operation), *route.fails):
        kind = KINDS[code]
        failed.setdefault(str(kind.v1 if is_openai(path) else kind.native), []).append(code.value)
    content = {"application/json": {"schema": _reference(error)}}
    return found | {
        status: {"description": ", ".join(dict.fromkeys(codes)), "content": content}
        for status, codes in sorted(failed.items())
    }


def _error(path: str) -> type[BaseModel]:
    if is_anthropic(path):
        return a.AnthropicError
    return a.OpenAIError if is_openai(path) else a.NativeError


def _common(operation: JsonObject) -> tuple[Code, ...]:
    """Ways to fail that follow from what a route takes."""
    always = (Code.INVALID_API_KEY, Code.FORBIDDEN, Code.REQUEST_TIMEOUT, Code.BODY_TOO_LARGE, Code.INTERNAL)
    if "requestBody" in operation:
        return always + TAKES_BODY
    return (*always, Code.INVALID_PARAMETER) if "parameters" in operation else always


def _content(route: Route) -> JsonObject:
    content: JsonObject = {media: {"schema": EVENT if media == EVENTS else {"type": "string"}} for media in route.media}
    if route.model is None:
        return content
    one = _reference(route.model)
    schema = {"type": "array", "items": one, "minItems": 1, "maxItems": 1} if route.many else one
    return {"application/json": {"schema": schema}} | content


def _reference(model: type[BaseModel]) -> JsonObject:
    return {"$ref": REFERENCE.format(model=model.__name__)}


def _links(document: JsonObject, path: str, parameter: str) -> JsonObject:
    """From an answer that names something to every operation of the same surface that takes the name."""
    place = "$response.body#/id"
    links = {
        operation["operationId"]: {"operationId": operation["operationId"], "parameters": {parameter: place}}
        for other, operations in document["paths"].items()
        if other.startswith(path + "/{" + parameter + "}")
        for operation in operations.values()
    }
    if parameter == "file_id":
        create = document["paths"][JOBS]["post"]["operationId"]
        links[create] = {"operationId": create, "requestBody": {"model": "base", "training_file": place}}
    return links
