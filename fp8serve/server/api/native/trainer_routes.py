"""The routes for a trainer beside the server: weights by broadcast or shared memory, and pauses of generation.

They have the names and fields of vLLM and of SGLang, so that trainers which sample from those servers can use this one.
They are about the default model.
"""

from collections.abc import Coroutine
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from fp8serve.engine.client import EngineClient
from fp8serve.server.api.routing import BoundedRoute, JsonObject, ResponseModel, StateDep
from fp8serve.server.schemas import trainer_bodies as bodies
from fp8serve.server.server_state import ServerState
from fp8serve.server.serving import trainer
from fp8serve.server.serving.served_weights import ServedWeights
from fp8serve.server.serving.trainer import PauseMode

router = APIRouter(tags=["trainers"], route_class=BoundedRoute)
GROUP = "weight_transfer"  # the name of vLLM's only group
ONE_BROADCAST = 1 << 62  # more bytes than any packed broadcast
SGLANG_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class Message(ResponseModel):
    message: str


class Success(ResponseModel):
    success: Literal[True] = True


class Result(Success):
    message: str


class PauseStatus(ResponseModel):
    status: Literal["paused", "resumed"]


class IsPaused(ResponseModel):
    is_paused: bool


class WorldSize(ResponseModel):
    world_size: int


class ServerInfo(ResponseModel):
    vllm_config: JsonObject


async def _run(state: ServerState, change: Coroutine[Any, Any, ServedWeights | None]) -> str:
    """Runs an update of the default model's weights. Returns a sentence that says whether they are served."""
    served = await state.model_loader.run_to_completion(
        change, f"receive weights of the model {state.models.default.name}"
    )
    return "The tensors have arrived." if served is None else f"The weights {served.weight_version} are served."


async def _join(state: ServerState, address: dict[str, str | int | None]) -> None:
    seconds = state.settings.transfer_seconds
    change = trainer.join_group(state.models.default, address, seconds)
    await state.model_loader.run_to_completion(change, "join a trainer's process group")


async def _pause(state: ServerState, mode: PauseMode) -> None:
    change = trainer.pause(state.models.default, mode, state.active)
    await state.model_loader.run_to_completion(change, "pause generation")


# -- vLLM --------------------------------------------------------------------------------------------------------------


@router.get("/get_world_size", summary="The number of processes of this server that receive weights (vLLM)")
async def get_world_size() -> WorldSize:
    return WorldSize(world_size=1)


@router.get("/server_info", summary="The configuration that trainers read (vLLM)")
async def server_info(state: StateDep) -> ServerInfo:
    """Returns the part of vLLM's configuration that its trainers read. Log-probabilities are those of the tokens before
    temperature and penalties."""
    served = state.models.default.resolve()
    return ServerInfo(
        vllm_config={
            "model_config": {
                "model": served.source.model_id,
                "dtype": f"torch.{served.engine.info.get('dtype', 'bfloat16')}",
                "max_model_len": served.engine.limits.max_model_len,
                "logprobs_mode": "raw_logprobs",
            },
            "parallel_config": {
                "tensor_parallel_size": served.source.options.tensor_parallel,
                "pipeline_parallel_size": 1,
                "data_parallel_size": 1,
            },
            "weight_transfer_config": {"backend": "nccl"},
            "lora_config": None,
        }
    )


@router.post("/init_weight_transfer_engine", summary="Join a trainer's process group (vLLM)")
async def init_weight_transfer_engine(body: bodies.InitTransferBody, state: StateDep) -> Message:
    """Connects to the port that the trainer, rank 0, has opened. Responds when the group is complete."""
    info = body.init_info
    is_on_cpu = state.models.default.resolve().engine.info.get("device", "cpu").startswith("cpu")
    await _join(
        state,
        {
            "name": GROUP,
            "host": info.master_address,
            "port": info.master_port,
            "rank": info.rank_offset,
            "world_size": info.world_size,
            "backend": info.backend or ("gloo" if is_on_cpu else "nccl"),
            "rendezvous": "vllm",
            "packed_bytes": info.packed_bytes,
        },
    )
    return Message(message="Weight transfer initialized")


@router.post("/start_weight_update", summary="Begin an update of the weights (vLLM)")
async def start_weight_update(state: StateDep, body: bodies.StartUpdateBody | None = None) -> Message:
    """Begins an update of one or more `/update_weights`, which `/finish_weight_update` ends."""
    await trainer.start_update(state.models.default)
    return Message(message="Weight update started")


@router.post("/update_weights", summary="Receive weights from a trainer (vLLM)")
async def update_weights(body: bodies.UpdateWeightsBody, state: StateDep) -> Message:
    """Receives tensors by broadcast or from a shared memory. They are kept beside the served weights until the update
    is complete: at `/finish_weight_update`, or without `/start_weight_update` when all weights of the model have
    arrived. The weights are then checked and exchanged, and must generate a token. If that fails, or the tensors do not
    arrive within `--transfer-seconds`, the old weights continue to serve and the update is dropped.
    """
    info, seconds = body.update_info, state.settings.transfer_seconds
    shared = info.shared_memory

    async def transfer(engine: EngineClient) -> None:
        if shared is None:
            await engine.receive_weights(GROUP, info.infos, info.packed_bytes, seconds)
        else:
            await engine.read_shared_weights(shared, info.infos)

    change = trainer.receive(state.models.default, transfer, state.settings.drain_seconds, body.weight_version)
    return Message(message=await _run(state, change))


@router.post("/finish_weight_update", summary="Serve the weights of an update (vLLM)")
async def finish_weight_update(state: StateDep, body: bodies.FinishUpdateBody | None = None) -> Message:
    """Checks the tensors that have arrived since `/start_weight_update` and serves them. Responds with a 409 if no
    update was started, or if the last one has ended or failed."""
    label, model = None if body is None else body.weight_version, state.models.default
    change = trainer.finish_update(model, state.settings.drain_seconds, label)
    return Message(message=await _run(state, change))


@router.post("/pause", summary="Pause generation (vLLM)")
async def pause(
    state: StateDep, mode: Annotated[PauseMode, Query()] = "abort", clear_cache: Annotated[bool, Query()] = True
) -> PauseStatus:
    """Makes new requests wait until `/resume`. Requests in flight end with what they have generated (`abort`), finish
    first (`wait`), or continue after `/resume` (`keep`), with the weights that serve then. With `keep`, the prefix
    cache is emptied only by new weights.
    """
    await _pause(state, mode)
    if clear_cache and mode != "keep":
        await trainer.call_engine(state.models.default, lambda engine: engine.reset_prefix_cache())
    return PauseStatus(status="paused")


@router.post("/resume", summary="Continue generation after a pause (vLLM)")
async def resume(state: StateDep) -> PauseStatus:
    await trainer.resume(state.models.default)
    return PauseStatus(status="resumed")


@router.get("/is_paused", summary="Whether generation is paused (vLLM)")
async def is_paused(state: StateDep) -> IsPaused:
    return IsPaused(is_paused=state.models.default.is_paused)


@router.post("/reset_prefix_cache", summary="Empty the prefix cache (vLLM)")
async def reset_prefix_cache(state: StateDep) -> Success:
    await trainer.call_engine(state.models.default, lambda engine: engine.reset_prefix_cache())
    return Success()


# -- SGLang ------------------------------------------------------------------------------------------------------------


@router.post("/init_weights_update_group", summary="Join a trainer's process group (SGLang)")
async def init_weights_update_group(body: bodies.InitGroupBody, state: StateDep) -> Result:
    """Connects to the port that the trainer, rank 0, has opened. Responds when the group is complete."""
    await _join(
        state,
        {
            "name": body.group_name,
            "host": body.master_address,
            "port": body.master_port,
            "rank": body.rank_offset,
            "world_size": body.world_size,
            "backend": body.backend,
            "rendezvous": "torch",
        },
    )
    return Result(message="The process group is complete.")


@router.post("/destroy_weights_update_group", summary="Leave a trainer's process group (SGLang)")
async def destroy_weights_update_group(state: StateDep, body: bodies.DestroyGroupBody | None = None) -> Result:
    name = (body or bodies.DestroyGroupBody()).group_name
    await trainer.call_engine(state.models.default, lambda engine: engine.leave_group(name))
    return Result(message="The server has left the process group.")


@router.post("/update_weights_from_distributed", summary="Receive weights from a trainer (SGLang)")
async def update_weights_from_distributed(body: bodies.DistributedUpdateBody, state: StateDep) -> Result:
    """Receives tensors by broadcast, as `/update_weights` does. With `abort_all_requests`, requests in flight end with
    what they have generated before complete weights are exchanged; otherwise they finish first.
    """
    group, seconds = body.group_name, state.settings.transfer_seconds
    packed_bytes = None if body.load_format is None else ONE_BROADCAST
    to_abort = state.active if body.abort_all_requests else None

    async def transfer(engine: EngineClient) -> None:
        await engine.receive_weights(group, body.infos, packed_bytes, seconds)

    change = trainer.receive(
        state.models.default, transfer, state.settings.drain_seconds, body.weight_version, waits_for_finish=False,
        to_abort=to_abort,
    )  # fmt: skip
    return Result(message=await _run(state, change))


@router.post("/pause_generation", summary="Pause generation (SGLang)")
async def pause_generation(state: StateDep, body: bodies.PauseGenerationBody | None = None) -> Result:
    """Makes new requests wait until `/continue_generation`."""
    await _pause(state, SGLANG_MODES["abort" if body is None else body.mode])
    return Result(message="Generation is paused.")


@router.post("/continue_generation", summary="Continue generation after a pause (SGLang)")
async def continue_generation(state: StateDep, body: bodies.ContinueGenerationBody | None = None) -> Result:
    await trainer.resume(state.models.default)
    return Result(message="Generation continues.")


@router.get("/flush_cache", summary="Empty the prefix cache (SGLang)")
@router.post("/flush_cache", summary="Empty the prefix cache (SGLang)")
async def flush_cache(state: StateDep) -> Result:
    await trainer.call_engine(state.models.default, lambda engine: engine.reset_prefix_cache())
    return Result(message="The prefix cache is empty.")
