"""The routes for models and adapters: listing, loading, activating and unloading them, and aliases."""

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Literal, overload

from fastapi import APIRouter
from starlette.responses import PlainTextResponse

from fp8serve.errors import RequestError
from fp8serve.server.api.model_list_routes import Model, all_models
from fp8serve.server.api.routing import BoundedRoute, JsonObject, ResponseModel, StateDep
from fp8serve.server.faults import Code, Fault
from fp8serve.server.named_models import NamedModel, adapters_below, check_name, models_below
from fp8serve.server.schemas import finetune_bodies as bodies
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving import weight_replacement
from fp8serve.server.serving.model_loader import source_of
from fp8serve.server.serving.served_model import BASE, ServedModel
from fp8serve.server.serving.served_weights import AdapterSource, ServedWeights, WeightSource
from fp8serve.server.serving.verification import UNVERIFIED, MeasuredRow, Verification, Verified

router = APIRouter(tags=["models"], route_class=BoundedRoute)
MEMORY = {"weights": "weight_bytes", "cache": "kv_cache_bytes"}


class ServedView(ResponseModel):
    source: str
    model: str
    weight_version: str


class AvailableSource(ResponseModel):
    source: str
    model: str
    base: str


class ActivationProgress(ResponseModel):
    model: str
    seconds: float


class ModelView(ResponseModel):
    name: str
    default: bool
    state: str
    problem: str | None
    served: ServedView | None
    activating: ActivationProgress | None
    aliases: list[str]
    task: Literal["generate", "embed", "classify"] | None
    max_model_len: int | None
    in_flight: int
    memory_bytes: dict[str, int]
    adapters: list[JsonObject]


class Models(ResponseModel):
    alias: str
    state: str
    served: ServedView | None
    activating: ActivationProgress | None
    available: list[AvailableSource]
    models: list[ModelView]
    aliases: dict[str, str]
    loadable: list[str]
    object: Literal["list"] = "list"
    data: list[Model]


class UnloadResponse(ResponseModel):
    name: str
    state: Literal["unloaded"] = "unloaded"


class VerificationView(ResponseModel):
    tokens: int
    perplexity: float
    perplexity_before: float | None


class ActivationResponse(ResponseModel):
    model: str
    served: ServedView
    previous: ServedView | None
    verified: VerificationView | None


class ReplaceWeightsResponse(ActivationResponse):
    weights_version: int


@router.get("/models", summary="Served models and available sources")
async def models(state: StateDep) -> Models:
    """Lists all models. `alias`, `state`, `served` and `activating` describe the default model. `object` and `data` are
    those of `/v1/models`, for clients of OpenAI's API whose base URL lacks `/v1`.
    """
    default = state.models.default
    results = await asyncio.to_thread(state.sources.result_jobs)
    return Models(
        alias=default.name,
        state=default.state,
        served=served_view(default.current),
        activating=_activation_progress(default.activating),
        available=[
            AvailableSource(source=BASE, model=default.name, base=default.name),
            *(AvailableSource(source=job.id, model=job.model_id, base=job.base) for job in results),
        ],
        models=[model_view(state, model) for model in state.models.models.values()],
        aliases=dict(state.models.aliases),
        loadable=sorted(await asyncio.to_thread(models_below, state.settings.models_dir)),
        data=list((await all_models(state)).values()),
    )


@router.post("/models/{name:path}/load", summary="Load a model")
async def load(name: str, state: StateDep, body: bodies.LoadBody | None = None) -> ModelView:
    """Responds when the model is ready, or at once if it is loaded. Other models are not affected. The weights must be
    finite and the model must generate a token; its perplexity is not verified.
    """
    source = None if body is None or body.source is None else await asyncio.to_thread(_source, state, name, body)
    if source is None and body is not None and body.options:
        message = "options needs a source; send source, or leave out options."
        raise Fault(Code.INVALID_PARAMETER, message, param="options")
    return model_view(state, await state.activator.load(name, source))


@router.post("/weights", summary="Replace the weights of a served model by another version of them")
async def replace_weights(body: bodies.WeightsBody, state: StateDep) -> ReplaceWeightsResponse:
    """Overwrites the weights in the running engine, for a trainer beside the server. It responds when the new weights
    are in use. The engine first completes active requests, and new requests get 503 meanwhile, so each response comes
    from one version. The new weights must generate a token. With `texts`, their perplexity may be at most
    `max_perplexity_ratio` times that of the old weights. If a check fails, the old weights are restored.
    """
    model = state.models.require(body.model, "model")
    directory = (await asyncio.to_thread(models_below, state.settings.models_dir)).get(body.path)
    if directory is None:
        hint = "Paths are the directories of --models-dir that hold a model."
        raise Fault(Code.MODEL_NOT_FOUND, "There is no such directory.", param="path", hint=hint)
    if model.adapters:
        hint = f"Unload first: {', '.join(model.adapters)}."
        raise Fault(Code.ALIAS_BUSY, "The model has adapters, which are for the weights that it serves.", hint=hint)
    seconds = state.settings.drain_seconds if body.seconds is None else body.seconds
    previous = served_view(model.current)
    verification = await _verification_on_texts(state, model, body)
    change = weight_replacement.replace_weights(model, directory, seconds, verification)
    purpose = f"replace the weights of the model {model.name} by {body.path}"
    served, verified = await state.model_loader.run_to_completion(change, purpose)
    return ReplaceWeightsResponse(
        model=model.name,
        served=served_view(served),
        previous=previous,
        verified=verification_view(verified),
        weights_version=served.engine.info["weights_version"],
    )


async def _verification_on_texts(state: ServerState, model: ServedModel, body: bodies.WeightsBody) -> Verification:
    """Returns how replaced weights are verified. Raises Fault if a text is too long or all texts are too short to have
    a perplexity."""
    if body.texts is None:
        return UNVERIFIED
    served = model.resolve()
    if not served.engine.limits.generates:
        raise Fault(Code.INVALID_PARAMETER, "The model generates no text, so it has no perplexity.", param="texts")
    prompts = await state.parser.encode_prompts(served, body.texts, "texts")
    too_long = next((n for n, ids in enumerate(prompts) if len(ids) >= served.engine.limits.max_model_len), None)
    if too_long is not None:
        raise Fault(Code.INVALID_PARAMETER, f"Text {too_long + 1} fills the whole context.", param="texts")
    rows = [MeasuredRow(ids, (True,) * len(ids)) for ids in prompts if len(ids) > 1]
    if not rows:
        raise Fault(Code.INVALID_PARAMETER, "Perplexity needs a text of at least two tokens.", param="texts")
    ratio = bodies.DEFAULT_MAX_PERPLEXITY_RATIO if body.max_perplexity_ratio is None else body.max_perplexity_ratio
    return Verification(rows, ratio, model.deadlines.load, rows_name="the texts")


@router.post("/models/{name:path}/unload", summary="Unload a model")
async def unload(name: str, state: StateDep, body: bodies.UnloadBody | None = None) -> UnloadResponse:
    """Refuses new requests for the model at once. Active requests have `seconds` to complete."""
    seconds = body.seconds if body is not None else None
    await state.model_loader.unload(name, state.settings.drain_seconds if seconds is None else seconds)
    return UnloadResponse(name=name)


@router.post("/models/{name:path}/alias", summary="Give a model another name, or remove that name")
async def alias(name: str, body: bodies.AliasBody, state: StateDep) -> ModelView:
    model = state.models.require(name)
    if body.remove:
        state.models.aliases.pop(body.alias, None)
        return model_view(state, model)
    try:
        check_name(body.alias)
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param="alias") from None
    is_own_name = body.alias in state.model_loader.known_sources or body.alias in state.models.models
    if is_own_name or state.models.get_adapter(body.alias) is not None:
        raise Fault(Code.NAME_TAKEN, f"{body.alias} is a model's own name.", param="alias", hint="Choose another.")
    state.models.aliases[body.alias] = model.name
    return model_view(state, model)


def _source(state: ServerState, name: str, body: bodies.LoadBody) -> WeightSource:
    """Returns the source to load. Raises Fault if it does not exist, or if the name or an option is invalid."""
    key = str(body.source)
    directory = models_below(state.settings.models_dir).get(key)
    if directory is None and not state.sources.has_name(key):
        hint = "Sources are ids of fine-tune jobs that succeeded, checkpoints, and the directories of --models-dir."
        raise Fault(Code.MODEL_NOT_FOUND, "There is no such source.", param="source", hint=hint)
    if path_option := next((name for name in ("scales", "cache_dir", "draft_model") if name in body.options), None):
        message = f"{path_option} is a path on the server's disk, which only the server's command line can set."
        raise Fault(Code.INVALID_PARAMETER, message, param="options")
    try:
        source = source_of(NamedModel(name, directory or Path(), body.options), state.settings.device)
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param="options" if body.options else "name") from None
    return state.sources.find_by_name(key, source) or source


def model_view(state: ServerState, model: ServedModel) -> ModelView:
    served = model.current
    info = {} if served is None else served.engine.info
    return ModelView(
        name=model.name,
        default=model is state.models.default,
        state=model.state,
        problem=None if model.problem is None else Fault(Code.LOAD_FAILED, str(model.problem)).message,
        served=served_view(served),
        activating=_activation_progress(model.activating),
        aliases=sorted(alias for alias, name in state.models.aliases.items() if name == model.name),
        task=None if served is None else served.engine.limits.task,
        max_model_len=None if served is None else served.engine.limits.max_model_len,
        in_flight=model.admission.in_flight,
        memory_bytes={kind: info[key] for kind, key in MEMORY.items() if key in info},
        adapters=[adapter.view() for adapter in model.adapters.values()],
    )


def _activation_progress(activation: tuple[str, float] | None) -> ActivationProgress | None:
    return activation and ActivationProgress(model=activation[0], seconds=time.monotonic() - activation[1])


# -- activation, and adapters by vLLM's routes -------------------------------------------------------------------------


@router.post("/models/{name:path}/activate", summary="Activate the result of a job, or the base model")
async def activate_model(name: str, body: bodies.ActivateBody, state: StateDep) -> ActivationResponse:
    return await activate_source(state, state.models.require(name), body.source, body.max_perplexity_ratio)


async def activate_source(state: ServerState, model: ServedModel, key: str, ratio: float) -> ActivationResponse:
    """Activates the weights of a source, or loads its adapter beside the model's weights. The activation completes even
    if the client disconnects. `ratio` is the largest ratio of perplexities that verification accepts.
    """
    if (trained := await asyncio.to_thread(state.sources.find_adapter, key)) is not None:
        adapter, verified = await state.activator.activate_adapter(model, *trained, ratio)
        name, view, previous = adapter.name, served_view(adapter.served_with(model.resolve())), None
    else:
        name, previous = model.name, served_view(model.current)
        served, verified = await state.activator.activate(model, key, ratio)
        view = served_view(served)
    return ActivationResponse(model=name, served=view, previous=previous, verified=verification_view(verified))


def verification_view(verified: Verified | None) -> VerificationView | None:
    return None if verified is None else VerificationView(**asdict(verified))


@overload
def served_view(served: ServedWeights) -> ServedView: ...
@overload
def served_view(served: ServedWeights | None) -> ServedView | None: ...


def served_view(served: ServedWeights | None) -> ServedView | None:
    if served is None:
        return None
    source = served.source
    return ServedView(source=source.key, model=source.model_id, weight_version=served.weight_version)


@router.post(
    "/v1/load_lora_adapter", name="load", summary="Load an adapter of a model", response_class=PlainTextResponse
)
async def load_adapter(body: bodies.LoadAdapterBody, state: StateDep) -> str:
    """Responds when requests can use the adapter. Active requests continue. A loaded adapter is not reloaded."""
    model = state.models.require(body.base_model_name, "base_model_name")
    source = await asyncio.to_thread(_adapter_source, state, body)
    await state.activator.load_adapter(model, source)
    return f"Success: LoRA adapter '{source.name}' added successfully."


@router.post("/v1/unload_lora_adapter", name="unload", summary="Unload an adapter", response_class=PlainTextResponse)
async def unload_adapter(body: bodies.UnloadAdapterBody, state: StateDep) -> str:
    """Refuses new requests for the adapter with 404. Active requests complete with it."""
    await state.activator.unload_adapter(body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def _adapter_source(state: ServerState, body: bodies.LoadAdapterBody) -> AdapterSource:
    """Returns the adapter to load. Raises Fault if its name is invalid or its path does not exist."""
    try:
        check_name(body.lora_name)
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param="lora_name") from None
    directory = adapters_below(state.settings.models_dir).get(body.lora_path)
    if directory is not None:
        return AdapterSource(body.lora_name, *directory)
    if (trained := state.sources.find_adapter(body.lora_path)) is not None:
        return state.sources.adapter_source(*trained, body.lora_name)
    hint = (
        "Paths are ids of fine-tune jobs that trained an adapter, checkpoints of them, and directories of --models-dir "
        "that hold one."
    )
    raise Fault(Code.MODEL_NOT_FOUND, "There is no such adapter.", param="lora_path", hint=hint)
