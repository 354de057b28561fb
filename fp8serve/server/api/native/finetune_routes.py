"""The native fine-tune routes: start, list, watch, pause, cancel and activate jobs.

Events come as a JSON list, or, for a client that accepts `text/event-stream`, as server-sent events that replay from
`Last-Event-ID` and go on until the job has ended; ids are the event table's, so a reader that reconnects misses
nothing.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import ConfigDict
from starlette.responses import Response

from fp8serve.server.api.native.model_routes import Swapped, swap
from fp8serve.server.api.routing import STREAM, Answer, BoundedRoute, IdempotencyKey, JsonObject, PageSize, StateDep
from fp8serve.server.finetuning.job_records import Event, Job
from fp8serve.server.finetuning.job_store import FINAL
from fp8serve.server.finetuning.sources import checkpoint_metrics, checkpoint_name
from fp8serve.server.http.streams import EventStream, event, until_disconnect
from fp8serve.server.schemas.finetune_bodies import ActivateJobBody, FinetuneBody
from fp8serve.server.server_state import ServerState
from fp8serve.train.events import as_csv, as_it_stands

router = APIRouter(tags=["fine-tuning"], route_class=BoundedRoute)
EVENTS_AT_ONCE = 500
CSV: dict[int | str, dict[str, Any]] = {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}


JobStatus = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]


class JobView(Answer):
    id: str
    status: JobStatus
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


class JobPage(Answer):
    jobs: list[JobView]
    has_more: bool


class EventView(Answer):
    id: int
    created_at: int
    level: str
    type: str
    message: str
    data: JsonObject


class EventPage(Answer):
    events: list[EventView]
    has_more: bool


class CheckpointView(Answer):
    step: int
    model: str
    created_at: int
    metrics: JsonObject


class Checkpoints(Answer):
    checkpoints: list[CheckpointView]


class DeletedJob(Answer):
    id: str
    deleted: Literal[True] = True


class Series(Answer):
    metrics: list[JsonObject]


class DataCounts(Answer):
    """The trainer names further counts."""

    model_config = ConfigDict(extra="allow")

    examples: int
    rows: int
    tokens: int


class DryRun(Answer):
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
    """Rows in `data` or an uploaded `file_id`. The same Idempotency-Key within a day gives the same job."""
    job, _ = await state.submissions.submit(body, idempotency_key, request.scope.get("rows"))
    response.headers["Location"] = f"/finetune/{job.id}"
    return job_view(state, job)


@router.post("/finetune/validate", summary="What a job would do, without doing it")
async def validate(body: FinetuneBody, request: Request, state: StateDep) -> DryRun:
    """Bad rows by number, tokens per epoch, the share that is learnt, steps, memory, and one row with its mask."""
    report = await until_disconnect(request, state.submissions.dry_run(body, request.scope.get("rows")))
    return DryRun.model_validate(report)


@router.get("/finetune", summary="Jobs, newest first")
async def list_jobs(state: StateDep, limit: PageSize = 20, after: str | None = None) -> JobPage:
    jobs = await asyncio.to_thread(state.jobs.jobs, limit + 1, after)
    return JobPage(jobs=[job_view(state, job) for job in jobs[:limit]], has_more=len(jobs) > limit)


@router.get("/finetune/{job_id}", summary="One job")
async def get_job(job_id: str, state: StateDep) -> JobView:
    return job_view(state, await asyncio.to_thread(state.jobs.get, job_id))


@router.get(
    "/finetune/{job_id}/events",
    summary="What happened to a job, as a list or as a stream",
    response_model=EventPage,
    responses=STREAM,
)
async def events(
    job_id: str,
    request: Request,
    state: StateDep,
    limit: PageSize = 1000,
    after: Annotated[int, Query(ge=0)] = 0,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response | EventPage:
    """Oldest first, beginning after the event `after` (or the `Last-Event-ID` header). `Accept: text/event-stream`
    follows the job to its end.
    """
    job = await asyncio.to_thread(state.jobs.get, job_id)
    start = (
        int(last_event_id)
        if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit()
        else after
    )
    start = min(start, 2**62)
    if "text/event-stream" in request.headers.get("accept", ""):
        state.streams.enter()
        return EventStream(follow(state, job.id, start), state.settings.limits.keep_alive_seconds, state.streams.leave)
    items = await asyncio.to_thread(state.jobs.events, job_id, start, limit + 1)
    return EventPage(events=list(map(event_view, items[:limit])), has_more=len(items) > limit)


async def follow(state: ServerState, job_id: str, after: int) -> AsyncGenerator[bytes, None]:
    """Every event behind `after`, as they come, until the job has ended or the server goes down; then `end`."""
    while not state.draining.is_set():
        ended = (await asyncio.to_thread(state.jobs.get, job_id)).status in FINAL
        items = await asyncio.to_thread(state.jobs.events, job_id, after, EVENTS_AT_ONCE)
        for item in items:
            after = item.seq
            yield event(event_view(item).model_dump(), name=item.type, id=item.seq)
        if ended and not items:
            job = await asyncio.to_thread(state.jobs.get, job_id)
            yield event({"status": job.status}, name="end", id=after)
            return
        if not items:
            await _until_changed(state)


async def _until_changed(state: ServerState) -> None:
    """Wakes at the trainer's word, and twice a second for changes that come from elsewhere."""
    try:
        async with asyncio.timeout(0.5), state.runner.changed:
            await state.runner.changed.wait()
    except TimeoutError:
        pass


@router.get("/finetune/{job_id}/checkpoints", summary="Checkpoints that are whole and on the disk, newest first")
async def checkpoints(job_id: str, state: StateDep) -> Checkpoints:
    """Each can be activated, loaded and trained on by the name in `model`, whatever became of the job."""
    job = await asyncio.to_thread(state.jobs.get, job_id)
    written = await asyncio.to_thread(state.sources.checkpoints, job)
    return Checkpoints(
        checkpoints=[
            CheckpointView(
                step=item.data["step"],
                model=checkpoint_name(job.model_id, item.data["step"]),
                created_at=item.created_at,
                metrics=checkpoint_metrics(item),
            )
            for item in written
        ]
    )


@router.get(
    "/finetune/{job_id}/metrics",
    summary="A job's metrics, for each reported step, as JSON or CSV",
    response_model=Series,
    responses=CSV,
)
async def series(
    job_id: str, request: Request, state: StateDep, format: Literal["json", "csv"] | None = None
) -> Response | Series:
    """Oldest first. A step that was taken again appears once, with its later values. CSV for `format=csv`, or for
    `Accept: text/csv`; for a job without a step only the header.
    """
    job = await asyncio.to_thread(state.jobs.get, job_id)
    newest = await asyncio.to_thread(state.jobs.newest_events, job.id, 100_000, None, "metrics")
    rows = as_it_stands(item.data for item in reversed(newest))
    if format == "csv" or (format is None and "text/csv" in request.headers.get("accept", "")):
        name = {"Content-Disposition": f'attachment; filename="{job.id}.csv"'}
        return Response(as_csv(rows), headers=name, media_type="text/csv")
    return Series(metrics=[dict(row) for row in rows])


@router.post("/finetune/{job_id}/cancel", summary="End a job; what it wrote stays")
async def cancel(job_id: str, state: StateDep) -> JobView:
    return job_view(state, await state.submissions.cancel(job_id))


@router.post("/finetune/{job_id}/pause", summary="Stop a job at a checkpoint until it is resumed")
async def pause(job_id: str, state: StateDep) -> JobView:
    """Its process ends, so the device is free, and jobs behind it run meanwhile. A job that was paused ends with the
    same bytes as one that was not.
    """
    return job_view(state, await state.submissions.pause(job_id))


@router.post("/finetune/{job_id}/resume", summary="Continue a job that failed or is paused, from its last checkpoint")
async def resume(job_id: str, state: StateDep) -> JobView:
    """This includes a job that failed on a full disk, once there is room. The job gets its place in the queue back."""
    return job_view(state, await state.submissions.resume(job_id))


@router.delete("/finetune/{job_id}", summary="Delete a job that has ended, with everything that it wrote")
async def delete(job_id: str, state: StateDep) -> DeletedJob:
    """This includes its result and its checkpoints, so it is refused while one of them serves, or another job continues
    from it.
    """
    await asyncio.to_thread(state.retention.delete, job_id)
    return DeletedJob(id=job_id)


@router.post("/finetune/{job_id}/activate", summary="Serve a job's result in place of the present weights")
async def activate(job_id: str, state: StateDep, body: ActivateJobBody | None = None) -> Swapped:
    """Answers when the new weights serve. No request in flight is affected; on failure nothing changes.

    The weights are verified first: all numbers must be finite, a few tokens are written, and the perplexity on the
    job's held-out rows, or on its training rows if it has none, may be at most `max_perplexity_ratio` times that of the
    present weights. `step` serves the model of a checkpoint, even of a job that has not succeeded.
    """
    body = body or ActivateJobBody()
    job = await asyncio.to_thread(state.jobs.get, job_id)
    key = await asyncio.to_thread(state.sources.key, job, body.step)
    owner = await asyncio.to_thread(state.sources.owner, job)
    return await swap(state, owner, key, body.max_perplexity_ratio)


def job_view(state: ServerState, job: Job) -> JobView:
    return JobView(
        id=job.id,
        status=job.status,
        base_model=job.base,
        fine_tuned_model=job.model_id if job.status == "succeeded" else None,
        active=state.models.serving(job.id),
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        cancel_requested=job.cancel_requested,
        pause_requested=job.pause_requested,
        progress=job.progress,
        config=job.config,
        training_file=job.training_file,
        validation_file=job.validation_file,
        metadata=job.metadata,
        error=job.error,
    )


def event_view(item: Event) -> EventView:
    return EventView(
        id=item.seq,
        created_at=item.created_at,
        level=item.level,
        type=item.type,
        message=item.message,
        data=item.data,
    )
