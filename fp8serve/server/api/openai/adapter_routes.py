"""vLLM's routes that load an adapter beside a model, and unload it."""

import asyncio

from fastapi import APIRouter
from starlette.responses import PlainTextResponse

from fp8serve.errors import RequestError
from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.dependencies import StateDep
from fp8serve.server.faults import Code, Fault
from fp8serve.server.named_models import check_name
from fp8serve.server.schemas.model_bodies import LoadAdapterBody, UnloadAdapterBody
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.adapters import AdapterSource

router = APIRouter(prefix="/v1", tags=["models"], route_class=BoundedRoute)


@router.post("/load_lora_adapter", summary="Serve an adapter beside a model", response_class=PlainTextResponse)
async def load(body: LoadAdapterBody, state: StateDep) -> str:
    """Answers when requests can name the adapter. Running requests continue; an adapter that is loaded already stays as
    it is.
    """
    base = body.base_model_name
    model = state.models.default if base is None else state.models.find(base, "base_model_name")
    source = await asyncio.to_thread(_source, state, body)
    await state.load_adapter(model, source)
    return f"Success: LoRA adapter '{source.name}' added successfully."


@router.post("/unload_lora_adapter", summary="Stop serving an adapter", response_class=PlainTextResponse)
async def unload(body: UnloadAdapterBody, state: StateDep) -> str:
    """Running requests are finished with it; new ones get a 404."""
    await state.unload_adapter(body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def _source(state: ServerState, body: LoadAdapterBody) -> AdapterSource:
    """Fault: the name or the path is none."""
    try:
        check_name(body.lora_name)
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param="lora_name") from None
    found = state.loadable_adapters().get(body.lora_path)
    if found is not None:
        return AdapterSource(body.lora_name, *found)
    if (trained := state.sources.adapter(body.lora_path)) is not None:
        return state.sources.of_adapter(*trained, body.lora_name)
    hint = (
        "Paths are ids of fine-tune jobs that trained an adapter, checkpoints of them, and directories of --models-dir "
        "that hold one."
    )
    raise Fault(Code.MODEL_NOT_FOUND, "There is no such adapter.", param="lora_path", hint=hint)
