"""The weights that serve a model name, and how other weights replace them.

`ServedModel.current` is the only place that says which weights are served. It is replaced by one assignment on the
event loop, so every request sees either the previous weights or the new ones, never a mixture. A request holds a lease
on the weights it started with.

Other weights of the same model, served with the same options, are exchanged in the running engine (`_swap_in_place`).
The engine first stages them beside the served ones while requests run. Then new requests wait until those in flight
have finished, the weights are exchanged and verified, and the waiting requests get the new weights. If the
verification fails, the weights are exchanged again, which restores every bit.

All other weights get a new engine process, and so do weights that would let requests wait for too long. A replaced
engine is closed when its last lease ends.

Either way new weights must generate a token and pass their verification (`verification.py`) before a deadline;
otherwise the previous weights stay in use. If the engine process of new weights dies several times within their
probation, the previous weights are loaded again.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fp8serve.engine.client import EngineClient
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, MachineError
from fp8serve.server.faults import Code, Fault
from fp8serve.server.output_parsers.output_format import detect_format
from fp8serve.server.serving.admission import Admission
from fp8serve.server.serving.scale_history import ScaleHistory
from fp8serve.server.serving.served_weights import (
    Launch,
    ServedAdapter,
    ServedWeights,
    WeightSource,
    have_same_text_files,
    weight_version,
)
from fp8serve.server.serving.verification import UNVERIFIED, Verification, Verified
from fp8serve.server.settings import Deadlines

log = logging.getLogger("fp8serve.server")

BASE = "base"
State = Literal["loading", "ready", "restarting", "failed", "unloading", "closed"]
MAX_FAILED_RESTARTS = 3
"""Failed restarts in a row after which the server reports that it is not live."""
PROBATION_SECONDS = 600.0
MAX_DRAIN_SECONDS = 2.0
"""How long new requests may wait for those in flight before weights are exchanged in place."""
MAX_VERIFICATION_SECONDS = 5.0
"""The longest time for measuring the previous weights. If it takes longer, requests would wait too long while the new
weights are measured in the same engine, so the new weights get a new engine process."""
MAX_DEATHS = 3
"""Deaths of an engine process within its probation after which the previous weights are loaded again."""

SaveActivation = Callable[[str], Awaitable[None]]
"""Stores the key of the weights that the server shall load at its next start."""


@dataclass
class Probation:
    """The trial period of newly activated weights. If their engine process dies MAX_DEATHS times within it, `previous`
    is loaded again."""

    previous: WeightSource
    save_activation: SaveActivation
    ends_at: float  # on the monotonic clock
    deaths: int = 0


class _NotInPlaceError(Exception):
    """Weights cannot be exchanged in the running engine, for the reason in the message. Nothing has changed."""


class ServedModel:
    """A model name and the weights that serve it. `base_source` are its first weights, which activations call
    "base"."""

    def __init__(
        self, name: str, base_source: WeightSource, start_engine: Launch, admission: Admission, deadlines: Deadlines
    ) -> None:
        self.name = name
        self.base_source = base_source
        self.admission = admission
        self.deadlines = deadlines
        self.failed_restarts = 0
        self.current: ServedWeights | None = None
        self.state: State = "loading"
        self.problem: Fp8ServeError | None = None  # why the model could not be loaded
        self.adapters: dict[str, ServedAdapter] = {}
        self.is_replacing_weights = False  # whether `replace_weights` is copying weights over the served ones
        self.released = asyncio.Event()  # cleared while new requests wait for `_swap_in_place`
        self.released.set()
        self.is_shutting_down = False  # whether the server stops after the requests in flight
        self.needs_layer_stats = False  # whether /metrics reports FP8 layers one by one
        self.gpu_memory: float | None = None  # for an engine without this option, unless it replaces another one
        self.last_stats: tuple[ServedWeights | None, dict[str, Any]] = (None, {})
        self.last_layer_stats: tuple[ServedWeights | None, list[dict[str, Any]]] = (None, [])
        self.history = ScaleHistory()
        self.activating: tuple[str, float] | None = None  # the model id being loaded, and its start (monotonic clock)
        self._launch = start_engine
        self._swap = asyncio.Lock()
        self._retiring: dict[ServedWeights, asyncio.Task[None]] = {}
        self._canary_ids = itertools.count()
        self._probation: Probation | None = None

    # -- the served weights --------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Returns the names by which requests may address this model: its own name and the id of its weights."""
        return list(dict.fromkeys([self.name, *([self.current.source.model_id] if self.current else [])]))

    def resolve(self) -> ServedWeights:
        """Returns the weights for a new request. Raises Fault 503 while no engine runs, 404 during an unload."""
        self._refuse_if_unloading()
        served = self.current
        if self.is_replacing_weights:
            raise Fault(Code.STARTING, "Other weights are being activated for this model.", retry_after=1)
        if served is not None and served.engine.alive:
            return served
        if self.state == "loading":
            raise Fault(Code.STARTING, "The model is loading.", retry_after=2)
        if self.state == "failed":
            raise Fault(Code.ENGINE_DOWN, f"The model could not be loaded: {self.problem}", retry_after=60)
        raise Fault(Code.ENGINE_DOWN, "The engine process is restarting.", retry_after=2)

    def _refuse_if_unloading(self) -> None:
        if self.state in ("unloading", "closed"):
            raise Fault(Code.MODEL_NOT_FOUND, "The model is being unloaded.", param="model")

    @property
    def ready(self) -> bool:
        served = self.current
        return (
            self.state == "ready"
            and not self.is_replacing_weights
            and served is not None
            and served.engine.alive
            and self.hang_reason(served) is None
        )

    @property
    def stats(self) -> dict[str, Any]:
        """The last statistics of the current engine; empty if it has reported none or does not run."""
        weights, stats = self.last_stats
        return stats if weights is self.current and self.ready else {}

    def adapter_stats(self) -> dict[str, dict[str, int]]:
        """Returns for each adapter the numbers of running and waiting sequences in the engine's last report."""
        counts, none = self.stats.get("adapters", {}), {"running": 0, "waiting": 0}
        return {name: counts.get(adapter.engine_name, none) for name, adapter in self.adapters.items()}

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The last statistics of the current engine's FP8 layers; empty unless `needs_layer_stats`."""
        weights, layers = self.last_layer_stats
        return layers if weights is self.current and self.ready else []

    @property
    def live(self) -> bool:
        """Whether the engine process responds or is being loaded; false after MAX_FAILED_RESTARTS failed restarts."""
        served = self.current
        if served is None or not served.engine.alive:
            return self.failed_restarts < MAX_FAILED_RESTARTS
        return self.hang_reason(served) is None

    def hang_reason(self, served: ServedWeights) -> str | None:
        """Returns why the engine process counts as hung, or None if it does not."""
        if served.silence >= self.deadlines.heartbeat:
            return f"The engine sent no heartbeat for {self.deadlines.heartbeat:g} seconds and was killed."
        if served.engine.step_seconds >= self.deadlines.step:
            return f"The engine did not finish a step within {self.deadlines.step:g} seconds and was killed."
        return None

    # -- loading and replacing weights ---------------------------------------------------------------------------------

    async def start(
        self, sources: Sequence[WeightSource], fit: Callable[[WeightSource], WeightSource] = lambda source: source
    ) -> ServedWeights:
        """Loads the first of `sources` that can be served.

        `fit` returns a source with its share of the machine's memory. If no source can be served, the error of the last
        one is raised.
        """
        async with self._swap:
            for source in sources[:-1]:
                try:
                    return await self._start_one(source, fit)
                except Fp8ServeError as error:
                    if self.is_shutting_down:
                        raise
                    fallback = sources[-1].model_id
                    log.error("%s cannot be served (%s); serving %s instead", source.model_id, error, fallback)
            return await self._start_one(sources[-1], fit)

    async def _start_one(self, source: WeightSource, fit: Callable[[WeightSource], WeightSource]) -> ServedWeights:
        served = await self.load_engine(await asyncio.to_thread(fit, source))
        self._serve(served)
        return served

    def _serve(self, served: ServedWeights) -> None:
        self.current, self.state = served, "ready"
        self.admission.capacity.num_seqs = served.engine.info.get("max_num_seqs", served.source.options.num_seqs)

    async def activate(
        self, source: WeightSource, save_activation: SaveActivation, verification: Verification = UNVERIFIED
    ) -> tuple[ServedWeights, Verified | None]:
        """Loads `source` beside the served weights, verifies it, saves the activation and swaps.

        The weights are exchanged in the running engine if possible, or else loaded by a new engine process. The swap
        itself cannot fail. If anything before it fails, `save_activation` included, this method raises and changes
        nothing: the served weights are always those that the next start of the server would load.
        """
        self._refuse_if_unloading()
        if self.adapters:
            hint = f"Unload first: {', '.join(self.adapters)}."
            raise Fault(Code.ALIAS_BUSY, "The model has adapters, which belong to its current weights.", hint=hint)
        self._refuse_if_swapping()
        async with self._swap:
            self.activating = source.model_id, time.monotonic()
            try:
                try:
                    return await self._swap_in_place(source, save_activation, verification)
                except _NotInPlaceError as error:
                    log.info("starting a new engine process for %s: %s", source.model_id, error)
                new, verified = await self._load_verified(source, save_activation, verification)
                self._take_over(new, save_activation)
                return new, verified
            finally:
                self.activating = None

    def _take_over(self, new: ServedWeights, save_activation: SaveActivation) -> None:
        """Serves `new` from now on. Their probation begins, and a replaced engine process is retired."""
        previous = self.current
        self._serve(new)
        if previous is not None and new.source != previous.source:
            self._probation = None  # base weights get none: they are the fallback
            if new.source != self.base_source:
                ends_at = time.monotonic() + PROBATION_SECONDS
                self._probation = Probation(previous.source, save_activation, ends_at)
        self.admission.metrics.swaps("ok").inc()
        log.info("now serving %s (%s)", new.source.model_id, new.weight_version)
        if previous is not None and previous.engine is not new.engine:
            self._retire(previous)

    async def _swap_in_place(
        self, source: WeightSource, save_activation: SaveActivation, verification: Verification
    ) -> tuple[ServedWeights, Verified | None]:
        """Exchanges the weights of the running engine for those of `source` (see the docstring of this module).

        Raises Fault 409 if the new weights fail their verification, and _NotInPlaceError if they cannot be exchanged.
        In both cases the previous weights stay in use.
        """
        old = self.current
        if old is None or (obstacle := await asyncio.to_thread(self._obstacle_to_swap, old, source)) is not None:
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
        self.released.clear()  # new requests wait
        try:
            await self._drain_and_swap(old)
            verified = await self._verify_swapped(new, save_activation, verification, perplexity)
            self._take_over(new, save_activation)
        finally:
            self.released.set()
            with contextlib.suppress(Fp8ServeError, OSError):
                await old.engine.discard_staged_weights()
        log.info("%s replaced the weights of the running engine", source.model_id)
        return new, verified

    def _obstacle_to_swap(self, old: ServedWeights, source: WeightSource) -> str | None:
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

    async def _drain_and_swap(self, old: ServedWeights) -> None:
        try:
            await self._wait_until_unleased(old, MAX_DRAIN_SECONDS)
            try:
                await old.engine.swap_weights()
            except asyncio.CancelledError:  # the engine may exchange them nevertheless
                await asyncio.shield(old.engine.kill("The exchange of its weights was interrupted."))
                raise
        except Fault as fault:
            raise _NotInPlaceError(fault.message) from None
        except (Fp8ServeError, OSError) as error:
            raise _NotInPlaceError(str(error)) from None

    async def _verify_swapped(
        self,
        new: ServedWeights,
        save_activation: SaveActivation,
        verification: Verification,
        previous_perplexity: float | None,
    ) -> Verified | None:
        """Verifies exchanged weights and saves their activation. If that fails, the previous weights serve again."""
        try:
            await self._run_canary(new.engine)
            verified = await verification.check_overwritten(new, previous_perplexity)
            await save_activation(new.source.key)
        except BaseException as error:
            await asyncio.shield(self._swap_back(new))
            if not isinstance(error, Fp8ServeError) or isinstance(error, Fault):
                raise
            self.admission.metrics.swaps("failed").inc()
            message = f"The new weights cannot be served, and the previous ones stay in use: {error}"
            raise Fault(Code.ACTIVATION_FAILED, message) from None
        return verified

    async def _swap_back(self, new: ServedWeights) -> None:
        """Restores the previous weights of the engine. If that fails, the engine is killed and restarts with them."""
        try:
            await new.engine.swap_weights()
        except (Fp8ServeError, OSError) as error:
            log.error("the previous weights could not be restored: %s", error)
            await new.engine.kill("The weights that replaced its own cannot be served.")

    def _refuse_if_swapping(self) -> None:
        if self._swap.locked():
            hint = "Try again when that activation has finished."
            raise Fault(Code.ALIAS_BUSY, "Other weights are already being activated for this model.", hint=hint)

    async def replace_weights(
        self, directory: Path, seconds: float, verification: Verification = UNVERIFIED
    ) -> tuple[ServedWeights, Verified | None]:
        """Copies the weights of `directory`, another version of the same model, over the served ones.

        Requests in flight have `seconds` to finish, and new requests are refused meanwhile, so each response comes from
        one version. The new weights must generate a token and pass `verification` before they serve. An engine process
        that restarts later loads the weights that it first started with.

        Raises Fault 409 if the weights do not fit or fail verification, if the model has adapters, or if requests do
        not finish in time. The previous weights are then served again.
        """
        old = self.resolve()
        self._refuse_if_swapping()
        async with self._swap:
            previous_perplexity = await verification.measure_previous(old)
            self.is_replacing_weights = True
            try:
                await self._wait_until_unleased(old, seconds)
                try:
                    version = await asyncio.to_thread(weight_version, directory)
                    await old.engine.load_weights(directory)
                except (Fp8ServeError, OSError) as error:
                    raise Fault(Code.LOAD_FAILED, f"The weights cannot be loaded: {error}") from None
                new = replace(
                    old, weight_version=version, overwritten_from=directory, unleased=asyncio.Event(), leases=0
                )
                verified = await self._verify_or_restore(old, new, verification, previous_perplexity)
            finally:
                self.is_replacing_weights = False
            if self.current is not old:
                raise Fault(Code.ENGINE_DOWN, "The engine ended while its weights were being replaced.", retry_after=2)
            self.current = new
            log.info("now serving %s with the weights %s", new.source.model_id, new.weight_version)
            return new, verified

    async def _verify_or_restore(
        self, old: ServedWeights, new: ServedWeights, verification: Verification, previous_perplexity: float | None
    ) -> Verified | None:
        """Verifies `new`, whose weights were copied over those of `old`. On failure restores `old` and raises Fault."""
        try:
            await self._run_canary(new.engine)
            return await verification.check_overwritten(new, previous_perplexity)
        except Fp8ServeError as error:
            outcome = await self._restore_previous_weights(old)
            message = f"The new weights cannot be served, and {outcome}: {error}"
            raise Fault(Code.ACTIVATION_FAILED, message) from None

    async def _restore_previous_weights(self, old: ServedWeights) -> str:
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

    async def _wait_until_unleased(self, served: ServedWeights, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while served.leases:
                    await served.unleased.wait()
        except TimeoutError:
            message = f"{served.leases} requests were still running after {seconds:g} seconds."
            raise Fault(Code.ALIAS_BUSY, message, hint="Try again with a larger value of `seconds`.") from None

    async def _load_verified(
        self, source: WeightSource, save_activation: SaveActivation, verification: Verification
    ) -> tuple[ServedWeights, Verified | None]:
        """Starts an engine with `source`, verifies it and saves its activation."""
        try:
            await verification.check_files(source.directory)
            new = await self.load_engine(source, replaces_another=True)
            async with _closed_on_failure(new):
                verified = await verification.check_engine(new, self.current)
        except Fp8ServeError as error:
            self.admission.metrics.swaps("failed").inc()
            message = f"The new weights cannot be served, and the previous ones stay in use: {error}"
            raise Fault(Code.ACTIVATION_FAILED, message) from None
        async with _closed_on_failure(new):
            await save_activation(source.key)
        return new, verified

    def restart_source(self, dead: ServedWeights) -> WeightSource:
        """Returns what to load after the engine of `dead` died: the same source, or the previous one after MAX_DEATHS
        deaths within the probation."""
        probation = self._probation
        if probation is None or self.adapters or time.monotonic() > probation.ends_at:
            return dead.source
        probation.deaths += 1
        if probation.deaths < MAX_DEATHS:
            return dead.source
        names = dead.source.model_id, probation.deaths, probation.previous.model_id
        log.error("the engine process of %s died %d times since its activation; loading %s again", *names)
        return probation.previous

    async def record_rollback(self, dead: ServedWeights, new: ServedWeights) -> None:
        """Saves that `new` is served again, if `restart_source` chose other weights than those of `dead`."""
        probation = self._probation
        if probation is None or new.source == dead.source:
            return
        self._probation = None
        self.admission.metrics.swaps("rolled_back").inc()
        log.info("now serving %s (%s) again", new.source.model_id, new.weight_version)
        try:
            await probation.save_activation(new.source.key)
        except Exception:
            log.exception("the rollback could not be saved: at its next start the server loads the failed weights")

    def is_swapping(self) -> bool:
        """Whether other weights are being loaded for this model."""
        return self._swap.locked()

    async def load_engine(self, source: WeightSource, replaces_another: bool = False) -> ServedWeights:
        """Starts an engine process with `source` and its adapters, and lets it generate a token. With
        `replaces_another`, it runs beside the engine that it replaces for a while, and may use the memory that the old
        engine has left free.

        Raises Fp8ServeError if that fails or exceeds the deadline; the engine process is then killed.
        """
        try:
            async with asyncio.timeout(self.deadlines.load):
                engine, tokenizer = await self._launch(source if replaces_another else self._with_gpu_memory(source))
                try:
                    version = await asyncio.to_thread(weight_version, source.directory)
                    await self._run_canary(engine)
                    await self._load_adapters(engine)
                except BaseException:
                    await engine.kill("Loading was abandoned before the engine was ready.")
                    raise
        except TimeoutError:
            raise MachineError(f"The weights were not loaded within {self.deadlines.load:g} seconds.") from None
        except OSError as error:
            raise MachineError(f"The weights cannot be read: {error.strerror}.") from None
        output_format = detect_format(tokenizer.template, tokenizer.takes_tools, source.output_format)
        return ServedWeights(source, engine, tokenizer, self.admission, f"{source.key}-{version}", output_format)

    def _with_gpu_memory(self, source: WeightSource) -> WeightSource:
        options = source.options
        if not options.device.startswith("cuda") or options.gpu_memory is not None:
            return source
        return replace(source, options=replace(options, gpu_memory=self.gpu_memory))

    async def _load_adapters(self, engine: EngineClient) -> None:
        """Loads the model's adapters. An adapter that fails is dropped; at the first start a required one raises."""
        for name, adapter in list(self.adapters.items()):
            try:
                adapter.facts = await engine.load_adapter(adapter.engine_name, adapter.source.directory)
            except Fp8ServeError as error:
                if adapter.source.required and self.current is None:
                    raise
                log.error("the adapter %s is no longer served, because it cannot be loaded: %s", name, error)
                self.adapters.pop(name, None)
                adapter.admission.metrics.forget()

    async def _run_canary(self, engine: EngineClient) -> None:
        """Computes one greedy token, one embedding or one score, to find an engine that loads but cannot compute."""
        if not engine.limits.generates:
            await (engine.embed([[0]]) if engine.limits.task == "embed" else engine.classify([[0]], [[0]]))
            return
        params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        request = Request(f"canary-{next(self._canary_ids)}", (0,), params)
        async with contextlib.aclosing(engine.generate(request)) as outputs:
            async for output in outputs:
                if output.finish_reason == "error":
                    raise Fp8ServeError(output.error or "The engine cannot compute a token with these weights.")

    def _retire(self, old: ServedWeights) -> None:
        """Closes the engine of `old` in the background, after its last lease."""

        async def close_when_unleased() -> None:
            if old.leases:
                await old.unleased.wait()
            await old.engine.close()

        task = self._retiring[old] = asyncio.create_task(close_when_unleased())
        task.add_done_callback(lambda _: self._retiring.pop(old, None))

    def replace_dead_engine(self, dead: ServedWeights, new: ServedWeights) -> bool:
        """Serves `new` instead of `dead`. Returns False, and changes nothing, if `dead` was replaced meanwhile."""
        if self.current is not dead:
            return False
        self._serve(new)
        return True

    def engines(self) -> list[EngineClient]:
        """Returns the engine processes of this model, including replaced ones that still have requests in flight."""
        return [served.engine for served in (*self._retiring, *([self.current] if self.current else []))]

    async def unload(self, seconds: float) -> None:
        """Refuses new requests and closes the engines. Requests in flight are aborted after `seconds`."""
        self.state = "unloading"
        if self.current is not None:
            self._retire(self.current)
        if self._retiring:
            await asyncio.wait(self._retiring.values(), timeout=seconds)
        for served in list(self._retiring):
            await served.engine.kill(f"The model was unloaded, and this request did not finish in {seconds:g} seconds.")
        if self._retiring:
            await asyncio.wait(self._retiring.values())
        self.current, self.state = None, "closed"

    async def close(self) -> None:
        """Closes every engine process at once."""
        for task in list(self._retiring.values()):
            task.cancel()
        self.state = "closed"
        if self.current is not None:
            await self.current.engine.close()


@contextlib.asynccontextmanager
async def _closed_on_failure(served: ServedWeights) -> AsyncGenerator[None, None]:
    """Closes the engine if the block raises or is cancelled."""
    try:
        yield
    except BaseException:
        await served.engine.close()
        raise
