"""The checkpoints of a job: which there are, their names, and the model that is made of one on request.

As at OpenAI, a checkpoint's name is that of the job, or of its result, followed by `:ckpt-step-N`. Before it can be
served or trained on, it is exported to a model directory like the job's result, JOB_DIR/served/step-N, which stays
until the job is deleted. The export needs torch, which the server's process does not load, so another process does it.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

from fp8serve.processes import describe_exit, module_command
from fp8serve.server.faults import Code, Fault, safe_text
from fp8serve.server.finetuning.job_records import Event, Job
from fp8serve.server.finetuning.job_runner import JobRunner
from fp8serve.server.finetuning.job_store import JobStore

_NAME = re.compile(r"(.+):ckpt-step-([0-9]{1,9})")
EXPORT = module_command("fp8serve.train.export")


def checkpoint_name(of: str, step: int) -> str:
    """The name of a checkpoint; `of` is the id of its job, or the name of the job's result."""
    return f"{of}:ckpt-step-{step}"


def parsed(name: str) -> tuple[str, int] | None:
    """(job or result, step) of a checkpoint's name; None for another name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def job_of(key: str) -> str:
    """The job's id in the key of a source, which names a job or a checkpoint."""
    parts = parsed(key)
    return key if parts is None else parts[0]


def written_checkpoints(store: JobStore, runner: JobRunner, job: Job) -> list[Event]:
    """Checkpoint events whose directory is still there. A directory gets its name only when it is whole."""
    newest: dict[int, Event] = {}
    for item in store.newest_events(job.id, 10_000, kind="checkpoint"):
        newest.setdefault(int(item.data["step"]), item)
    return [item for step, item in newest.items() if _folder(runner, job, step).is_dir()]


def checkpoint_metrics(item: Event) -> dict[str, Any]:
    """What the trainer measured at a checkpoint."""
    return {k: v for k, v in item.data.items() if k != "step"}


def checkpoint_model(store: JobStore, runner: JobRunner, job: Job, step: int) -> Path:
    """The model directory of a checkpoint, which is made now if it does not exist yet. Blocks.

    Fault 409: there is no such checkpoint, or no model can be made of it.
    """
    out = runner.dir_of(job.id) / "served" / f"step-{step}"
    if not out.is_dir():
        if not _folder(runner, job, step).is_dir():
            steps = ", ".join(str(item.data["step"]) for item in written_checkpoints(store, runner, job)) or "none"
            raise Fault(Code.JOB_STATE, f"The job has no checkpoint of step {step}; it has {steps}.", param="step")
        _export(_folder(runner, job, step), out)
    return out


def source_key(store: JobStore, runner: JobRunner, job: Job, step: int | None) -> str:
    """The key of the job's result if `step` is None or the step of the result, otherwise of the checkpoint."""
    last = next((int(item.data["step"]) for item in written_checkpoints(store, runner, job)), None)
    is_result = job.status == "succeeded" and step == last and job.config.get("result", "last") == "last"
    return job.id if step is None or is_result else checkpoint_name(job.id, step)


def _folder(runner: JobRunner, job: Job, step: int) -> Path:
    return runner.dir_of(job.id) / "out" / "checkpoints" / f"step-{step}"


def _export(checkpoint: Path, out: Path) -> None:
    done = subprocess.run([*EXPORT, str(checkpoint), str(out)], capture_output=True, text=True, check=False)
    if done.returncode and not out.is_dir():  # another request may have made it meanwhile
        last_line = (done.stderr.strip().splitlines() or [describe_exit(done.returncode)])[-1]
        raise Fault(Code.JOB_STATE, f"No model can be made of the checkpoint: {safe_text(last_line)}")
