"""The checkpoints of a job that can be gone on from."""

from typing import Any

from fp8serve.server.finetuning.job_records import Event, Job
from fp8serve.server.finetuning.job_runner import JobRunner
from fp8serve.server.finetuning.job_store import JobStore


def written_checkpoints(store: JobStore, runner: JobRunner, job: Job) -> list[Event]:
    """Checkpoint events whose directory is still there. A directory gets its name only when it is whole."""
    folder = runner.dir_of(job.id) / "out" / "checkpoints"
    newest: dict[int, Event] = {}
    for item in store.newest_events(job.id, 10_000, kind="checkpoint"):
        newest.setdefault(int(item.data["step"]), item)
    return [item for step, item in newest.items() if (folder / f"step-{step}").is_dir()]


def checkpoint_metrics(item: Event) -> dict[str, Any]:
    """What the trainer measured at a checkpoint."""
    return {k: v for k, v in item.data.items() if k != "step"}
