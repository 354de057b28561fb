"""The errors of requests: their codes, statuses and response bodies.

`Code` names the error, and its `kind` gives the HTTP status under `/v1` and on native routes, the OpenAI `type` and the
native `error_type`. Handlers raise `Fault(Code.X, "sentence", param=...)` and never build an error
response themselves; the request's path decides its format. Bodies are much smaller than 16 KiB and contain neither the
request's values nor paths on the server's disk: `safe_text` shortens and cleans messages of other programs.
"""

import errno
import re
from enum import Enum
from typing import Any, NamedTuple

from starlette.responses import JSONResponse


class Kind(NamedTuple):
    """The statuses and types of an error. `is_retryable` says whether sending the same request again may succeed."""

    v1_status: int
    native_status: int
    openai_type: str
    native_type: str
    is_retryable: bool = False


_INVALID = Kind(400, 422, "invalid_request_error", "validation")
_CONFLICT = Kind(409, 409, "conflict_error", "conflict")
_MISSING = Kind(404, 404, "not_found_error", "not_found")
_UNAVAILABLE = Kind(503, 503, "server_error", "overloaded", is_retryable=True)


class Code(Enum):
    """The error codes. Their values are the field `code` of error responses."""

    INVALID_JSON = "invalid_json", _INVALID
    INVALID_PARAMETER = "invalid_parameter", _INVALID
    UNKNOWN_PARAMETER = "unknown_parameter", _INVALID
    UNSUPPORTED_PARAMETER = "unsupported_parameter", _INVALID
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded", _INVALID
    TEMPLATE_ERROR = "template_error", Kind(400, 422, "invalid_request_error", "template_error")
    TOKENIZER_ERROR = "tokenizer_error", _INVALID
    INVALID_API_KEY = "invalid_api_key", Kind(401, 401, "authentication_error", "unauthorized")
    FORBIDDEN = "forbidden", Kind(403, 403, "permission_error", "unauthorized")
    ROUTE_NOT_FOUND = "route_not_found", _MISSING
    METHOD_NOT_ALLOWED = "method_not_allowed", Kind(405, 405, "invalid_request_error", "validation")
    MODEL_NOT_FOUND = "model_not_found", _MISSING
    JOB_NOT_FOUND = "job_not_found", _MISSING
    FILE_NOT_FOUND = "file_not_found", _MISSING
    REQUEST_NOT_FOUND = "request_not_found", _MISSING
    REQUEST_TIMEOUT = "request_timeout", Kind(408, 408, "invalid_request_error", "validation")
    REQUEST_CANCELLED = "request_cancelled", _CONFLICT
    JOB_STATE = "job_state", _CONFLICT
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch", _CONFLICT
    ALIAS_BUSY = "alias_busy", _CONFLICT
    TRAINING_REFUSED = "training_refused", _CONFLICT
    ACTIVATION_FAILED = "activation_failed", _CONFLICT
    NOT_ROLLING = "scales_not_rolling", _CONFLICT
    LOAD_FAILED = "load_failed", _CONFLICT
    NAME_TAKEN = "name_taken", _CONFLICT
    BODY_TOO_LARGE = "body_too_large", Kind(413, 413, "invalid_request_error", "validation")
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type", Kind(415, 415, "invalid_request_error", "validation")
    QUEUE_FULL = "queue_full", Kind(429, 429, "rate_limit_error", "overloaded", is_retryable=True)
    RATE_LIMITED = "rate_limit_exceeded", Kind(429, 429, "rate_limit_error", "overloaded", is_retryable=True)
    STARTING = "starting", _UNAVAILABLE
    DRAINING = "draining", _UNAVAILABLE
    PAUSED = "paused_for_training", _UNAVAILABLE
    ENGINE_DOWN = "engine_down", _UNAVAILABLE
    STORAGE_UNAVAILABLE = "storage_unavailable", _UNAVAILABLE
    GENERATION_FAILED = "generation_failed", Kind(500, 424, "server_error", "generation")
    INTERNAL = "internal_error", Kind(500, 500, "server_error", "internal")
    DISK_FULL = "disk_full", Kind(507, 507, "server_error", "storage")

    kind: Kind

    def __new__(cls, value: str, kind: Kind = _INVALID) -> "Code":  # the default is for `Code("internal_error")`
        code = object.__new__(cls)
        code._value_, code.kind = value, kind
        return code


ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's error type for each status under `/v1`."""

MAX_MESSAGE_LENGTH = 600
_PATH = re.compile(r"(?<![\w/])/(?:[\w.@+-]+/)+[\w.@+-]*")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


def safe_text(text: str) -> str:
    """Returns the text as one line of at most MAX_MESSAGE_LENGTH characters, without memory addresses.

    Of file-system paths, only the last part is kept.
    """
    line = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    line = _PATH.sub(lambda m: m.group().rstrip("/").rsplit("/", 1)[-1], _ADDRESS.sub("0x…", line))
    return line if len(line) <= MAX_MESSAGE_LENGTH else line[: MAX_MESSAGE_LENGTH - 1] + "…"


class Fault(Exception):  # noqa: N818 - the request failed, not the program
    """An error of a request, with a message for the client.

    `param` is the field at fault, and `hint` says what to do. `retry_after` is in seconds; its default is 1 for
    retryable codes.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        param: str | None = None,
        hint: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = safe_text(message)
        self.param = param if param is None else safe_text(param)[:120]
        self.hint = hint
        self.retry_after = retry_after if retry_after is not None or not code.kind.is_retryable else 1

    def status(self, path: str) -> int:
        return self.code.kind.v1_status if is_openai(path) else self.code.kind.native_status

    def body(self, path: str, request_id: str) -> dict[str, Any]:
        """Returns the error body for `path`: of Anthropic or OpenAI under /v1, with `error_type` elsewhere."""
        if is_anthropic(path):
            return self.anthropic(request_id)
        return self.openai() if is_openai(path) else self.native(request_id)

    @property
    def full_message(self) -> str:
        """The message followed by the hint."""
        return f"{self.message} {self.hint}" if self.hint else self.message

    def anthropic(self, request_id: str) -> dict[str, Any]:
        status = self.code.kind.v1_status
        kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        error: dict[str, Any] = {"type": kind, "message": self.full_message}
        if self.param == "thread":  # Anthropic's client then repeats the request without this field
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"type": "error", "error": error, "request_id": request_id}

    def openai(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.full_message,
                "type": self.code.kind.openai_type,
                "param": self.param,
                "code": self.code.value,
            }
        }

    def native(self, request_id: str) -> dict[str, Any]:
        """Returns the body for native routes. For unknown paths, `error` includes the hint, because clients of other
        projects may show only that field."""
        is_unknown_path = self.code is Code.ROUTE_NOT_FOUND
        error, hint = (self.full_message, None) if is_unknown_path else (self.message, self.hint)
        body = {"error": error, "error_type": self.code.kind.native_type, "code": self.code.value}
        extra = {"param": self.param, "hint": hint, "request_id": request_id}
        return body | {key: value for key, value in extra.items() if value}

    def headers(self) -> dict[str, str]:
        """Returns headers that tell clients when to retry, or not to retry (SDKs would retry a 408 or 409)."""
        if self.code is Code.INVALID_API_KEY:
            return {"WWW-Authenticate": 'Basic realm="fp8serve", charset="UTF-8"'}
        if self.retry_after is not None:
            return {"Retry-After": str(self.retry_after)}
        return {"x-should-retry": "false"} if self.code.kind.v1_status in (408, 409) else {}

    def response(self, path: str, request_id: str) -> JSONResponse:
        id_header = {"request-id": request_id} if is_anthropic(path) else {}
        return JSONResponse(self.body(path, request_id), self.status(path), self.headers() | id_header)


STORAGE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG})
"""Error numbers of writes to a full, failing or read-only disk."""


def disk_fault(reason: str) -> Fault:
    """Returns the fault for a write that the disk of the data directory refused."""
    return Fault(
        Code.DISK_FULL, f"The data directory cannot be written: {reason}.", hint="Free space on the server's disk."
    )


def is_anthropic(path: str) -> bool:
    """Whether `path` is a route of Anthropic's API, with its format of errors."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def is_openai(path: str) -> bool:
    """Whether `path` has the statuses of `/v1` and, unless `is_anthropic`, OpenAI's format of errors."""
    return path in ("/v1", "/classify") or path.startswith("/v1/")
