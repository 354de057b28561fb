"""`/v1/models`: the names that requests may use."""

from typing import Any

from fastapi import APIRouter

from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.server_state import ServerState

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.get("/models", summary="Names that requests may use now")
async def list_models(state: StateDep) -> dict[str, Any]:
    return {"object": "list", "data": [_model(state, name) for name in state.models.names()]}


@router.get("/models/{model:path}", summary="One model")
async def get_model(model: str, state: StateDep) -> dict[str, Any]:
    state.models.find(model, "model")
    return _model(state, model)


def _model(state: ServerState, name: str) -> dict[str, Any]:
    model = state.models.find(name)
    served = model.current
    length = served.engine.limits.max_model_len if served is not None else None
    return {
        "id": name,
        "object": "model",
        "created": state.started_at,
        "owned_by": "fp8serve",
        "root": model.name,
        "parent": None,
        "max_model_len": length,
        "task": None if served is None else served.engine.limits.task,
    }
