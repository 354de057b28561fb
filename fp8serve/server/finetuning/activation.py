"""Loads models and activates weights and adapters, and stores each activation for the next start of the server.

The job database stores activations by the directory of the model's base weights, and by the model's name if it is not
the default model. A change continues even if the client that requested it disconnects.
"""

import asyncio
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from fp8serve.errors import Fp8ServeError, shown
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.database import Job
from fp8serve.server.finetuning.job_runner import JobRunner
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.finetuning.sources import WeightSources, job_id_of
from fp8serve.server.parsing.request_parser import RequestParser
from fp8serve.server.serving.adapter_loader import AdapterLoader
from fp8serve.server.serving.adapters import AdapterSource, ServedAdapter
from fp8serve.server.serving.model_loader import ModelLoader
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.served_model import BASE, ServedModel
from fp8serve.server.serving.served_weights import ServedWeights, WeightSource
from fp8serve.server.serving.verification import UNVERIFIED, MeasuredRow, Verification, Verified
from fp8serve.train.job_process import job_config

log = logging.getLogger("fp8serve.server")
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
        change = self._activate(model, key, ratio)
        return await self.model_loader.run_to_completion(change, f"activate {shown(key)} as the model {model.name}")

    async def _activate(self, model: ServedModel, key: str, ratio: float) -> tuple[ServedWeights, Verified | None]:
        model_key = self._model_key(model.name, model.base_source)

        async def save_activation(served_key: str) -> None:
            source_key = BASE if served_key == model.base_source.key else served_key
            await asyncio.to_thread(self.jobs.set_activated, model_key, source_key)

        if key == BASE:
            return await model.activate(model.base_source, save_activation)
        source = await asyncio.to_thread(self.sources.find, key, model.base_source)
        job = await asyncio.to_thread(self.jobs.get, job_id_of(source.key))
        has_tokenizer = (source.directory / "tokenizer.json").exists()
        tokenizer = source.directory if has_tokenizer else model.base_source.directory
        return await model.activate(source, save_activation, await self._verification(model, job, ratio, tokenizer))

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
        directory = str(base_source.directory.resolve())
        return directory if name == self.models.default.name else f"{name}={directory}"

    async def _verification(self, model: ServedModel, job: Job, ratio: float, tokenizer: Path) -> Verification:
        """Returns a verification on the job's validation rows, or on training rows if it has none.

        The tokenizer in the directory `tokenizer` encodes the rows. In rows without trained tokens, all tokens count.
        If the rows cannot be read, perplexity is not measured.
        """
        rows: list[MeasuredRow] = []
        try:
            config = replace(await asyncio.to_thread(job_config, self.runner.job_dir(job.id)), model=str(tokenizer))
            files = list(config.eval_data or config.data)
            request = {"config": config.to_json(), "files": files, "max_tokens": MAX_MEASURED_TOKENS}
            for ids, counts in json.loads(await self.parser.inspect_rows("first_rows", json.dumps(request).encode())):
                rows.append(MeasuredRow(tuple(ids), tuple(counts if any(counts[1:]) else [True] * len(ids))))
        except (Fp8ServeError, OSError) as error:
            log.warning("the rows of job %s cannot be read, so its perplexity is not measured: %s", job.id, error)
        return Verification(rows, ratio, model.deadlines.load)
