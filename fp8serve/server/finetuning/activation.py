"""Which weights and adapters a model serves: changes at the request of a client, remembered for the next start.

The job table remembers them by the directory that the model was first made of, with the model's name if it is not the
default. A change continues to its end even if the client that asked for it goes away.
"""

import asyncio
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from fp8serve.errors import Fp8ServeError
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.job_records import Job
from fp8serve.server.finetuning.job_runner import JobRunner
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.finetuning.sources import Sources, job_of
from fp8serve.server.parsing.request_parser import RequestParser
from fp8serve.server.serving.adapter_loader import AdapterLoader
from fp8serve.server.serving.adapters import AdapterSource, ServedAdapter
from fp8serve.server.serving.loader import Loader
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.served import Served, Source
from fp8serve.server.serving.served_model import BASE, ServedModel
from fp8serve.server.serving.verification import UNVERIFIED, MeasuredRow, Verification, Verified

log = logging.getLogger("fp8serve.server")
MEASURED_TOKENS = 2048


@dataclass(frozen=True)
class Activation:
    """See the module. `draining`: set when the server takes nothing new."""

    jobs: JobStore
    runner: JobRunner
    sources: Sources
    models: Registry
    loader: Loader
    adapters: AdapterLoader
    parser: RequestParser
    draining: asyncio.Event

    async def load(self, name: str, home: Source | None = None, keep: bool = False) -> ServedModel:
        """The model `name`, made of `home`, or where that is None of what the name stood for before: then it serves
        what was activated for that. Fault 404 where it stood for nothing. `keep`: see `Loader.load`.
        """
        self._refuse_while_draining()
        if home is not None:
            return await self.loader.load(name, home, [home], keep)
        if (home := self.loader.known.get(name)) is None:
            return self.models.find(name)
        return await self.loader.load(name, home, await self.sources_of(name, home), keep)

    async def sources_of(self, name: str, home: Source) -> list[Source]:
        """What the model tries to serve when it starts, in this order."""
        return await asyncio.to_thread(self.sources.first, home, self._key(name, home))

    async def activate(self, model: ServedModel, key: str, ratio: float) -> tuple[Served, Verified | None]:
        """Verifies and swaps the weights of `model`, and remembers the choice for the next start. ratio: see
        `Verification`.

        The base, which serves where all else fails, is only tried.
        """
        return await self.loader.to_the_end(self._activate(model, key, ratio))

    async def _activate(self, model: ServedModel, key: str, ratio: float) -> tuple[Served, Verified | None]:
        activated = self._key(model.name, model.home)

        async def record(served: str) -> None:
            await asyncio.to_thread(self.jobs.set_activated, activated, BASE if served == model.home.key else served)

        if key == BASE:
            return await model.activate(model.home, record)
        source = await asyncio.to_thread(self.sources.find, key, model.home)
        job = await asyncio.to_thread(self.jobs.get, job_of(source.key))
        has_tokenizer = (source.directory / "tokenizer.json").exists()
        tokenizer = source.directory if has_tokenizer else model.home.directory
        return await model.activate(source, record, await self._verification(model, job, ratio, tokenizer))

    # -- adapters ------------------------------------------------------------------------------------------------------

    async def expect_adapters(self, model: ServedModel) -> None:
        """Loads, with the model, the adapters of jobs that were activated before the server was started again."""
        for key in await asyncio.to_thread(self.jobs.activated_adapters, self._key(model.name, model.home)):
            try:
                trained = await asyncio.to_thread(self.sources.adapter, key)
                if trained is None:
                    raise Fault(Code.JOB_NOT_FOUND, "There is no job with such an adapter any more.")
                self.adapters.expect(model, await asyncio.to_thread(self.sources.of_adapter, *trained))
            except Fault as fault:
                log.error("the adapter of %s, activated earlier, cannot be served: %s", key, fault.told)

    async def load_adapter(
        self, model: ServedModel, source: AdapterSource, verification: Verification = UNVERIFIED
    ) -> tuple[ServedAdapter, Verified | None]:
        """Beside `model`. Fault: see `AdapterLoader.load`."""
        self._refuse_while_draining()
        return await self.loader.to_the_end(self.adapters.load(model, source, verification))

    async def activate_adapter(
        self, model: ServedModel, job: Job, step: int | None, ratio: float
    ) -> tuple[ServedAdapter, Verified | None]:
        """Verifies what the job trained beside `model`, or had at a step, and serves it by its own name; after the next
        start, too."""
        self.sources.check_base(job, model)
        source = await asyncio.to_thread(self.sources.of_adapter, job, step)
        verification = await self._verification(model, job, ratio, model.home.directory)
        adapter, verified = await self.load_adapter(model, source, verification)
        key = self._key(model.name, model.home)
        await asyncio.to_thread(self.jobs.add_activated_adapter, key, adapter.source.key)
        return adapter, verified

    async def unload_adapter(self, name: str) -> None:
        """Fault 404: there is no adapter of that name."""
        model, adapter = self.models.find_adapter(name)
        if adapter.source.name == adapter.source.root:  # and not another name that a route gave it
            key = self._key(model.name, model.home)
            await asyncio.to_thread(self.jobs.remove_activated_adapter, key, adapter.source.key)
        await self.adapters.unload(name)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _refuse_while_draining(self) -> None:
        if self.draining.is_set():
            raise Fault(Code.DRAINING, "The server is shutting down.", retry_after=5)

    def _key(self, name: str, home: Source) -> str:
        """Under which the job table remembers what was activated for a model."""
        directory = str(home.directory.resolve())
        return directory if name == self.models.default.name else f"{name}={directory}"

    async def _verification(self, model: ServedModel, job: Job, ratio: float, tokenizer: Path) -> Verification:
        """By the rows of the job, as the tokenizer in a directory reads them: its held-out rows, or rows that it
        learnt if it has none; by none if they cannot be read. All tokens of a prompt without an answer count.
        """
        rows: list[MeasuredRow] = []
        try:
            config = replace(await asyncio.to_thread(self.runner.config_of, job.id), model=str(tokenizer))
            files = list(config.eval_data or config.data)
            request = {"config": config.to_json(), "files": files, "most": MEASURED_TOKENS}
            for ids, counts in json.loads(await self.parser.look_at_rows("some_rows", json.dumps(request).encode())):
                rows.append(MeasuredRow(tuple(ids), tuple(counts if any(counts[1:]) else [True] * len(ids))))
        except (Fp8ServeError, OSError) as error:
            log.warning("the rows of a job cannot be read, so its perplexity is not measured: %s", error)
        return Verification(rows, ratio, model.deadlines.load)
