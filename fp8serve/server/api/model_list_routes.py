"""`/v1/models`: the names that requests may use, with the state of each, followed by those that could be loaded.

An adapter names its model as `parent`. A name in the state "available" cannot be used yet: it is the result of a
fine-tune, or a directory of --models-dir. The list and each model have the fields of OpenAI's API and of Anthropic's,
because both APIs have these routes, and their clients ignore the fields that they do not know.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter

from fp8serve.engine.request import Task
from fp8serve.errors import suggestion
from fp8serve.server.api.routing import Answer, StateDep
from fp8serve.server.faults import Code, Fault
from fp8serve.server.named_models import models_below
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.served_model import ServedModel

router = APIRouter(prefix="/v1", tags=["OpenAI"])


class Model(Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "fp8serve"
    root: str
    parent: str | None = None
    type: Literal["model"] = "model"
    display_name: str
    created_at: str  # `created` as RFC 3339
    state: str
    max_model_len: int | None = None
    task: Task | None = None  # None while nothing is loaded


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[Model]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


@router.get("/models", summary="Names that requests may use now, and names of models that could be loaded")
async def list_models(state: StateDep) -> ModelList:
    models = await all_models(state)
    return ModelList(
        data=list(models.values()), first_id=next(iter(models), None), last_id=next(reversed(models), None)
    )


@router.get("/models/{model:path}", summary="One model")
async def get_model(model: str, state: StateDep) -> Model:
    models = await all_models(state)
    if model not in models:
        message = f"There is no model of that name here.{suggestion(model, models)}"
        raise Fault(Code.MODEL_NOT_FOUND, message, param="model")
    return models[model]


async def all_models(state: ServerState) -> dict[str, Model]:
    """All models by name; those that answer come first. `root` of an adapter is its name at its source."""
    usable = [(name, state.models.named(name)) for name in state.models.names()]
    shown = {name: _served(state, name, model, model.name) for name, model in usable if model is not None}
    for model in state.models.models.values():
        for name, adapter in model.adapters.items():
            shown[name] = _served(state, name, model, adapter.source.root, parent=model.name)
    for jobs in (state.sources.results, state.sources.adapters):
        for job in await asyncio.to_thread(jobs):
            shown.setdefault(job.model_id, _model(job.model_id, job.finished_at or job.created_at, parent=job.base))
    for name in sorted(await asyncio.to_thread(models_below, state.settings.models_dir)):
        shown.setdefault(name, _model(name, state.started_at))
    return shown


def _served(state: ServerState, name: str, model: ServedModel, root: str, parent: str | None = None) -> Model:
    limits = None if model.current is None else model.current.engine.limits
    return _model(
        name,
        state.started_at,
        root=root,
        parent=parent,
        state=model.state,
        max_model_len=limits and limits.max_model_len,
        task=limits and limits.task,
    )


def _model(name: str, created: int, state: str = "available", **facts: Any) -> Model:
    """`created`: Unix time in seconds."""
    day = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return Model(id=name, created=created, display_name=name, created_at=day, state=state, **{"root": name} | facts)
