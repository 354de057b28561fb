"""Finds the weights that a model can serve: base weights, the result of a fine-tune job, or a job's checkpoint.

As at OpenAI, a checkpoint is named by the job's id or result, followed by `:ckpt-step-N`. Before it can be served or
trained on, a checkpoint is exported to a model directory JOB_DIR/served/step-N, which exists until the job is deleted.
The export needs torch, which the server does not import, so it runs in another process.
"""

import logging
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8serve.errors import ModelError, shown
from fp8serve.model.storage.files import read_json
from fp8serve.processes import describe_exit, module_command
from fp8serve.server.faults import Code, Fault, safe_text
from fp8serve.server.finetuning.database import Event, Job
from fp8serve.server.finetuning.job_runner import JobRunner
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.served_model import BASE, ServedModel
from fp8serve.server.serving.served_weights import AdapterSource, WeightSource

log = logging.getLogger("fp8serve.server")
MAX_JOBS = 100_000
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
