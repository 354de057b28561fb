"""The swap of a model's weights to a job's result, and back."""

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.schemas.finetune_bodies import ActivateBody
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.served import Served
from fp8serve.server.serving.served_model import ServedModel
from fp8serve.server.serving.verification import Verified

router = APIRouter(tags=["fine-tuning"], route_class=BoundedRoute)


@router.post("/models/{name:path}/activate", summary="Serve a job's result, or go back to the base model")
async def activate_model(name: str, body: ActivateBody, state: StateDep) -> dict[str, Any]:
    return await swap(state, state.models.find(name), body.source, body.max_perplexity_ratio)


async def swap(state: ServerState, model: ServedModel, key: str, ratio: float) -> dict[str, Any]:
    """The swap goes on to its end even if the client that asked for it goes away. A job's adapter is loaded beside.

    ratio: see `Verification`.
    """
    if (found := await asyncio.to_thread(state.sources.adapter, key)) is not None:
        adapter, verified = await state.activate_adapter(model, *found, ratio)
        served = served_view(adapter.beside(model.resolve()))
        return {"model": adapter.name, "served": served, "previous": None, "verified": verified_view(verified)}
    before = served_view(model.current)
    now, verified = await state.loader.to_the_end(state.activate(model, key, ratio))
    return {
        "model": model.name, "served": served_view(now), "previous": before, "verified": verified_view(verified)
    }  # fmt: skip


def verified_view(verified: Verified | None) -> dict[str, Any] | None:
    return None if verified is None else asdict(verified)


def served_view(served: Served | None) -> dict[str, Any] | None:
    return served and {
        "source": served.source.key,
        "model": served.source.model_id,
        "weight_version": served.weight_version,
    }  # type: ignore[return-value]
