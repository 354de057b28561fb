"""A trainer beside the server: it sends weights to the engine's process, and pauses generation meanwhile.

The tensors do not pass through this process. It tells the engine which tensors are about to arrive, and from where
(engine/weight_receiver.py). They are kept beside the served weights until all have arrived. Then they are checked,
exchanged and verified (`weight_replacement.serve_received`). So a trainer that fails in the middle changes nothing.

An update that was started explicitly ends when the trainer says so, and must be complete then. Otherwise it ends by
itself with the last weight of the model.

While generation is paused, new requests wait. Those in flight are aborted, finish first, or are suspended in the engine
and continue afterwards, with the weights that serve then.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Literal

from fp8serve.engine.client import EngineClient
from fp8serve.errors import Fp8ServeError
from fp8serve.server.faults import Code, Fault
from fp8serve.server.serving.generation import Generation
from fp8serve.server.serving.served_model import ServedModel
from fp8serve.server.serving.served_weights import ServedWeights
from fp8serve.server.serving.weight_replacement import (
    abort_requests,
    refuse_if_adapted,
    serve_received,
    wait_until_idle,
)

PauseMode = Literal["abort", "wait", "keep"]
Transfer = Callable[[EngineClient], Awaitable[None]]


async def start_update(model: ServedModel) -> None:
    """Begins an update, and drops tensors of an earlier one."""
    engine = model.resolve().engine
    await _call(engine, lambda engine: engine.discard_received_weights())
    model.updated_engine = engine


async def join_group(model: ServedModel, address: dict[str, str | int | None], seconds: float) -> None:
    """Joins a trainer's process group. An update that another trainer has started ends, because its tensors are
    dropped."""
    await call_engine(model, lambda engine: engine.join_group(address, seconds))
    model.updated_engine = None


async def receive(
    model: ServedModel,
    transfer: Transfer,
    seconds: float,
    label: str | None,
    *,
    waits_for_finish: bool = True,
    to_abort: Iterable[Generation] | None = None,
) -> ServedWeights | None:
    """Receives tensors. Serves them if they complete the update; returns None if not. With `waits_for_finish`, an
    update that was started explicitly is only served by `finish_update`. Requests in flight have `seconds` to finish,
    or are aborted if `to_abort` has those of all models."""
    refuse_if_adapted(model)
    engine = model.resolve().engine
    await _call(engine, transfer)
    if waits_for_finish and model.updated_engine is engine:
        return None
    return await serve_received(model, seconds, label, allow_incomplete=True, to_abort=to_abort)


async def finish_update(model: ServedModel, seconds: float, label: str | None) -> ServedWeights | None:
    """Serves the weights of an update that was started. Raises Fault 409 if none was, or if its engine has ended."""
    is_open = model.updated_engine is model.resolve().engine
    model.updated_engine = None
    if not is_open:
        raise Fault(Code.LOAD_FAILED, "No update was started, so the weights are those from before.")
    return await serve_received(model, seconds, label)


async def pause(model: ServedModel, mode: PauseMode, generations: Iterable[Generation]) -> None:
    """Pauses generation. `generations` are the requests in flight of all models. Raises Fault, and pauses nothing, if
    the model writes no text or its engine does not run."""
    engine = model.resolve().engine
    engine.limits.check_generates()
    model.is_paused = True
    model.released.clear()
    try:
        if mode == "wait":
            await wait_until_idle(model, None)
        async with model.swap_lock:
            if not model.is_paused:  # `resume` was called meanwhile
                return
            if mode == "abort":
                await abort_requests(model, generations)
            await _call(engine, lambda engine: engine.suspend())
    except BaseException:
        model.is_paused = False
        model.release()
        raise


async def resume(model: ServedModel) -> None:
    """Continues generation. Does nothing if it is not paused."""
    async with model.swap_lock:
        served, model.is_paused = model.current, False
        if served is not None and served.engine.alive:
            await _call(served.engine, lambda engine: engine.resume())
        model.release()


async def call_engine(model: ServedModel, call: Transfer) -> None:
    """Calls the engine of the model. Raises Fault 409 with the sentence of its error."""
    await _call(model.resolve().engine, call)


async def _call(engine: EngineClient, call: Transfer) -> None:
    try:
        await call(engine)
    except (Fp8ServeError, OSError) as error:
        raise Fault(Code.LOAD_FAILED, str(error)) from None
