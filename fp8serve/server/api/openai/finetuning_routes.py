"""`/v1/files` and `/v1/fine_tuning/jobs`: OpenAI's view of uploaded training data and of the job table.

A file is uploaded once and used by any number of jobs. Its bytes lie in `files/<id>.jsonl` (`.csv`, `.parquet` and so
on) under the data directory; of the name that a client gave only its end counts, which says how the file is read
(docs/data.md). What is in the file is checked when a job uses it, not here, as OpenAI's service does; a file with bad
rows does not fail the request for a job.
"""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from fp8serve.model.storage.files import fsync, make_private
from fp8serve.model.text.data_files import ending_of
from fp8serve.server.api.routing import Answer, BoundedRoute, IdempotencyKey, JsonObject, PageSize, StateDep
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.job_directory import file_path
from fp8serve.server.finetuning.job_records import Event, Job, Status, StoredFile, new_file_id
from fp8serve.server.finetuning.sources import checkpoint_metrics, checkpoint_name
from fp8serve.server.http.uploads import Upload, receive_upload
from fp8serve.server.schemas.finetune_bodies import LEARNING_RATE, JobBody
from fp8serve.server.server_state import ServerState

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)
JOBS = "/fine_tuning/jobs"
CHUNK = 1 << 16
PURPOSE = "fine-tune"
FORM = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": {
    "type": "object", "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": PURPOSE}},
}}}}}  # fmt: skip


class FileObject(Answer):
    id: str
    object: Literal["file"] = "file"
    status: str = "processed"
    expires_at: None = None
    status_details: None = None
    bytes: int
    created_at: int
    filename: str
    purpose: str


class DeletedFile(Answer):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class OpenAIJob(Answer):
    created_at: int
    finished_at: int | None
    estimated_finish: int | None = None
    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    model: str
    fine_tuned_model: str | None
    organization_id: str = "org-local"
    status: Status
    training_file: str
    validation_file: str | None
    result_files: list[str] = Field(default_factory=list)
    trained_tokens: int | None
    error: JsonObject | None
    seed: int
    hyperparameters: JsonObject
    method: JsonObject
    integrations: list[JsonObject] = Field(default_factory=list)
    metadata: dict[str, str] | None


class OpenAIEvent(Answer):
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    id: str
    created_at: int
    level: str
    message: str
    type: Literal["metrics", "message"]
    data: JsonObject


class OpenAICheckpoint(Answer):
    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    step_number: int
    fine_tuning_job_id: str
    metrics: JsonObject


Item = TypeVar("Item", FileObject, OpenAIJob, OpenAIEvent, OpenAICheckpoint)


class Page(Answer, Generic[Item]):
    """OpenAI's list object, a page at a time."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    first_id: str | None
    last_id: str | None

    @classmethod
    def of(cls, items: list[Item], limit: int) -> Self:
        """The first `limit` of `items`, which hold one more if there are more."""
        shown = items[:limit]
        first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
        return cls(data=shown, has_more=len(items) > limit, first_id=first, last_id=last)


class FilePage(Page[FileObject]): ...


class OpenAIJobPage(Page[OpenAIJob]): ...


class OpenAIEventPage(Page[OpenAIEvent]): ...


class OpenAICheckpointPage(Page[OpenAICheckpoint]): ...


# -- files -------------------------------------------------------------------------------------------------------------


@router.post("/files", summary="Upload training data", openapi_extra=FORM)
async def upload(request: Request, state: StateDep) -> FileObject:
    """JSON lines, or by the end of its name text, JSON, CSV, TSV or Parquet; all but Parquet also with .gz."""
    folder = state.data_dir / "files"
    make_private(folder)
    file_id = new_file_id()
    arrived = await receive_upload(request, folder / f".{file_id}.part", state.settings.limits)
    return file_view(await asyncio.to_thread(_store, state, arrived, file_id))


def _store(state: ServerState, arrived: Upload, file_id: str) -> StoredFile:
    """Gives the file its name and its row; a file that is not accepted leaves nothing."""
    try:
        _check_form(arrived)
        final = arrived.path.with_name(file_id + ending_of(arrived.filename or ""))
        arrived.path.rename(final)
        try:
            fsync(final.parent)
            return state.jobs.add_file(file_id, arrived.filename or "", arrived.size, arrived.sha256, PURPOSE)
        except BaseException:
            final.unlink(missing_ok=True)
            raise
    finally:
        arrived.path.unlink(missing_ok=True)


def _check_form(arrived: Upload) -> None:
    if unknown := sorted(set(arrived.fields) - {"purpose"}):
        raise Fault(
            Code.UNSUPPORTED_PARAMETER, f"This server does not implement {unknown[0]}; leave it out.", param=unknown[0]
        )
    if arrived.fields.get("purpose") != PURPOSE:
        raise Fault(Code.INVALID_PARAMETER, f"purpose must be {PURPOSE}.", param="purpose")
    if arrived.size == 0:
        raise Fault(Code.INVALID_PARAMETER, "The file is empty.", param="file")


@router.get("/files", summary="Uploaded files")
async def list_files(
    state: StateDep,
    limit: Annotated[int, Query(ge=1, le=10000)] = 10000,
    after: str | None = None,
    purpose: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> FilePage:
    files = await asyncio.to_thread(state.jobs.files, limit + 1, after, purpose, order == "asc")
    return FilePage.of(list(map(file_view, files)), limit)


@router.get("/files/{file_id}", summary="Information about one file")
async def get_file(file_id: str, state: StateDep) -> FileObject:
    return file_view(await asyncio.to_thread(state.jobs.file, file_id))


class FileBytes(StreamingResponse):
    media_type = "application/octet-stream"


@router.get("/files/{file_id}/content", summary="A file's bytes", response_class=FileBytes)
async def content(file_id: str, state: StateDep) -> Response:
    stored = await asyncio.to_thread(state.jobs.file, file_id)
    path = file_path(state.data_dir, stored.id)

    def chunks() -> Iterator[bytes]:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    return FileBytes(chunks(), headers={"Content-Length": str(stored.bytes)})


@router.delete("/files/{file_id}", summary="Delete a file; jobs that used it keep their copy")
async def delete(file_id: str, state: StateDep) -> DeletedFile:
    await asyncio.to_thread(state.jobs.delete_file, file_id)
    for path in (state.data_dir / "files").glob(f"{file_id}.*"):
        path.unlink(missing_ok=True)
    return DeletedFile(id=file_id)


def file_view(item: StoredFile) -> FileObject:
    return FileObject(
        id=item.id, bytes=item.bytes, created_at=item.created_at, filename=item.filename, purpose=item.purpose
    )


# -- jobs --------------------------------------------------------------------------------------------------------------


@router.post(JOBS, summary="Start a fine-tune job")
async def create(body: JobBody, state: StateDep, idempotency_key: IdempotencyKey = None) -> OpenAIJob:
    job, _ = await state.submissions.submit(body.native(), idempotency_key, check_files=False)
    return job_view(state, job)


@router.get(JOBS, summary="Jobs, newest first")
async def list_jobs(state: StateDep, limit: PageSize = 20, after: str | None = None) -> OpenAIJobPage:
    jobs = await asyncio.to_thread(state.jobs.jobs, limit + 1, after)
    return OpenAIJobPage.of([job_view(state, job) for job in jobs], limit)


@router.get(JOBS + "/{job_id}", summary="One job")
async def get_job(job_id: str, state: StateDep) -> OpenAIJob:
    return job_view(state, await asyncio.to_thread(state.jobs.get, job_id))


@router.post(JOBS + "/{job_id}/cancel", summary="End a job")
async def cancel(job_id: str, state: StateDep) -> OpenAIJob:
    return job_view(state, await state.submissions.cancel(job_id))


@router.post(JOBS + "/{job_id}/pause", summary="Stop a job at a checkpoint until it is resumed")
async def pause(job_id: str, state: StateDep) -> OpenAIJob:
    return job_view(state, await state.submissions.pause(job_id))


@router.post(JOBS + "/{job_id}/resume", summary="Continue a job that failed or is paused")
async def resume(job_id: str, state: StateDep) -> OpenAIJob:
    return job_view(state, await state.submissions.resume(job_id))


@router.get(JOBS + "/{job_id}/events", summary="What happened to a job, newest first")
async def events(
    job_id: str, state: StateDep, limit: PageSize = 20, after: Annotated[str | None, Query(max_length=64)] = None
) -> OpenAIEventPage:
    await asyncio.to_thread(state.jobs.get, job_id)
    newest = await asyncio.to_thread(state.jobs.newest_events, job_id, limit + 1, _number(after, "ftevent-"))
    return OpenAIEventPage.of(list(map(event_view, newest)), limit)


@router.get(JOBS + "/{job_id}/checkpoints", summary="Checkpoints that are whole and on the disk, newest first")
async def checkpoints(
    job_id: str, state: StateDep, limit: PageSize = 10, after: Annotated[str | None, Query(max_length=64)] = None
) -> OpenAICheckpointPage:
    job = await asyncio.to_thread(state.jobs.get, job_id)
    bound = _number(after, "ftckpt_")
    written = await asyncio.to_thread(state.sources.checkpoints, job)
    older = [checkpoint_view(job, item) for item in written if bound is None or item.seq < bound]
    return OpenAICheckpointPage.of(older, limit)


def _number(cursor: str | None, prefix: str) -> int | None:
    """The event number inside a cursor. Fault for one that we did not make."""
    if cursor is None:
        return None
    digits = cursor.removeprefix(prefix)
    if not (cursor.startswith(prefix) and digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise Fault(Code.INVALID_PARAMETER, "after must be an id from an earlier page.", param="after")
    return int(digits)


def job_view(state: ServerState, job: Job) -> OpenAIJob:
    config = job.config
    hyperparameters = {
        "n_epochs": config["epochs"],
        "batch_size": config["batch_size"],
        "learning_rate_multiplier": config["learning_rate"] / LEARNING_RATE,
    }
    no_error = {"code": None, "message": None, "param": None}
    return OpenAIJob(
        created_at=job.created_at,
        finished_at=job.finished_at,
        id=job.id,
        model=job.base,
        fine_tuned_model=job.model_id if job.status == "succeeded" else None,
        status=job.status,
        training_file=job.training_file or "inline",
        validation_file=job.validation_file,
        trained_tokens=job.progress.get("trained_tokens"),
        error=(job.error or no_error) if job.status == "failed" else None,
        seed=config["seed"],
        hyperparameters=hyperparameters,
        method=_method(config, hyperparameters),
        metadata=job.metadata or None,
    )


def _method(config: Mapping[str, Any], hyperparameters: JsonObject) -> JsonObject:
    """OpenAI's `method`; a job of an older version has none in its configuration and is supervised."""
    if config.get("method", "sft") == "dpo":
        beta = "auto" if config["beta"] is None else config["beta"]
        return {"type": "dpo", "dpo": {"hyperparameters": {**hyperparameters, "beta": beta}}}
    return {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}


def event_view(item: Event) -> OpenAIEvent:
    return OpenAIEvent(
        id=f"ftevent-{item.seq}",
        created_at=item.created_at,
        level=item.level,
        message=item.message,
        type="metrics" if item.type == "metrics" else "message",
        data=item.data,
    )


def checkpoint_view(job: Job, item: Event) -> OpenAICheckpoint:
    step = item.data["step"]
    return OpenAICheckpoint(
        id=f"ftckpt_{item.seq}",
        created_at=item.created_at,
        fine_tuned_model_checkpoint=checkpoint_name(job.model_id, step),
        step_number=step,
        fine_tuning_job_id=job.id,
        metrics={"step": step} | checkpoint_metrics(item),
    )
