"""A model name and the weights that serve it: what requests see, and the engine processes behind it.

`ServedModel.current` is the only place that says which weights are served. It is replaced by one assignment on the
event loop, so every request sees either the previous weights or the new ones, never a mixture. A request holds a lease
on the weights it started with. weight_replacement.py replaces the weights, supervisor.py restarts engine processes.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fp8serve.engine.client import EngineClient
from fp8serve.engine.options import LOST_SECONDS
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, MachineError
from fp8serve.model.storage.versions import weight_version
from fp8serve.server.faults import Code, Fault
from fp8serve.server.output_parsers.output_format import detect_format
from fp8serve.server.serving.admission import Admission
from fp8serve.server.serving.served_scales import ScaleHistory
from fp8serve.server.serving.served_weights import Launch, ServedAdapter, ServedWeights, WeightSource
from fp8serve.server.settings import Deadlines

log = logging.getLogger("fp8serve.server")

BASE = "base"
State = Literal["loading", "ready", "restarting", "failed", "unloading", "closed"]
MAX_FAILED_RESTARTS = 3
"""Failed restarts in a row after which the server reports that it is not live."""

SaveActivation = Callable[[str], Awaitable[None]]
"""Stores the key of the weights that the server shall load at its next start."""


@dataclass
class Probation:
    """The trial period of newly activated weights. If their engine process dies too often within it, `previous` is
    loaded again (supervisor.py)."""

    previous: WeightSource
    save_activation: SaveActivation
    ends_at: float  # on the monotonic clock
    deaths: int = 0


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
        self.released = asyncio.Event()  # cleared while new requests wait for an exchange or the end of a pause
        self.released.set()
        self.is_paused = False  # whether generation is paused until a client continues it (trainer.py)
        self.updated_engine: EngineClient | None = None  # for which a trainer has started an update that it will finish
        self.is_shutting_down = False  # whether the server stops after the requests in flight
        self.needs_layer_stats = False  # whether /metrics reports FP8 layers one by one
        self.gpu_memory: float | None = None  # for an engine without this option, unless it replaces another one
        self.last_stats: tuple[ServedWeights | None, dict[str, Any]] = (None, {})
        self.last_layer_stats: tuple[ServedWeights | None, list[dict[str, Any]]] = (None, [])
        self.history = ScaleHistory()
        self.activating: tuple[str, float] | None = None  # the model id being loaded, and its start (monotonic clock)
        self.swap_lock = asyncio.Lock()  # held while other weights are loaded
        self.probation: Probation | None = None
        self._launch = start_engine
        self._retiring: dict[ServedWeights, asyncio.Task[None]] = {}
        self._canary_ids = itertools.count()

    # -- the served weights --------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Returns the names by which requests may address this model: its own name and the id of its weights."""
        return list(dict.fromkeys([self.name, *([self.current.source.model_id] if self.current else [])]))

    def resolve(self) -> ServedWeights:
        """Returns the weights for a new request. Raises Fault 503 while no engine runs, 404 during an unload."""
        self.refuse_if_unloading()
        served = self.current
        if self.is_replacing_weights:
            raise Fault(Code.STARTING, "Other weights are being activated for this model.", retry_after=1)
        if served is not None and served.accepts_requests:
            return served
        if self.state == "loading":
            raise Fault(Code.STARTING, "The model is loading.", retry_after=2)
        if self.state == "failed":
            raise Fault(Code.ENGINE_DOWN, f"The model could not be loaded: {self.problem}", retry_after=60)
        raise Fault(Code.ENGINE_DOWN, "The engine process is restarting.", retry_after=2)

    def refuse_if_unloading(self) -> None:
        if self.state in ("unloading", "closed"):
            raise Fault(Code.MODEL_NOT_FOUND, "The model is being unloaded.", param="model")

    @property
    def ready(self) -> bool:
        served = self.current
        return (
            self.state == "ready"
            and not self.is_replacing_weights
            and served is not None
            and served.accepts_requests
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
        seconds = self.deadlines.heartbeat
        if served.source.options.tensor_parallel > 1:  # when the other ranks end (engine/rank_group.py)
            seconds = min(seconds, LOST_SECONDS)
        if served.silence >= seconds:
            return f"The engine sent no heartbeat for {seconds:g} seconds and was killed."
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
        async with self.swap_lock:
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
        self.serve(served)
        return served

    def serve(self, served: ServedWeights) -> None:
        self.current, self.state = served, "ready"
        self.admission.capacity.num_seqs = served.engine.info.get("max_num_seqs", served.source.options.num_seqs)

    def release(self) -> None:
        """Lets new requests continue that waited for a swap, unless generation is paused."""
        if not self.is_paused:
            self.released.set()

    def is_swapping(self) -> bool:
        """Whether other weights are being loaded for this model."""
        return self.swap_lock.locked()

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
                    await self.run_canary(engine)
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

    async def run_canary(self, engine: EngineClient) -> None:
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

    def retire(self, old: ServedWeights) -> None:
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
        self.serve(new)
        return True

    def engines(self) -> list[EngineClient]:
        """Returns the engine processes of this model, including replaced ones that still have requests in flight."""
        return [served.engine for served in (*self._retiring, *([self.current] if self.current else []))]

    async def unload(self, seconds: float) -> None:
        """Refuses new requests and closes the engines. Requests in flight are aborted after `seconds`."""
        self.state = "unloading"
        self.released.set()
        if self.current is not None:
            self.retire(self.current)
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
