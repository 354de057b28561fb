"""The weights that a name can serve: those of its own directory, of a fine-tune job's result, or of a checkpoint.

As at OpenAI, a checkpoint's name is that of the job, or of its result, followed by `:ckpt-step-N`. Before it can be
served or trained on, it is exported to a model directory like the job's result, JOB_DIR/served/step-N, which stays
until the job is deleted. The export needs torch, which the server's process does not load, so another process does it.
"""

import logging
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8serve.errors import ModelError
from fp8serve.model.storage.files import read_json
from fp8serve.processes import describe_exit, module_command
from fp8serve.server.faults import Code, Fault, safe_text
from fp8serve.server.finetuning.job_records import Event, Job
from fp8serve.server.finetuning.job_runner import JobRunner
from fp8serve.server.finetuning.job_store import JobStore
from fp8serve.server.serving.adapters import AdapterSource
from fp8serve.server.serving.registry import Registry
from fp8serve.server.serving.served import Source
from fp8serve.server.serving.served_model import BASE, ServedModel

log = logging.getLogger("fp8serve.server")
MANY = 100_000
CHECKPOINT_NAME = re.compile(r"(.+):ckpt-step-([0-9]{1,9})")
EXPORT = module_command("fp8serve.train.export")


def checkpoint_name(of: str, step: int) -> str:
    """The name of a checkpoint; `of` is the id of its job, or the name of the job's result."""
    return f"{of}:ckpt-step-{step}"


def job_of(key: str) -> str:
    """The job's id in the key of a source, which names a job or a checkpoint."""
    match = CHECKPOINT_NAME.fullmatch(key)
    return key if match is None else match[1]


def checkpoint_metrics(item: Event) -> dict[str, Any]:
    """What the trainer measured at a checkpoint."""
    return {k: v for k, v in item.data.items() if k != "step"}


@dataclass(frozen=True)
class Sources:
    """Reads the job table: every call blocks."""

    jobs: JobStore
    runner: JobRunner
    models: Registry

    def find(self, key: str, home: Source) -> Source:
        """The weights of a key: `home` for "base", otherwise those of a job or of a checkpoint. Fault 404 or 409 when
        there are none.
        """
        if key == BASE:
            return home
        checkpoint = self.checkpoint(key)
        return self.of_job(self.jobs.get(key), home) if checkpoint is None else self.of_checkpoint(*checkpoint, home)

    def knows(self, name: str) -> bool:
        """Whether jobs have made something under that name."""
        return self.result(name) is not None or self.checkpoint(name) is not None

    def trained(self, name: str, home: Source) -> Source | None:
        """What jobs have made under that name: a result, or a checkpoint. Fault 409: it cannot be served."""
        if (job := self.result(name)) is not None:
            return self.of_job(job, home)
        return None if (checkpoint := self.checkpoint(name)) is None else self.of_checkpoint(*checkpoint, home)

    def of_job(self, job: Job, home: Source) -> Source:
        """The job's result, to be served as `home` is. Fault 409 when there is none."""
        directory = self._result_directory(job)
        _refuse_adapter(job)
        return self._source(home, job.id, job.model_id, directory)

    def of_checkpoint(self, job: Job, step: int, home: Source) -> Source:
        """A checkpoint as a model like the job's result; it is made now if it does not exist yet. Fault 409 when there
        is no such checkpoint.
        """
        _refuse_adapter(job)
        key, name = (checkpoint_name(of, step) for of in (job.id, job.model_id))
        return self._source(home, key, name, self._checkpoint_directory(job, step))

    def _source(self, home: Source, key: str, name: str, directory: Path) -> Source:
        options = replace(home.options, recipe="stored", scales=None)
        return replace(home, key=key, model_id=name, directory=directory, options=options)

    def checkpoint(self, name: str) -> tuple[Job, int] | None:
        """The job and the step in the name of a checkpoint; None for another name, or if there is no such job."""
        if (match := CHECKPOINT_NAME.fullmatch(name)) is None:
            return None
        job = _named(match[1], self.jobs.jobs(limit=MANY))
        return None if job is None else (job, int(match[2]))

    def checkpoints(self, job: Job) -> list[Event]:
        """The events of checkpoints whose directory is still there, newest first. A directory gets its name only when
        it is whole."""
        newest: dict[int, Event] = {}
        for item in self.jobs.newest_events(job.id, 10_000, kind="checkpoint"):
            newest.setdefault(int(item.data["step"]), item)
        return [item for step, item in newest.items() if self._checkpoint(job, step).is_dir()]

    def key(self, job: Job, step: int | None) -> str:
        """The key of the job's result if `step` is None or the step of the result, otherwise of the checkpoint."""
        last = next((int(item.data["step"]) for item in self.checkpoints(job)), None)
        is_result = job.status == "succeeded" and step == last and job.config.get("result", "last") == "last"
        return job.id if step is None or is_result else checkpoint_name(job.id, step)

    def _checkpoint(self, job: Job, step: int) -> Path:
        return self.runner.dir_of(job.id) / "out" / "checkpoints" / f"step-{step}"

    def _checkpoint_directory(self, job: Job, step: int) -> Path:
        """The model directory of a checkpoint, which is made now if it does not exist yet. Fault 409: there is no such
        checkpoint, or no model can be made of it.
        """
        out, checkpoint = self.runner.dir_of(job.id) / "served" / f"step-{step}", self._checkpoint(job, step)
        if out.is_dir():
            return out
        if not checkpoint.is_dir():
            steps = ", ".join(str(item.data["step"]) for item in self.checkpoints(job)) or "none"
            raise Fault(Code.JOB_STATE, f"The job has no checkpoint of step {step}; it has {steps}.", param="step")
        export = subprocess.run([*EXPORT, str(checkpoint), str(out)], capture_output=True, text=True, check=False)
        if export.returncode and not out.is_dir():  # another request may have made it meanwhile
            last_line = (export.stderr.strip().splitlines() or [describe_exit(export.returncode)])[-1]
            raise Fault(Code.JOB_STATE, f"No model can be made of the checkpoint: {safe_text(last_line)}")
        return out

    def first(self, home: Source, mark: str) -> list[Source]:
        """What a model tries to serve when it starts, in this order: what was activated under `mark`, then its own
        weights."""
        key = self.jobs.activated(mark)
        try:
            return [home] if key in (None, BASE) else [self.find(str(key), home), home]
        except Fault as fault:
            log.error("%s, activated earlier, cannot be served (%s); serving %s", key, fault, home.model_id)
            return [home]

    def results(self, most: int = 1000) -> list[Job]:
        """Jobs that succeeded with a model as their result, newest first."""
        return [job for job in self.jobs.jobs(limit=most, status="succeeded") if not is_adapter(job)]

    def result(self, name: str) -> Job | None:
        """The succeeded job whose id, or whose result's id, is `name`."""
        return _named(name, self.results(MANY))

    def adapters(self, most: int = 1000) -> list[Job]:
        """Jobs that succeeded with an adapter as their result, newest first."""
        return [job for job in self.jobs.jobs(limit=most, status="succeeded") if is_adapter(job)]

    def adapter(self, name: str) -> tuple[Job, int | None] | None:
        """The job that succeeded with an adapter and is called `name`, by its id or by its result's, and None; for the
        name of one of its checkpoints, the job and the step.
        """
        if (checkpoint := self.checkpoint(name)) is not None:
            return checkpoint if is_adapter(checkpoint[0]) else None
        job = _named(name, self.adapters(MANY))
        return None if job is None else (job, None)

    def of_adapter(self, job: Job, step: int | None = None, name: str | None = None) -> AdapterSource:
        """The adapter that a job trained, or its state at a step, under its own name or `name`. Fault 409 when there is
        none.
        """
        if step is not None:
            key, root = (checkpoint_name(of, step) for of in (job.id, job.model_id))
            return AdapterSource(name or root, root, self._checkpoint_directory(job, step), key)
        return AdapterSource(name or job.model_id, job.model_id, self._result_directory(job), job.id)

    def _result_directory(self, job: Job) -> Path:
        directory = self.runner.result_dir(job)
        if job.status != "succeeded" or not directory.is_dir():
            raise Fault(Code.JOB_STATE, f"Only a job that succeeded can be served; this one is {job.status}.")
        return directory

    def check_base(self, job: Job, model: ServedModel) -> None:
        """Fault 409 unless `model` serves the weights beside which the job trained its adapter."""
        served = model.current
        if served is not None and served.source.key != job.source:
            message = (
                f"The adapter was trained beside {job.base}, and {model.name} serves {served.source.model_id} now."
            )
            raise Fault(Code.JOB_STATE, message, hint="First activate the model that it was trained beside.")

    def owner(self, job: Job) -> ServedModel:
        """The loaded model from whose weights the job's line began. Fault 409 when that model is not loaded."""
        trained = self._first_directory(job)
        models = [m for m in self.models.models.values() if str(m.home.directory.resolve()) == trained]
        if models:  # several names may stand for one directory
            return next((model for model in models if model.name == job.root), models[0])
        hint = "Load it first, or name the model that the result replaces: POST /models/{name}/activate."
        raise Fault(Code.JOB_STATE, f"The job was trained from {job.root}, which is not loaded here.", hint=hint)

    def _first_directory(self, job: Job) -> str | None:
        """The model directory from which the first job of the line started."""
        while (before := self._job_or_none(job.source)) is not None:
            job = before
        try:
            return str(read_json(self.runner.dir_of(job.id) / "job.json")["model"])
        except (ModelError, KeyError):
            return None

    def _job_or_none(self, key: str) -> Job | None:
        try:
            return None if key == BASE else self.jobs.get(job_of(key))
        except Fault:
            return None


def _named(name: str, jobs: list[Job]) -> Job | None:
    """The job whose id, or whose result's name, is `name`."""
    return next((job for job in jobs if name in (job.id, job.model_id)), None)


def _refuse_adapter(job: Job) -> None:
    if is_adapter(job):
        hint = "Activate it beside its model, or train without lora_rank."
        raise Fault(Code.JOB_STATE, "The job's result is an adapter, which is not a model by itself.", hint=hint)


def is_adapter(job: Job) -> bool:
    """Whether the job's result is an adapter, which is not a model by itself."""
    return job.config.get("lora_rank") is not None
