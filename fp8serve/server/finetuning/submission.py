"""From a fine-tune request to a queued job, or to a report of what the job would do.

Both `POST /finetune` and `/v1/fine_tuning/jobs` come here. `TrainConfig` checks the numbers, and the trainer's own code
the rows, so a request that is accepted is one that the training process accepts. A parser process tokenizes rows, and
parses long files; short ones are parsed in a thread of the front. The directory is complete before the job is in the
table: a crash in between leaves a directory that nothing names, which the next start removes.

Jobs that have ended are deleted here, too, with everything that they wrote: one by its id, or the oldest beyond a
number. A job stays if its result is served, will be served when the server starts again, or is needed by another job.
The job leaves the table before its files are removed, so files that a crash leaves behind are removed at the next
start.
"""

import asyncio
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8serve.errors import DataError
from fp8serve.model.config.decoder import read_config
from fp8serve.model.text.data_files import is_lines
from fp8serve.server.faults import Code, Fault, safe_text
from fp8serve.server.finetuning.job_directory import JobDirectories, public_config, request_hash, write_config
from fp8serve.server.finetuning.job_records import Job, NewJob, new_job_id
from fp8serve.server.finetuning.job_runner import JobRunner
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.finetuning.sources import Sources, job_of
from fp8serve.server.parsing.parser_pool import SHORT
from fp8serve.server.parsing.request_parser import RequestParser
from fp8serve.server.schemas.finetune_bodies import FinetuneBody
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.served import Source
from fp8serve.server.serving.served_model import BASE
from fp8serve.server.settings import Settings
from fp8serve.train.config import TrainConfig
from fp8serve.train.memory import memory_estimate
from fp8serve.train.validate import read_files

log = logging.getLogger("fp8serve.server")


@dataclass(frozen=True)
class Submissions:
    """Accepts jobs. `draining` is set when the server accepts nothing new."""

    settings: Settings
    data_dir: Path
    store: JobStore
    runner: JobRunner
    models: Registry
    parser: RequestParser
    sources: Sources
    draining: asyncio.Event

    async def submit(
        self, body: FinetuneBody, key: str | None, rows: Path | None = None, check_files: bool = True
    ) -> tuple[Job, bool]:
        """Makes a queued job and returns it with True; with False if an earlier request with this `key` made it.

        Raises Fault. `rows` is the folder where the rows of a long request lie. `check_files=False` leaves bad rows of
        an uploaded file to the job, which then fails with them.
        """
        self._refuse_if_not_allowed()
        source = await asyncio.to_thread(self._training_source, body.model)
        job_id = new_job_id()
        try:
            mark = await asyncio.to_thread(request_hash, body, rows)
            config = await asyncio.to_thread(self._directories.fill, self.runner.dir_of(job_id), body, source, rows)
            await self._check_data(body, config, check_files)
            job, is_new = await asyncio.to_thread(self._enter, job_id, body, source, config, key, mark)
        except BaseException:
            self.runner.discard(job_id)
            raise
        if is_new:
            self.runner.look_again()
        else:
            self.runner.discard(job_id)
        return job, is_new

    async def resume(self, job_id: str) -> Job:
        """Queues a job that failed or is paused. Fault for a job in any other state, or when no job may run here."""
        self._refuse_if_not_allowed()
        job = await asyncio.to_thread(self.store.resume, job_id)
        self.runner.look_again()
        return job

    async def pause(self, job_id: str) -> Job:
        """Asks a job to stop at a checkpoint and wait. Fault 409 when it has ended already."""
        job = await asyncio.to_thread(self.store.request_pause, job_id)
        self.runner.look_again()
        return job

    async def cancel(self, job_id: str) -> Job:
        """Asks a job to end. Fault 409 when it has ended already."""
        job = await asyncio.to_thread(self.store.request_cancel, job_id)
        self.runner.look_again()
        return job

    async def dry_run(self, body: FinetuneBody, rows: Path | None = None) -> dict[str, Any]:
        """What the job would do: bad rows, tokens, the share of them that is learnt, steps, memory, and an example
        row."""
        source = await asyncio.to_thread(self._training_source, body.model)
        directory = self.runner.dir_of(f"validate-{new_job_id()}")
        try:
            config = await asyncio.to_thread(self._directories.fill, directory, body, source, rows)
            report = await self._report(config)
            bad_lines = [{"line": bad["line"], "message": safe_text(bad["message"])} for bad in report["bad_lines"]]
            memory = await asyncio.to_thread(self._memory, config, report)
            return report | {"bad_lines": bad_lines, "memory_bytes": memory}
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    @property
    def _directories(self) -> JobDirectories:
        return JobDirectories(self.settings, self.data_dir, self.store)

    def _refuse_if_not_allowed(self) -> None:
        """Fault 409 when a job would run on the serving device without permission; 503 while draining."""
        if self.draining.is_set():
            raise Fault(Code.DRAINING, "The server is shutting down.", retry_after=5)
        if (reason := self.settings.training_refused) is not None:
            hint = "Start it with --train-on share, with --train-on pause, or with --train-device for another device."
            raise Fault(Code.TRAINING_REFUSED, reason, hint=hint)

    def _training_source(self, model: str | None) -> Source:
        """The weights to start from: those that `model` serves now (None: the default model), "base", or the result or
        a checkpoint of an earlier job, by its name or by the job's id.
        """
        served = self.models.default if model is None else self.models.named(model)
        if served is not None:
            return served.home if served.current is None else served.current.source
        if model == BASE:
            return self.models.default.home
        if (source := self.sources.trained(str(model), self.models.default.home)) is None:
            raise Fault(Code.MODEL_NOT_FOUND, "There is no model of that name to fine-tune.", param="model")
        return source

    async def _check_data(self, body: FinetuneBody, config: TrainConfig, check_files: bool) -> None:
        """Fault 4xx naming the first row that cannot be trained on: rows of `data` are tokenized, files are parsed."""
        if body.data is not None:
            for bad in (await self._report(config))["bad_lines"]:
                param = "validation_data" if bad["file"] in config.eval_data else "data"
                raise Fault(Code.INVALID_PARAMETER, bad["message"], param=param)
        elif check_files:
            await self._check_rows(config, config.data, "data")
        if check_files:
            await self._check_rows(config, config.eval_data, "validation_data")

    async def _check_rows(self, config: TrainConfig, files: Sequence[str], param: str) -> None:
        """In a thread if the files are short. A compressed file is not: its few bytes may become many."""
        try:
            if all(map(is_lines, files)) and sum(Path(name).stat().st_size for name in files) <= SHORT:
                await asyncio.to_thread(read_files, config, files)
            else:
                request = {"config": config.to_json(), "files": list(files)}
                await self.parser.look_at_rows("rows", json.dumps(request).encode())
        except DataError as error:
            raise Fault(Code.INVALID_PARAMETER, str(error), param=param) from None

    async def _report(self, config: TrainConfig) -> dict[str, Any]:
        """The trainer's ValidationReport as plain data, with paths on the server's disk."""
        report: dict[str, Any] = json.loads(await self.parser.look_at_rows("dry_run", config.to_json().encode()))
        return report

    def _memory(self, config: TrainConfig, report: dict[str, Any]) -> dict[str, int]:
        """That of one of the job's processes. The front reads the model's configuration itself: where transformers
        computes the model, that takes a further process, which a parser's limits forbid.
        """
        model, processes = read_config(config.model), config.processes(self.settings.train_procs)
        return memory_estimate(model, config, report["microbatch_tokens"], report["trainable_fraction"], processes)

    def _enter(
        self, job_id: str, body: FinetuneBody, source: Source, config: TrainConfig, key: str | None, mark: str
    ) -> tuple[Job, bool]:
        """The directory is whole before the table knows of it."""
        write_config(self.runner.dir_of(job_id), config)
        new = NewJob(
            base=source.model_id, source=source.key, config=public_config(config), suffix=body.suffix,
            training_file=body.file_id, validation_file=body.validation_file_id, metadata=body.metadata,
        )  # fmt: skip
        return self.store.create(new, job_id, self.settings.limits.jobs_queued, key, mark)


@dataclass(frozen=True)
class Retention:
    """Every call blocks. keep: the number of ended jobs that stay; None: all of them."""

    store: JobStore
    runner: JobRunner
    models: Registry
    keep: int | None

    def delete(self, job_id: str) -> None:
        """Fault 404: there is no such job. Fault 409: it has not ended, or is in use."""
        if any(job_of(key) == job_id for key in self.models.sources()):
            hint = "Activate or load something else in its place first."
            raise Fault(Code.JOB_STATE, "The job's result, or a checkpoint of it, is being served.", hint=hint)
        self.store.delete_job(job_id)
        self.runner.discard(job_id)

    def sweep(self) -> None:
        """Deletes the oldest jobs beyond `keep`, except those that must stay."""
        for job in () if self.keep is None else self.store.ended()[self.keep :]:
            try:
                self.delete(job.id)
            except Fault as fault:
                log.info("job %s is older than those that are kept, and stays: %s", job.id, fault.told)
            else:
                log.info("job %s was deleted: it was older than the %d that are kept", job.id, self.keep)
