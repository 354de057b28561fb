"""What a server says about itself: health, facts, live scales, metrics.

Liveness and readiness are different questions. Live: this process answers and the engine gave a sign of life lately,
or is being loaded; a busy engine is live. Ready: weights are loaded, the server is neither draining nor paused, and
the queue is not nearly full.
"""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

import fp8serve
from fp8serve.engine.sampling_params import MAX_STOP_STRINGS
from fp8serve.errors import Fp8ServeError
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.api.native.activation_routes import served_view
from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import CONTENT_TYPE
from fp8serve.server.schemas.finetune_bodies import SaveScalesBody

router = APIRouter(tags=["server"])
ModelName = Annotated[str | None, Query(max_length=512, description="A name of /v1/models; the default's if left out.")]
LayerName = Annotated[str, Query(max_length=512, description="A name of /scales.")]
NO_STORE = {"Cache-Control": "no-store"}


@router.get("/health/live", summary="Whether the process should be left alone (200) or restarted (503)")
async def live(state: StateDep) -> Response:
    return _health(state.models.default.live, state.status)


@router.get("/health/ready", summary="Whether to send requests here")
async def ready(state: StateDep) -> Response:
    return _health(state.ready, state.status)


@router.head("/health", include_in_schema=False)
@router.get("/health", summary="As /health/ready")
async def health(state: StateDep) -> Response:
    return _health(state.ready, state.status)


@router.get("/ping", include_in_schema=False)
async def ping(state: StateDep) -> Response:
    return _health(state.ready, state.status)


def _health(good: bool, state: str) -> Response:
    return JSONResponse(
        {"ok": good, "state": state}, 200 if good else 503, NO_STORE | ({} if good else {"Retry-After": "2"})
    )


@router.get("/info", summary="A model, its configuration, and the limits in force")
async def info(state: StateDep, model: ModelName = None) -> dict[str, Any]:
    settings, limits = state.settings, state.settings.limits
    served = state.models.resolve(model)
    longest = served.engine.limits.max_model_len
    return {
        "model_id": state.models.default.name if model is None else state.models.own_name(model),
        "model_sha": served.weight_version,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": served.admission.room.capacity,
        "max_best_of": limits.n,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "max_input_tokens": longest - 1,
        "max_total_tokens": longest,
        "max_client_batch_size": limits.prompts if served.engine.limits.task == "generate" else limits.texts,
        "router": "fp8serve",
        "version": fp8serve.__version__,
        "sha": None,
        "docker_label": None,
        "served": served_view(served),
        "adapters": [adapter.view() for adapter in state.models.beside(served)],
        "engine": public_facts(served.engine.info),
        "options": settings.public,
        "train_on": settings.train_on,
        "training_device": settings.training_device,
        "training_refused": settings.training_refused,
        "limits": vars(limits),
    }


def public_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """The engine's own description, without places on the server's disk."""
    return {k: v for k, v in facts.items() if not (isinstance(v, str) and v.startswith("/"))}


@router.get("/version", summary="The version of this server")
async def version() -> dict[str, str]:
    return {"version": fp8serve.__version__}


@router.get("/scales", summary="Live amax, scale, headroom and saturation of every FP8 layer")
async def scales(state: StateDep, model: ModelName = None) -> dict[str, Any]:
    served = state.models.resolve(model)
    try:
        return {"weight_version": served.weight_version, "layers": await served.engine.scales()}
    except (Fp8ServeError, OSError) as error:
        raise Fault(Code.ENGINE_DOWN, f"The engine did not answer: {error}") from None


@router.get("/scales/history", summary="How the inputs of one FP8 layer have moved since its weights began to serve")
async def history(state: StateDep, layer: LayerName, model: ModelName = None) -> dict[str, Any]:
    """One sample about every five seconds; over a long time neighbouring entries are merged and keep the larger
    inputs."""
    found = state.models.default if model is None else state.models.find(model, "model")
    served, kept = found.resolve(), found.history
    entries = kept.of(layer) if kept.weight_version == served.weight_version else []
    if entries is None:
        message = "No FP8 layer of that name has a stored scale."
        raise Fault(Code.INVALID_PARAMETER, message, param="layer", hint="GET /scales has their names.")
    return {"weight_version": served.weight_version, "layer": layer, "entries": entries}


@router.post("/scales/save", summary="Write the served weights with their present scales to a new directory")
async def save(state: StateDep, body: SaveScalesBody | None = None, model: ModelName = None) -> dict[str, Any]:
    """Only with --roll-history. It continues to its end even if the client that asked for it goes away."""
    name = None if body is None else body.name
    saved, count = await asyncio.shield(asyncio.ensure_future(state.save_scales(model, name)))
    return {"name": saved, "scales": count}


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(state: StateDep) -> Response:
    return Response(state.metrics.render(), media_type=CONTENT_TYPE)
