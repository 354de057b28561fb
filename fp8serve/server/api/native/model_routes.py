"""The models of this server and their adapters: which there are, loading, swapping and unloading them, other names."""

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Literal, overload

from fastapi import APIRouter
from starlette.responses import PlainTextResponse

from fp8serve.errors import RequestError
from fp8serve.server.api.model_list_routes import Model, all_models
from fp8serve.server.api.routing import Answer, BoundedRoute, JsonObject, StateDep
from fp8serve.server.faults import Code, Fault
from fp8serve.server.named_models import NamedModel, adapters_below, check_name, models_below
from fp8serve.server.schemas.finetune_bodies import (
    USUAL_MAX_RATIO,
    ActivateBody,
    AliasBody,
    LoadAdapterBody,
    LoadBody,
    UnloadAdapterBody,
    UnloadBody,
    WeightsBody,
)
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving.adapters import AdapterSource
from fp8serve.server.serving.served import Served, Source
from fp8serve.server.serving.served_model import BASE, ServedModel
from fp8serve.server.serving.verification import UNVERIFIED, MeasuredRow, Verification, Verified

router = APIRouter(tags=["models"], route_class=BoundedRoute)
MEMORY = {"weights": "weight_bytes", "cache": "kv_cache_bytes"}


class ServedView(Answer):
    source: str
    model: str
    weight_version: str


class Available(Answer):
    source: str
    model: str
    base: str


class Activating(Answer):
    model: str
    seconds: float


class ModelView(Answer):
    name: str
    default: bool
    state: str
    problem: str | None
    served: ServedView | None
    activating: Activating | None
    aliases: list[str]
    task: Literal["generate", "embed", "classify"] | None
    max_model_len: int | None
    in_flight: int
    memory_bytes: dict[str, int]
    adapters: list[JsonObject]


class Models(Answer):
    alias: str
    state: str
    served: ServedView | None
    activating: Activating | None
    available: list[Available]
    models: list[ModelView]
    aliases: dict[str, str]
    loadable: list[str]
    object: Literal["list"] = "list"
    data: list[Model]


class Unloaded(Answer):
    name: str
    state: Literal["unloaded"] = "unloaded"


class VerifiedView(Answer):
    tokens: int
    perplexity: float
    perplexity_before: float | None


class Swapped(Answer):
    model: str
    served: ServedView
    previous: ServedView | None
    verified: VerifiedView | None


class Replaced(Swapped):
    weights_version: int


@router.get("/models", summary="What is served, and what could be")
async def models(state: StateDep) -> Models:
    """`alias`, `state`, `served` and `activating` are the default model's. `object` and `data` are as in `/v1/models`,
    for OpenAI's clients whose base URL lacks `/v1`.
    """
    default = state.models.default
    results = await asyncio.to_thread(state.sources.results)
    return Models(
        alias=default.name,
        state=default.state,
        served=served_view(default.current),
        activating=_activating(default.activating),
        available=[
            Available(source=BASE, model=default.name, base=default.name),
            *(Available(source=job.id, model=job.model_id, base=job.base) for job in results),
        ],
        models=[model_view(state, model) for model in state.models.models.values()],
        aliases=dict(state.models.aliases),
        loadable=sorted(await asyncio.to_thread(models_below, state.settings.models_dir)),
        data=list((await all_models(state)).values()),
    )


@router.post("/models/{name:path}/load", summary="Serve a further model")
async def load(name: str, state: StateDep, body: LoadBody | None = None) -> ModelView:
    """Answers when the model serves, or at once if it already does. No other model is affected. All numbers in its
    files must be finite, and it must write a token; there is nothing to compare its perplexity with.
    """
    home = None if body is None or body.source is None else await asyncio.to_thread(_home, state, name, body)
    if home is None and body is not None and body.options:
        message = "Options are for a source; say which, or leave them out."
        raise Fault(Code.INVALID_PARAMETER, message, param="options")
    return model_view(state, await state.activation.load(name, home))


@router.post("/weights", summary="Overwrite the weights of a served model with another version of them")
async def replace_weights(body: WeightsBody, state: StateDep) -> Replaced:
    """For a trainer beside the server: no second engine is loaded. Answers when the new weights serve. Requests under
    way are finished first, and new ones get 503 meanwhile, so every answer comes from one version. All or nothing: the
    new weights must write a token, and with `texts` their perplexity on these may be at most `max_perplexity_ratio`
    times that of the old weights. Otherwise the old weights continue to serve.
    """
    model = state.models.default if body.model is None else state.models.find(body.model, "model")
    directory = (await asyncio.to_thread(models_below, state.settings.models_dir)).get(body.path)
    if directory is None:
        hint = "Paths are the directories of --models-dir that hold a model."
        raise Fault(Code.MODEL_NOT_FOUND, "There is no such directory.", param="path", hint=hint)
    if model.adapters:
        hint = f"Unload first: {', '.join(model.adapters)}."
        raise Fault(Code.ALIAS_BUSY, "The model has adapters, which are for the weights that it serves.", hint=hint)
    seconds = state.settings.drain_seconds if body.seconds is None else body.seconds
    before = served_view(model.current)
    verification = await _by_texts(state, model, body)
    served, verified = await state.loader.to_the_end(model.replace_weights(directory, seconds, verification))
    return Replaced(
        model=model.name,
        served=served_view(served),
        previous=before,
        verified=verified_view(verified),
        weights_version=served.engine.info["weights_version"],
    )


async def _by_texts(state: ServerState, model: ServedModel, body: WeightsBody) -> Verification:
    """What is asked of weights that are pushed. Fault 422: the texts are too long, or nothing can be measured."""
    if body.texts is None:
        return UNVERIFIED
    served = model.resolve()
    if not served.engine.limits.generates:
        raise Fault(Code.INVALID_PARAMETER, "The model writes no text, and has no perplexity.", param="texts")
    prompts = await state.parser.prompts(served, body.texts)
    too_long = next((n for n, ids in enumerate(prompts) if len(ids) >= served.engine.limits.max_model_len), None)
    if too_long is not None:
        raise Fault(Code.INVALID_PARAMETER, f"Text {too_long + 1} fills the whole context.", param="texts")
    rows = [MeasuredRow(ids, (True,) * len(ids)) for ids in prompts if len(ids) > 1]
    if not rows:
        raise Fault(Code.INVALID_PARAMETER, "No text has two tokens, of which the second is measured.", param="texts")
    ratio = USUAL_MAX_RATIO if body.max_perplexity_ratio is None else body.max_perplexity_ratio
    return Verification(rows, ratio, model.deadlines.load, what="the texts")


@router.post("/models/{name:path}/unload", summary="Stop serving a further model")
async def unload(name: str, state: StateDep, body: UnloadBody | None = None) -> Unloaded:
    """New requests for it are refused at once; answers under way have `seconds` to end."""
    seconds = body.seconds if body is not None else None
    await state.loader.unload(name, state.settings.drain_seconds if seconds is None else seconds)
    return Unloaded(name=name)


@router.post("/models/{name:path}/alias", summary="Give a model another name, or remove that name")
async def alias(name: str, body: AliasBody, state: StateDep) -> ModelView:
    model = state.models.find(name)
    if body.remove:
        state.models.aliases.pop(body.alias, None)
    else:
        _give(state, model, body.alias)
    return model_view(state, model)


def _give(state: ServerState, model: ServedModel, alias: str) -> None:
    try:
        check_name(alias)
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param="alias") from None
    if alias in state.loader.known or alias in state.models.models or state.models.adapter(alias) is not None:
        raise Fault(Code.NAME_TAKEN, f"{alias} is a model's own name.", param="alias", hint="Choose another.")
    state.models.aliases[alias] = model.name


def _home(state: ServerState, name: str, body: LoadBody) -> Source:
    """What the name is to stand for. Fault: there is no such source, or the name or an option is none."""
    source = str(body.source)
    directory = models_below(state.settings.models_dir).get(source)
    if directory is None and not state.sources.knows(source):
        hint = "Sources are ids of fine-tune jobs that succeeded, checkpoints, and the directories of --models-dir."
        raise Fault(Code.MODEL_NOT_FOUND, "There is no such source.", param="source", hint=hint)
    if place := next((name for name in ("scales", "cache_dir", "draft_model") if name in body.options), None):
        message = f"{place} is a place on the server's disk, which only its command line can name."
        raise Fault(Code.INVALID_PARAMETER, message, param="options")
    try:
        named = NamedModel(name, directory or Path(), body.options)
        home = Source(BASE, name, named.directory, named.engine(state.settings.device), named.answers)
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param="options" if body.options else "name") from None
    return state.sources.trained(source, home) or home


def model_view(state: ServerState, model: ServedModel) -> ModelView:
    served = model.current
    info = {} if served is None else served.engine.info
    return ModelView(
        name=model.name,
        default=model is state.models.default,
        state=model.state,
        problem=None if model.problem is None else Fault(Code.LOAD_FAILED, str(model.problem)).message,
        served=served_view(served),
        activating=_activating(model.activating),
        aliases=sorted(alias for alias, name in state.models.aliases.items() if name == model.name),
        task=None if served is None else served.engine.limits.task,
        max_model_len=None if served is None else served.engine.limits.max_model_len,
        in_flight=model.admission.in_flight,
        memory_bytes={kind: info[key] for kind, key in MEMORY.items() if key in info},
        adapters=[adapter.view() for adapter in model.adapters.values()],
    )


def _activating(activation: tuple[str, float] | None) -> Activating | None:
    return activation and Activating(model=activation[0], seconds=time.monotonic() - activation[1])


# -- activation, and adapters by vLLM's routes -------------------------------------------------------------------------


@router.post("/models/{name:path}/activate", summary="Serve a job's result, or go back to the base model")
async def activate_model(name: str, body: ActivateBody, state: StateDep) -> Swapped:
    return await swap(state, state.models.find(name), body.source, body.max_perplexity_ratio)


async def swap(state: ServerState, model: ServedModel, key: str, ratio: float) -> Swapped:
    """The swap goes on to its end even if the client that asked for it goes away. A job's adapter is loaded beside.

    ratio: see `Verification`.
    """
    if (trained := await asyncio.to_thread(state.sources.adapter, key)) is not None:
        adapter, verified = await state.activation.activate_adapter(model, *trained, ratio)
        served = served_view(adapter.served_with(model.resolve()))
        return Swapped(model=adapter.name, served=served, previous=None, verified=verified_view(verified))
    before = served_view(model.current)
    now, verified = await state.activation.activate(model, key, ratio)
    return Swapped(model=model.name, served=served_view(now), previous=before, verified=verified_view(verified))


def verified_view(verified: Verified | None) -> VerifiedView | None:
    return None if verified is None else VerifiedView(**asdict(verified))


@overload
def served_view(served: Served) -> ServedView: ...
@overload
def served_view(served: Served | None) -> ServedView | None: ...


def served_view(served: Served | None) -> ServedView | None:
    if served is None:
        return None
    source = served.source
    return ServedView(source=source.key, model=source.model_id, weight_version=served.weight_version)


@router.post(
    "/v1/load_lora_adapter", name="load", summary="Serve an adapter beside a model", response_class=PlainTextResponse
)
async def load_adapter(body: LoadAdapterBody, state: StateDep) -> str:
    """Answers when requests can name the adapter. Running requests continue; an adapter that is loaded already stays as
    it is.
    """
    base = body.base_model_name
    model = state.models.default if base is None else state.models.find(base, "base_model_name")
    source = await asyncio.to_thread(_adapter_source, state, body)
    await state.activation.load_adapter(model, source)
    return f"Success: LoRA adapter '{source.name}' added successfully."


@router.post(
    "/v1/unload_lora_adapter", name="unload", summary="Stop serving an adapter", response_class=PlainTextResponse
)
async def unload_adapter(body: UnloadAdapterBody, state: StateDep) -> str:
    """Running requests are finished with it; new ones get a 404."""
    await state.activation.unload_adapter(body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def _adapter_source(state: ServerState, body: LoadAdapterBody) -> AdapterSource:
    """Fault: the name or the path is none."""
    try:
        check_name(body.lora_name)
    except RequestError as error:
        raise Fault(Code.INVALID_PARAMETER, str(error), param="lora_name") from None
    directory = adapters_below(state.settings.models_dir).get(body.lora_path)
    if directory is not None:
        return AdapterSource(body.lora_name, *directory)
    if (trained := state.sources.adapter(body.lora_path)) is not None:
        return state.sources.of_adapter(*trained, body.lora_name)
    hint = (
        "Paths are ids of fine-tune jobs that trained an adapter, checkpoints of them, and directories of --models-dir "
        "that hold one."
    )
    raise Fault(Code.MODEL_NOT_FOUND, "There is no such adapter.", param="lora_path", hint=hint)
