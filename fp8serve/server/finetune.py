"""The native fine-tune routes: start, list, watch, cancel and activate jobs.

Events come as a JSON list, or, for a client that accepts `text/event-stream`, as server-sent events that replay from
`Last-Event-ID` and go on until the job has ended; ids are the event table's, so a reader that reconnects misses
nothing.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import JSONResponse, Response

from fp8serve.server.faults import Code, Fault
from fp8serve.server.house import House, HouseDep
from fp8serve.server.jobs import FINAL
from fp8serve.server.models import Served
from fp8serve.server.protocol import ActivateBody
from fp8serve.server.records import Event, Job
from fp8serve.server.streams import EventStream, event
from fp8serve.server.submission import FinetuneBody, dry_run, submit

router = APIRouter(tags=["fine-tuning"])
Limit = Annotated[int, Query(ge=1, le=1000)]
IdempotencyKey = Annotated[str | None, Header(max_length=255)]
EVENTS_AT_ONCE = 500


@router.post("/finetune", status_code=202, summary="Start a fine-tune job")
async def start(body: FinetuneBody, house: HouseDep, idempotency_key: IdempotencyKey = None) -> Response:
    """Rows in `data` or an uploaded `file_id`. The same Idempotency-Key within a day gives the same job."""
    job, made = await asyncio.to_thread(submit, house, body, idempotency_key)
    if made:
        house.trainer.submitted()
    return JSONResponse(native(house, job), 202, {"Location": f"/finetune/{job.id}"})


@router.post("/finetune/validate", summary="What a job would do, without doing it")
async def validate(body: FinetuneBody, house: HouseDep) -> dict[str, Any]:
    """Bad rows by number, tokens per epoch, the share that is learnt, steps, memory, and one row with its mask."""
    return await asyncio.to_thread(dry_run, house, body)


@router.get("/finetune", summary="Jobs, newest first")
async def list_jobs(house: HouseDep, limit: Limit = 20, after: str | None = None) -> dict[str, Any]:
    jobs = await asyncio.to_thread(house.jobs.jobs, limit + 1, after)
    return {"jobs": [native(house, job) for job in jobs[:limit]], "has_more": len(jobs) > limit}


@router.get("/finetune/{job_id}", summary="One job")
async def get_job(job_id: str, house: HouseDep) -> dict[str, Any]:
    return native(house, await asyncio.to_thread(house.jobs.get, job_id))


@router.get(
    "/finetune/{job_id}/events", summary="What happened to a job, as a list or as a stream", response_model=None
)
async def events(
    job_id: str,
    request: Request,
    house: HouseDep,
    limit: Limit = 1000,
    after: Annotated[int, Query(ge=0)] = 0,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response | dict[str, Any]:
    """Oldest first, from behind `after` (or the `Last-Event-ID` header). `Accept: text/event-stream` follows the job to
    its end.
    """
    job = await asyncio.to_thread(house.jobs.get, job_id)
    start = (
        int(last_event_id)
        if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit()
        else after
    )
    start = min(start, 2**62)
    if "text/event-stream" in request.headers.get("accept", ""):
        house.admission.open_stream()
        return EventStream(
            follow(house, job.id, start), house.settings.limits.keep_alive_seconds, house.admission.close_stream
        )
    found = await asyncio.to_thread(house.jobs.events, job_id, start, limit + 1)
    return {"events": [e.native() for e in found[:limit]], "has_more": len(found) > limit}


async def follow(house: House, job_id: str, after: int) -> AsyncGenerator[bytes, None]:
    """Every event behind `after`, as they come, until the job has ended or the server goes down; then `end`."""
    while not house.draining.is_set():
        ended = (await asyncio.to_thread(house.jobs.get, job_id)).status in FINAL
        found = await asyncio.to_thread(house.jobs.events, job_id, after, EVENTS_AT_ONCE)
        for item in found:
            after = item.seq
            yield event(item.native(), name=item.type, id=item.seq)
        if ended and not found:
            job = await asyncio.to_thread(house.jobs.get, job_id)
            yield event({"status": job.status}, name="end", id=after)
            return
        if not found:
            await _until_changed(house)


async def _until_changed(house: House) -> None:
    """Wakes at the trainer's word, and twice a second for changes that come from elsewhere."""
    try:
        async with asyncio.timeout(0.5), house.trainer.changed:
            await house.trainer.changed.wait()
    except TimeoutError:
        pass


@router.get("/finetune/{job_id}/checkpoints", summary="Checkpoints that are whole and on the disk, newest first")
async def checkpoints(job_id: str, house: HouseDep) -> dict[str, Any]:
    job = await asyncio.to_thread(house.jobs.get, job_id)
    found = await asyncio.to_thread(written_checkpoints, house, job)
    return {
        "checkpoints": [
            {"step": e.data["step"], "created_at": e.created_at, "metrics": checkpoint_metrics(e)} for e in found
        ]
    }


def written_checkpoints(house: House, job: Job) -> list[Event]:
    """Checkpoint events whose directory is still there. A directory gets its name only when it is whole."""
    folder = house.trainer.dir_of(job.id) / "out" / "checkpoints"
    newest: dict[int, Event] = {}
    for item in house.jobs.newest_events(job.id, 10_000, kind="checkpoint"):
        newest.setdefault(int(item.data["step"]), item)
    return [item for step, item in newest.items() if (folder / f"step-{step}").is_dir()]


def checkpoint_metrics(item: Event) -> dict[str, Any]:
    return {k: v for k, v in item.data.items() if k != "step"}


@router.get("/finetune/{job_id}/metrics", summary="The series of a job's metrics, one object for each reported step")
async def series(job_id: str, house: HouseDep) -> dict[str, Any]:
    await asyncio.to_thread(house.jobs.get, job_id)
    found = await asyncio.to_thread(house.jobs.newest_events, job_id, 100_000, None, "metrics")
    return {"metrics": [item.data for item in reversed(found)]}


@router.post("/finetune/{job_id}/cancel", summary="End a job; what it wrote stays")
async def cancel(job_id: str, house: HouseDep) -> dict[str, Any]:
    job = await asyncio.to_thread(house.jobs.request_cancel, job_id)
    house.trainer.submitted()
    return native(house, job)


@router.post("/finetune/{job_id}/activate", summary="Serve a job's result in place of the present weights")
async def activate(job_id: str, house: HouseDep) -> dict[str, Any]:
    """Answers when the new weights serve. No request in flight is touched; on failure nothing changes."""
    await asyncio.to_thread(house.jobs.get, job_id)
    return await swap(house, job_id)


@router.get("/models", summary="What is served, and what could be")
async def models(house: HouseDep) -> dict[str, Any]:
    succeeded = await asyncio.to_thread(house.jobs.jobs, 1000, None, "succeeded")
    available = [{"source": "base", "model": house.models.name}]
    available += [{"source": job.id, "model": job.model_id(house.models.name)} for job in succeeded]
    return {
        "alias": house.models.name,
        "state": house.models.state,
        "served": served_view(house.models.current),
        "activating": _activating(house.models.activating),
        "available": available,
    }


def _activating(under_way: tuple[str, float] | None) -> dict[str, Any] | None:
    return under_way and {"model": under_way[0], "seconds": time.monotonic() - under_way[1]}


@router.post("/models/{name}/activate", summary="Serve a job's result, or go back to the base model")
async def activate_model(name: str, body: ActivateBody, house: HouseDep) -> dict[str, Any]:
    if name != house.models.name:
        raise Fault(
            Code.MODEL_NOT_FOUND,
            "There is no model of that name here.",
            param="name",
            hint=f"The name is {house.models.name}.",
        )
    return await swap(house, body.source)


async def swap(house: House, key: str) -> dict[str, Any]:
    """The swap goes on to its end even if the client that asked for it goes away."""
    before = served_view(house.models.current)
    served = await asyncio.shield(asyncio.ensure_future(house.activate(key)))
    return {"model": house.models.name, "served": served_view(served), "previous": before}


def served_view(served: Served | None) -> dict[str, Any] | None:
    return served and {
        "source": served.source.key,
        "model": served.source.model_id,
        "weight_version": served.weight_version,
    }  # type: ignore[return-value]


def native(house: House, job: Job) -> dict[str, Any]:
    """A job as these routes show it."""
    current = house.models.current
    return {
        "id": job.id,
        "status": job.status,
        "base_model": job.base,
        "fine_tuned_model": job.model_id(house.models.name) if job.status == "succeeded" else None,
        "active": current is not None and current.source.key == job.id,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "cancel_requested": job.cancel_requested,
        "progress": job.progress,
        "config": job.config,
        "training_file": job.training_file,
        "validation_file": job.validation_file,
        "metadata": job.metadata,
        "error": job.error,
    }
