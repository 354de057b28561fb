"""How other weights replace those of a model while it serves.

Other weights of the same model, served with the same options, are exchanged in the running engine (`_swap_in_place`).
The engine first stages them beside the served ones while requests run. Then new requests wait until those in flight
have finished, the weights are exchanged and verified, and the waiting requests get the new weights. If the
verification fails, the weights are exchanged again, which restores every bit.

All other weights get a new engine process, and so do weights that would let requests wait for too long. A replaced
engine is closed when its last lease ends.

Either way new weights must generate a token and pass their verification (`verification.py`) before a deadline;
otherwise the previous weights stay in use. If the engine process of new weights dies several times within their
probation, the previous weights are loaded again (supervisor.py).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from pathlib import Path

from fp8serve.errors import Fp8ServeError
from fp8serve.model.storage.versions import weight_version
from fp8serve.server.faults import Code, Fault
from fp8serve.server.serving.generation import Generation
from fp8serve.server.serving.served_model import Probation, SaveActivation, ServedModel
from fp8serve.server.serving.served_weights import ServedWeights, WeightSource, have_same_text_files
from fp8serve.server.serving.verification import UNVERIFIED, Verification, Verified

log = logging.getLogger("fp8serve.server")

PROBATION_SECONDS = 600.0
MAX_DRAIN_SECONDS = 2.0
"""How long new requests may wait for those in flight before weights are exchanged in place."""
MAX_VERIFICATION_SECONDS = 5.0
"""The longest time for measuring the previous weights. If it takes longer, requests would wait too long while the new
weights are measured in the same engine, so the new weights get a new engine process."""


class _NotInPlaceError(Exception):
    """Weights cannot be exchanged in the running engine, for the reason in the message. Nothing has changed."""


async def activate(
    model: ServedModel,
    source: WeightSource,
    save_activation: SaveActivation,
    verification: Verification = UNVERIFIED,
    in_place: bool = True,
) -> tuple[ServedWeights, Verified | None]:
    """Loads `source` beside the served weights, verifies it, saves the activation and swaps.

    With `in_place` the weights are exchanged in the running engine if possible. Otherwise a new engine process loads
    them, and requests are answered with the previous weights while `save_activation` runs. The swap itself cannot fail.
    If anything before it fails, `save_activation` included, this function raises and changes nothing: the served
    weights are always those that the next start of the server would load.
    """
    model.refuse_if_unloading()
    refuse_if_adapted(model)
    if model.is_paused:
        raise Fault(Code.ALIAS_BUSY, "Generation is paused.", hint="Continue it first.")
    _refuse_if_swapping(model)
    async with model.swap_lock:
        model.activating = source.model_id, time.monotonic()
        try:
            try:
                if not in_place:
                    raise _NotInPlaceError("several servers serve the model")
                return await _swap_in_place(model, source, save_activation, verification)
            except _NotInPlaceError as error:
                log.info("starting a new engine process for %s: %s", source.model_id, error)
            new, verified = await _load_verified(model, source, save_activation, verification)
            _take_over(model, new, save_activation)
            return new, verified
        finally:
            model.activating = None


def _take_over(model: ServedModel, new: ServedWeights, save_activation: SaveActivation) -> None:
    """Serves `new` from now on. Their probation begins, and a replaced engine process is retired."""
    previous = model.current
    model.serve(new)
    if previous is not None and new.source != previous.source:
        model.probation = None  # base weights get none: they are the fallback
        if new.source != model.base_source:
            ends_at = time.monotonic() + PROBATION_SECONDS
            model.probation = Probation(previous.source, save_activation, ends_at)
    model.admission.metrics.swaps("ok").inc()
    log.info("now serving %s (%s)", new.source.model_id, new.weight_version)
    if previous is not None and previous.engine is not new.engine:
        model.retire(previous)


async def _load_verified(
    model: ServedModel, source: WeightSource, save_activation: SaveActivation, verification: Verification
) -> tuple[ServedWeights, Verified | None]:
    """Starts an engine with `source`, verifies it and saves its activation."""
    try:
        await verification.check_files(source.directory)
        new = await model.load_engine(source, replaces_another=True)
        async with _closed_on_failure(new):
            verified = await verification.check_engine(new, model.current)
    except Fp8ServeError as error:
        model.admission.metrics.swaps("failed").inc()
        message = f"The new weights cannot be served, and the previous ones stay in use: {error}"
        raise Fault(Code.ACTIVATION_FAILED, message) from None
    async with _closed_on_failure(new):
        await save_activation(source.key)
    return new, verified


async def _swap_in_place(
    model: ServedModel, source: WeightSource, save_activation: SaveActivation, verification: Verification
) -> tuple[ServedWeights, Verified | None]:
    """Exchanges the weights of the running engine for those of `source` (see the docstring of this module).

    Raises Fault 409 if the new weights fail their verification, and _NotInPlaceError if they cannot be exchanged.
    In both cases the previous weights stay in use.
    """
    old = model.current
    if old is None or (obstacle := await asyncio.to_thread(_obstacle_to_swap, old, source)) is not None:
        raise _NotInPlaceError("no engine runs" if old is None else obstacle)
    try:
        await verification.check_files(source.directory)
        version = await asyncio.to_thread(weight_version, source.directory)
        started = time.monotonic()
        perplexity = await verification.measure_previous(old)
        if (seconds := time.monotonic() - started) > MAX_VERIFICATION_SECONDS:
            raise _NotInPlaceError(f"requests would wait about {seconds:.0f} seconds for the verification")
        await old.engine.stage_weights(source.directory)
    except (Fp8ServeError, OSError) as error:
        raise _NotInPlaceError(str(error)) from None
    new = replace(
        old, source=source, weight_version=f"{source.key}-{version}", overwritten_from=None, leases=0,
        unleased=asyncio.Event(),
    )  # fmt: skip
    model.released.clear()  # new requests wait
    try:
        await _drain_and_swap(old)
        verified = await _verify_swapped(model, new, save_activation, verification, perplexity)
        _take_over(model, new, save_activation)
    finally:
        model.release()
        with contextlib.suppress(Fp8ServeError, OSError):
            await old.engine.discard_staged_weights()
    log.info("%s replaced the weights of the running engine", source.model_id)
    return new, verified


def _obstacle_to_swap(old: ServedWeights, source: WeightSource) -> str | None:
    """Returns why weights cannot be exchanged in the engine of `old`, or None. The engine checks the rest."""
    if not old.engine.alive:
        return "no engine runs"
    if source.options != old.source.options:
        return "its engine options differ from those of the served weights"
    if not old.engine.limits.generates:
        return "the model generates no text"
    if not have_same_text_files(source.directory, old.source.directory):
        return "its tokenizer or generation config differs from that of the served weights"
    return None


async def _drain_and_swap(old: ServedWeights) -> None:
    try:
        await _wait_until_unleased(old, MAX_DRAIN_SECONDS)
        await _exchange(old)
    except Fault as fault:
        raise _NotInPlaceError(fault.message) from None


async def _verify_swapped(
    model: ServedModel,
    new: ServedWeights,
    save_activation: SaveActivation,
    verification: Verification,
    previous_perplexity: float | None,
) -> Verified | None:
    """Verifies exchanged weights and saves their activation. If that fails, the previous weights serve again."""
    try:
        await model.run_canary(new.engine)
        verified = await verification.check_overwritten(new, previous_perplexity)
        await save_activation(new.source.key)
    except BaseException as error:
        await asyncio.shield(_swap_back(new))
        if not isinstance(error, Fp8ServeError) or isinstance(error, Fault):
            raise
        model.admission.metrics.swaps("failed").inc()
        message = f"The new weights cannot be served, and the previous ones stay in use: {error}"
        raise Fault(Code.ACTIVATION_FAILED, message) from None
    return verified


async def _swap_back(new: ServedWeights) -> None:
    """Restores the previous weights of the engine. If that fails, the engine is killed and restarts with them."""
    try:
        await new.engine.swap_weights()
    except (Fp8ServeError, OSError) as error:
        log.error("the previous weights could not be restored: %s", error)
        await new.engine.kill("The weights that replaced its own cannot be served.")


async def replace_weights(
    model: ServedModel, directory: Path, seconds: float, verification: Verification = UNVERIFIED
) -> tuple[ServedWeights, Verified | None]:
    """Copies the weights of `directory`, another version of the same model, over the served ones.

    Requests in flight have `seconds` to finish, and new requests are refused meanwhile, so each response comes from
    one version. The new weights must generate a token and pass `verification` before they serve. An engine process
    that restarts later loads the weights that it first started with.

    Raises Fault 409 if the weights do not fit or fail verification, if the model has adapters, or if requests do
    not finish in time. The previous weights are then served again.
    """
    old = model.resolve()
    _refuse_if_swapping(model)
    async with model.swap_lock:
        previous_perplexity = await verification.measure_previous(old)
        model.is_replacing_weights = True
        try:
            await _wait_until_unleased(old, seconds)
            try:
                version = await asyncio.to_thread(weight_version, directory)
                await old.engine.load_weights(directory)
            except (Fp8ServeError, OSError) as error:
                raise Fault(Code.LOAD_FAILED, f"The weights cannot be loaded: {error}") from None
            new = replace(old, weight_version=version, overwritten_from=directory, unleased=asyncio.Event(), leases=0)
            verified = await _verify_or_restore(model, old, new, verification, previous_perplexity)
        finally:
            model.is_replacing_weights = False
        if model.current is not old:
            raise Fault(Code.ENGINE_DOWN, "The engine ended while its weights were being replaced.", retry_after=2)
        model.current = new
        log.info("now serving %s with the weights %s", new.source.model_id, new.weight_version)
        return new, verified


async def serve_received(
    model: ServedModel,
    seconds: float,
    label: str | None = None,
    *,
    allow_incomplete: bool = False,
    to_abort: Iterable[Generation] | None = None,
) -> ServedWeights | None:
    """Serves the weights that a trainer has sent to the engine (trainer.py). Returns None, and changes nothing, if
    `allow_incomplete` and some of the model's weights have not arrived yet.

    The engine first checks and stages them beside the served ones. Requests in flight have `seconds` to finish, and new
    ones wait meanwhile; suspended requests continue with the new weights. With `to_abort`, the requests in flight of
    all models, those of this model are aborted instead. Then the weights are exchanged and must generate a token, or
    else they are exchanged again. `label` names the version; by default it is a digest.

    Raises Fault 409 if the weights do not fit, or if requests do not finish in time. The old weights then still serve.
    """
    old = model.resolve()
    _refuse_if_swapping(model)
    async with model.swap_lock:
        try:
            version = await old.engine.stage_received_weights(allow_incomplete)
        except (Fp8ServeError, OSError) as error:
            raise Fault(Code.LOAD_FAILED, f"The weights cannot be loaded: {error}") from None
        if version is None:
            return None
        new = replace(
            old, weight_version=f"{old.source.key}-{label or version}", overwritten_from=None, leases=0,
            unleased=asyncio.Event(),
        )  # fmt: skip
        model.released.clear()
        try:
            if to_abort is not None:
                await abort_requests(model, to_abort)
            if not model.is_paused:
                await wait_until_idle(model, seconds)
            await _exchange(old)
            await _verify_swapped(model, new, _save_nothing, UNVERIFIED, None)
            if model.current is not old:
                raise Fault(Code.ENGINE_DOWN, "The engine ended while its weights were being replaced.", retry_after=2)
            model.serve(new)
            model.admission.metrics.swaps("ok").inc()
        finally:
            model.release()
            with contextlib.suppress(Fp8ServeError, OSError):
                await old.engine.discard_staged_weights()
        log.info("now serving %s with the weights %s", new.source.model_id, new.weight_version)
        return new


async def _exchange(old: ServedWeights) -> None:
    """Exchanges the staged weights. Raises Fault 409 if that fails; the old weights then still serve."""
    try:
        await old.engine.swap_weights()
    except asyncio.CancelledError:  # the engine may exchange them nevertheless
        await asyncio.shield(old.engine.kill("The exchange of its weights was interrupted."))
        raise
    except (Fp8ServeError, OSError) as error:
        raise Fault(Code.LOAD_FAILED, f"The weights cannot be exchanged: {error}") from None


async def _save_nothing(key: str) -> None:
    """The weights of a trainer are not stored: a server that starts again loads those with which it first started."""


async def wait_until_idle(model: ServedModel, seconds: float | None) -> None:
    """Waits until no request of the model is in flight. Raises Fault 409 if that takes more than `seconds`."""
    capacity = model.admission.capacity
    try:
        async with asyncio.timeout(seconds):
            await capacity.idle.wait()
    except TimeoutError:
        message = f"{capacity.in_flight} requests were still running after {seconds:g} seconds."
        raise Fault(Code.ALIAS_BUSY, message, hint="Pause generation first.") from None


async def abort_requests(model: ServedModel, generations: Iterable[Generation]) -> None:
    """Ends the requests in flight with what they have generated. `generations` are those of all models."""
    engine = model.resolve().engine
    for generation in generations:
        if generation.served.engine is engine:
            generation.was_paused = True
    try:
        await engine.abort_requests()
    except (Fp8ServeError, OSError) as error:
        raise Fault(Code.LOAD_FAILED, str(error)) from None


def refuse_if_adapted(model: ServedModel) -> None:
    if model.adapters:
        hint = f"Unload first: {', '.join(model.adapters)}."
        raise Fault(Code.ALIAS_BUSY, "The model has adapters, which belong to its current weights.", hint=hint)


async def _verify_or_restore(
    model: ServedModel,
    old: ServedWeights,
    new: ServedWeights,
    verification: Verification,
    previous_perplexity: float | None,
) -> Verified | None:
    """Verifies `new`, whose weights were copied over those of `old`. On failure restores `old` and raises Fault."""
    try:
        await model.run_canary(new.engine)
        return await verification.check_overwritten(new, previous_perplexity)
    except Fp8ServeError as error:
        outcome = await _restore_previous_weights(old)
        message = f"The new weights cannot be served, and {outcome}: {error}"
        raise Fault(Code.ACTIVATION_FAILED, message) from None


async def _restore_previous_weights(old: ServedWeights) -> str:
    """Loads the weights of `old` again from their directory and returns what happened, as a clause for a message.

    If that fails, or the directory has other weights by now, the engine process is killed: it restarts with the
    weights that it first started with.
    """
    directory = old.overwritten_from or old.source.directory
    try:
        is_same = old.weight_version.endswith(await asyncio.to_thread(weight_version, directory))
        if is_same and old.source.options.scales is None:
            await old.engine.load_weights(directory)
            return "the previous weights are served again"
    except (Fp8ServeError, OSError) as error:
        log.error("the previous weights could not be loaded again: %s", error)
    await old.engine.kill("The weights that replaced its own cannot be served.")
    return "the engine restarts with its original weights"


async def _wait_until_unleased(served: ServedWeights, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            while served.leases:
                await served.unleased.wait()
    except TimeoutError:
        message = f"{served.leases} requests were still running after {seconds:g} seconds."
        raise Fault(Code.ALIAS_BUSY, message, hint="Try again with a larger value of `seconds`.") from None


def _refuse_if_swapping(model: ServedModel) -> None:
    if model.is_swapping():
        hint = "Try again when that activation has finished."
        raise Fault(Code.ALIAS_BUSY, "Other weights are already being activated for this model.", hint=hint)


@contextlib.asynccontextmanager
async def _closed_on_failure(served: ServedWeights) -> AsyncGenerator[None, None]:
    """Closes the engine if the block raises or is cancelled."""
    try:
        yield
    except BaseException:
        await served.engine.close()
        raise
