"""The routes for the state of the server: health, information, live scales, metrics and active requests.

A server is live if its process responds and the engine is loading or has sent a recent heartbeat; a busy engine is
live. A server is ready if its default model is loaded, every other model of the command line is loaded or has failed,
the server is neither draining nor paused, and its queue is not nearly full.

An entry of /requests is an HTTP request with all its choices: its tenant, its size and its progress, without the prompt
and the generated text. Requests for embeddings or classification are not listed, nor are requests whose prompts are
still being tokenized.
"""

import asyncio
import logging
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

import fp8serve
from fp8serve.engine.sampling_params import MAX_STOP_STRINGS
from fp8serve.errors import Fp8ServeError
from fp8serve.server.access.scopes import opens
from fp8serve.server.api.native.model_routes import ServedView, served_view
from fp8serve.server.api.routing import BoundedRoute, JsonObject, ResponseModel, StateDep
from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import CONTENT_TYPE
from fp8serve.server.schemas.finetune_bodies import SaveScalesBody
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.generation import Generation, State
from fp8serve.server.vllm_metrics import VllmMetrics

log = logging.getLogger("fp8serve.server")
MAX_LISTED_REQUESTS = 200


class Health(ResponseModel):
    ok: bool
    state: str


class Version(ResponseModel):
    version: str = fp8serve.__version__


class Info(ResponseModel):
    model_id: str
    model_sha: str
    model_pipeline_tag: str = "text-generation"
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int
    router: str = "fp8serve"
    version: str = fp8serve.__version__
    sha: None = None
    docker_label: None = None
    served: ServedView
    adapters: list[JsonObject]
    engine: JsonObject
    options: JsonObject
    train_on: Literal["refuse", "share", "pause"]
    training_device: str
    training_refused: str | None
    limits: dict[str, int | float]


class LayerScale(ResponseModel):
    """The input of one FP8 layer. The numbers are null for current scaling, whose scale is computed from each input
    (docs/numerics.md)."""

    name: str
    input: str
    amax: float | None
    scale: float | None
    headroom: float | None
    saturated: int | None
    saturation: float | None
    calibrated_amax: float | None
    window_amax: float | None
    window_saturation: float | None
    drift: float | None
    drifts: bool


class Scales(ResponseModel):
    weight_version: str
    layers: list[LayerScale]


class ScaleEntry(ResponseModel):
    """A sample of a layer's scale. `at` is the Unix time of its last observation. `window_amax` is the amax of the last
    complete window."""

    at: float
    amax: float | None
    window_amax: float | None
    scale: float | None


class ScaleHistory(ResponseModel):
    """The samples of one layer, oldest first. The list is empty before the first sample."""

    weight_version: str
    layer: str
    entries: list[ScaleEntry]


class SaveScalesResponse(ResponseModel):
    """`name` is the new directory, which lies beside the model directory. `scales` is the number of scales that
    follow the traffic."""

    name: str
    scales: int


class RequestView(ResponseModel):
    """An active HTTP request with all its choices. `id` identifies it in these routes. `request_id` is the id in the
    log and in the response header, which the client may set. `age` is in seconds since admission. `state` is `decode`
    from the first token on. `answers` is the number of choices."""

    id: str
    request_id: str
    tenant: str
    model: str
    age: float
    state: State
    answers: int
    prompt_tokens: int
    generated_tokens: int
    max_new_tokens: int


class RequestList(ResponseModel):
    """The oldest active requests, and the number of all active requests."""

    requests: list[RequestView]
    total: int


router = APIRouter(tags=["server"], route_class=BoundedRoute)
ModelName = Annotated[str | None, Query(max_length=512, description="A model's name; the default model if omitted.")]
LayerName = Annotated[str, Query(max_length=512, description="The name of a layer in GET /scales.")]
NO_STORE = {"Cache-Control": "no-store"}
HEALTH: dict[str, Any] = {"response_model": Health, "responses": {503: {"model": Health, "description": "Not ready"}}}


@router.get("/health/live", summary="Liveness: a process that returns 503 should be restarted", **HEALTH)
async def live(state: StateDep) -> Response:
    return _health(state.models.default.live, state.status)


@router.get("/health/ready", summary="Readiness: a server that returns 503 should get no requests", **HEALTH)
async def ready(state: StateDep) -> Response:
    return _health(state.ready, state.status)


@router.get("/ping", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/health", summary="Readiness, as GET /health/ready", **HEALTH)
async def health(state: StateDep) -> Response:
    return _health(state.ready, state.status)


def _health(ok: bool, state: str) -> Response:
    content = Health(ok=ok, state=state).model_dump_json()
    headers = NO_STORE | ({} if ok else {"Retry-After": "2"})
    return Response(content, 200 if ok else 503, headers, media_type="application/json")


@router.get("/info", summary="A model, its configuration, and the limits of this server")
async def info(state: StateDep, model: ModelName = None) -> Info:
    settings, limits = state.settings, state.settings.limits
    served = state.models.resolve(model)
    longest = served.engine.limits.max_model_len
    return Info(
        model_id=state.models.canonical_name(model),
        model_sha=served.weight_version,
        max_concurrent_requests=served.admission.capacity.max_requests,
        max_best_of=limits.n,
        max_stop_sequences=MAX_STOP_STRINGS,
        max_input_tokens=longest - 1,
        max_total_tokens=longest,
        max_client_batch_size=limits.prompts if served.engine.limits.task == "generate" else limits.texts,
        served=served_view(served),
        adapters=[adapter.view() for adapter in state.models.adapters_of(served)],
        engine=public_facts(served.engine.info),
        options=settings.public,
        train_on=settings.train_on,
        training_device=settings.training_device,
        training_refused=settings.training_refused,
        limits=vars(limits),
    )


def public_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the engine's information without paths on the server's disk."""
    return {k: v for k, v in facts.items() if not (isinstance(v, str) and v.startswith("/"))}


@router.get("/version", summary="The version of this server")
async def version() -> Version:
    return Version()


@router.get("/scales", summary="Live amax, scale, headroom and saturation of every FP8 layer")
async def scales(state: StateDep, model: ModelName = None) -> Scales:
    served = state.models.resolve(model)
    try:
        layers = [LayerScale(**layer) for layer in await served.engine.scales()]
    except (Fp8ServeError, OSError) as error:
        raise Fault(Code.ENGINE_DOWN, f"The engine did not answer: {error}") from None
    return Scales(weight_version=served.weight_version, layers=layers)


@router.get("/scales/history", summary="Samples of the input of one FP8 layer since its weights began to serve")
async def history(state: StateDep, layer: LayerName, model: ModelName = None) -> ScaleHistory:
    """Returns a sample for about every five seconds. In a long history, neighbouring samples are merged into their
    maximum."""
    served_model = state.models.require(model, "model")
    served, scale_history = served_model.resolve(), served_model.history
    entries = scale_history.entries(layer) if scale_history.weight_version == served.weight_version else []
    if entries is None:
        message = "No FP8 layer of that name has a stored scale."
        raise Fault(Code.INVALID_PARAMETER, message, param="layer", hint="GET /scales lists the layers.")
    samples = [ScaleEntry.model_validate(entry) for entry in entries]
    return ScaleHistory(weight_version=served.weight_version, layer=layer, entries=samples)


@router.post("/scales/save", summary="Write the served weights with their current scales to a new directory")
async def save(state: StateDep, body: SaveScalesBody | None = None, model: ModelName = None) -> SaveScalesResponse:
    """Needs --roll-history. The server completes the write even if the client disconnects."""
    name = None if body is None else body.name
    served_model = state.models.require(model, "model")
    saving = state.scale_saver.save(served_model.resolve(), served_model.base_source.directory, name)
    saved_name, count = await asyncio.shield(asyncio.ensure_future(saving))
    return SaveScalesResponse(name=saved_name, scales=count)


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(request: Request, state: StateDep) -> Response:
    """With --metrics-without-key, series about tenants need a key with the scope `read`."""
    caller = request.scope["caller"]
    text = state.metrics.render(with_tenants=caller is not None and opens(caller.scopes, request.scope))
    if state.settings.vllm_metrics:
        text += VllmMetrics(state.metrics).render()
    return Response(text, media_type=CONTENT_TYPE)


@router.get("/requests", summary="Active requests, oldest first")
async def requests(state: StateDep) -> RequestList:
    active = _active_generations(state)
    return RequestList(requests=list(map(request_view, active[:MAX_LISTED_REQUESTS])), total=len(active))


@router.post("/requests/{request_id}/cancel", summary="Cancel an active request")
async def cancel(request_id: str, state: StateDep) -> RequestView:
    """The client of the request gets an error with the code request_cancelled. `request_id` is an `id` of GET
    /requests."""
    for generation in _active_generations(state):
        if generation.id == request_id:
            view = request_view(generation)
            generation.fail(Fault(Code.REQUEST_CANCELLED, "An operator of this server cancelled the request."))
            details = view.request_id, view.tenant, view.generated_tokens
            log.info("cancelled request %s of tenant %s after %d tokens", *details)
            return view
    raise Fault(Code.REQUEST_NOT_FOUND, "No active request has this id; it may have ended.", param="request_id")


def _active_generations(state: ServerState) -> list[Generation]:
    active = [generation for generation in state.active if generation.is_running]
    return sorted(active, key=lambda generation: generation.started)


def request_view(generation: Generation) -> RequestView:
    usage = generation.usage
    return RequestView(
        id=generation.id,
        request_id=usage.request_id,
        tenant=usage.tenant,
        model=generation.served.source.model_id,
        age=time.perf_counter() - generation.started,
        state=generation.state,
        answers=len(generation.requests),
        prompt_tokens=generation.prompt_tokens,
        generated_tokens=generation.generated_tokens,
        max_new_tokens=sum(request.params.max_new_tokens for request in generation.requests),
    )
