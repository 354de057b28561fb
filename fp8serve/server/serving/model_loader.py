"""Loads and unloads models other than the default one, and adapters, while the server runs.

Changes to the model of one name wait for each other. Models are loaded one at a time, because each must fit in the
memory that the others leave free (`with_cache_bound`). Models that are already served are not affected. A change
continues when the client that requested it disconnects, and is cancelled when the server shuts down.
"""

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fp8serve.engine.client import EngineClient
from fp8serve.errors import Fp8ServeError, MachineError
from fp8serve.model.device import estimate_weight_memory
from fp8serve.model.storage.headers import require_finite
from fp8serve.model.storage.memory import free_memory
from fp8serve.server.faults import Code, Fault
from fp8serve.server.metrics import Metrics
from fp8serve.server.named_models import NamedModel
from fp8serve.server.serving.admission import Admission
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.served_model import BASE, ServedModel
from fp8serve.server.serving.served_weights import AdapterSource, ServedAdapter, ServedWeights, WeightSource
from fp8serve.server.serving.supervisor import EngineSupervisor
from fp8serve.server.serving.verification import Verification, Verified

log = logging.getLogger("fp8serve.server")
T = TypeVar("T")
PROCESS_BYTES = 256 << 20  # memory of an engine process besides weights and KV cache
CACHE_DIVISOR = 4  # as in engine/memory.py: the KV cache gets a quarter of the memory that remains


class ModelLoader:
    """Adds models to the registry `models` and removes them. `create_model` makes a model that is not loaded yet.

    `known_sources` holds the base source of each name that was served, so that an unloaded model can be loaded again.
    """

    def __init__(self, models: Registry, create_model: Callable[[str, WeightSource], ServedModel]) -> None:
        self.models = models
        self.known_sources: dict[str, WeightSource] = {}
        self._create_model = create_model
        self._load_lock = asyncio.Lock()
        self._name_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._supervisors: dict[str, asyncio.Task[None]] = {}
        self._changes: set[asyncio.Task[Any]] = set()

    async def load(
        self, name: str, base_source: WeightSource, sources: Sequence[WeightSource], keep_failed: bool = False
    ) -> ServedModel:
        """Returns the model `name`, loading the first of `sources` that can be served unless it is loaded already.

        If `keep_failed`, a model that cannot be served stays listed with the reason. Otherwise a client named the
        files, and all numbers in them are checked for NaN and infinity. Raises Fault 409 if the name is in use or no
        source can be served.
        """
        change = self._load(name, base_source, sources, keep_failed)
        return await self.run_to_completion(change, f"load the model {name}")

    async def unload(self, name: str, seconds: float) -> None:
        """Unloads a model; requests in flight are aborted after `seconds`. Does nothing if it is unloaded already.

        Raises Fault 404 for an unknown name, and 409 for the default model or while other weights are being activated.
        """
        if name == self.models.default.name:
            message = f"{name} is the default model, which cannot be unloaded."
            raise Fault(Code.NAME_TAKEN, message, param="name", hint="Activate other weights for it instead.")
        if name not in self.known_sources:
            self.models.require(name)
            message = f"{name} is an alias or the id of a model's weights; use the model's own name."
            raise Fault(Code.MODEL_NOT_FOUND, message, param="name")
        await self.run_to_completion(self._unload(name, seconds), f"unload the model {name}")

    async def close(self) -> None:
        """Cancels all changes and closes every engine."""
        tasks = [*self._changes, *self._supervisors.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in self.models.models.values():
            await model.close()

    def cancel_changes(self) -> None:
        """Cancels all loads and unloads, because the server shuts down."""
        for task in self._changes:
            task.cancel()

    async def run_to_completion(self, change: Coroutine[Any, Any, T], purpose: str) -> T:
        """Returns the result of `change`, which continues if the caller is cancelled. Raises Fault 503 if
        `cancel_changes` cancelled it. `purpose`, such as "unload the model llama", is for the log."""
        task = asyncio.create_task(change, name=purpose)
        self._changes.add(task)
        task.add_done_callback(self._finish_change)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Fault(Code.DRAINING, "The server is shutting down.", retry_after=5) from None
            raise

    def _finish_change(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # the client may have disconnected
            log.warning("failed to %s: %s", task.get_name(), error)

    async def _load(
        self, name: str, base_source: WeightSource, sources: Sequence[WeightSource], keep_failed: bool
    ) -> ServedModel:
        async with self._name_locks[name]:
            if (loaded := self._loaded_model(name, base_source)) is not None:
                return loaded
            previous_source, self.known_sources[name] = self.known_sources.get(name), base_source
            model = self.models.models[name] = self._create_model(name, base_source)
            try:
                await self._start(model, sources, check_finite=not keep_failed)
            except BaseException as error:
                if keep_failed and isinstance(error, Fp8ServeError):
                    model.state, model.problem = "failed", error
                else:
                    self._remove(name)
                    if previous_source is None:
                        del self.known_sources[name]
                    else:
                        self.known_sources[name] = previous_source
                if isinstance(error, Fp8ServeError):
                    raise Fault(Code.LOAD_FAILED, f"The model cannot be served: {error}") from None
                raise
            self._supervisors[name] = asyncio.create_task(EngineSupervisor(model).watch())
            return model

    async def _start(self, model: ServedModel, sources: Sequence[WeightSource], check_finite: bool) -> None:
        async with self._load_lock:
            engines = [engine for other in self.models.models.values() for engine in other.engines()]

            def fit(source: WeightSource) -> WeightSource:
                fitting = with_cache_bound(source, engines)
                if check_finite:
                    require_finite(source.directory)
                return fitting

            served = await model.start(sources, fit)
        log.info("also serving %s (%s) as %s", served.source.model_id, served.weight_version, model.name)

    def _loaded_model(self, name: str, base_source: WeightSource) -> ServedModel | None:
        """Returns the model if it is loaded from `base_source`. Raises Fault 409 if the name is in use otherwise.

        A model that failed to load is removed, so that it can be loaded again.
        """
        model = self.models.models.get(name)
        if model is not None and model.state == "failed" and model is not self.models.default:
            self._remove(name)
            return None
        if model is not None and model.base_source == base_source:
            return model
        if self.models.is_taken(name):
            hint = "Unload it first, or choose another name."
            message = f"{name} is already the name of another model or adapter."
            raise Fault(Code.NAME_TAKEN, message, param="name", hint=hint)
        return None

    async def _unload(self, name: str, seconds: float) -> None:
        async with self._name_locks[name]:
            model = self.models.models.get(name)
            if model is None:
                return
            if model.is_swapping():
                hint = "Try again when that activation has finished."
                raise Fault(Code.ALIAS_BUSY, "Other weights are being activated for this model.", hint=hint)
            if (task := self._supervisors.pop(name, None)) is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await model.unload(seconds)
            self._remove(name)
            log.info("unloaded %s", name)

    def _remove(self, name: str) -> None:
        self.models.models.pop(name).admission.metrics.forget()


class AdapterLoader:
    """Loads adapters beside the models of `models`, one after the other. Active requests keep the adapter that they
    started with. The requests for an adapter are counted under its own name, within the capacity of its model."""

    def __init__(self, models: Registry, metrics: Metrics) -> None:
        self._models, self._metrics = models, metrics
        self._numbers = itertools.count()
        self._change_lock = asyncio.Lock()
        self._unload_tasks: set[asyncio.Task[None]] = set()

    def register(self, model: ServedModel, source: AdapterSource) -> None:
        """Adds the adapter to those that each new engine process of `model` loads."""
        model.adapters[source.name] = self._new_adapter(model, source)

    async def load(
        self, model: ServedModel, source: AdapterSource, verification: Verification
    ) -> tuple[ServedAdapter, Verified | None]:
        """Loads and verifies an adapter beside the weights of `model`. An adapter that is already loaded is returned.

        Raises Fault 409 if the name is in use, the adapter does not fit the model or its verification fails. Raises
        Fault 503 while the model has no engine.
        """
        async with self._change_lock:
            loaded = model.adapters.get(source.name)
            if loaded is not None and loaded.source == source:
                return loaded, None
            if self._models.is_taken(source.name):
                hint = "Unload it first, or choose another name."
                message = f"{source.name} is already the name of another model or adapter."
                raise Fault(Code.NAME_TAKEN, message, hint=hint)
            if model.is_swapping():
                hint = "Try again when it is done."
                raise Fault(Code.ALIAS_BUSY, "Other weights are being loaded for this model.", hint=hint)
            served, adapter = model.resolve(), self._new_adapter(model, source)
            with served.lease():
                try:
                    await verification.check_files(source.directory)
                    adapter.facts = await served.engine.load_adapter(adapter.engine_name, source.directory)
                except Fp8ServeError as error:
                    adapter.admission.metrics.forget()
                    raise Fault(Code.LOAD_FAILED, f"The adapter cannot be served: {error}") from None
                try:
                    verified = await verification.check_engine(adapter.served_with(served), served)
                except BaseException as error:
                    adapter.admission.metrics.forget()
                    await self._remove_from_engine(served, adapter)
                    if isinstance(error, Fp8ServeError):
                        message = f"The adapter failed its verification and is not served: {error}"
                        raise Fault(Code.ACTIVATION_FAILED, message) from None
                    raise
            if model.current is not served:
                adapter.admission.metrics.forget()
                message = "Other weights were activated while the adapter was being loaded."
                raise Fault(Code.ALIAS_BUSY, message, hint="Try again.")
            model.adapters[source.name] = adapter
            log.info("also serving the adapter %s (%s) beside %s", source.name, source.root, model.name)
            return adapter, verified

    async def unload(self, name: str) -> None:
        """Unloads an adapter. Requests in flight still finish with it. Raises Fault 404 for an unknown name."""
        async with self._change_lock:
            model, adapter = self._models.require_adapter(name)
            del model.adapters[name]
            adapter.admission.metrics.forget()
        task = asyncio.create_task(self._remove_when_unleased(model, adapter))
        self._unload_tasks.add(task)
        task.add_done_callback(self._unload_tasks.discard)
        log.info("unloaded the adapter %s", name)

    async def close(self) -> None:
        """Cancels unloads that wait for requests, without waiting for those requests."""
        tasks = list(self._unload_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _new_adapter(self, model: ServedModel, source: AdapterSource) -> ServedAdapter:
        admission = Admission(model.admission.capacity, self._metrics.for_model(source.name))
        return ServedAdapter(source, f"{source.name} ({next(self._numbers)})", admission)

    async def _remove_when_unleased(self, model: ServedModel, adapter: ServedAdapter) -> None:
        served = model.current
        if adapter.leases:
            await adapter.unleased.wait()
        if served is None or served is not model.current or not served.engine.alive:
            return  # the engine that had loaded the adapter has ended
        await self._remove_from_engine(served, adapter)

    async def _remove_from_engine(self, served: ServedWeights, adapter: ServedAdapter) -> None:
        try:
            await served.engine.unload_adapter(adapter.engine_name)
        except Fp8ServeError as error:
            log.error("the adapter %s could not be unloaded from the engine process: %s", adapter.name, error)


def source_of(named: NamedModel, device: str) -> WeightSource:
    """Returns the base source of a named model. `device` is used unless its options contain another device."""
    return WeightSource(BASE, named.name, named.directory, named.engine_options(device), named.output_format)


def with_cache_bound(source: WeightSource, engines: Iterable[EngineClient]) -> WeightSource:
    """Returns `source` with a size for its KV cache that fits in memory beside the loaded `engines`. Blocks.

    Raises MachineError if the model does not fit.
    """
    engines, options = list(engines), source.options
    if not engines or not options.device.startswith("cpu"):
        return source
    free, weights = free_memory() - sum(map(_unclaimed_bytes, engines)), _peak_weight_bytes(source)
    remaining = free - weights - PROCESS_BYTES
    cache = options.kv_cache_bytes or remaining // CACHE_DIVISOR
    if cache <= 0 or cache > remaining:
        requested = f" and its KV cache {_format_size(options.kv_cache_bytes)}" if options.kv_cache_bytes else ""
        raise MachineError(
            f"The model does not fit: its weights take {_format_size(weights)}, its process "
            f"{_format_size(PROCESS_BYTES)}{requested}, but only {_format_size(max(free, 0))} are left by the other "
            "models; unload one of them, or load a smaller model."
        )
    return replace(source, options=replace(options, kv_cache_bytes=cache))


def _unclaimed_bytes(engine: EngineClient) -> int:
    """Returns the memory that an engine process may still allocate for its weights and KV cache."""
    info, draft = engine.info, engine.info.get("draft_model") or {}
    weights = sum(part.get("weight_bytes", 0) for part in (info, draft)) - info.get("streamed_bytes", 0)
    planned = weights + info.get("kv_cache_bytes", 0)
    return max(0, int(planned) - engine.resident_bytes) if engine.alive else 0


def _peak_weight_bytes(source: WeightSource) -> int:
    """Returns the peak memory of the weights and of a draft model's weights, which are loaded as they are stored."""
    options, draft = source.options, source.options.draft_model
    peak = estimate_weight_memory(source.directory, options.recipe, options.head_dtype, options.scales).peak
    return peak if draft is None else peak + estimate_weight_memory(Path(draft), "stored", options.head_dtype).peak


def _format_size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
