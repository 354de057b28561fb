"""The route `/v1/models`: the served models, aliases and adapters, followed by the models that can be loaded.

The `parent` of an adapter is its model. A model in the state "available" is not loaded: it is the result of a fine-tune
job or a directory of --models-dir. The responses have the fields of OpenAI's API and of Anthropic's, because both have
these routes and their clients ignore unknown fields.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter

from fp8serve.engine.request import Task
from fp8serve.errors import suggestion
from fp8serve.server.api.routing import ResponseModel, StateDep
from fp8serve.server.faults import Code, Fault
from fp8serve.server.named_models import models_below
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.served_model import ServedModel

router = APIRouter(prefix="/v1", tags=["OpenAI"])


class Model(ResponseModel):
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
    task: Task | None = None  # None if the model is not loaded


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[Model]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


@router.get("/models", summary="Served models, and models that can be loaded")
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
    """Returns all models by name, served models first. The `root` of an adapter is its name at its source."""
    served = [(name, state.models.get(name)) for name in state.models.names()]
    listed = {name: _served_model(state, name, model, model.name) for name, model in served if model is not None}
    for model in state.models.models.values():
        for name, adapter in model.adapters.items():
            listed[name] = _served_model(state, name, model, adapter.source.root, parent=model.name)
    for jobs in (state.sources.result_jobs, state.sources.adapter_jobs):
        for job in await asyncio.to_thread(jobs):
            created = job.finished_at or job.created_at
            listed.setdefault(job.model_id, _model_entry(job.model_id, created, parent=job.base))
    for name in sorted(await asyncio.to_thread(models_below, state.settings.models_dir)):
        listed.setdefault(name, _model_entry(name, state.started_at))
    return listed


def _served_model(state: ServerState, name: str, model: ServedModel, root: str, parent: str | None = None) -> Model:
    limits = None if model.current is None else model.current.engine.limits
    return _model_entry(
        name,
        state.started_at,
        root=root,
        parent=parent,
        state=model.state,
        max_model_len=limits and limits.max_model_len,
        task=limits and limits.task,
    )


def _model_entry(name: str, created: int, state: str = "available", **fields: Any) -> Model:
    """Returns the entry of a model. `created` is a Unix time in seconds."""
    date = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return Model(id=name, created=created, display_name=name, created_at=date, state=state, **{"root": name} | fields)
