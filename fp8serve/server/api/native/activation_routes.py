"""Which weights are served, which could be, and the swap from one to another."""

import asyncio
import time
from typing import Any

from fastapi import APIRouter

from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.schemas.finetune_bodies import ActivateBody
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.served import Served
from fp8serve.server.serving.served_model import ServedModel

router = APIRouter(tags=["fine-tuning"], route_class=BoundedRoute)


@router.get("/models", summary="What is served, and what could be")
async def models(state: StateDep) -> dict[str, Any]:
    default = state.models.default
    available = [{"source": "base", "model": default.name}]
    available += [{"source": job.id, "model": job.model_id} for job in await asyncio.to_thread(state.sources.results)]
    return {
        "alias": default.name,
        "state": default.state,
        "served": served_view(default.current),
        "activating": _activating(default.activating),
        "available": available,
    }


def _activating(under_way: tuple[str, float] | None) -> dict[str, Any] | None:
    return under_way and {"model": under_way[0], "seconds": time.monotonic() - under_way[1]}


@router.post("/models/{name:path}/activate", summary="Serve a job's result, or go back to the base model")
async def activate_model(name: str, body: ActivateBody, state: StateDep) -> dict[str, Any]:
    return await swap(state, state.models.find(name), body.source)


async def swap(state: ServerState, model: ServedModel, key: str) -> dict[str, Any]:
    """The swap goes on to its end even if the client that asked for it goes away."""
    before = served_view(model.current)
    served = await asyncio.shield(asyncio.ensure_future(state.activate(model, key)))
    return {"model": model.name, "served": served_view(served), "previous": before}


def served_view(served: Served | None) -> dict[str, Any] | None:
    return served and {
        "source": served.source.key,
        "model": served.source.model_id,
        "weight_version": served.weight_version,
    }  # type: ignore[return-value]
