"""Activates weights and adapters: verifies them, makes a model serve them, and stores the choice.

The job database stores activations, for the next start of the server, by the directory of the model's base weights, and
by the model's name if it is not the default model. A change continues even if the client that requested it disconnects.

Servers that share a database activate weights together (fronts.py), in new engine processes if there are several
servers: in the running engine, requests would wait until the last server has loaded the weights. They store activations
by the model's name. A server that cannot serve the active weights does not start with others.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from fp8serve.errors import Fp8ServeError, shown
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.database import Job
from fp8serve.server.finetuning.fronts import LEASE_SECONDS, POLL_SECONDS, Fronts, Swap
from fp8serve.server.finetuning.job_runner import JobRunner
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.finetuning.weight_sources import WeightSources, job_id_of
from fp8serve.server.parsing.request_parser import RequestParser
from fp8serve.server.serving.model_loader import AdapterLoader, ModelLoader
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.served_model import BASE, ServedModel
from fp8serve.server.serving.served_weights import AdapterSource, ServedAdapter, ServedWeights, WeightSource
from fp8serve.server.serving.verification import UNVERIFIED, MeasuredRow, Verification, Verified
from fp8serve.server.serving.weight_replacement import activate
from fp8serve.train.job_process import job_config

log = logging.getLogger("fp8serve.server")
T = TypeVar("T")
MAX_MEASURED_TOKENS = 2048


@dataclass(frozen=True)
class Activator:
    """Changes what models serve. `draining` is set when the server shuts down."""

    jobs: JobStore
    runner: JobRunner
    sources: WeightSources
    models: Registry
    model_loader: ModelLoader
    adapter_loader: AdapterLoader
    parser: RequestParser
    draining: asyncio.Event
    fronts: Fronts

    async def load(self, name: str, base_source: WeightSource | None = None, keep_failed: bool = False) -> ServedModel:
        """Loads the model `name` from `base_source` and returns it.

        If `base_source` is None, the model's earlier source is used, and the weights that were activated for it are
        served. Raises Fault 404 if the name was never served. For `keep_failed` see `ModelLoader.load`.
        """
        self._refuse_while_draining()
        if base_source is not None:
            return await self.model_loader.load(name, base_source, [base_source], keep_failed)
        if (base_source := self.model_loader.known_sources.get(name)) is None:
            return self.models.require(name)
        return await self.model_loader.load(name, base_source, await self.sources_of(name, base_source), keep_failed)

    async def sources_of(self, name: str, base_source: WeightSource) -> list[WeightSource]:
        """Returns the weights that the model tries to serve when it starts, in this order."""
        return await asyncio.to_thread(self.sources.startup_sources, base_source, self._model_key(name, base_source))

    async def activate(self, model: ServedModel, key: str, ratio: float) -> tuple[ServedWeights, Verified | None]:
        """Verifies the weights with this key and swaps them in. `ratio` is the `max_ratio` of the verification.

        The activation is stored for the next start of the server. The base weights only have to generate a token. They
        are not verified, because they must be able to serve if all else fails.
        """
        activate_weights = self._activate_on_all if self.jobs.is_shared else self._activate
        change = activate_weights(model, key, ratio)
        return await self.model_loader.run_to_completion(change, f"activate {shown(key)} as the model {model.name}")

    async def _activate(
        self, model: ServedModel, key: str, ratio: float, swap: Swap | None = None
    ) -> tuple[ServedWeights, Verified | None]:
        source = await asyncio.to_thread(self.sources.find, key, model.base_source)

        async def save_activation(served_key: str) -> None:
            if swap is not None and served_key == source.key:
                await self._agree(swap)
            elif swap is not None:
                roll_back = partial(self.fronts.roll_back, swap)
                await asyncio.to_thread(roll_back, _stored_key(model, served_key))
            else:
                save = partial(self.jobs.set_activated, self._model_key(model.name, model.base_source))
                await asyncio.to_thread(save, _stored_key(model, served_key))

        in_place = swap is None or swap.is_alone
        if key == BASE:
            return await activate(model, source, save_activation, in_place=in_place)
        job = await asyncio.to_thread(self.jobs.get, job_id_of(source.key))
        has_tokenizer = (source.directory / "tokenizer.json").exists()
        tokenizer = source.directory if has_tokenizer else model.base_source.directory
        verification = await self._verification(model, job, ratio, tokenizer)
        return await activate(model, source, save_activation, verification, in_place)

    # -- several servers -----------------------------------------------------------------------------------------------

    async def _activate_on_all(
        self, model: ServedModel, key: str, ratio: float
    ) -> tuple[ServedWeights, Verified | None]:
        """Activates weights on all servers that share the database, and returns when all of them serve the weights."""
        source = await asyncio.to_thread(self.sources.find, key, model.base_source)
        stored_key, seconds = _stored_key(model, source.key), model.deadlines.load
        swap = await asyncio.to_thread(self.fronts.propose, model.name, stored_key, ratio, seconds)
        result = await self._join(swap)
        with contextlib.suppress(Fault, TimeoutError):  # the swap itself can no longer fail
            async with asyncio.timeout(LEASE_SECONDS):
                while not await asyncio.to_thread(self.fronts.is_complete, swap):
                    await asyncio.sleep(POLL_SECONDS)
        return result

    async def accept(self, swap: Swap) -> None:
        """Takes part in a swap that another server has begun. A failure is logged, and the other server reports it."""
        change = self.model_loader.run_to_completion(self._join(swap), f"activate {shown(swap.source)} as {swap.model}")
        with contextlib.suppress(Fault):
            await change

    async def _join(self, swap: Swap) -> tuple[ServedWeights, Verified | None]:
        """Loads the weights of a swap and serves them when all servers have loaded them. Aborts the swap for all
        servers if this one cannot, but not if it is cancelled because the server ends."""
        try:
            model = self.models.require(swap.model)
            result = await self._activate(model, swap.source, swap.max_ratio, swap)
        except asyncio.CancelledError:
            await _persist(partial(self.fronts.withdraw, swap))
            raise
        except Exception as error:
            reason = error.full_message if isinstance(error, Fault) else f"The server failed ({type(error).__name__})."
            await _persist(partial(self.fronts.abort, swap, reason))
            raise
        await _persist(partial(self.fronts.set_swapped, swap))
        return result

    async def _agree(self, swap: Swap) -> None:
        """Votes that this server has loaded the weights, and returns when all servers have. Raises Fault 409 if one of
        them could not."""
        await _persist(partial(self.fronts.set_loaded, swap))
        while (decision := await _persist(partial(self.fronts.decide, swap))).state == "loading":
            await asyncio.sleep(POLL_SECONDS)
        if decision.state == "aborted":
            message = "Not every server can serve the new weights, so all servers keep the previous ones: "
            raise Fault(Code.ACTIVATION_FAILED, message + str(decision.reason))

    def missed_activation(self, model: ServedModel) -> str | None:
        """Returns the key of the active weights if the model serves others, otherwise None. Blocks."""
        served, key = model.current, self.jobs.activated(self._model_key(model.name, model.base_source))
        return None if served is None or key in (None, _stored_key(model, served.source.key)) else key

    def was_rolled_back(self, model: ServedModel, key: str) -> bool:
        """Whether the active weights `key` are those that the model served before its last activation."""
        return model.probation is not None and key == _stored_key(model, model.probation.previous.key)

    async def catch_up(self, model: ServedModel, key: str) -> None:
        """Serves the active weights, which the other servers serve already."""

        async def keep_activation(served_key: str) -> None:
            pass

        source = await asyncio.to_thread(self.sources.find, key, model.base_source)
        change = activate(model, source, keep_activation)
        await self.model_loader.run_to_completion(change, f"serve {shown(key)}, which other servers have activated")

    async def unload_adapters(self, model: ServedModel, previous: set[str]) -> set[str]:
        """Unloads those of the adapters `previous` that are no longer active. Returns the keys of the active ones."""
        model_key = self._model_key(model.name, model.base_source)
        active = set(await asyncio.to_thread(self.jobs.activated_adapters, model_key))
        loaded = _activated_adapters(model)
        for key in (previous - active) & loaded.keys():
            await self.adapter_loader.unload(loaded[key])
        return active

    async def load_adapters(self, model: ServedModel, active: set[str]) -> None:
        """Loads those of the adapters `active` that this server lacks."""
        for key in active - _activated_adapters(model).keys():
            trained = await asyncio.to_thread(self.sources.find_adapter, key)
            if trained is not None:
                await self.load_adapter(model, await asyncio.to_thread(self.sources.adapter_source, *trained))

    # -- adapters ------------------------------------------------------------------------------------------------------

    async def register_activated_adapters(self, model: ServedModel) -> None:
        """Registers the adapters of jobs that an earlier server had activated, to be loaded when the model starts."""
        model_key = self._model_key(model.name, model.base_source)
        for key in await asyncio.to_thread(self.jobs.activated_adapters, model_key):
            try:
                trained = await asyncio.to_thread(self.sources.find_adapter, key)
                if trained is None:
                    raise Fault(Code.JOB_NOT_FOUND, "The job that trained the adapter was deleted.")
                self.adapter_loader.register(model, await asyncio.to_thread(self.sources.adapter_source, *trained))
            except Fault as fault:
                log.error("the activated adapter of %s cannot be served: %s", key, fault.full_message)

    async def load_adapter(
        self, model: ServedModel, source: AdapterSource, verification: Verification = UNVERIFIED
    ) -> tuple[ServedAdapter, Verified | None]:
        """Loads an adapter beside `model`. Raises the faults of `AdapterLoader.load`."""
        self._refuse_while_draining()
        change, key = self.adapter_loader.load(model, source, verification), shown(source.key)
        purpose = f"load the adapter {source.name} (source {key}) beside the model {model.name}"
        return await self.model_loader.run_to_completion(change, purpose)

    async def activate_adapter(
        self, model: ServedModel, job: Job, step: int | None, ratio: float
    ) -> tuple[ServedAdapter, Verified | None]:
        """Verifies a job's adapter, or its checkpoint at `step`, and serves it under its own name beside `model`.

        The activation is stored, so the adapter is served after the next start of the server, too.
        """
        self.sources.check_base(job, model)
        source = await asyncio.to_thread(self.sources.adapter_source, job, step)
        verification = await self._verification(model, job, ratio, model.base_source.directory)
        adapter, verified = await self.load_adapter(model, source, verification)
        model_key = self._model_key(model.name, model.base_source)
        await asyncio.to_thread(self.jobs.add_activated_adapter, model_key, adapter.source.key)
        return adapter, verified

    async def unload_adapter(self, name: str) -> None:
        """Unloads an adapter and removes its stored activation. Raises Fault 404 for an unknown name."""
        model, adapter = self.models.require_adapter(name)
        if adapter.source.name == adapter.source.root:  # only adapters with their original name were activated
            model_key = self._model_key(model.name, model.base_source)
            await asyncio.to_thread(self.jobs.remove_activated_adapter, model_key, adapter.source.key)
        await self.adapter_loader.unload(name)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _refuse_while_draining(self) -> None:
        if self.draining.is_set():
            raise Fault(Code.DRAINING, "The server is shutting down.", retry_after=5)

    def _model_key(self, name: str, base_source: WeightSource) -> str:
        """Returns the key under which the job database stores the activations of a model."""
        if self.jobs.is_shared:
            return name
        directory = str(base_source.directory.resolve())
        return directory if name == self.models.default.name else f"{name}={directory}"

    async def _verification(self, model: ServedModel, job: Job, ratio: float, tokenizer: Path) -> Verification:
        """Returns a verification on the job's validation rows, or on training rows if it has none.

        The tokenizer in the directory `tokenizer` encodes the rows. In rows without trained tokens, all tokens count.
        If the rows cannot be read, perplexity is not measured.
        """
        rows: list[MeasuredRow] = []
        try:
            directory = await asyncio.to_thread(self.runner.artifacts.fetch_job, job.id)
            config = replace(await asyncio.to_thread(job_config, directory), model=str(tokenizer))
            files = list(config.eval_data or config.data)
            request = {"config": config.to_json(), "files": files, "max_tokens": MAX_MEASURED_TOKENS}
            for ids, counts in json.loads(await self.parser.inspect_rows("first_rows", json.dumps(request).encode())):
                rows.append(MeasuredRow(tuple(ids), tuple(counts if any(counts[1:]) else [True] * len(ids))))
        except (Fp8ServeError, OSError, Fault) as error:
            log.warning("the rows of job %s cannot be read, so its perplexity is not measured: %s", job.id, error)
        return Verification(rows, ratio, model.deadlines.load)


async def _persist(call: Callable[[], T]) -> T:
    """Returns the result of `call`, which is repeated until the database can be used."""
    while True:
        try:
            return await asyncio.to_thread(call)
        except Fault:  # it is logged
            await asyncio.sleep(POLL_SECONDS)


def _activated_adapters(model: ServedModel) -> dict[str, str]:
    """Returns key and name of the loaded adapters that may have been activated: those with their original name."""
    return {a.source.key: name for name, a in model.adapters.items() if a.source.name == a.source.root}


def _stored_key(model: ServedModel, key: str) -> str:
    """Returns the key that stands for the weights `key` in the job database."""
    return BASE if key == model.base_source.key else key
