"""The four scopes of API keys, and the routes that each of them opens.

`admin` opens every route. A route that is missing in the table is open for `admin` alone. Paths are matched as the
router matches them, on the decoded path.
"""

import re
from collections.abc import Iterable

from starlette.routing import compile_path
from starlette.types import Scope as Request

from fp8serve.server.access.keys import SCOPES, Scope

JOBS = "/v1/fine_tuning/jobs"

WITH_ANY_KEY = (
    "GET /", "GET /docs", "GET /openapi.json", "GET /version", "GET /v1/models", "GET /v1/models/{model:path}",
    "GET /console", "GET /console/{file}",
)  # fmt: skip
"""Routes for every key: those that all clients use, and pages without information about this server."""

OPENED_BY: dict[Scope, tuple[str, ...]] = {
    "read": (
        "GET /info", "GET /scales", "GET /scales/history", "GET /metrics", "GET /models", "GET /requests",
    ),
    "generate": (
        "POST /generate", "POST /tokenize", "POST /detokenize", "POST /v1/completions", "POST /v1/chat/completions",
        "POST /v1/embeddings", "POST /v1/rerank", "POST /v1/score", "POST /classify", "POST /v1/messages",
        "POST /v1/messages/count_tokens", "POST /v1/responses",
    ),
    "finetune": (
        "GET /finetune", "POST /finetune", "POST /finetune/validate", "GET /finetune/{job_id}",
        "DELETE /finetune/{job_id}",
        "GET /finetune/{job_id}/events", "GET /finetune/{job_id}/checkpoints", "GET /finetune/{job_id}/metrics",
        "POST /finetune/{job_id}/cancel", "POST /finetune/{job_id}/pause", "POST /finetune/{job_id}/resume",
        "GET /v1/files", "POST /v1/files", "GET /v1/files/{file_id}", "DELETE /v1/files/{file_id}",
        "GET /v1/files/{file_id}/content",
        f"GET {JOBS}", f"POST {JOBS}", f"GET {JOBS}/{{job_id}}", f"GET {JOBS}/{{job_id}}/events",
        f"GET {JOBS}/{{job_id}}/checkpoints", f"POST {JOBS}/{{job_id}}/cancel", f"POST {JOBS}/{{job_id}}/pause",
        f"POST {JOBS}/{{job_id}}/resume",
    ),
    "admin": (
        "POST /finetune/{job_id}/activate", "POST /models/{name:path}/activate", "POST /models/{name:path}/load",
        "POST /models/{name:path}/unload", "POST /models/{name:path}/alias", "POST /scales/save", "POST /weights",
        "POST /requests/{request_id}/cancel", "POST /pause", "POST /resume", "GET /is_paused", "GET /get_world_size",
        "GET /server_info",
        "POST /init_weight_transfer_engine", "POST /start_weight_update", "POST /update_weights",
        "POST /finish_weight_update", "POST /reset_prefix_cache", "POST /pause_generation",
        "POST /continue_generation", "POST /init_weights_update_group", "POST /destroy_weights_update_group",
        "POST /update_weights_from_distributed", "GET /flush_cache", "POST /flush_cache",
        "POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter",
    ),
}  # fmt: skip

RoutePatterns = tuple[tuple[str, re.Pattern[str]], ...]


def _compile(routes: Iterable[str]) -> RoutePatterns:
    pairs = (route.partition(" ") for route in routes)
    return tuple((method, compile_path(path)[0]) for method, _, path in pairs)


_OPEN_ROUTES: dict[Scope, RoutePatterns] = {
    scope: _compile(WITH_ANY_KEY + (() if scope == "admin" else OPENED_BY[scope])) for scope in SCOPES
}
_LIMITED_ROUTES = _compile(OPENED_BY["generate"])


def opens(scopes: Iterable[Scope], request: Request) -> bool:
    """Whether one of `scopes` opens the route of this ASGI request."""
    return any(scope == "admin" or _matches(_OPEN_ROUTES[scope], request) for scope in scopes)


def has_tenant_limits(request: Request) -> bool:
    """Whether the limits of tenants apply to the route of this ASGI request."""
    return _matches(_LIMITED_ROUTES, request)


def _matches(patterns: RoutePatterns, request: Request) -> bool:
    method = "GET" if request["method"] == "HEAD" else request["method"]
    return any(method == route_method and pattern.match(request["path"]) for route_method, pattern in patterns)
