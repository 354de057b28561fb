"""`/v1/models`: the names that requests may use, with the state of each, followed by those that could be loaded.

An adapter names its model as `parent`. A name in the state "available" cannot be used yet: it is the result of a
fine-tune, or a directory of --models-dir. The list and each model have the fields of OpenAI's API and of Anthropic's,
because both APIs have these routes, and their clients ignore the fields that they do not know.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from fp8serve.errors import suggestion
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.faults import Code, Fault
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.adapters import ServedAdapter
from fp8serve.server.serving.served_model import ServedModel

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.get("/models", summary="Names that requests may use now, and names of models that could be loaded")
async def list_models(state: StateDep) -> dict[str, Any]:
    models = await _all(state)
    ends = {"first_id": next(iter(models), None), "last_id": next(reversed(models), None)}
    return {"object": "list", "data": list(models.values()), "has_more": False, **ends}


@router.get("/models/{model:path}", summary="One model")
async def get_model(model: str, state: StateDep) -> dict[str, Any]:
    models = await _all(state)
    if model not in models:
        message = f"There is no model of that name here.{suggestion(model, models)}"
        raise Fault(Code.MODEL_NOT_FOUND, message, param="model")
    return models[model]


async def _all(state: ServerState) -> dict[str, dict[str, Any]]:
    """All models by name; those that answer come first."""
    usable = [(name, state.models.named(name)) for name in state.models.names()]
    shown = {name: _served(state, name, model) for name, model in usable if model is not None}
    for model in state.models.models.values():
        shown |= {name: _beside(state, model, adapter) for name, adapter in model.adapters.items()}
    for jobs in (state.sources.results, state.sources.adapters):
        for job in await asyncio.to_thread(jobs):
            shown.setdefault(job.model_id, _available(job.model_id, job.finished_at or job.created_at, job.base))
    for name in sorted(await asyncio.to_thread(state.loadable)):
        shown.setdefault(name, _available(name, state.started_at, None))
    return shown


def _served(state: ServerState, name: str, model: ServedModel) -> dict[str, Any]:
    served = model.current
    return _described(name, state.started_at) | {
        "root": model.name,
        "state": model.state,
        "max_model_len": served.engine.limits.max_model_len if served is not None else None,
        "task": None if served is None else served.engine.limits.task,
    }


def _beside(state: ServerState, model: ServedModel, adapter: ServedAdapter) -> dict[str, Any]:
    """An adapter: `parent` is its model, `root` its name at its source."""
    return _served(state, adapter.name, model) | {"root": adapter.source.root, "parent": model.name}


def _available(name: str, created: int, parent: str | None) -> dict[str, Any]:
    return _described(name, created) | {"parent": parent, "state": "available", "max_model_len": None, "task": None}


def _described(name: str, created: int) -> dict[str, Any]:
    """What is known without loading it. `created`: Unix time in seconds."""
    day = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    openai = {"id": name, "object": "model", "created": created, "owned_by": "fp8serve", "root": name, "parent": None}
    return openai | {"type": "model", "display_name": name, "created_at": day}
