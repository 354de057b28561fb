"""The state of a server: health, facts, live scales, metrics, and the requests that engines are computing.

Liveness and readiness are different questions. Live: this process answers and the engine gave a sign of life lately,
or is being loaded; a busy engine is live. Ready: weights are loaded, the server is neither draining nor paused, and
the queue is not nearly full.

A row of /requests is an HTTP request with all its answers. It tells who asked, for how much, and how far it is, but
shows no prompt and no answer. Prompts that are still being tokenized, embeddings and classes are not listed.
"""

import asyncio
import logging
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.responses import PlainTextResponse, Response

import fp8serve
from fp8serve.engine.sampling_params import MAX_STOP_STRINGS
from fp8serve.errors import Fp8ServeError
from fp8serve.server.api.native.model_routes import ServedView, served_view
from fp8serve.server.api.routing import Answer, BoundedRoute, JsonObject, StateDep
from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import CONTENT_TYPE
from fp8serve.server.schemas.finetune_bodies import SaveScalesBody
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.generation import Generation
from fp8serve.server.vllm_metrics import VllmMetrics

log = logging.getLogger("fp8serve.server")
LISTED = 200


class Health(Answer):
    ok: bool
    state: str


class Version(Answer):
    version: str = fp8serve.__version__


class Info(Answer):
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


class LayerScale(Answer):
    """The input of one FP8 layer; numbers are null if its scale follows every input (docs/numerics.md)."""

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


class Scales(Answer):
    weight_version: str
    layers: list[LayerScale]


class ScaleEntry(Answer):
    """`at`: Unix time of its last sample. `window_amax`: of the last window, null until one has ended."""

    at: float
    amax: float | None
    window_amax: float | None
    scale: float | None


class ScaleHistory(Answer):
    """Oldest first; empty until the engine was first asked."""

    weight_version: str
    layer: str
    entries: list[ScaleEntry]


class SavedScales(Answer):
    """`name`: of the directory, beside the model. `scales`: how many follow the traffic."""

    name: str
    scales: int


RequestState = Literal["queued", "prefill", "decode"]


class RequestView(Answer):
    """One HTTP request that the engine computes, with all its answers, but without their texts.

    `id`: made here, for these routes. `request_id`: that of the log and the answer's header, which a client may choose.
    `model`: the name that answers. `age`: seconds since it was admitted. `state`: decode from its first token on.
    """

    id: str
    request_id: str
    tenant: str
    model: str
    age: float
    state: RequestState
    answers: int
    prompt_tokens: int
    generated_tokens: int
    max_new_tokens: int


class RequestList(Answer):
    """The oldest `requests`, and how many there are in all."""

    requests: list[RequestView]
    total: int


router = APIRouter(tags=["server"], route_class=BoundedRoute)
ModelName = Annotated[str | None, Query(max_length=512, description="A name of /v1/models; the default's if left out.")]
LayerName = Annotated[str, Query(max_length=512, description="A name of /scales.")]
NO_STORE = {"Cache-Control": "no-store"}
HEALTH: dict[str, Any] = {"response_model": Health, "responses": {503: {"model": Health, "description": "Not ready"}}}


@router.get("/health/live", summary="Whether the process should be left alone (200) or restarted (503)", **HEALTH)
async def live(state: StateDep) -> Response:
    return _health(state.models.default.live, state.status)


@router.get("/health/ready", summary="Whether to send requests here", **HEALTH)
async def ready(state: StateDep) -> Response:
    return _health(state.ready, state.status)


@router.head("/health", include_in_schema=False)
@router.get("/health", summary="As /health/ready", **HEALTH)
async def health(state: StateDep) -> Response:
    return _health(state.ready, state.status)


@router.get("/ping", include_in_schema=False)
async def ping(state: StateDep) -> Response:
    return _health(state.ready, state.status)


def _health(ok: bool, state: str) -> Response:
    content = Health(ok=ok, state=state).model_dump_json()
    headers = NO_STORE | ({} if ok else {"Retry-After": "2"})
    return Response(content, 200 if ok else 503, headers, media_type="application/json")


@router.get("/info", summary="A model, its configuration, and the limits in force")
async def info(state: StateDep, model: ModelName = None) -> Info:
    settings, limits = state.settings, state.settings.limits
    served = state.models.resolve(model)
    longest = served.engine.limits.max_model_len
    return Info(
        model_id=state.models.default.name if model is None else state.models.own_name(model),
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
    """The engine's own description, without places on the server's disk."""
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


@router.get("/scales/history", summary="How the inputs of one FP8 layer have moved since its weights began to serve")
async def history(state: StateDep, layer: LayerName, model: ModelName = None) -> ScaleHistory:
    """One sample about every five seconds; over a long time neighbouring entries are merged and keep the larger
    inputs."""
    chosen = state.models.default if model is None else state.models.find(model, "model")
    served, past = chosen.resolve(), chosen.history
    entries = past.of(layer) if past.weight_version == served.weight_version else []
    if entries is None:
        message = "No FP8 layer of that name has a stored scale."
        raise Fault(Code.INVALID_PARAMETER, message, param="layer", hint="GET /scales has their names.")
    samples = [ScaleEntry.model_validate(entry) for entry in entries]
    return ScaleHistory(weight_version=served.weight_version, layer=layer, entries=samples)


@router.post("/scales/save", summary="Write the served weights with their present scales to a new directory")
async def save(state: StateDep, body: SaveScalesBody | None = None, model: ModelName = None) -> SavedScales:
    """Only with --roll-history. It continues to its end even if the client that asked for it goes away."""
    name = None if body is None else body.name
    chosen = state.models.default if model is None else state.models.find(model, "model")
    saved, count = await asyncio.shield(asyncio.ensure_future(state.rolled.save(chosen, name)))
    return SavedScales(name=saved, scales=count)


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(state: StateDep) -> Response:
    text = state.metrics.render()
    if state.settings.vllm_metrics:
        text += VllmMetrics(state.metrics).render()
    return Response(text, media_type=CONTENT_TYPE)


@router.get("/requests", summary="The requests that are being answered, oldest first")
async def requests(state: StateDep) -> RequestList:
    active = _under_way(state)
    return RequestList(requests=list(map(request_view, active[:LISTED])), total=len(active))


@router.post("/requests/{request_id}/cancel", summary="End a request that is being answered")
async def cancel(request_id: str, state: StateDep) -> RequestView:
    """Its client gets an error with the code request_cancelled. `request_id`: the `id` of GET /requests."""
    for generation in _under_way(state):
        if generation.id == request_id:
            view = request_view(generation)
            generation.fail(Fault(Code.REQUEST_CANCELLED, "An operator of this server cancelled the request."))
            facts = view.request_id, view.tenant, view.generated_tokens
            log.info("cancelled request %s of tenant %s after %d tokens", *facts)
            return view
    raise Fault(
        Code.REQUEST_NOT_FOUND, "No request of that id is being answered; it may have ended.", param="request_id"
    )


def _under_way(state: ServerState) -> list[Generation]:
    return sorted((one for one in state.active if one.under_way), key=lambda one: one.started)


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
        generated_tokens=generation.generated,
        max_new_tokens=sum(request.params.max_new_tokens for request in generation.requests),
    )
