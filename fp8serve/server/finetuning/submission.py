"""Turns fine-tune requests into queued jobs or dry-run reports, and deletes jobs that have ended.

`POST /finetune` and `POST /v1/fine_tuning/jobs` both use this module. `TrainConfig` checks the hyper-parameters and the
trainer's own code checks the rows, so the training process accepts what the server accepted. A parser process tokenizes
rows and parses long files; short files are parsed in a thread of the server. The job's directory is complete before the
job is added to the database. If the server crashes in between, its next start removes the directory.

JOB_DIR/data.jsonl, data.csv, ...     the training rows: a hard link to the upload, or a file of the request's rows
JOB_DIR/validation.jsonl, ...         the validation rows, if there are any
JOB_DIR/job.json                      the TrainConfig

From then on only the training process writes the directory, apart from the server's exports of checkpoints:

JOB_DIR/events.jsonl                  the events, which the server copies to the database
JOB_DIR/out/                          checkpoints and the result
JOB_DIR/result.json                   the sign that the job has succeeded
JOB_DIR/worker.lock, worker.log       the lock of the process, and its output
JOB_DIR/stop                          a server on another machine asks the process to stop
JOB_DIR/served/step-N/                checkpoints that were exported as models (weight_sources.py)

A client can delete a job that has ended. The server deletes the oldest of them if there are more than it keeps. Neither
deletes a job whose result is served, is activated for the next start, or is needed by another job. The job is removed
from the database before its files. If the server crashes in between, its next start removes the files.
"""

import asyncio
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from fp8serve.errors import DataError, Fp8ServeError, ModelError, RequestError, shown
from fp8serve.model.config.decoder import read_config
from fp8serve.model.config.model_config import adaptable_linear_names, select_linears
from fp8serve.model.storage.files import fsync
from fp8serve.model.text.data_files import ending_of, is_line_based
from fp8serve.options import http_address
from fp8serve.server.faults import Code, Fault, safe_text
from fp8serve.server.finetuning.artifacts import Artifacts
from fp8serve.server.finetuning.database import Job, NewJob, StoredFile, new_job_id
from fp8serve.server.finetuning.job_runner import JobRunner
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.finetuning.weight_sources import WeightSources, job_id_of
from fp8serve.server.parsing.parser_pool import SHORT_BYTES
from fp8serve.server.parsing.request_parser import RequestParser
from fp8serve.server.parsing.sizes import write_rows
from fp8serve.server.schemas.bodies import Body
from fp8serve.server.schemas.finetune_bodies import FinetuneBody, Rows
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.served_model import BASE
from fp8serve.server.serving.served_weights import WeightSource
from fp8serve.server.settings import Settings
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import check_length
from fp8serve.train.events import check_optimizer_package
from fp8serve.train.memory import memory_estimate
from fp8serve.train.validate import read_files

log = logging.getLogger("fp8serve.server")
DEFAULT_SEQ_LEN = TrainConfig.seq_len
LIMIT_FIELDS = ("max_rows", "max_row_bytes", "max_data_bytes", "max_data_memory")
PRIVATE_FIELDS = ("model", "data", "eval_data", "out", "reward", "grader_url", *LIMIT_FIELDS)


@dataclass(frozen=True)
class Submissions:
    """Accepts fine-tune jobs, and pauses, resumes and cancels them. `draining` is set when the server shuts down."""

    settings: Settings
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
            config = await asyncio.to_thread(self.fill_directory, self.runner.job_dir(job_id), body, source, rows)
            await self._check_data(body, config, check_files)
            job, is_new = await asyncio.to_thread(self._create_job, job_id, body, source, config, key, digest)
        except BaseException:
            self.runner.artifacts.discard(self.runner.job_dir(job_id))
            raise
        if is_new:
            self.runner.wake()
        else:
            self.runner.artifacts.discard(self.runner.job_dir(job_id))
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
            config = await asyncio.to_thread(self.fill_directory, directory, body, source, rows)
            report, names = await self._report(config), await asyncio.to_thread(self._upload_names, body, config)
            bad_lines = [
                {"line": bad["line"], "message": safe_text(_with_upload_names(bad["message"], names))}
                for bad in report["bad_lines"]
            ]
            # not in a parser process, because this may start a process, for a model that transformers computes
            model = await asyncio.to_thread(read_config, config.model)
            processes = config.usable_processes(self.settings.train_procs)
            lengths = report["microbatch_tokens"], report["trainable_fraction"]
            memory = await asyncio.to_thread(memory_estimate, model, config, *lengths, processes)
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

    def fill_directory(
        self, directory: Path, body: FinetuneBody, source: WeightSource, rows: Path | None
    ) -> TrainConfig:
        """Creates the job's directory with its data and returns the job's configuration.

        `rows` is a folder with the rows of a long request, which a parser process wrote to files. Raises Fault for data
        or hyper-parameters that are refused.
        """
        directory.mkdir(mode=0o700)
        row_files = {} if rows is None else {path.stem: path for path in rows.iterdir()}
        data = self._add_rows(directory / "data", body.data, body.file_id, row_files.get("data"))
        validation = self._add_rows(
            directory / "validation", body.validation_data, body.validation_file_id, row_files.get("validation_data")
        )
        return self._create_config(directory, body, source, data, validation)

    def _add_rows(self, stem: Path, rows: Rows | None, file_id: str | None, row_file: Path | None) -> list[Path]:
        """Adds an uploaded file, the file `row_file` or `rows` to the job's directory as `stem` with a suffix.

        Returns the path of the new file in a list, which is empty if the request has no rows of this kind.
        """
        if file_id is not None:
            source = file_path(self.runner.artifacts, self.store.file(file_id))
            path = stem.with_name(stem.name + "".join(source.suffixes))
            _link(source, path)
            return [path]
        if rows is None:
            return []
        path = stem.with_suffix(".jsonl")
        if row_file is not None:
            row_file.rename(path)
            return [path]
        limits = self.settings.limits
        try:
            write_rows(path, rows, limits.rows, limits.row_bytes)
        except RequestError as error:
            raise Fault(Code.INVALID_PARAMETER, str(error), param=stem.name) from None
        return [path]

    def _create_config(
        self,
        directory: Path,
        body: FinetuneBody,
        source: WeightSource,
        data: Sequence[Path],
        validation: Sequence[Path],
    ) -> TrainConfig:
        """Returns the job's configuration. Raises Fault if the trainer would refuse it."""
        check_grader(body.grader_url, self.settings.grader_urls)
        limits = self.settings.limits
        try:
            model = read_config(source.directory)
            seq_len = body.seq_len or min(DEFAULT_SEQ_LEN, model.max_position_embeddings)
            check_length(seq_len, model)
            config = TrainConfig.from_dict(
                body.hyper_parameters()
                | {"model": str(source.directory.resolve()), "out": str(directory / "out"), "seq_len": seq_len}
                | {"data": [str(p) for p in data], "eval_data": [str(p) for p in validation]}
                | {"max_rows": limits.rows, "max_row_bytes": limits.row_bytes}
                | {"max_data_bytes": limits.upload_bytes, "max_data_memory": limits.validation_memory}
                | {"device": self.settings.training_device, "report_to": list(self.settings.report_to)}
            )
            check_optimizer_package(config)
        except Fp8ServeError as error:
            raise Fault(Code.INVALID_PARAMETER, str(error)) from None
        try:
            if config.lora_targets:
                select_linears(adaptable_linear_names(model), config.lora_targets)
        except ModelError as error:
            raise Fault(Code.INVALID_PARAMETER, str(error), param="lora_targets") from None
        return config

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

    def _create_job(
        self, job_id: str, body: FinetuneBody, source: WeightSource, config: TrainConfig, key: str | None, digest: str
    ) -> tuple[Job, bool]:
        directory = self.runner.job_dir(job_id)
        (directory / "job.json").write_text(config.to_json(), encoding="utf-8")
        for path in (directory / "job.json", directory, directory.parent):
            fsync(path)
        self.runner.artifacts.publish_job(job_id)
        new = NewJob(
            base=source.model_id, source=source.key, config=public_config(config), suffix=body.suffix,
            training_file=body.file_id, validation_file=body.validation_file_id, metadata=body.metadata,
        )  # fmt: skip
        return self.store.create(new, job_id, self.settings.limits.jobs_queued, key, digest)


def _with_upload_names(message: str, names: Mapping[str, str]) -> str:
    for path, name in names.items():
        message = message.replace(path, name)
    return message


def public_config(config: TrainConfig) -> dict[str, Any]:
    """Returns the configuration as clients see it: without paths on the server's disk, and without addresses, which may
    contain a password."""
    public = {k: v for k, v in json.loads(config.to_json()).items() if k not in PRIVATE_FIELDS}
    return public | {"learning_rate": public.pop("lr")}


def request_hash(body: Body, rows: Path | None = None) -> str:
    """Returns a hash of a request and of its rows in a folder, to compare requests with the same idempotency key."""
    digest = hashlib.sha256(body.model_dump_json().encode())
    for path in sorted(rows.iterdir()) if rows is not None else ():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _link(source: Path, path: Path) -> None:
    """Links the upload into the job's directory, so that the job keeps its data if the upload is deleted."""
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)
        fsync(path)


def upload_path(artifacts: Artifacts, file_id: str, filename: str) -> Path:
    """Returns the path of an uploaded file, whose ending tells its format."""
    return artifacts.root / "files" / (file_id + ending_of(filename))


def file_path(artifacts: Artifacts, file: StoredFile) -> Path:
    """Returns the path of an uploaded file that is in the database. Raises Fault 404 if the file is missing."""
    path = artifacts.fetch(upload_path(artifacts, file.id, file.filename))
    if not path.exists():
        raise Fault(Code.FILE_NOT_FOUND, "The file with that id is missing on the server's disk.", param="file_id")
    return path


DEFAULT_PORTS = {"http": 80, "https": 443}


def check_grader(url: str | None, allowed: Iterable[str]) -> None:
    """Raises Fault unless `url` is below an allowed address. The message does not reveal the allowed addresses."""
    if url is None:
        return
    if (address := http_address(url)) is None:
        message = f"grader_url must be an address such as http://localhost:9000/grade, not {shown(url)}."
        raise Fault(Code.INVALID_PARAMETER, message, param="grader_url")
    if not any(_is_below(address, root) for root in map(http_address, allowed) if root is not None):
        raise Fault(
            Code.INVALID_PARAMETER,
            "This server does not send completions to that address.",
            param="grader_url",
            hint="Its operator allows addresses of graders with --grader-url.",
        )


def _is_below(url: SplitResult, root: SplitResult) -> bool:
    is_same = _origin(url) == _origin(root)
    prefix = f"{root.path.rstrip('/')}/"
    return is_same and "@" not in url.netloc and _is_plain(url.path) and f"{url.path}/".startswith(prefix)


def _origin(url: SplitResult) -> tuple[str, str | None, int | None]:
    return url.scheme, url.hostname, url.port or DEFAULT_PORTS.get(url.scheme)


def _is_plain(path: str) -> bool:
    """Whether a server resolves the path as it is written: it contains no `..`, however encoded."""
    return "%" not in path and "\\" not in path and not {".", ".."} & set(path.split("/"))


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
        self.runner.artifacts.discard(self.runner.job_dir(job_id))

    def sweep(self) -> None:
        """Deletes all ended jobs but the newest `max_jobs`, except jobs that are in use."""
        for job in () if self.max_jobs is None else self.store.ended_jobs()[self.max_jobs :]:
            try:
                self.delete(job.id)
            except Fault as fault:
                log.info("job %s exceeds --keep-jobs but cannot be deleted: %s", job.id, fault.full_message)
            else:
                log.info("job %s was deleted: --keep-jobs keeps the newest %d jobs", job.id, self.max_jobs)
