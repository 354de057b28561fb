"""Turns fine-tune requests into queued jobs or dry-run reports, and deletes jobs that have ended.

`POST /finetune` and `POST /v1/fine_tuning/jobs` both use this module. `TrainConfig` checks the hyper-parameters and the
trainer's own code checks the rows, so the training process accepts what the server accepted. A parser process tokenizes
rows and parses long files; short files are parsed in a thread of the server. The job's directory is complete before the
job is added to the database. If the server crashes in between, its next start removes the directory.

A client can delete a job that has ended. The server deletes the oldest of them if there are more than it keeps. Neither
deletes a job whose result is served, is activated for the next start, or is needed by another job. The job is removed
from the database before its files. If the server crashes in between, its next start removes the files.
"""

import asyncio
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8serve.errors import DataError
from fp8serve.model.config.decoder import read_config
from fp8serve.model.text.data_files import is_line_based
from fp8serve.server.faults import Code, Fault, safe_text
from fp8serve.server.finetuning.database import Job, NewJob, new_job_id
from fp8serve.server.finetuning.job_directory import JobDirectories, public_config, request_hash, write_config
from fp8serve.server.finetuning.job_runner import JobRunner
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.finetuning.sources import WeightSources, job_id_of
from fp8serve.server.parsing.parser_pool import SHORT_BYTES
from fp8serve.server.parsing.request_parser import RequestParser
from fp8serve.server.schemas.finetune_bodies import FinetuneBody
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.served_model import BASE
from fp8serve.server.serving.served_weights import WeightSource
from fp8serve.server.settings import Settings
from fp8serve.train.config import TrainConfig
from fp8serve.train.memory import memory_estimate
from fp8serve.train.validate import read_files

log = logging.getLogger("fp8serve.server")


@dataclass(frozen=True)
class Submissions:
    """Accepts fine-tune jobs, and pauses, resumes and cancels them. `draining` is set when the server shuts down."""

    settings: Settings
    directories: JobDirectories
    store: JobStore
    runner: JobRunner
    models: Registry
    parser: RequestParser
    sources: WeightSources
    draining: asyncio.Event

    async def submit(
        self, body: FinetuneBody, key: str | None, rows: Path | None = None, check_files: bool = True
    ) -> tuple[Job, bool]:
        """Creates a queued job and returns it with True.

        If an earlier request with the same idempotency `key` created the job, it is returned with False. `rows` is a
        folder with the rows of a long request. With `check_files=False`, rows of uploaded files are not checked, and
        bad rows make the job fail. Raises Fault if the request is refused.
        """
        self._refuse_if_not_allowed()
        source = await asyncio.to_thread(self._training_source, body.model)
        job_id = new_job_id()
        try:
            digest = await asyncio.to_thread(request_hash, body, rows)
            config = await asyncio.to_thread(self.directories.fill, self.runner.job_dir(job_id), body, source, rows)
            await self._check_data(body, config, check_files)
            job, is_new = await asyncio.to_thread(self._create_job, job_id, body, source, config, key, digest)
        except BaseException:
            self.runner.discard(job_id)
            raise
        if is_new:
            self.runner.wake()
        else:
            self.runner.discard(job_id)
        return job, is_new

    async def resume(self, job_id: str) -> Job:
        """Queues a failed or paused job. Raises Fault for a job in another state, or if no job may run here."""
        self._refuse_if_not_allowed()
        job = await asyncio.to_thread(self.store.resume, job_id)
        self.runner.wake()
        return job

    async def pause(self, job_id: str) -> Job:
        """Requests that a job pauses at a checkpoint. Raises Fault 409 if it has ended."""
        job = await asyncio.to_thread(self.store.request_pause, job_id)
        self.runner.wake()
        return job

    async def cancel(self, job_id: str) -> Job:
        """Requests that a job is cancelled. Raises Fault 409 if it has ended."""
        job = await asyncio.to_thread(self.store.request_cancel, job_id)
        self.runner.wake()
        return job

    async def dry_run(self, body: FinetuneBody, rows: Path | None = None) -> dict[str, Any]:
        """Returns a report of what the job would do: bad rows, tokens, the share of trained tokens, steps, memory, and
        an example row."""
        source = await asyncio.to_thread(self._training_source, body.model)
        directory = self.runner.job_dir(f"validate-{new_job_id()}")
        try:
            config = await asyncio.to_thread(self.directories.fill, directory, body, source, rows)
            report, names = await self._report(config), await asyncio.to_thread(self._upload_names, body, config)
            bad_lines = [
                {"line": bad["line"], "message": safe_text(_with_upload_names(bad["message"], names))}
                for bad in report["bad_lines"]
            ]
            memory = await asyncio.to_thread(self._memory, config, report)
            return report | {"bad_lines": bad_lines, "memory_bytes": memory}
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _refuse_if_not_allowed(self) -> None:
        """Raises Fault 409 if a job would run on the serving device without permission, and 503 while draining."""
        if self.draining.is_set():
            raise Fault(Code.DRAINING, "The server is shutting down.", retry_after=5)
        if (reason := self.settings.training_refused) is not None:
            hint = "Start it with --train-on share, with --train-on pause, or with --train-device for another device."
            raise Fault(Code.TRAINING_REFUSED, reason, hint=hint)

    def _training_source(self, model: str | None) -> WeightSource:
        """Returns the weights from which training starts.

        `model` is the name of a served model, "base", or the name of an earlier job's result or checkpoint. If `model`
        is None, the weights that the default model serves are returned.
        """
        served_model = self.models.default if model is None else self.models.get(model)
        if served_model is not None:
            return served_model.base_source if served_model.current is None else served_model.current.source
        if model == BASE:
            return self.models.default.base_source
        if (source := self.sources.find_by_name(str(model), self.models.default.base_source)) is None:
            raise Fault(Code.MODEL_NOT_FOUND, "There is no model with that name to fine-tune.", param="model")
        return source

    async def _check_data(self, body: FinetuneBody, config: TrainConfig, check_files: bool) -> None:
        """Raises Fault for the first row that cannot be used. Rows of `data` are tokenized, files only parsed."""
        names = await asyncio.to_thread(self._upload_names, body, config)
        if body.data is not None:
            for bad in (await self._report(config))["bad_lines"]:
                param = "validation_data" if bad["file"] in config.eval_data else "data"
                raise Fault(Code.INVALID_PARAMETER, _with_upload_names(bad["message"], names), param=param)
        elif check_files:
            await self._check_rows(config, config.data, "data", names)
        if check_files:
            await self._check_rows(config, config.eval_data, "validation_data", names)

    def _upload_names(self, body: FinetuneBody, config: TrainConfig) -> dict[str, str]:
        """Maps the path of each uploaded file in the job's directory to the name with which it was uploaded."""
        uploads = (config.data, body.file_id), (config.eval_data, body.validation_file_id)
        return {path: self.store.file(file).filename for paths, file in uploads if file is not None for path in paths}

    async def _check_rows(
        self, config: TrainConfig, files: Sequence[str], param: str, names: Mapping[str, str]
    ) -> None:
        """Parses the rows of `files`. Short files of lines are parsed in a thread of the server. All others go to a
        parser process, even short compressed files, which may expand. `names` are those of `_upload_names`."""
        try:
            if all(map(is_line_based, files)) and sum(Path(name).stat().st_size for name in files) <= SHORT_BYTES:
                await asyncio.to_thread(read_files, config, files)
            else:
                request = {"config": config.to_json(), "files": list(files)}
                await self.parser.inspect_rows("check_rows", json.dumps(request).encode())
        except DataError as error:
            raise Fault(Code.INVALID_PARAMETER, _with_upload_names(str(error), names), param=param) from None

    async def _report(self, config: TrainConfig) -> dict[str, Any]:
        """Returns the trainer's ValidationReport as plain data. It contains paths on the server's disk."""
        report: dict[str, Any] = json.loads(await self.parser.inspect_rows("dry_run", config.to_json().encode()))
        return report

    def _memory(self, config: TrainConfig, report: dict[str, Any]) -> dict[str, int]:
        """Returns an estimate of the memory of each process of the job.

        This runs in the server process, not in a parser process. If the model runs through the transformers library,
        reading its configuration starts another process, which a parser process may not do.
        """
        model, processes = read_config(config.model), config.usable_processes(self.settings.train_procs)
        return memory_estimate(model, config, report["microbatch_tokens"], report["trainable_fraction"], processes)

    def _create_job(
        self, job_id: str, body: FinetuneBody, source: WeightSource, config: TrainConfig, key: str | None, digest: str
    ) -> tuple[Job, bool]:
        write_config(self.runner.job_dir(job_id), config)
        new = NewJob(
            base=source.model_id, source=source.key, config=public_config(config), suffix=body.suffix,
            training_file=body.file_id, validation_file=body.validation_file_id, metadata=body.metadata,
        )  # fmt: skip
        return self.store.create(new, job_id, self.settings.limits.jobs_queued, key, digest)


def _with_upload_names(message: str, names: Mapping[str, str]) -> str:
    for path, name in names.items():
        message = message.replace(path, name)
    return message


@dataclass(frozen=True)
class Retention:
    """Deletes jobs that have ended. Every call blocks. If `max_jobs` is None, `sweep` keeps all jobs."""

    store: JobStore
    runner: JobRunner
    models: Registry
    max_jobs: int | None

    def delete(self, job_id: str) -> None:
        """Deletes a job with its files. Raises Fault 404 for an unknown job, and 409 if it runs or is in use."""
        if any(job_id_of(key) == job_id for key in self.models.source_keys()):
            hint = "Activate or load other weights in its place first."
            raise Fault(Code.JOB_STATE, "The job's result, or one of its checkpoints, is being served.", hint=hint)
        self.store.delete_job(job_id)
        self.runner.discard(job_id)

    def sweep(self) -> None:
        """Deletes all ended jobs but the newest `max_jobs`, except jobs that are in use."""
        for job in () if self.max_jobs is None else self.store.ended_jobs()[self.max_jobs :]:
            try:
                self.delete(job.id)
            except Fault as fault:
                log.info("job %s exceeds --keep-jobs but cannot be deleted: %s", job.id, fault.full_message)
            else:
                log.info("job %s was deleted: --keep-jobs keeps the newest %d jobs", job.id, self.max_jobs)
