"""Loads models other than the default while the server runs, and unloads them.

A change of one name waits for the change of the same name that is under way, and loads are made one after the other, so
that each is compared with the memory of the others (`fitted`). Nothing here affects a model that serves. A change
under way continues when the client that asked for it goes away, and ends with the server.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fp8serve.errors import Fp8ServeError, MachineError
from fp8serve.model.resident import resident
from fp8serve.model.storage.headers import require_finite
from fp8serve.model.storage.memory import free_memory
from fp8serve.server.faults import Code, Fault
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.served import EngineHandle, Source
from fp8serve.server.serving.served_model import ServedModel
from fp8serve.server.serving.supervisor import EngineSupervisor

log = logging.getLogger("fp8serve.server")
T = TypeVar("T")


class Loader:
    """Adds models to `models` and removes them. `make` makes a model of a name that is not loaded yet.
    `known`: what each name that was served stood for, so that it can be loaded again.
    """

    def __init__(self, models: Registry, make: Callable[[str, Source], ServedModel]) -> None:
        self.models = models
        self.known: dict[str, Source] = {}
        self._make = make
        self._loading = asyncio.Lock()
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._supervised: dict[str, asyncio.Task[None]] = {}
        self._under_way: set[asyncio.Task[Any]] = set()

    async def load(self, name: str, home: Source, sources: Sequence[Source], keep: bool = False) -> ServedModel:
        """The model `name`, serving the first of `sources` that can be served, unless it already serves `home`.

        Fault 409: the name stands for something else, or the weights cannot be served. `keep`: the model then stays
        listed, with the reason. Without it, all numbers of the files must be finite: a client named them, and not the
        command line.
        """
        return await self.to_the_end(self._load(name, home, sources, keep))

    async def unload(self, name: str, seconds: float) -> None:
        """Unloads a model; answers under way have so many seconds. Does nothing if the name is no longer served.

        Fault 404 for another name; 409 for the default, and while other weights are loaded for it.
        """
        if name not in self.known:
            self._refuse(name)
        await self.to_the_end(self._unload(name, seconds))

    async def close(self) -> None:
        """Ends changes under way, and every engine."""
        tasks = [*self._under_way, *self._supervised.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in self.models.models.values():
            await model.close()

    def give_up(self) -> None:
        """Ends changes under way: the server takes nothing new."""
        for task in self._under_way:
            task.cancel()

    async def to_the_end(self, change: Coroutine[Any, Any, T]) -> T:
        """The result of `change`, which continues if its caller goes away. Fault 503 when it was given up."""
        task = asyncio.create_task(change)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Fault(Code.DRAINING, "The server is shutting down.", retry_after=5) from None
            raise

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # the client may be gone
            log.warning("a change of the models failed: %s", error)

    async def _load(self, name: str, home: Source, sources: Sequence[Source], keep: bool) -> ServedModel:
        async with self._changing[name]:
            if (there := self._already(name, home)) is not None:
                return there
            before, self.known[name] = self.known.get(name), home
            model = self.models.models[name] = self._make(name, home)
            try:
                await self._start(model, sources, checks=not keep)
            except BaseException as error:
                if keep and isinstance(error, Fp8ServeError):
                    model.state, model.problem = "failed", error
                else:
                    self._remove(name)
                    self._forget_home(name, before)
                if isinstance(error, Fp8ServeError):
                    raise Fault(Code.LOAD_FAILED, f"The model cannot be served: {error}") from None
                raise
            self._supervised[name] = asyncio.create_task(EngineSupervisor(model).watch())
            return model

    async def _start(self, model: ServedModel, sources: Sequence[Source], checks: bool) -> None:
        async with self._loading:
            others = [engine for other in self.models.models.values() for engine in other.engines()]
            served = await model.start(sources, lambda source: _usable(source, others, checks))
        log.info("also serving %s (%s) as %s", served.source.model_id, served.weight_version, model.name)

    def _already(self, name: str, home: Source) -> ServedModel | None:
        """The model, if it is loaded. Fault 409: the name stands for something else."""
        there = self.models.models.get(name)
        if there is not None and there.state == "failed" and there is not self.models.default:
            self._remove(name)
            return None
        if there is not None and there.home == home:
            return there
        if self.models.is_taken(name):
            hint = "Unload it first, or choose another name."
            raise Fault(Code.NAME_TAKEN, f"{name} is already the name of something else.", param="name", hint=hint)
        return None

    async def _unload(self, name: str, seconds: float) -> None:
        async with self._changing[name]:
            model = self.models.models.get(name)
            if model is None:
                return
            if model.swapping():
                hint = "Try again when it is done."
                raise Fault(Code.ALIAS_BUSY, "Other weights are being loaded for this model.", hint=hint)
            if (task := self._supervised.pop(name, None)) is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await model.leave(seconds)
            self._remove(name)
            log.info("unloaded %s", name)

    def _refuse(self, name: str) -> None:
        if name == self.models.default.name:
            message = f"{name} is the default model, which is there as long as the server is."
            raise Fault(Code.NAME_TAKEN, message, param="name", hint="Activate other weights for it instead.")
        self.models.find(name)  # at best, it is an alias
        raise Fault(Code.MODEL_NOT_FOUND, "Use the model's own name.", param="name")

    def _forget_home(self, name: str, before: Source | None) -> None:
        """Forgets the model that the name should have had; the name keeps the one from `before`."""
        if before is None:
            del self.known[name]
        else:
            self.known[name] = before

    def _remove(self, name: str) -> None:
        self.models.models.pop(name).admission.metrics.forget()


def _usable(source: Source, others: Sequence[EngineHandle], checks: bool) -> Source:
    """`source` with its share of the machine. Fp8ServeError: there is no room, or `checks` and a number is NaN."""
    fitting = fitted(source, others)
    if checks:
        require_finite(source.directory)
    return fitting


PROCESS = 256 << 20  # bytes that an engine takes besides weights and cache
CACHE_SHARE = 4  # as engine/memory.py: a quarter of what is left


def fitted(source: Source, others: Iterable[EngineHandle]) -> Source:
    """`source` with a bound for its cache. Blocks. MachineError when it does not fit beside the `others`."""
    others, options = list(others), source.options
    if not others or not options.device.startswith("cpu"):
        return source
    free, weights = free_memory() - sum(map(_still_to_take, others)), _weight_bytes(source)
    left = free - weights - PROCESS
    cache = options.kv_cache_bytes or left // CACHE_SHARE
    if cache <= 0 or cache > left:
        requested = f" and its cache {_size(options.kv_cache_bytes)}" if options.kv_cache_bytes else ""
        raise MachineError(
            f"The model does not fit: its weights take {_size(weights)}, its process {_size(PROCESS)}{requested}, and "
            f"{_size(max(free, 0))} are free beside what the loaded models may take; unload one, or load a smaller one."
        )
    return replace(source, options=replace(options, kv_cache_bytes=cache))


def _still_to_take(engine: EngineHandle) -> int:
    draft = engine.info.get("draft_model") or {}
    planned = sum(part.get("weight_bytes", 0) for part in (engine.info, draft)) + engine.info.get("kv_cache_bytes", 0)
    return max(0, int(planned) - engine.resident_bytes) if engine.alive else 0


def _weight_bytes(source: Source) -> int:
    """The most that the weights take, of the draft model, too, which is read as it is stored."""
    options, draft = source.options, source.options.draft_model
    peak = resident(source.directory, options.recipe, options.head_dtype, options.scales).peak
    return peak if draft is None else peak + resident(Path(draft), "stored", options.head_dtype).peak


def _size(size: int) -> str:
    """Bytes in a readable unit."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
