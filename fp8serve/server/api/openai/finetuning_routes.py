"""The routes `/v1/files` and `/v1/fine_tuning/jobs`: uploaded training data and fine-tune jobs in OpenAI's format.

A file is uploaded once and used by any number of jobs. It is stored as `files/<id>.jsonl` (`.csv`, `.parquet`, ...) in
the data directory. The suffix of its name decides how it is parsed (docs/data.md). As in OpenAI's service, the rows are
validated when a job starts to use them: invalid rows fail the job, not the request that creates it.
"""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from fp8serve.model.storage.files import fsync, make_private
from fp8serve.server.api.routing import (
    BoundedRoute,
    IdempotencyKey,
    JobDep,
    JsonObject,
    PageSize,
    ResponseModel,
    StateDep,
)
from fp8serve.server.faults import Code, Fault
from fp8serve.server.finetuning.database import Event, Job, Status, StoredFile, new_file_id
from fp8serve.server.finetuning.submission import file_path, upload_path
from fp8serve.server.finetuning.weight_sources import checkpoint_metrics, checkpoint_name
from fp8serve.server.http.uploads import Upload, receive_upload
from fp8serve.server.schemas.finetune_bodies import LEARNING_RATE, JobBody
from fp8serve.server.server_state import ServerState

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=BoundedRoute)
JOBS = "/fine_tuning/jobs"
CHUNK_BYTES = 1 << 16
PURPOSE = "fine-tune"
FORM = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": {
    "type": "object", "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": PURPOSE}},
}}}}}  # fmt: skip


class FileObject(ResponseModel):
    id: str
    object: Literal["file"] = "file"
    status: str = "processed"
    expires_at: None = None
    status_details: None = None
    bytes: int
    created_at: int
    filename: str
    purpose: str


class DeletedFile(ResponseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class OpenAIJob(ResponseModel):
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


class OpenAIEvent(ResponseModel):
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    id: str
    created_at: int
    level: str
    message: str
    type: Literal["metrics", "message"]
    data: JsonObject


class OpenAICheckpoint(ResponseModel):
    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    step_number: int
    fine_tuning_job_id: str
    metrics: JsonObject


Item = TypeVar("Item", FileObject, OpenAIJob, OpenAIEvent, OpenAICheckpoint)


class Page(ResponseModel, Generic[Item]):
    """A page of OpenAI's list object."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    first_id: str | None
    last_id: str | None

    @classmethod
    def of(cls, items: list[Item], limit: int) -> Self:
        """Returns a page with the first `limit` items. Further items mean that there is another page."""
        data = items[:limit]
        first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, has_more=len(items) > limit, first_id=first_id, last_id=last_id)


class FilePage(Page[FileObject]): ...


class OpenAIJobPage(Page[OpenAIJob]): ...


class OpenAIEventPage(Page[OpenAIEvent]): ...


class OpenAICheckpointPage(Page[OpenAICheckpoint]): ...


# -- files -------------------------------------------------------------------------------------------------------------


@router.post("/files", summary="Upload training data", openapi_extra=FORM)
async def upload(request: Request, state: StateDep) -> FileObject:
    """Stores a file of JSON lines, or of text, JSON, CSV, TSV or Parquet if its name has this suffix. All formats but
    Parquet may be compressed (.gz)."""
    folder = state.data_dir / "files"
    make_private(folder)
    file_id = new_file_id()
    upload = await receive_upload(request, folder / f".{file_id}.part", state.settings.limits)
    return file_view(await asyncio.to_thread(_store, state, upload, file_id))


def _store(state: ServerState, upload: Upload, file_id: str) -> StoredFile:
    """Renames the uploaded file and adds it to the file table. Deletes the file if it is not accepted."""
    try:
        _check_form(upload)
        path = upload_path(state.runner.artifacts, file_id, upload.filename or "")
        upload.path.rename(path)
        try:
            fsync(path.parent)
            state.runner.artifacts.publish(path)
            return state.jobs.add_file(file_id, upload.filename or "", upload.size, upload.sha256, PURPOSE)
        except BaseException:
            state.runner.artifacts.discard(path)
            raise
    finally:
        upload.path.unlink(missing_ok=True)


def _check_form(upload: Upload) -> None:
    if unknown := sorted(set(upload.fields) - {"purpose"}):
        raise Fault(
            Code.UNSUPPORTED_PARAMETER, f"This server does not implement {unknown[0]}; leave it out.", param=unknown[0]
        )
    if upload.fields.get("purpose") != PURPOSE:
        raise Fault(Code.INVALID_PARAMETER, f"purpose must be {PURPOSE}.", param="purpose")
    if upload.size == 0:
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


@router.get("/files/{file_id}", summary="One file")
async def get_file(file_id: str, state: StateDep) -> FileObject:
    return file_view(await asyncio.to_thread(state.jobs.file, file_id))


class FileBytes(StreamingResponse):
    media_type = "application/octet-stream"


@router.get("/files/{file_id}/content", summary="Content of a file", response_class=FileBytes)
async def content(file_id: str, state: StateDep) -> Response:
    stored_file = await asyncio.to_thread(state.jobs.file, file_id)
    path = await asyncio.to_thread(file_path, state.runner.artifacts, stored_file)

    def chunks() -> Iterator[bytes]:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    return FileBytes(chunks(), headers={"Content-Length": str(stored_file.bytes)})


@router.delete("/files/{file_id}", summary="Delete a file; jobs that use it have a copy")
async def delete(file_id: str, state: StateDep) -> DeletedFile:
    stored_file = await asyncio.to_thread(state.jobs.file, file_id)
    await asyncio.to_thread(state.jobs.delete_file, file_id)
    path = upload_path(state.runner.artifacts, stored_file.id, stored_file.filename)
    await asyncio.to_thread(state.runner.artifacts.discard, path)
    return DeletedFile(id=file_id)


def file_view(item: StoredFile) -> FileObject:
    return FileObject(
        id=item.id, bytes=item.bytes, created_at=item.created_at, filename=item.filename, purpose=item.purpose
    )


# -- jobs --------------------------------------------------------------------------------------------------------------


@router.post(JOBS, summary="Start a fine-tune job")
async def create(body: JobBody, state: StateDep, idempotency_key: IdempotencyKey = None) -> OpenAIJob:
    job, _ = await state.submissions.submit(body.to_native(), idempotency_key, check_files=False)
    return job_view(state, job)


@router.get(JOBS, summary="Jobs, newest first")
async def list_jobs(state: StateDep, limit: PageSize = 20, after: str | None = None) -> OpenAIJobPage:
    jobs = await asyncio.to_thread(state.jobs.jobs, limit + 1, after)
    return OpenAIJobPage.of([job_view(state, job) for job in jobs], limit)


@router.get(JOBS + "/{job_id}", summary="One job")
async def get_job(job: JobDep, state: StateDep) -> OpenAIJob:
    return job_view(state, job)


@router.post(JOBS + "/{job_id}/cancel", summary="Cancel a job")
async def cancel(job_id: str, state: StateDep) -> OpenAIJob:
    return job_view(state, await state.submissions.cancel(job_id))


@router.post(JOBS + "/{job_id}/pause", summary="Stop a job at a checkpoint until it is resumed")
async def pause(job_id: str, state: StateDep) -> OpenAIJob:
    return job_view(state, await state.submissions.pause(job_id))


@router.post(JOBS + "/{job_id}/resume", summary="Continue a job that failed or is paused")
async def resume(job_id: str, state: StateDep) -> OpenAIJob:
    return job_view(state, await state.submissions.resume(job_id))


@router.get(JOBS + "/{job_id}/events", summary="Events of a job, newest first")
async def events(
    job: JobDep, state: StateDep, limit: PageSize = 20, after: Annotated[str | None, Query(max_length=64)] = None
) -> OpenAIEventPage:
    before = _event_number(after, "ftevent-")
    newest = await asyncio.to_thread(state.jobs.newest_events, job.id, limit + 1, before)
    return OpenAIEventPage.of(list(map(event_view, newest)), limit)


@router.get(JOBS + "/{job_id}/checkpoints", summary="Complete checkpoints of a job, newest first")
async def checkpoints(
    job: JobDep, state: StateDep, limit: PageSize = 10, after: Annotated[str | None, Query(max_length=64)] = None
) -> OpenAICheckpointPage:
    before = _event_number(after, "ftckpt_")
    job_checkpoints = await asyncio.to_thread(state.sources.checkpoints, job)
    older = [checkpoint_view(job, item) for item in job_checkpoints if before is None or item.seq < before]
    return OpenAICheckpointPage.of(older, limit)


def _event_number(cursor: str | None, prefix: str) -> int | None:
    """Returns the event number in a cursor. Raises Fault if the cursor is no id of an event or checkpoint."""
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
    if config.get("method", "sft") == "dpo":  # jobs of older versions have no method
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
