"""`/v1/fine_tuning/jobs`: OpenAI's view of the same job table that `/finetune` shows.

`method` must be supervised; anything else is refused, never replaced by it. `"auto"` means the default of the native
route. OpenAI's `learning_rate_multiplier` multiplies that default, 2e-5. Following OpenAI, a file with bad rows does
not fail the request.
"""

import asyncio
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Header, Query
from pydantic import Field

from fp8serve.server.faults import Code, Fault
from fp8serve.server.files import page
from fp8serve.server.finetune import Limit, checkpoint_metrics, resume_job, written_checkpoints
from fp8serve.server.house import House, HouseDep
from fp8serve.server.protocol import Body, Metadata, Strict
from fp8serve.server.reading import BoundedRoute
from fp8serve.server.records import Event, Job
from fp8serve.server.submission import FileId, FinetuneBody, Suffix, submit

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["OpenAI"], route_class=BoundedRoute)
LEARNING_RATE = 2e-5


class HyperParameters(Strict):
    n_epochs: Annotated[int, Field(ge=1, le=50)] | Literal["auto"] = "auto"
    batch_size: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = "auto"
    learning_rate_multiplier: Annotated[float, Field(ge=1e-6, le=1e5)] | Literal["auto"] = "auto"


class Supervised(Strict):
    hyperparameters: HyperParameters = HyperParameters()


class Method(Strict):
    type: Literal["supervised"]
    supervised: Supervised = Supervised()


class JobBody(Body):
    """`POST /v1/fine_tuning/jobs`."""

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"integrations": (None, [])}

    model: str
    training_file: FileId
    validation_file: FileId | None = None
    suffix: Suffix | None = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    method: Method | None = None
    hyperparameters: HyperParameters | None = None
    metadata: Metadata | None = None
    integrations: list[Any] | None = None

    def native(self) -> FinetuneBody:
        """The same job as the native route spells it."""
        chosen = (
            self.method.supervised.hyperparameters
            if self.method is not None
            else self.hyperparameters or HyperParameters()
        )
        named: dict[str, Any] = {
            "epochs": chosen.n_epochs,
            "batch_size": chosen.batch_size,
            "seed": self.seed,
            "suffix": self.suffix,
            "metadata": self.metadata,
        }
        if chosen.learning_rate_multiplier != "auto":
            named["learning_rate"] = LEARNING_RATE * chosen.learning_rate_multiplier
        given = {k: v for k, v in named.items() if v is not None and v != "auto"}
        return FinetuneBody(
            file_id=self.training_file, validation_file_id=self.validation_file, model=self.model, **given
        )


@router.post("", summary="Start a fine-tune job")
async def create(
    body: JobBody, house: HouseDep, idempotency_key: Annotated[str | None, Header(max_length=255)] = None
) -> dict[str, Any]:
    job, made = await submit(house, body.native(), idempotency_key, check_files=False)
    if made:
        house.trainer.submitted()
    return view(house, job)


@router.get("", summary="Jobs, newest first")
async def list_jobs(house: HouseDep, limit: Limit = 20, after: str | None = None) -> dict[str, Any]:
    jobs = await asyncio.to_thread(house.jobs.jobs, limit + 1, after)
    return page([view(house, job) for job in jobs[:limit]], len(jobs) > limit)


@router.get("/{job_id}", summary="One job")
async def get_job(job_id: str, house: HouseDep) -> dict[str, Any]:
    return view(house, await asyncio.to_thread(house.jobs.get, job_id))


@router.post("/{job_id}/cancel", summary="End a job")
async def cancel(job_id: str, house: HouseDep) -> dict[str, Any]:
    job = await asyncio.to_thread(house.jobs.request_cancel, job_id)
    house.trainer.submitted()
    return view(house, job)


@router.post("/{job_id}/resume", summary="Go on with a job that failed")
async def resume(job_id: str, house: HouseDep) -> dict[str, Any]:
    return view(house, await resume_job(house, job_id))


@router.get("/{job_id}/events", summary="What happened to a job, newest first")
async def events(
    job_id: str, house: HouseDep, limit: Limit = 20, after: Annotated[str | None, Query(max_length=64)] = None
) -> dict[str, Any]:
    await asyncio.to_thread(house.jobs.get, job_id)
    found = await asyncio.to_thread(house.jobs.newest_events, job_id, limit + 1, _number(after, "ftevent-"))
    return page([event_view(item) for item in found[:limit]], len(found) > limit)


@router.get("/{job_id}/checkpoints", summary="Checkpoints that are whole and on the disk, newest first")
async def checkpoints(
    job_id: str, house: HouseDep, limit: Limit = 10, after: Annotated[str | None, Query(max_length=64)] = None
) -> dict[str, Any]:
    job = await asyncio.to_thread(house.jobs.get, job_id)
    bound = _number(after, "ftckpt_")
    found = [e for e in await asyncio.to_thread(written_checkpoints, house, job) if bound is None or e.seq < bound]
    return page([checkpoint_view(house, job, item) for item in found[:limit]], len(found) > limit)


def _number(cursor: str | None, prefix: str) -> int | None:
    """The event number inside a cursor. Fault for one that we did not make."""
    if cursor is None:
        return None
    digits = cursor.removeprefix(prefix)
    if not (cursor.startswith(prefix) and digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise Fault(Code.INVALID_PARAMETER, "after must be an id from an earlier page.", param="after")
    return int(digits)


# -- rendering ---------------------------------------------------------------------------------------------------------


def view(house: House, job: Job) -> dict[str, Any]:
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
        "fine_tuned_model": job.model_id(house.models.name) if job.status == "succeeded" else None,
        "organization_id": "org-local",
        "status": job.status,
        "training_file": job.training_file or "inline",
        "validation_file": job.validation_file,
        "result_files": [],
        "trained_tokens": job.progress.get("trained_tokens"),
        "error": job.error or {"code": None, "message": None, "param": None} if job.status == "failed" else None,
        "seed": config["seed"],
        "hyperparameters": shown,
        "method": {"type": "supervised", "supervised": {"hyperparameters": shown}},
        "integrations": [],
        "metadata": job.metadata or None,
    }


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


def checkpoint_view(house: House, job: Job, item: Event) -> dict[str, Any]:
    step = item.data["step"]
    return {
        "id": f"ftckpt_{item.seq}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": item.created_at,
        "fine_tuned_model_checkpoint": f"{job.model_id(house.models.name)}:ckpt-step-{step}",
        "step_number": step,
        "fine_tuning_job_id": job.id,
        "metrics": {"step": step} | checkpoint_metrics(item),
    }
