"""Finds the weights that a model can serve, and activates them: base weights, the result of a fine-tune job, or a job's
checkpoint.

As at OpenAI, a checkpoint is named by the job's id or result, followed by `:ckpt-step-N`. Before it can be served or
trained on, a checkpoint is exported to a model directory JOB_DIR/served/step-N, which exists until the job is deleted.
The export needs torch, which the server does not import, so it runs in another process.

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
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fp8serve.errors import Fp8ServeError, ModelError, shown
from fp8serve.model.storage.files import read_json
from fp8serve.processes import describe_exit, module_command
from fp8serve.server.faults import Code, Fault, safe_text
from fp8serve.server.finetuning.database import Event, Job
from fp8serve.server.finetuning.fronts import LEASE_SECONDS, POLL_SECONDS, Fronts, Swap
from fp8serve.server.finetuning.job_runner import JobRunner
from fp8serve.server.finetuning.job_store import JobStore
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
MAX_JOBS = 100_000
MAX_MEASURED_TOKENS = 2048
CHECKPOINT_NAME = re.compile(r"(.+):ckpt-step-([0-9]{1,9})")
EXPORT_COMMAND = module_command("fp8serve.train.export")


def checkpoint_name(job_name: str, step: int) -> str:
    """Returns the name of a checkpoint. `job_name` is the id of its job, or the name of the job's result."""
    return f"{job_name}:ckpt-step-{step}"


def job_id_of(key: str) -> str:
    """Returns the job's id in the key of a job or a checkpoint."""
    match = CHECKPOINT_NAME.fullmatch(key)
    return key if match is None else match[1]


def checkpoint_metrics(event: Event) -> dict[str, Any]:
    """Returns the metrics in the event of a checkpoint."""
    return {k: v for k, v in event.data.items() if k != "step"}


@dataclass(frozen=True)
class WeightSources:
    """Finds weights and adapters in the job database and on the disk. Every call blocks."""

    jobs: JobStore
    runner: JobRunner
    models: Registry

    def find(self, key: str, base_source: WeightSource) -> WeightSource:
        """Returns the source with this key: `base_source` for "base", otherwise that of a job or checkpoint.

        Raises Fault 404 or 409 if there is none.
        """
        if key == BASE:
            return base_source
        if (checkpoint := self.find_checkpoint(key)) is not None:
            return self.from_checkpoint(*checkpoint, base_source)
        if (job := self._get_job(key)) is None:
            hint = 'Sources are "base", ids of fine-tune jobs that succeeded, and checkpoints; GET /models lists them.'
            raise Fault(Code.JOB_NOT_FOUND, f"There is no source {shown(key)}.", param="source", hint=hint)
        return self.from_job(job, base_source)

    def has_name(self, name: str) -> bool:
        """Whether a job's result or checkpoint has this name."""
        return self.find_result(name) is not None or self.find_checkpoint(name) is not None

    def find_by_name(self, name: str, base_source: WeightSource) -> WeightSource | None:
        """Returns the job's result or checkpoint with this name, or None. Raises Fault 409 if it cannot be served."""
        if (job := self.find_result(name)) is not None:
            return self.from_job(job, base_source)
        checkpoint = self.find_checkpoint(name)
        return None if checkpoint is None else self.from_checkpoint(*checkpoint, base_source)

    def from_job(self, job: Job, base_source: WeightSource) -> WeightSource:
        """Returns the job's result, with the engine options of `base_source`. Raises Fault 409 if there is none."""
        directory = self._result_directory(job)
        _refuse_adapter(job)
        return self._source(base_source, job.id, job.model_id, directory)

    def from_checkpoint(self, job: Job, step: int, base_source: WeightSource) -> WeightSource:
        """Returns a checkpoint as a model. Exports it unless it was exported before.

        Raises Fault 409 if there is no such checkpoint.
        """
        _refuse_adapter(job)
        key, name = checkpoint_name(job.id, step), checkpoint_name(job.model_id, step)
        return self._source(base_source, key, name, self._export_checkpoint(job, step))

    def _source(self, base_source: WeightSource, key: str, name: str, directory: Path) -> WeightSource:
        options = replace(base_source.options, recipe="stored", scales=None)
        return replace(base_source, key=key, model_id=name, directory=directory, options=options)

    def find_checkpoint(self, name: str) -> tuple[Job, int] | None:
        """Returns the job and the step that a checkpoint's name contains, or None for other names and unknown jobs."""
        if (match := CHECKPOINT_NAME.fullmatch(name)) is None:
            return None
        job = _find_job(match[1], self.jobs.jobs(limit=MAX_JOBS))
        return None if job is None else (job, int(match[2]))

    def checkpoints(self, job: Job) -> list[Event]:
        """Returns the events of the checkpoints that exist, newest first.

        A checkpoint's directory is complete as soon as it has its name.
        """
        by_step: dict[int, Event] = {}
        for event in self.jobs.newest_events(job.id, 10_000, kind="checkpoint"):
            by_step.setdefault(int(event.data["step"]), event)
        names = self.runner.artifacts.checkpoints(job.id)
        return [event for step, event in by_step.items() if f"step-{step}" in names]

    def result_key(self, job: Job, step: int | None) -> str:
        """Returns the key of the checkpoint at `step`, or of the job's result if `step` is None or the result's
        step."""
        last = next((int(event.data["step"]) for event in self.checkpoints(job)), None)
        is_result = job.status == "succeeded" and step == last and job.config.get("result", "last") == "last"
        return job.id if step is None or is_result else checkpoint_name(job.id, step)

    def _checkpoint_dir(self, job: Job, step: int) -> Path:
        return self.runner.artifacts.checkpoints_dir(job.id) / f"step-{step}"

    def _export_checkpoint(self, job: Job, step: int) -> Path:
        """Returns the model directory of a checkpoint. Exports the checkpoint unless it was exported before.

        Raises Fault 409 if there is no such checkpoint or it cannot be exported.
        """
        artifacts = self.runner.artifacts
        out = artifacts.fetch(self.runner.job_dir(job.id) / "served" / f"step-{step}")
        if out.is_dir():
            return out
        checkpoint = artifacts.fetch(self._checkpoint_dir(job, step))
        if not checkpoint.is_dir():
            steps = ", ".join(str(event.data["step"]) for event in self.checkpoints(job)) or "none"
            message = f"The job has no checkpoint at step {step}; its checkpoints are: {steps}."
            raise Fault(Code.JOB_STATE, message, param="step")
        command = [*EXPORT_COMMAND, str(checkpoint), str(out)]
        export = subprocess.run(command, capture_output=True, text=True, check=False)
        if export.returncode and not out.is_dir():  # another request may have exported it meanwhile
            last_line = (export.stderr.strip().splitlines() or [describe_exit(export.returncode)])[-1]
            raise Fault(Code.JOB_STATE, f"The checkpoint cannot be exported as a model: {safe_text(last_line)}")
        artifacts.publish(out)
        return out

    def startup_sources(self, base_source: WeightSource, model_key: str) -> list[WeightSource]:
        """Returns what a model tries to serve when it starts, in this order: the weights activated under `model_key`,
        then its base weights. Servers that share a database serve nothing but the activated weights."""
        key = self.jobs.activated(model_key)
        try:
            sources = [base_source] if key in (None, BASE) else [self.find(str(key), base_source), base_source]
            return sources[:1] if self.jobs.is_shared else sources
        except Fault as fault:
            if self.jobs.is_shared:
                raise
            log.error("the activated weights %s cannot be served (%s); serving %s", key, fault, base_source.model_id)
            return [base_source]

    def result_jobs(self, limit: int = 1000) -> list[Job]:
        """Returns the jobs that succeeded with a model as their result, newest first."""
        return [job for job in self.jobs.jobs(limit=limit, status="succeeded") if not is_adapter(job)]

    def find_result(self, name: str) -> Job | None:
        """Returns the succeeded job whose id, or whose result's name, is `name`."""
        return _find_job(name, self.result_jobs(MAX_JOBS))

    def adapter_jobs(self, limit: int = 1000) -> list[Job]:
        """Returns the jobs that succeeded with an adapter as their result, newest first."""
        return [job for job in self.jobs.jobs(limit=limit, status="succeeded") if is_adapter(job)]

    def find_adapter(self, name: str) -> tuple[Job, int | None] | None:
        """Returns the job that trained an adapter and the step of a checkpoint, or None if there is no such job.

        `name` is the job's id, its result's name or a checkpoint's name. The step is None unless `name` is a
        checkpoint's.
        """
        if (checkpoint := self.find_checkpoint(name)) is not None:
            return checkpoint if is_adapter(checkpoint[0]) else None
        job = _find_job(name, self.adapter_jobs(MAX_JOBS))
        return None if job is None else (job, None)

    def adapter_source(self, job: Job, step: int | None = None, name: str | None = None) -> AdapterSource:
        """Returns the adapter of a job, or of its checkpoint at `step`, under `name` or its own name.

        Raises Fault 409 if there is none.
        """
        if step is not None:
            key, root = checkpoint_name(job.id, step), checkpoint_name(job.model_id, step)
            return AdapterSource(name or root, root, self._export_checkpoint(job, step), key)
        return AdapterSource(name or job.model_id, job.model_id, self._result_directory(job), job.id)

    def _result_directory(self, job: Job) -> Path:
        directory = self.runner.artifacts.fetch(self.runner.result_dir(job))
        if job.status != "succeeded" or not directory.is_dir():
            raise Fault(
                Code.JOB_STATE, f"Only the result of a succeeded job can be served, but this job is {job.status}."
            )
        return directory

    def check_base(self, job: Job, model: ServedModel) -> None:
        """Raises Fault 409 unless `model` serves the weights for which the job trained its adapter."""
        served = model.current
        if served is not None and served.source.key != job.source:
            message = f"The adapter was trained for {job.base}, but {model.name} now serves {served.source.model_id}."
            raise Fault(Code.JOB_STATE, message, hint="First activate the weights for which the adapter was trained.")

    def owning_model(self, job: Job) -> ServedModel:
        """Returns the loaded model from whose base weights the job started. A job that started from the result of
        another job is traced back to the first one.

        Raises Fault 409 if that model is not loaded.
        """
        directory = self._original_directory(job)
        models = [m for m in self.models.models.values() if str(m.base_source.directory.resolve()) == directory]
        if models:  # several models may have the same directory
            return next((model for model in models if model.name == job.root), models[0])
        hint = "Load it first, or name the model that the result replaces: POST /models/{name}/activate."
        raise Fault(
            Code.JOB_STATE, f"The job was trained from {job.root}, which is not loaded on this server.", hint=hint
        )

    def _original_directory(self, job: Job) -> str | None:
        """Returns the directory of the base weights from which the job started, directly or through the results of
        other jobs."""
        while (previous := self._get_job(job.source)) is not None:
            job = previous
        try:
            return str(read_json(self.runner.artifacts.fetch_job(job.id) / "job.json")["model"])
        except (ModelError, KeyError):
            return None

    def _get_job(self, key: str) -> Job | None:
        try:
            return None if key == BASE else self.jobs.get(job_id_of(key))
        except Fault:
            return None


def _find_job(name: str, jobs: list[Job]) -> Job | None:
    return next((job for job in jobs if name in (job.id, job.model_id)), None)


def _refuse_adapter(job: Job) -> None:
    if is_adapter(job):
        hint = "Activate the adapter beside its model, or train without lora_rank."
        raise Fault(Code.JOB_STATE, "The job's result is an adapter and cannot be served without its model.", hint=hint)


def is_adapter(job: Job) -> bool:
    """Whether the job's result is an adapter."""
    return job.config.get("lora_rank") is not None


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
        servers if this one cannot."""
        try:
            model = self.models.require(swap.model)
            result = await self._activate(model, swap.source, swap.max_ratio, swap)
        except BaseException as error:
            reason = error.full_message if isinstance(error, Fault) else "A server ended."
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

    async def catch_up(self, model: ServedModel, key: str) -> None:
        """Serves the active weights, which the other servers serve already."""

        async def keep_activation(served_key: str) -> None:
            pass

        source = await asyncio.to_thread(self.sources.find, key, model.base_source)
        change = activate(model, source, keep_activation)
        await self.model_loader.run_to_completion(change, f"serve {shown(key)}, which other servers have activated")

    async def follow_adapters(self, model: ServedModel, previous: set[str]) -> set[str]:
        """Loads the active adapters that this server lacks, and unloads those that were active at the last call, which
        returned `previous`. Returns the keys of the active adapters."""
        model_key = self._model_key(model.name, model.base_source)
        active = set(await asyncio.to_thread(self.jobs.activated_adapters, model_key))
        loaded = {a.source.key: name for name, a in model.adapters.items() if a.source.name == a.source.root}
        for key in active - loaded.keys():
            trained = await asyncio.to_thread(self.sources.find_adapter, key)
            if trained is not None:
                await self.load_adapter(model, await asyncio.to_thread(self.sources.adapter_source, *trained))
        for key in (previous - active) & loaded.keys():
            await self.adapter_loader.unload(loaded[key])
        return active

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


def _stored_key(model: ServedModel, key: str) -> str:
    """Returns the key that stands for the weights `key` in the job database."""
    return BASE if key == model.base_source.key else key
