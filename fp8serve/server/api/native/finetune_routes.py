"""The native routes for fine-tune jobs: start, list, follow, pause, cancel and activate them.

The events of a job are a JSON list. A client that accepts `text/event-stream` gets server-sent events, from
`Last-Event-ID` until the job has ended. Event ids are those of the event table, so a client that reconnects misses no
event.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import ConfigDict
from starlette.responses import Response

from fp8serve.server.api.native.model_routes import ActivationResponse, activate_source
from fp8serve.server.api.routing import (
    STREAM,
    BoundedRoute,
    IdempotencyKey,
    JobDep,
    JsonObject,
    PageSize,
    ResponseModel,
    StateDep,
)
from fp8serve.server.finetuning.database import Event, Job, Status
from fp8serve.server.finetuning.job_store import FINAL_STATUSES
from fp8serve.server.finetuning.weight_sources import checkpoint_metrics, checkpoint_name
from fp8serve.server.http.streams import EventStream, event, until_disconnect
from fp8serve.server.schemas.finetune_bodies import ActivateJobBody, FinetuneBody
from fp8serve.server.server_state import ServerState
from fp8serve.train.events import as_csv, latest_rows

router = APIRouter(tags=["fine-tuning"], route_class=BoundedRoute)
MAX_EVENTS_PER_READ = 500
CSV: dict[int | str, dict[str, Any]] = {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}


class JobView(ResponseModel):
    id: str
    status: Status
    base_model: str
    fine_tuned_model: str | None
    active: bool
    created_at: int
    started_at: int | None
    finished_at: int | None
    cancel_requested: bool
    pause_requested: bool
    progress: JsonObject
    config: JsonObject
    training_file: str | None
    validation_file: str | None
    metadata: dict[str, str]
    error: JsonObject | None


class JobPage(ResponseModel):
    jobs: list[JobView]
    has_more: bool


class EventView(ResponseModel):
    id: int
    created_at: int
    level: str
    type: str
    message: str
    data: JsonObject


class EventPage(ResponseModel):
    events: list[EventView]
    has_more: bool


class CheckpointView(ResponseModel):
    step: int
    model: str
    created_at: int
    metrics: JsonObject


class Checkpoints(ResponseModel):
    checkpoints: list[CheckpointView]


class DeletedJob(ResponseModel):
    id: str
    deleted: Literal[True] = True


class MetricsResponse(ResponseModel):
    metrics: list[JsonObject]


class DataCounts(ResponseModel):
    """Counts of the training data. The trainer adds further counts."""

    model_config = ConfigDict(extra="allow")

    examples: int
    rows: int
    tokens: int


class DryRun(ResponseModel):
    ok: bool
    bad_lines: list[JsonObject]
    bad_line_count: int
    data: DataCounts
    trainable_fraction: float
    steps: int
    steps_per_epoch: int
    longest_row: int
    microbatch_tokens: int
    sample: list[tuple[str, bool]]
    memory_bytes: dict[str, int]


@router.post("/finetune", status_code=202, summary="Start a fine-tune job")
async def start(
    body: FinetuneBody, request: Request, response: Response, state: StateDep, idempotency_key: IdempotencyKey = None
) -> JobView:
    """Trains on rows in `data` or in the file `file_id`. Requests with the same Idempotency-Key within a day start one
    job."""
    job, _ = await state.submissions.submit(body, idempotency_key, request.scope.get("rows"))
    response.headers["Location"] = f"/finetune/{job.id}"
    return job_view(state, job)


@router.post("/finetune/validate", summary="Check a job without starting it")
async def validate(body: FinetuneBody, request: Request, state: StateDep) -> DryRun:
    """Returns the numbers of invalid rows, the tokens per epoch, the fraction of trained tokens, the steps, the memory,
    and one row with its loss mask."""
    report = await until_disconnect(request, state.submissions.dry_run(body, request.scope.get("rows")))
    return DryRun.model_validate(report)


@router.get("/finetune", summary="Jobs, newest first")
async def list_jobs(state: StateDep, limit: PageSize = 20, after: str | None = None) -> JobPage:
    jobs = await asyncio.to_thread(state.jobs.jobs, limit + 1, after)
    return JobPage(jobs=[job_view(state, job) for job in jobs[:limit]], has_more=len(jobs) > limit)


@router.get("/finetune/{job_id}", summary="One job")
async def get_job(job: JobDep, state: StateDep) -> JobView:
    return job_view(state, job)


@router.get(
    "/finetune/{job_id}/events",
    summary="Events of a job, as a list or as a stream",
    response_model=EventPage,
    responses=STREAM,
)
async def events(
    job: JobDep,
    request: Request,
    state: StateDep,
    limit: PageSize = 1000,
    after: Annotated[int, Query(ge=0)] = 0,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response | EventPage:
    """Returns the events after the event `after` or after the header `Last-Event-ID`, oldest first. With `Accept:
    text/event-stream`, it follows the job to its end.
    """
    if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit():
        after = int(last_event_id)
    after = min(after, 2**62)
    if "text/event-stream" in request.headers.get("accept", ""):
        state.streams.acquire()
        keep_alive = state.settings.limits.keep_alive_seconds
        return EventStream(follow(state, job.id, after), keep_alive, state.streams.release)
    items = await asyncio.to_thread(state.jobs.events, job.id, after, limit + 1)
    return EventPage(events=list(map(event_view, items[:limit])), has_more=len(items) > limit)


async def follow(state: ServerState, job_id: str, after: int) -> AsyncGenerator[bytes, None]:
    """Yields the events after `after` as they occur, until the job has ended or the server drains. The event `end`
    follows the last event of the job."""
    while not state.draining.is_set():
        has_ended = (await asyncio.to_thread(state.jobs.get, job_id)).status in FINAL_STATUSES
        items = await asyncio.to_thread(state.jobs.events, job_id, after, MAX_EVENTS_PER_READ)
        for item in items:
            after = item.seq
            yield event(event_view(item).model_dump(), name=item.type, id=item.seq)
        if has_ended and not items:
            job = await asyncio.to_thread(state.jobs.get, job_id)
            yield event({"status": job.status}, name="end", id=after)
            return
        if not items:
            with contextlib.suppress(TimeoutError):  # the job runner does not report all changes
                async with asyncio.timeout(0.5), state.runner.changed:
                    await state.runner.changed.wait()


@router.get("/finetune/{job_id}/checkpoints", summary="Complete checkpoints of a job, newest first")
async def checkpoints(job: JobDep, state: StateDep) -> Checkpoints:
    """A checkpoint can be activated, loaded and trained on by its name in `model`, even if the job failed."""
    job_checkpoints = await asyncio.to_thread(state.sources.checkpoints, job)
    return Checkpoints(
        checkpoints=[
            CheckpointView(
                step=item.data["step"],
                model=checkpoint_name(job.model_id, item.data["step"]),
                created_at=item.created_at,
                metrics=checkpoint_metrics(item),
            )
            for item in job_checkpoints
        ]
    )


@router.get(
    "/finetune/{job_id}/metrics",
    summary="Metrics of a job for each reported step, as JSON or CSV",
    response_model=MetricsResponse,
    responses=CSV,
)
async def series(
    job: JobDep, request: Request, state: StateDep, format: Literal["json", "csv"] | None = None
) -> Response | MetricsResponse:
    """Returns the metrics, oldest first. A step that was repeated after a resume appears once, with its last values.
    The response is CSV with `format=csv` or `Accept: text/csv`; without steps it is only the CSV header.
    """
    newest = await asyncio.to_thread(state.jobs.newest_events, job.id, 100_000, None, "metrics")
    rows = latest_rows(item.data for item in reversed(newest))
    if format == "csv" or (format is None and "text/csv" in request.headers.get("accept", "")):
        headers = {"Content-Disposition": f'attachment; filename="{job.id}.csv"'}
        return Response(as_csv(rows), headers=headers, media_type="text/csv")
    return MetricsResponse(metrics=[dict(row) for row in rows])


@router.post("/finetune/{job_id}/cancel", summary="Cancel a job; its files are not deleted")
async def cancel(job_id: str, state: StateDep) -> JobView:
    return job_view(state, await state.submissions.cancel(job_id))


@router.post("/finetune/{job_id}/pause", summary="Stop a job at a checkpoint until it is resumed")
async def pause(job_id: str, state: StateDep) -> JobView:
    """Ends the process of the job, which frees its device for the next jobs. A paused and resumed job writes the same
    bytes as an uninterrupted job.
    """
    return job_view(state, await state.submissions.pause(job_id))


@router.post("/finetune/{job_id}/resume", summary="Continue a job that failed or is paused, from its last checkpoint")
async def resume(job_id: str, state: StateDep) -> JobView:
    """The job gets its former position in the queue. A job that failed on a full disk can be resumed, too."""
    return job_view(state, await state.submissions.resume(job_id))


@router.delete("/finetune/{job_id}", summary="Delete a job that has ended, with all its files")
async def delete(job_id: str, state: StateDep) -> DeletedJob:
    """The result and the checkpoints are deleted, too, so the request is refused while one of them is served or another
    job trains on it."""
    await asyncio.to_thread(state.retention.delete, job_id)
    return DeletedJob(id=job_id)


@router.post("/finetune/{job_id}/activate", summary="Activate the result of a job")
async def activate(job: JobDep, state: StateDep, body: ActivateJobBody | None = None) -> ActivationResponse:
    """Serves the result of a job instead of the current weights, and responds when the new weights are in use. Active
    requests are not affected. If the activation fails, the current weights stay.

    The new weights are verified first. They must be finite and generate tokens. Their perplexity on the job's
    validation rows, or on its training rows if there are none, may be at most `max_perplexity_ratio` times that of the
    current weights. With `step`, the checkpoint of this step is served, even if the job has not succeeded.
    """
    body = body or ActivateJobBody()
    result_key = await asyncio.to_thread(state.sources.result_key, job, body.step)
    owning_model = await asyncio.to_thread(state.sources.owning_model, job)
    return await activate_source(state, owning_model, result_key, body.max_perplexity_ratio)


def job_view(state: ServerState, job: Job) -> JobView:
    shared = {name: value for name, value in vars(job).items() if name in JobView.model_fields}
    result = job.model_id if job.status == "succeeded" else None
    is_active = job.id in state.models.source_keys()
    return JobView(base_model=job.base, fine_tuned_model=result, active=is_active, **shared)


def event_view(item: Event) -> EventView:
    return EventView(
        id=item.seq, created_at=item.created_at, level=item.level, type=item.type, message=item.message, data=item.data
    )
