"""`/v1/fine_tuning/jobs`: OpenAI's view of the same job table that `/finetune` shows.

Following OpenAI, a file with bad rows does not fail the request.
"""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query

from fp8serve.server.api.bounded_route import BoundedRoute
from fp8serve.server.api.dependencies import IdempotencyKey, PageSize, StateDep
from fp8serve.server.api.openai.pages import page
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.checkpoints import checkpoint_metrics, checkpoint_name, written_checkpoints
from fp8serve.server.finetuning.job_records import Event, Job
from fp8serve.server.schemas.openai_finetune_bodies import LEARNING_RATE, JobBody
from fp8serve.server.server_state import ServerState

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["OpenAI"], route_class=BoundedRoute)


@router.post("", summary="Start a fine-tune job")
async def create(body: JobBody, state: StateDep, idempotency_key: IdempotencyKey = None) -> dict[str, Any]:
    job, _ = await state.submissions.submit(body.native(), idempotency_key, check_files=False)
    return view(state, job)


@router.get("", summary="Jobs, newest first")
async def list_jobs(state: StateDep, limit: PageSize = 20, after: str | None = None) -> dict[str, Any]:
    jobs = await asyncio.to_thread(state.jobs.jobs, limit + 1, after)
    return page([view(state, job) for job in jobs[:limit]], len(jobs) > limit)


@router.get("/{job_id}", summary="One job")
async def get_job(job_id: str, state: StateDep) -> dict[str, Any]:
    return view(state, await asyncio.to_thread(state.jobs.get, job_id))


@router.post("/{job_id}/cancel", summary="End a job")
async def cancel(job_id: str, state: StateDep) -> dict[str, Any]:
    return view(state, await state.submissions.cancel(job_id))


@router.post("/{job_id}/pause", summary="Stop a job at a checkpoint until it is resumed")
async def pause(job_id: str, state: StateDep) -> dict[str, Any]:
    return view(state, await state.submissions.pause(job_id))


@router.post("/{job_id}/resume", summary="Continue a job that failed or is paused")
async def resume(job_id: str, state: StateDep) -> dict[str, Any]:
    return view(state, await state.submissions.resume(job_id))


@router.get("/{job_id}/events", summary="What happened to a job, newest first")
async def events(
    job_id: str, state: StateDep, limit: PageSize = 20, after: Annotated[str | None, Query(max_length=64)] = None
) -> dict[str, Any]:
    await asyncio.to_thread(state.jobs.get, job_id)
    found = await asyncio.to_thread(state.jobs.newest_events, job_id, limit + 1, _number(after, "ftevent-"))
    return page([event_view(item) for item in found[:limit]], len(found) > limit)


@router.get("/{job_id}/checkpoints", summary="Checkpoints that are whole and on the disk, newest first")
async def checkpoints(
    job_id: str, state: StateDep, limit: PageSize = 10, after: Annotated[str | None, Query(max_length=64)] = None
) -> dict[str, Any]:
    job = await asyncio.to_thread(state.jobs.get, job_id)
    bound = _number(after, "ftckpt_")
    found = [
        e
        for e in await asyncio.to_thread(written_checkpoints, state.jobs, state.runner, job)
        if bound is None or e.seq < bound
    ]
    return page([checkpoint_view(state, job, item) for item in found[:limit]], len(found) > limit)


def _number(cursor: str | None, prefix: str) -> int | None:
    """The event number inside a cursor. Fault for one that we did not make."""
    if cursor is None:
        return None
    digits = cursor.removeprefix(prefix)
    if not (cursor.startswith(prefix) and digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise Fault(Code.INVALID_PARAMETER, "after must be an id from an earlier page.", param="after")
    return int(digits)


# -- rendering ---------------------------------------------------------------------------------------------------------


def view(state: ServerState, job: Job) -> dict[str, Any]:
    """OpenAI's job object."""
    config = job.config
    shown = {
        "n_epochs": config["epochs"],
        "batch_size": config["batch_size"],
        "learning_rate_multiplier": config["learning_rate"] / LEARNING_RATE,
    }
    times = {"created_at": job.created_at, "finished_at": job.finished_at, "estimated_finish": None}
    return times | {
        "id": job.id,
        "object": "fine_tuning.job",
        "model": job.base,
        "fine_tuned_model": job.model_id if job.status == "succeeded" else None,
        "organization_id": "org-local",
        "status": job.status,
        "training_file": job.training_file or "inline",
        "validation_file": job.validation_file,
        "result_files": [],
        "trained_tokens": job.progress.get("trained_tokens"),
        "error": job.error or {"code": None, "message": None, "param": None} if job.status == "failed" else None,
        "seed": config["seed"],
        "hyperparameters": shown,
        "method": _method(config, shown),
        "integrations": [],
        "metadata": job.metadata or None,
    }


def _method(config: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's `method`; a job of an older version has none in its configuration and is supervised."""
    if config.get("method", "sft") == "dpo":
        beta = "auto" if config["beta"] is None else config["beta"]
        return {"type": "dpo", "dpo": {"hyperparameters": {**shown, "beta": beta}}}
    return {"type": "supervised", "supervised": {"hyperparameters": shown}}


def event_view(item: Event) -> dict[str, Any]:
    kind = "metrics" if item.type == "metrics" else "message"
    facts = {
        "created_at": item.created_at,
        "level": item.level,
        "message": item.message,
        "type": kind,
        "data": item.data,
    }
    return {"object": "fine_tuning.job.event", "id": f"ftevent-{item.seq}"} | facts


def checkpoint_view(state: ServerState, job: Job, item: Event) -> dict[str, Any]:
    step = item.data["step"]
    return {
        "id": f"ftckpt_{item.seq}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": item.created_at,
        "fine_tuned_model_checkpoint": checkpoint_name(job.model_id, step),
        "step_number": step,
        "fine_tuning_job_id": job.id,
        "metrics": {"step": step} | checkpoint_metrics(item),
    }
