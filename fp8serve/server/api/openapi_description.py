"""Adds to the OpenAPI document what FastAPI cannot derive: error responses, example bodies and links.

`ERROR_CODES` lists the error codes of each operation. Codes of all routes, such as those for a missing API key or
an invalid body, are added here. The HTTP statuses are those of `faults.Code`, from which error responses are made. The
response of an operation that creates a job or a file links to the operations that take its id.
"""

from typing import Literal

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from fp8serve.server.api.routing import JsonObject, ResponseModel, omit_if_none
from fp8serve.server.faults import Code, is_anthropic, is_openai
from fp8serve.server.http.scope import OPEN_PATHS

REFERENCE = "#/components/schemas/{model}"


class NativeError(ResponseModel):
    error: str
    error_type: str
    code: str
    param: str = omit_if_none()
    hint: str = omit_if_none()
    request_id: str = omit_if_none()


class OpenAIErrorBody(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(ResponseModel):
    error: OpenAIErrorBody


class AnthropicErrorBody(ResponseModel):
    type: str
    message: str


class AnthropicError(ResponseModel):
    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str


# The error codes of groups of operations.
MODEL_UNAVAILABLE = (Code.STARTING, Code.ENGINE_DOWN, Code.MODEL_NOT_FOUND)
TOKENIZATION = (*MODEL_UNAVAILABLE, Code.TOKENIZER_ERROR)
GENERATION = (*TOKENIZATION, Code.QUEUE_FULL, Code.RATE_LIMITED, Code.REQUEST_CANCELLED, Code.GENERATION_FAILED)
EMBEDDING = (*TOKENIZATION, Code.RATE_LIMITED, Code.CONTEXT_LENGTH_EXCEEDED)
STORED = (Code.STORAGE_UNAVAILABLE,)  # of operations that use the job database, or the bucket
JOB = (Code.JOB_NOT_FOUND, *STORED)
SUBMISSION = (
    Code.MODEL_NOT_FOUND, Code.FILE_NOT_FOUND, Code.TRAINING_REFUSED, Code.QUEUE_FULL, Code.DRAINING, Code.DISK_FULL,
    *STORED,
)  # fmt: skip
ACTIVATION = (
    Code.JOB_NOT_FOUND, Code.JOB_STATE, Code.ALIAS_BUSY, Code.ACTIVATION_FAILED, Code.LOAD_FAILED, Code.NAME_TAKEN,
    Code.STARTING, Code.ENGINE_DOWN, Code.DISK_FULL, *STORED,
)  # fmt: skip
SCALE_SAVE = (*MODEL_UNAVAILABLE, Code.NOT_ROLLING, Code.NAME_TAKEN, Code.ALIAS_BUSY, Code.DISK_FULL)
LOAD = (Code.MODEL_NOT_FOUND, Code.NAME_TAKEN, Code.LOAD_FAILED, Code.JOB_STATE, *STORED)
ADAPTER_LOAD = (*LOAD, Code.ALIAS_BUSY, Code.STARTING, Code.ENGINE_DOWN, Code.DRAINING)
ENGINE_CALL = (Code.LOAD_FAILED, Code.STARTING, Code.ENGINE_DOWN)
WEIGHT_UPDATE = (*ENGINE_CALL, Code.ALIAS_BUSY, Code.ACTIVATION_FAILED, Code.DRAINING)
RESUMPTION = (*JOB, Code.JOB_STATE, Code.TRAINING_REFUSED, Code.DRAINING, Code.DISK_FULL)
FILE = (Code.FILE_NOT_FOUND, *STORED)
JOBS = "/v1/fine_tuning/jobs"

ALL_OPERATIONS = (Code.INVALID_API_KEY, Code.FORBIDDEN, Code.REQUEST_TIMEOUT, Code.BODY_TOO_LARGE, Code.INTERNAL)
WITH_BODY = (
    Code.INVALID_JSON, Code.INVALID_PARAMETER, Code.UNKNOWN_PARAMETER, Code.UNSUPPORTED_PARAMETER, Code.QUEUE_FULL,
    Code.UNSUPPORTED_MEDIA_TYPE,
)  # fmt: skip

ERROR_CODES: dict[tuple[str, str], tuple[Code, ...]] = {
    ("get", "/"): (),
    ("get", "/health"): (),
    ("get", "/health/live"): (),
    ("get", "/health/ready"): (),
    ("get", "/info"): MODEL_UNAVAILABLE,
    ("get", "/version"): (),
    ("get", "/scales"): MODEL_UNAVAILABLE,
    ("post", "/scales/save"): SCALE_SAVE,
    ("get", "/scales/history"): (*MODEL_UNAVAILABLE, Code.INVALID_PARAMETER),
    ("get", "/requests"): (),
    ("post", "/requests/{request_id}/cancel"): (Code.REQUEST_NOT_FOUND,),
    ("get", "/metrics"): (),
    ("post", "/generate"): GENERATION,
    ("post", "/tokenize"): (*TOKENIZATION, Code.RATE_LIMITED, Code.TEMPLATE_ERROR),
    ("post", "/detokenize"): (*TOKENIZATION, Code.RATE_LIMITED),
    ("post", "/v1/completions"): GENERATION,
    ("post", "/v1/chat/completions"): (*GENERATION, Code.TEMPLATE_ERROR),
    ("post", "/v1/responses"): (*GENERATION, Code.TEMPLATE_ERROR),
    ("post", "/v1/messages"): (*GENERATION, Code.TEMPLATE_ERROR),
    ("post", "/v1/messages/count_tokens"): (*TOKENIZATION, Code.TEMPLATE_ERROR),
    ("post", "/v1/embeddings"): EMBEDDING,
    ("post", "/v1/rerank"): EMBEDDING,
    ("post", "/v1/score"): EMBEDDING,
    ("post", "/classify"): EMBEDDING,
    ("get", "/v1/models"): STORED,
    ("get", "/v1/models/{model}"): (Code.MODEL_NOT_FOUND, *STORED),
    ("post", "/finetune"): (*SUBMISSION, Code.IDEMPOTENCY_MISMATCH),
    ("post", "/finetune/validate"): SUBMISSION,
    ("get", "/finetune"): JOB,
    ("get", "/finetune/{job_id}"): JOB,
    ("delete", "/finetune/{job_id}"): (*JOB, Code.JOB_STATE, Code.DISK_FULL),
    ("get", "/finetune/{job_id}/events"): (*JOB, Code.QUEUE_FULL),
    ("get", "/finetune/{job_id}/checkpoints"): JOB,
    ("get", "/finetune/{job_id}/metrics"): JOB,
    ("post", "/finetune/{job_id}/cancel"): (*JOB, Code.JOB_STATE),
    ("post", "/finetune/{job_id}/pause"): (*JOB, Code.JOB_STATE),
    ("post", "/finetune/{job_id}/resume"): RESUMPTION,
    ("post", "/finetune/{job_id}/activate"): ACTIVATION,
    ("get", "/models"): STORED,
    ("post", "/models/{name}/activate"): ACTIVATION,
    ("post", "/models/{name}/load"): LOAD,
    ("post", "/models/{name}/unload"): (Code.MODEL_NOT_FOUND, Code.NAME_TAKEN, Code.ALIAS_BUSY),
    ("post", "/models/{name}/alias"): (Code.MODEL_NOT_FOUND, Code.NAME_TAKEN),
    ("post", "/weights"): (*ADAPTER_LOAD, Code.ACTIVATION_FAILED),
    ("get", "/get_world_size"): (),
    ("get", "/server_info"): (Code.STARTING, Code.ENGINE_DOWN),
    ("post", "/init_weight_transfer_engine"): (*ENGINE_CALL, Code.DRAINING),
    ("post", "/start_weight_update"): ENGINE_CALL,
    ("post", "/update_weights"): WEIGHT_UPDATE,
    ("post", "/finish_weight_update"): WEIGHT_UPDATE,
    ("post", "/pause"): (*ENGINE_CALL, Code.DRAINING, Code.INVALID_PARAMETER),
    ("post", "/resume"): (Code.LOAD_FAILED,),
    ("get", "/is_paused"): (),
    ("post", "/reset_prefix_cache"): ENGINE_CALL,
    ("post", "/init_weights_update_group"): (*ENGINE_CALL, Code.DRAINING),
    ("post", "/destroy_weights_update_group"): ENGINE_CALL,
    ("post", "/update_weights_from_distributed"): WEIGHT_UPDATE,
    ("post", "/pause_generation"): (*ENGINE_CALL, Code.DRAINING),
    ("post", "/continue_generation"): (Code.LOAD_FAILED,),
    ("get", "/flush_cache"): ENGINE_CALL,
    ("post", "/flush_cache"): ENGINE_CALL,
    ("post", "/v1/load_lora_adapter"): ADAPTER_LOAD,
    ("post", "/v1/unload_lora_adapter"): (Code.MODEL_NOT_FOUND, Code.DISK_FULL, *STORED),
    ("post", "/v1/files"): (Code.INVALID_PARAMETER, Code.UNSUPPORTED_MEDIA_TYPE, Code.DISK_FULL, *STORED),
    ("get", "/v1/files"): FILE,
    ("get", "/v1/files/{file_id}"): FILE,
    ("delete", "/v1/files/{file_id}"): (*FILE, Code.JOB_STATE),
    ("get", "/v1/files/{file_id}/content"): FILE,
    ("post", JOBS): (*SUBMISSION, Code.IDEMPOTENCY_MISMATCH),
    ("get", JOBS): JOB,
    ("get", JOBS + "/{job_id}"): JOB,
    ("get", JOBS + "/{job_id}/events"): JOB,
    ("get", JOBS + "/{job_id}/checkpoints"): JOB,
    ("post", JOBS + "/{job_id}/cancel"): (*JOB, Code.JOB_STATE),
    ("post", JOBS + "/{job_id}/pause"): (*JOB, Code.JOB_STATE),
    ("post", JOBS + "/{job_id}/resume"): RESUMPTION,
}
"""The error codes of each operation. A test fails for a route without an entry."""

ROWS = [{"prompt": "The capital of France is", "completion": " Paris."}]
MESSAGES = [{"role": "user", "content": "Name a colour."}]
EXAMPLES: dict[str, JsonObject] = {
    "/generate": {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 16}},
    "/tokenize": {"prompt": "Once upon a time"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 16},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 16},
    "/v1/responses": {"input": "Name a colour.", "max_output_tokens": 16},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
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
    "/init_weight_transfer_engine": {
        "init_info": {"master_address": "10.0.0.5", "master_port": 51216, "rank_offset": 1, "world_size": 2}
    },
    "/update_weights": {
        "update_info": {"names": ["model.norm.weight"], "dtype_names": ["bfloat16"], "shapes": [[4096]]}
    },
    "/init_weights_update_group": {
        "master_address": "10.0.0.5",
        "master_port": 51216,
        "rank_offset": 1,
        "world_size": 2,
        "backend": "gloo",
    },
    "/update_weights_from_distributed": {"names": ["model.norm.weight"], "dtypes": ["bfloat16"], "shapes": [[4096]]},
    "/v1/load_lora_adapter": {"lora_name": "clerk", "lora_path": "clerk-2026-01"},
    "/v1/unload_lora_adapter": {"lora_name": "tutor"},
}
"""A valid body of each of these routes."""
LINKS = {("/finetune", "202"): "job_id", ("/v1/files", "200"): "file_id", (JOBS, "200"): "job_id"}
"""The path parameter that takes the `id` of a response, by the path and the status of the response."""


def describe(app: FastAPI) -> None:
    """Replaces `app.openapi` by a function that returns the completed document, which it builds at the first call."""
    derive_document = app.openapi

    def openapi() -> JsonObject:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(derive_document())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: JsonObject) -> JsonObject:
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    errors = [(model, "serialization") for model in (NativeError, OpenAIError, AnthropicError)]
    schemas |= models_json_schema(errors, ref_template=REFERENCE)[1]["$defs"]  # type: ignore[arg-type]
    page = {"200": {"description": "Success", "content": {"text/html": {"schema": {"type": "string"}}}}}
    console = {"tags": ["server"], "summary": "The console", "operationId": "console", "responses": page}
    document["paths"]["/"] = {"get": console}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            responses.pop("422", None)
            responses |= _error_responses(path, operation, ERROR_CODES[method, path.replace(":path", "")])
            if method == "post" and path in EXAMPLES:
                operation["requestBody"]["content"]["application/json"]["example"] = EXAMPLES[path]
            for (source, status), parameter in LINKS.items():
                if method == "post" and path == source:
                    responses[status]["links"] = _links(document, path, parameter)
    return document


def _error_responses(path: str, operation: JsonObject, specific_codes: tuple[Code, ...]) -> JsonObject:
    if path in OPEN_PATHS:
        return {}
    model = "AnthropicError" if is_anthropic(path) else "OpenAIError" if is_openai(path) else "NativeError"
    codes = ALL_OPERATIONS + specific_codes
    if "requestBody" in operation:
        codes = ALL_OPERATIONS + WITH_BODY + specific_codes
    elif "parameters" in operation:
        codes = (*ALL_OPERATIONS, Code.INVALID_PARAMETER, *specific_codes)
    codes_by_status: dict[str, list[str]] = {}
    for code in codes:
        status = code.kind.v1_status if is_openai(path) else code.kind.native_status
        codes_by_status.setdefault(str(status), []).append(code.value)
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model=model)}}}
    return {
        status: {"description": ", ".join(dict.fromkeys(codes)), "content": content}
        for status, codes in sorted(codes_by_status.items())
    }


def _links(document: JsonObject, path: str, parameter: str) -> JsonObject:
    """Returns links from the response of `path` to the operations below `path` that take its id."""
    response_id = "$response.body#/id"
    links = {
        operation["operationId"]: {"operationId": operation["operationId"], "parameters": {parameter: response_id}}
        for other_path, operations in document["paths"].items()
        if other_path.startswith(path + "/{" + parameter + "}")
        for operation in operations.values()
    }
    if parameter == "file_id":
        create_job = document["paths"][JOBS]["post"]["operationId"]
        links[create_job] = {"operationId": create_job, "requestBody": {"model": "base", "training_file": response_id}}
    return links
